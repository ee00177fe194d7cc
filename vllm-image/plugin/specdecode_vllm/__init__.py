"""Makes a vLLM engine follow K tables live, measure its steps and say why it ended.

Official hooks only: the scheduler factory (`scheduler.make_scheduler`, given to
`--scheduler-cls`) and a `vllm.general_plugins` entry point (`plugin.register`).
"""

__version__ = "0.1.0"

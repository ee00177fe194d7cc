"""A stand-in for the vLLM server where no GPU is: real HTTP and metrics, simulated steps.

One model of the engine (`model`: batching, KV blocks, drafts, acceptance; `cost`: step time) runs
in real time behind a server (`engine`, `server`) or in virtual time as a library (`virtual`,
`block`). Tables, table metrics and termination messages are the plugin's own code.
"""

__version__ = "0.1.0"

"""The `vllm.general_plugins` entry point: runs in every process of vLLM, more than once."""

import logging

from specdecode_vllm import termination

logger = logging.getLogger("vllm.specdecode")


def register() -> None:
    """Install the termination handler; never raise, a plugin must not end the server."""
    try:
        termination.install()
    except Exception:
        logger.exception("specdecode plugin: no termination messages from this process")

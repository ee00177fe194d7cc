"""The Kubernetes operator that tunes speculative decoding of vLLM live."""

__version__ = "0.1.0"

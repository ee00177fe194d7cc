"""A stand-in for the vLLM server where no GPU is: real HTTP and metrics, simulated steps.

One model of the engine (`model`: batching, KV blocks, drafts, acceptance; `cost`: step time) runs
in real time behind a server (`engine`, `server`) or in virtual time as a library (`virtual`,
`block`). Tables, table metrics and termination messages are the plugin's own code.
"""

import hashlib
import os
import tempfile
from pathlib import Path

__version__ = "0.1.0"


def _choose_cache() -> Path:
    """Choose where compiled code is kept: by the content of all modules.

    numba looks at a function's own file only: after an edit of `cost`, `virtual` would go on with
    the old compiled step, silently.
    """
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    writable = os.access(folder, os.W_OK)
    base = folder / "__pycache__" if writable else Path(tempfile.gettempdir(), "specdecode-sim")
    return base / f"numba-{digest.hexdigest()[:12]}"


os.environ.setdefault("NUMBA_CACHE_DIR", str(_choose_cache()))

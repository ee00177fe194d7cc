"""What is fetched and made once for a node, kept outside the tree under the hash of its sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

CACHE = Path(os.environ.get("SPECDECODE_CACHE") or Path.home() / ".cache" / "specdecode") / "node"


def make_once(kind: str, sources: Iterable[bytes], make: Callable[[Path], None]) -> Path:
    """Return the folder of a kind that was made from these sources, made first where needed.

    It appears there complete or not at all; what older sources made is removed.
    """
    target = CACHE / f"{kind}-{_hash(sources)}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return target
        fresh = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=CACHE))
        fresh.chmod(0o755)
        try:
            make(fresh)
            for old in CACHE.glob(f"{kind}-*"):
                shutil.rmtree(old)
            fresh.rename(target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return target


def _hash(sources: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        digest.update(hashlib.sha256(source).digest())
    return digest.hexdigest()[:16]

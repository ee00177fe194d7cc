"""A process that answers /health, for tests of the operator's Kubernetes mechanics.

It is no engine: it has no model, no tokens and no metrics. Pods of it become Ready in a moment,
where one real engine takes a minute and three gigabytes; whatever an engine does is tested on the
real one. Signals and exits are those of a real process. `--fail-with TEXT` writes the text as the
termination message and ends with 1, as an engine does that cannot start. When a file with its
host's name appears in the folder SPECDECODE_PLANT it ends with 0, as vLLM does, with the file's
text as the termination message, or in its log where the text begins with `log:`; it does so only
with speculation on.
"""

from __future__ import annotations

import http.server
import os
import signal
import sys
import threading
import time
from pathlib import Path


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers every GET with 200."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


def main() -> None:
    """Serve until SIGTERM or the planted fault."""
    arguments = sys.argv[1:]
    if "--fail-with" in arguments:
        print(f"ERROR {arguments[arguments.index('--fail-with') + 1]}", file=sys.stderr)
        sys.exit(1)
    port = next(
        int(a.partition("=")[2] or arguments[i + 1])
        for i, a in enumerate(arguments)
        if a.partition("=")[0] == "--port"
    )
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server = http.server.ThreadingHTTPServer(("0.0.0.0", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    plant = Path(os.environ.get("SPECDECODE_PLANT", "/nonexistent"), os.environ["HOSTNAME"])
    while not plant.exists() or "--speculative-config" not in " ".join(arguments):
        time.sleep(0.05)
    text = plant.read_text()
    if text.startswith("log:"):
        print(text.removeprefix("log:"), file=sys.stderr, flush=True)
    else:
        Path(os.environ["SPECDECODE_TERMINATION_LOG"]).write_text(text)
    os._exit(0)


if __name__ == "__main__":
    main()

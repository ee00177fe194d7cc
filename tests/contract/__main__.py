"""Write the contract anew from the real engine: `python -m tests.contract`.

With `simulator` as argument it is printed of the simulated one instead.
"""

import json
import sys
import tempfile
from pathlib import Path

from tests.contract.describe import describe_answers, describe_metrics
from tests.contract.servers import CONTRACT, run_server


def main() -> None:
    """Describe a server and write or print the description."""
    kind = "simulator" if sys.argv[1:] == ["simulator"] else "real"
    with (
        tempfile.TemporaryDirectory() as folder,
        run_server(kind, Path(folder) / "server") as server,
    ):
        server.apply([[1, 64, 7]])
        answers = describe_answers(server.url)
        contract = {"answers": answers, "metrics": describe_metrics(server.read_metrics())}
    text = json.dumps(contract, indent=1, sort_keys=True) + "\n"
    if kind == "real":
        CONTRACT.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()

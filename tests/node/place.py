"""Where the tests on a node keep things, and the variables by which their parts know each other."""

from tests.support.engine import ROOT

FOLDER = ROOT / ".build" / "node"
CLUSTER = FOLDER / "cluster"
SCRATCH = FOLDER / "scratch"
FIGURES = FOLDER / "figures"
# Set for the tests: they run in namespaces of their own, or the reason why they cannot.
INSIDE_VARIABLE = "SPECDECODE_NODE_INSIDE"
SKIP_VARIABLE = "SPECDECODE_NODE_SKIP"

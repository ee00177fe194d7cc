"""Names that objects carry in the cluster: group, labels, annotations, field manager.

They are a contract with users, dashboards and the engine's plugin: change none.
"""

from __future__ import annotations

import re
from typing import Final

GROUP = "specdecode.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "SpecDecodeDeployment"
PLURAL = "specdecodedeployments"
SINGULAR = "specdecodedeployment"
SHORT_NAME = "sdd"

FIELD_MANAGER = "specdecode-operator"

# Labels
LABEL_NAME = "app.kubernetes.io/name"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_OBJECT = "specdecode.io/deployment"
LABEL_REVISION = "specdecode.io/revision"
APP_NAME = "specdecode-engine"

# Annotations on pods
ANNOTATION_ARM = "specdecode.io/arm"
ANNOTATION_TABLE_GENERATION = "specdecode.io/table-generation"
ANNOTATION_TABLE_BUMP = "specdecode.io/table-bump"
ANNOTATION_SCRAPE = "prometheus.io/scrape"
ANNOTATION_SCRAPE_PORT = "prometheus.io/port"
ANNOTATION_SCRAPE_PATH = "prometheus.io/path"

# Annotations on a revision's Deployment: the record from which it is never re-rendered.
ANNOTATION_INPUTS = "specdecode.io/inputs"
ANNOTATION_TEMPLATE = "specdecode.io/template"
ANNOTATION_RENDERED_BY = "specdecode.io/rendered-by"

# Annotation on the ConfigMap of tables: when its present generation was written (RFC 3339).
ANNOTATION_WRITTEN_AT = "specdecode.io/written-at"

ARM_STABLE = "stable"
ARM_CANARY = "canary"
ARM_OFF = "off"

ENGINE_CONTAINER = "engine"
ENGINE_PORT = 8000
ENGINE_PORT_NAME = "http"

# A revision's name, `NAME-<10 hex digits>`, must fit into a label value of 63 characters.
MAX_NAME_LENGTH: Final = 52
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

TABLES_FOLDER = "/etc/specdecode/tables"
TABLES_VOLUME = "specdecode-tables"
POD_FOLDER = "/etc/specdecode/pod"
POD_VOLUME = "specdecode-pod"
ARM_FILE = "arm"
TERMINATION_LOG = "/dev/termination-log"


def tables_name(name: str) -> str:
    """Name the ConfigMap that holds an object's K-tables."""
    return f"{name}-spec-tables"


def revision_name(name: str, revision: str) -> str:
    """Name the Deployment of one revision."""
    return f"{name}-{revision}"


def name_problem(name: str) -> str | None:
    """Say why an object cannot have this name, or None: its Service and labels carry it too."""
    if len(name) > MAX_NAME_LENGTH:
        return (
            f"the name {name!r} has {len(name)} characters: use at most {MAX_NAME_LENGTH}, so that "
            "it fits into labels together with a revision"
        )
    if not _NAME.fullmatch(name):
        return (
            f"the name {name!r} cannot name a Service: use lower case letters, digits and hyphens, "
            "a letter first, no hyphen last and no dots"
        )
    return None

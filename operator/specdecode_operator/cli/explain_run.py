"""Runs `specdecode explain`: from the live object to its explanation."""

from __future__ import annotations

import argparse
import os

from pydantic import ValidationError

from specdecode_operator.api.metadata import KIND
from specdecode_operator.api.v1alpha1 import Status
from specdecode_operator.cli import explain_text
from specdecode_operator.clients import transport
from specdecode_operator.clients.kube import KubeClient
from specdecode_operator.domain.observation import ObjectKey
from specdecode_operator.errors import PermanentError


class ExplainError(PermanentError):
    """The command cannot do what it was asked; the message says what to change."""


def run(options: argparse.Namespace) -> int:
    """Print the explanation; return the exit status."""
    if options.batch is not None and options.batch < 1:
        raise ExplainError("--batch takes a batch size from 1 on")
    key = ObjectKey(options.namespace, options.name)
    connection = transport.Transport(transport.load_configuration(os.environ), connections=1)
    try:
        found = KubeClient(connection, may_write=lambda: False).get_object(key)
    finally:
        connection.close()
    if found is None:
        raise ExplainError(
            f"there is no {KIND} {options.name} in the namespace {options.namespace}: see "
            "kubectl get sdd --all-namespaces"
        )
    try:
        status = Status.model_validate(found.get("status") or {})
    except ValidationError as error:
        raise ExplainError(
            f"{options.namespace}/{options.name}: its status was written by another version: "
            f"{error.errors(include_url=False, include_input=False)[0]['msg']}"
        ) from error
    print(explain_text.describe(key, found, status, batch=options.batch))
    return 0

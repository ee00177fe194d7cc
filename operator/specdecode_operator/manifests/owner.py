"""Metadata that every owned object carries: its owner and the labels by which it is found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdecode_operator.api import metadata
from specdecode_operator.domain.observation import ObjectKey


def build_owner_reference(key: ObjectKey, uid: str) -> dict[str, Any]:
    """Build the reference by which the garbage collector deletes what the object owned.

    `blockOwnerDeletion` stays false: setting it needs the right to update finalizers.
    """
    return {
        "apiVersion": metadata.API_VERSION,
        "kind": metadata.KIND,
        "name": key.name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def build_labels(name: str, *, revision: str | None = None) -> dict[str, str]:
    """Build the labels of an object's parts; those of one revision name it too."""
    labels = {
        metadata.LABEL_NAME: metadata.APP_NAME,
        metadata.LABEL_INSTANCE: name,
        metadata.LABEL_MANAGED_BY: metadata.FIELD_MANAGER,
        metadata.LABEL_OBJECT: name,
    }
    return labels if revision is None else {**labels, metadata.LABEL_REVISION: revision}


def build_selector(name: str, *, revision: str | None = None) -> dict[str, str]:
    """Build the labels that select an object's pods, or those of one of its revisions."""
    selector = {metadata.LABEL_OBJECT: name}
    return selector if revision is None else {**selector, metadata.LABEL_REVISION: revision}


def build_metadata(
    key: ObjectKey,
    uid: str,
    *,
    name: str,
    revision: str | None = None,
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Build the metadata of one owned object in the owner's namespace."""
    built: dict[str, Any] = {
        "name": name,
        "namespace": key.namespace,
        "labels": build_labels(key.name, revision=revision),
        "ownerReferences": [build_owner_reference(key, uid)],
    }
    return {**built, "annotations": dict(annotations)} if annotations else built

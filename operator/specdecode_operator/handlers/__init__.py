"""Kopf: decorators, unpacking, error mapping, nothing else.

Only `on.event`: timers, daemons and on.delete add finalizers (with the operator gone every delete
would hang), the other handlers add annotations.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
from typing import Any

import kopf

from specdecode_operator import errors, factory
from specdecode_operator.api import metadata
from specdecode_operator.config import OperatorConfig
from specdecode_operator.domain.observation import ObjectKey
from specdecode_operator.loop import pods
from specdecode_operator.loop.pods import Urgency

from .storage import NoDiffBase, NoProgress

logger = logging.getLogger(__name__)

_INSTALL_RETRY_SECONDS = 2.0
_LOGIN_PAUSE_SECONDS = 1.0
_HEARTBEAT_SECONDS = 1.0
_HEARTBEAT_LIMIT_SECONDS = 30.0
_WARM_UP_SECONDS = 30.0


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Construct and start the application; Kopf watches once the resource is installed."""
    configure(settings)
    if "application" not in memo:
        try:
            memo.application = factory.build(OperatorConfig.from_environment(os.environ))
        except errors.ConfigurationError as error:
            raise kopf.PermanentError(str(error)) from error  # Kopf would try for ever
    memo.application.start()
    memo.tasks = [asyncio.create_task(beat(memo.application)), asyncio.create_task(settle())]
    await wait_installed(memo.application)


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Stop the application; passes that run come to their end."""
    for task in memo.get("tasks", ()):
        task.cancel()
    if "application" in memo:
        await asyncio.to_thread(memo.application.stop)


@kopf.on.login()
async def log_in(memo: kopf.Memo, **_: Any) -> kopf.ConnectionInfo:
    """Use the credentials that our own client found; asked again whenever they are refused.

    Kopf ends the operator when it gets the same credentials again, yet an API server that starts
    refuses good ones for a moment: a priority that rises makes each answer another one.
    """
    memo.logins = memo.get("logins", 0) + 1
    if memo.logins > 1:
        await asyncio.sleep(_LOGIN_PAUSE_SECONDS)
    known = await asyncio.to_thread(memo.application.connection.credentials)
    return kopf.ConnectionInfo(
        server=known.server,
        ca_path=known.ca_path,
        insecure=known.insecure,
        certificate_path=known.certificate_path,
        private_key_path=known.private_key_path,
        scheme=known.scheme,
        token=known.token,
        priority=memo.logins,
    )


@kopf.on.event(metadata.GROUP, metadata.VERSION, metadata.PLURAL)
async def note_object(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
    """Ask for a pass when the user changed the object; our own status writes change nothing."""
    meta = event["object"]["metadata"]
    seen = (
        event["type"] == "DELETED",
        meta.get("generation"),
        meta.get("deletionTimestamp"),
        tuple(sorted((meta.get("annotations") or {}).items())),
    )
    if memo.get("seen") != seen:
        memo.seen = seen
        memo.application.ask(ObjectKey(meta["namespace"], meta["name"]), Urgency.SOON)


@kopf.on.event("", "v1", "pods", labels={metadata.LABEL_OBJECT: kopf.PRESENT})
async def note_pod(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
    """Ask for a pass of the pod's object, at once when a container ended."""
    pod = event["object"]
    name = pods.owner_name(pod)
    if name is None:
        return
    record = pods.to_record(pod)
    urgency = pods.compare(memo.get("record"), record)
    if event["type"] == "DELETED" and urgency is Urgency.NONE:
        urgency = Urgency.SOON
    memo.record = record
    memo.application.ask(ObjectKey(pod["metadata"]["namespace"], name), urgency)


def configure(settings: kopf.OperatorSettings) -> None:
    """Set what Kopf leaves to us: little memory, quick reconnects, nothing written anywhere."""
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.persistence.progress_storage = NoProgress()
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.watching.chunk_size = 100
    settings.watching.inactivity_timeout = 15
    settings.watching.connect_timeout = 5
    settings.watching.label_selectors["", "v1", "pods"] = metadata.LABEL_OBJECT
    settings.networking.request_timeout = 10
    settings.networking.connect_timeout = 2
    # For ever: an operator that ends because the API server is away comes back minutes late.
    settings.networking.error_backoffs = itertools.repeat(0.5)
    settings.queueing.idle_timeout = 1
    settings.queueing.worker_limit = None
    settings.process.ultimate_exiting_timeout = 25


async def wait_installed(application: factory.Application) -> None:
    """Return once the resource is served: what Kopf does not find at its start it never watches."""
    told = ""
    while True:
        try:
            return await asyncio.to_thread(application.check_installed)
        except errors.OperatorError as error:
            if str(error) != told:
                logger.warning("waiting: %s", error)
            told = str(error)
        await asyncio.sleep(_INSTALL_RETRY_SECONDS)


async def beat(application: factory.Application) -> None:
    """Show the probe that Kopf's event loop comes round."""
    application.progress.expect("events", every_seconds=_HEARTBEAT_LIMIT_SECONDS)
    while True:
        application.progress.beat("events")
        await asyncio.sleep(_HEARTBEAT_SECONDS)


async def settle() -> None:
    """Take what the start has built out of the collector's sight: its pauses are 100 ms."""
    await asyncio.sleep(_WARM_UP_SECONDS)
    gc.collect()
    gc.freeze()

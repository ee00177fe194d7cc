"""Kopf's store of credentials takes ours again after it has seen them refused."""

import asyncio

import kopf
import pytest
from kopf._cogs.structs.credentials import LoginError, Vault

from specdecode_operator import handlers
from specdecode_operator.clients.transport import Credentials


class Connection:
    def credentials(self) -> Credentials:
        return Credentials(
            server="https://api:6443",
            ca_path=None,
            insecure=False,
            certificate_path=None,
            private_key_path=None,
            scheme="Bearer",
            token="abc",
        )


class Application:
    connection = Connection()


async def refuse(vault: Vault, answers: list[kopf.ConnectionInfo]) -> None:
    """Populate, see a 401, and let the next answer come while the request waits."""
    await vault.populate({"log_in": answers[0]})
    key, item = vault.select()
    waiting = asyncio.create_task(vault.invalidate(key, item.info, exc=ValueError("401")))
    await vault.wait_for_emptiness()
    await vault.populate({"log_in": answers[1]})
    await waiting
    vault.select()


async def test_good_credentials_that_were_refused_once_are_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handlers, "_LOGIN_PAUSE_SECONDS", 0.0)
    memo = kopf.Memo(application=Application())
    await refuse(Vault(), [await handlers.log_in(memo), await handlers.log_in(memo)])


async def test_kopf_still_refuses_equal_ones() -> None:
    """The day this fails, the rising priority can go."""
    memo = kopf.Memo(application=Application())
    same = await handlers.log_in(memo)
    with pytest.raises(LoginError):
        await refuse(Vault(), [same, same])

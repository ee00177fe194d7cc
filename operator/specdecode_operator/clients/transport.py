"""One HTTP call to the API server: credentials, time limits, and errors in this package's words.

The official client gives configuration, TLS and connections. Its generated call layer is left
aside on purpose: it copies each body through typed models and its signature changed between
major versions.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import urlencode

import urllib3
from kubernetes import client as official
from kubernetes import config as official_config

from specdecode_operator import errors

CONNECT_SECONDS = 2.0
READ_SECONDS = 5.0
USER_AGENT = "specdecode-operator"
_CHUNK_BYTES = 65536

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


@dataclass(frozen=True)
class Credentials:
    """What somebody else needs to log in to the same API server, as of now."""

    server: str
    ca_path: str | None
    insecure: bool
    certificate_path: str | None
    private_key_path: str | None
    scheme: str | None
    token: str | None


def load_configuration(environ: Mapping[str, str]) -> official.Configuration:
    """Find the API server: KUBECONFIG where it is set, else the pod's account, else ~/.kube/config.

    KUBECONTEXT chooses a context of the file. Raises ConfigurationError with what was tried.
    """
    configuration = official.Configuration()
    in_cluster = not environ.get("KUBECONFIG") and "KUBERNETES_SERVICE_HOST" in environ
    try:
        if in_cluster:
            official_config.load_incluster_config(  # type: ignore[no-untyped-call]
                client_configuration=configuration
            )
        else:
            official_config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config"),
                context=environ.get("KUBECONTEXT") or None,
                client_configuration=configuration,
                persist_config=False,
            )
    except (official_config.ConfigException, OSError) as error:
        raise errors.ConfigurationError(
            f"no way to reach an API server: {error}; set KUBECONFIG (and KUBECONTEXT), or run in "
            "a pod with a service account"
        ) from error
    return configuration


class Transport:
    """Connections to one API server; safe to use from many threads."""

    def __init__(
        self,
        configuration: official.Configuration,
        *,
        connections: int = 16,
        read_seconds: float = READ_SECONDS,
    ) -> None:
        configuration.connection_pool_maxsize = connections
        configuration.retries = False  # the queue tries again, with back-off; nobody else does
        self._configuration = configuration
        self._read_seconds = read_seconds
        self._api = official.ApiClient(configuration)
        self._pool: urllib3.PoolManager = self._api.rest_client.pool_manager

    def close(self) -> None:
        """Close the idle connections."""
        self._pool.clear()

    def credentials(self) -> Credentials:
        """Give the present credentials; tokens are read again where they rotate."""
        header = self._authorization()
        scheme, _, token = header.rpartition(" ")
        configuration = self._configuration
        return Credentials(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
            scheme=scheme or None,
            token=token or None,
        )

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = JSON,
    ) -> dict[str, Any]:
        """Send JSON and return the JSON answered; raises errors.py names only."""
        response = self._open(method, path, query, body, content_type, preload=True)
        try:
            answer = json.loads(response.data)
        except ValueError as error:
            raise errors.TransientError(f"{method} {path}: the answer is no JSON") from error
        if not isinstance(answer, dict):
            raise errors.TransientError(f"{method} {path}: the answer is no JSON object")
        return answer

    def tail(
        self, path: str, *, query: Mapping[str, str], limit_bytes: int, timeout_seconds: float
    ) -> bytes:
        """Read a stream and keep its last `limit_bytes`.

        Raises TransientError if the stream has not ended within the time: a tail that is cut
        short at its end would look complete.
        """
        deadline = time.monotonic() + timeout_seconds
        response = self._open("GET", path, query, None, JSON, preload=False, read=timeout_seconds)
        kept = bytearray()
        try:
            while chunk := response.read1(_CHUNK_BYTES):
                kept += chunk
                del kept[:-limit_bytes]
                if time.monotonic() > deadline:
                    raise errors.TransientError(f"GET {path}: not read in {timeout_seconds:g} s")
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise errors.TransientError(f"GET {path}: {_cause(error)}") from error
        finally:
            response.close()
        return bytes(kept)

    def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        content_type: str,
        *,
        preload: bool,
        read: float | None = None,
    ) -> urllib3.BaseHTTPResponse:
        headers = {"Accept": "application/json, */*", "User-Agent": USER_AGENT}
        if authorization := self._authorization():
            headers["Authorization"] = authorization
        if body is not None:
            headers["Content-Type"] = content_type
        read = read or self._read_seconds
        encoded = "?" + urlencode(query) if query else ""
        try:
            response = self._pool.request(
                method,
                self._configuration.host + path + encoded,
                body=None if body is None else json.dumps(body),
                headers=headers,
                timeout=urllib3.Timeout(connect=min(CONNECT_SECONDS, read), read=read),
                retries=False,
                preload_content=preload,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise errors.TransientError(f"{method} {path}: {_cause(error)}") from error
        if response.status >= 300:
            data = response.data
            response.release_conn()
            _raise(response.status, data, f"{method} {path}")
        return response

    def _authorization(self) -> str:
        configuration = self._configuration
        # The name of the key changed with version 36 of the official client.
        token = configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            return str(token)
        if configuration.username:
            return str(configuration.get_basic_auth_token())
        return ""


def _cause(error: Exception) -> str:
    """Name a failed connection in a few words."""
    refused = isinstance(error, urllib3.exceptions.NewConnectionError)  # it is a time-out, too
    if isinstance(error, urllib3.exceptions.TimeoutError) and not refused:
        return "timed out"
    inner = getattr(error, "reason", None) or error
    return f"{type(inner).__name__}: {inner}"[:200]


def _raise(status: int, data: bytes, what: str) -> NoReturn:
    """Turn a refusal of the API server into an error of this package."""
    try:
        message = str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        message = data[:200].decode(errors="replace")
    sentence = f"{what}: {status} {message}"[:1000]
    by_status: dict[int, type[errors.OperatorError]] = {
        400: errors.InvalidObjectError,
        403: errors.ForbiddenError,
        404: errors.NotFoundError,
        405: errors.InvalidObjectError,
        409: errors.ConflictError,
        413: errors.InvalidObjectError,
        415: errors.InvalidObjectError,
        422: errors.InvalidObjectError,
    }
    # A field of the wrong type is answered as if the server had failed.
    if status == 500 and "failed to create typed patch object" in message:
        status = 422
    # 401 is transient: tokens rotate, and authentication may be a web hook that is down.
    raise by_status.get(status, errors.TransientError)(sentence)

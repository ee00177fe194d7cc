"""The server that is loaded, and the ways in which a request to it can fail."""

from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit


class ErrorKind(StrEnum):
    """Why a request failed."""

    REFUSED = "refused"  # nothing listens there
    UNREACHABLE = "unreachable"  # no such host, no route, no TLS
    RESET = "reset"  # the connection ended before the reply did
    TIMEOUT = "timeout"  # nothing came for as long as the target allows
    HTTP_4XX = "http4xx"
    HTTP_5XX = "http5xx"
    ENGINE = "engine"  # the stream itself told of an error, or that the request was aborted
    PROTOCOL = "protocol"  # the reply is not what an OpenAI-compatible server sends


class RequestError(Exception):
    """A request that failed, and why."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Target:
    """The server to load; `probe` fills in what only the server knows.

    `idle_timeout_seconds` is the longest wait for the next bytes, the first token among them.
    """

    url: str
    model: str
    tokens_per_character: float = 1.0
    keep_alive: bool = True
    api_key: str | None = field(default=None, repr=False)
    idle_timeout_seconds: float = 120.0
    connect_timeout_seconds: float = 10.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(
                f"{self.url!r} is no server address: give http://HOST:PORT or https://HOST:PORT"
            )
        if parts.username is not None:
            raise ValueError("credentials do not belong into the address: use an API key")
        if not (self.url + (self.api_key or "")).isprintable():
            raise ValueError("the address or the API key contains a line break")
        parts.port  # noqa: B018 - raises ValueError for a port out of range

"""Prometheus: raw samples in, or one short sentence why there are none.

Addresses may carry passwords and headers tokens: no message repeats either.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Self

import requests
from prometheus_api_client import PrometheusConnect
from prometheus_api_client.exceptions import PrometheusApiClientException
from urllib3.exceptions import ReadTimeoutError
from urllib3.util import Retry

from specdecode_operator import errors
from specdecode_operator.domain.observation import Series

_RETRIES = 1
_BACKOFF_SECONDS = 0.2
_RETRIED_STATUS = (429, 502, 503, 504)
_MAX_CAUSE = 200


class PrometheusClient:
    """One Prometheus (or what speaks its API); safe to use from many threads.

    `ca` is the path of a CA bundle, None for the system's. Every method raises
    MetricsUnavailableError and nothing else. After a time-out nothing is asked for as long again,
    so that a silent Prometheus does not hold all workers all of the time.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        ca: str | None = None,
        timeout: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        session = requests.Session()
        session.verify = ca or True
        # Otherwise ~/.netrc may replace the Authorization header that was configured.
        session.auth = _KeepHeaders()
        self._timeout_seconds = max(1, round(timeout))
        self._clock = clock
        self._silent_until = float("-inf")
        self._connect = PrometheusConnect(
            url=url.rstrip("/"),
            headers=dict(headers or {}),
            session=session,
            timeout=self._timeout_seconds,
            retry=_RetryNoTimeout(
                total=_RETRIES,
                backoff_factor=_BACKOFF_SECONDS,
                status_forcelist=_RETRIED_STATUS,
                allowed_methods=("GET",),
                raise_on_status=False,
                respect_retry_after_header=False,
            ),
        )

    def query_range_vector(self, promql: str, at: datetime) -> tuple[Series, ...]:
        """Ask for raw samples: `promql` ends in a range such as `[300s]`, which ends at `at`."""
        return tuple(_to_series(item) for item in self._query(promql, at))

    def check_health(self) -> None:
        """Raise MetricsUnavailableError unless Prometheus answers a query."""
        self._query("vector(1)", None)

    def close(self) -> None:
        """Close the idle connections."""
        self._connect.close()

    def _query(self, promql: str, at: datetime | None) -> list[Mapping[str, Any]]:
        if self._clock() < self._silent_until:
            raise errors.MetricsUnavailableError(self._describe_silence())
        params = {} if at is None else {"time": f"{at.timestamp():.3f}"}
        try:
            answer = self._connect.custom_query(promql, params=params)
        except PrometheusApiClientException as error:
            raise errors.MetricsUnavailableError(_refusal(str(error))) from None
        except requests.Timeout:
            self._silent_until = self._clock() + self._timeout_seconds
            raise errors.MetricsUnavailableError(self._describe_silence()) from None
        except requests.exceptions.SSLError:
            raise errors.MetricsUnavailableError(
                "the certificate of Prometheus is not trusted: set SPECDECODE_PROMETHEUS_CA_FILE"
            ) from None
        except requests.ConnectionError as error:
            raise errors.MetricsUnavailableError(_unreachable(error)) from None
        except (requests.RequestException, ValueError, KeyError, TypeError) as error:
            raise errors.MetricsUnavailableError(
                f"Prometheus gave no valid answer ({type(error).__name__})"
            ) from None
        if not isinstance(answer, list):
            raise errors.MetricsUnavailableError("Prometheus gave no list of series")
        return answer

    def _describe_silence(self) -> str:
        return f"Prometheus did not answer within {self._timeout_seconds} s"


class _RetryNoTimeout(Retry):
    """Tries a broken connection again, which may just have been idle too long; no time-out."""

    def increment(
        self,
        method: str | None = None,
        url: str | None = None,
        response: Any = None,
        error: Exception | None = None,
        _pool: Any = None,
        _stacktrace: Any = None,
    ) -> Self:
        if isinstance(error, ReadTimeoutError):
            raise error
        return super().increment(method, url, response, error, _pool, _stacktrace)


class _KeepHeaders(requests.auth.AuthBase):
    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        return request


def _to_series(item: Mapping[str, Any]) -> Series:
    try:
        labels = {str(k): str(v) for k, v in item["metric"].items()}
        samples = tuple((float(at), float(value)) for at, value in item["values"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise errors.MetricsUnavailableError("Prometheus gave a series without samples") from None
    return Series(name=labels.pop("__name__", ""), labels=labels, samples=samples)


def _refusal(text: str) -> str:
    """Say what an HTTP error of Prometheus was; its own sentence is kept where there is one."""
    status = re.search(r"HTTP Status Code (\d+)", text)
    said = re.search(r'\\?"error\\?":\s*\\?"(.*?)\\?"\s*[,}]', text)
    code = status.group(1) if status else "an error"
    hint = {
        "401": ": not authenticated, see SPECDECODE_PROMETHEUS_HEADERS_FILE",
        "403": ": not allowed, see SPECDECODE_PROMETHEUS_HEADERS_FILE",
        "404": ": no Prometheus API at this address",
    }.get(code, f": {said.group(1)}" if said else "")
    return f"Prometheus answered {code}{hint}"[:_MAX_CAUSE]


def _unreachable(error: requests.ConnectionError) -> str:
    """Name the usual causes without repeating the address."""
    text = str(error)
    for sign, cause in (
        ("Connection refused", "connection refused"),
        ("NameResolutionError", "its name cannot be resolved"),
        ("Name or service not known", "its name cannot be resolved"),
        ("No route to host", "no route to it"),
        ("Network is unreachable", "no route to it"),
        ("timed out", "connecting timed out"),
    ):
        if sign in text:
            return f"Prometheus cannot be reached: {cause}"
    return "Prometheus cannot be reached: the connection broke"

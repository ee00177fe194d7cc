"""The two ways in which work fails, so that callers need to know no library's exceptions.

A transient error is worth another try without anyone acting; a permanent one needs a person.
"""

from __future__ import annotations


class OperatorError(Exception):
    """Base of every error that this package raises on purpose."""


class TransientError(OperatorError):
    """The same call may succeed later: network, time-out, conflict, overload."""


class PermanentError(OperatorError):
    """The same call will fail again until somebody changes something."""


class ConflictError(TransientError):
    """The object changed since it was read: read it again and decide anew."""


class NotLeaderError(TransientError):
    """Another operator holds the lease now: this one must not write."""


class NotFoundError(PermanentError):
    """The object is not there (any more)."""


class ForbiddenError(PermanentError):
    """The API server denied the call: a missing RBAC rule."""


class InvalidObjectError(PermanentError):
    """The API server refused the object's content."""


class MetricsUnavailableError(TransientError):
    """Prometheus could not be asked: refused, timed out, or answered with an error."""


class ConfigurationError(PermanentError):
    """The operator's own configuration is wrong; the message names the variable."""


class InvalidTableError(PermanentError):
    """A K-table breaks an invariant; the message says which and what to change."""


class InvalidSpecError(PermanentError):
    """The user's spec cannot become objects; the message says what to change."""

"""Says in the container's termination message why the engine ended.

vLLM's main process exits 0 after its engine died, so the exit code tells nothing. A handler on
the logger `vllm` sees the exception first, in the process it happened in; later processes only
echo it. All of them share one file: the deeper cause wins, among equals the first.
"""

import fcntl
import json
import logging
import multiprocessing
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

SCHEMA = 1
MAX_MESSAGE_BYTES = 4096
MAX_LINE_CHARACTERS = 1024
DEFAULT_TERMINATION_LOG = "/dev/termination-log"

# Signatures of a cause in one line, the deepest causes first. Each is bound to its context,
# so that a request that merely talks of one of them is not taken for it.
SIGNATURES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "gpu-hardware",
        re.compile(r"uncorrectable ECC|ECC error|GPU has fallen off the bus", re.IGNORECASE),
    ),
    (
        "illegal-memory-access",
        re.compile(
            r"(CUDA|HIP|Triton)[^\n]{0,80}illegal memory access|cudaErrorIllegalAddress"
            r"|CUDA_ERROR_ILLEGAL_ADDRESS|^an illegal memory access was encountered"
            r"|Memory access fault by GPU|HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION"
        ),
    ),
    ("device-assert", re.compile(r"device-side assert triggered")),
    (
        "cuda-out-of-memory",
        re.compile(r"(CUDA|HIP)[^\n]{0,40}out of memory|OutOfMemoryError|Lack of device memory"),
    ),
    (
        "collective-timeout",
        re.compile(r"Watchdog caught collective operation timeout|NCCL[^\n]*(timeout|timed out)"),
    ),
    ("engine-hang", re.compile(r"RPC call to \w+ timed out")),
)
# Causes in order of depth; what stands first overwrites what stands later.
DEPTH = (*(cause for cause, _ in SIGNATURES), "config-refused", "engine-crash")
# Lines by which vLLM says that a process of its own is ending for an error.
FATAL_RECORDS = re.compile(
    r"EngineCore (encountered a fatal error|failed to start)|WorkerProc (hit an exception|failed)"
    r"|Error getting async model runner output|(died|exited) unexpectedly|output_handler failed"
    r"|Exception occurred while running API servers"
)
# What the other processes say after it: true, and no cause.
ECHOES = re.compile(r"EngineDeadError|EngineCore encountered an issue|initialization failed. See")
REFUSALS = ("ValueError", "ValidationError", "NotImplementedError", "ArgumentError")
SECRETS = re.compile(r"\b(hf_|sk-)\w{6,}|(?<=//)[^/\s:@]+:[^/\s@]+(?=@)|(?<=Bearer )\S+")


@dataclass(frozen=True)
class Report:
    """One cause as it stands in the termination message."""

    cause: str
    line: str
    process: str
    at: str
    schema: int = SCHEMA

    def to_json(self) -> bytes:
        """Return the message, cut to what Kubernetes keeps."""
        line = SECRETS.sub("[redacted]", self.line)[:MAX_LINE_CHARACTERS]
        while True:
            content = json.dumps({**asdict(self), "line": line}).encode()
            if len(content) <= MAX_MESSAGE_BYTES:
                return content
            line = line[: len(line) // 2]


def find_signature(text: str) -> tuple[str, str] | None:
    """Return (cause, line) of the first line that carries a signature, or None."""
    for line in map(str.strip, text.splitlines()):
        for cause, pattern in SIGNATURES:
            if pattern.search(line):
                return cause, line
    return None


def classify_exception(error: BaseException, *, starting: bool) -> tuple[str, str] | None:
    """Return (cause, line) of an exception that ended a process; None for a mere echo.

    Of a chain the innermost exception that carries a signature decides. Only an engine that was
    still starting can have refused its configuration.
    """
    for link in reversed(list(_chain(error))):
        if found := find_signature(_describe(link)):
            return found
    line = _describe(error).strip().splitlines()[0]
    if ECHOES.search(line):
        return None
    refused = starting and any(kind.__name__ in REFUSALS for kind in type(error).__mro__)
    return ("config-refused" if refused else "engine-crash"), line


def _chain(error: BaseException | None) -> list[BaseException]:
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links


def _describe(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error))


def classify_record(record: logging.LogRecord) -> tuple[str, str] | None:
    """Return (cause, line) of a log record that tells of a fatal error, else None."""
    if record.levelno < logging.WARNING:
        return None
    message = record.getMessage()
    is_fatal = FATAL_RECORDS.search(message) is not None
    error = record.exc_info[1] if record.exc_info else None
    if is_fatal and error is not None:
        return classify_exception(error, starting="failed to start" in message)
    if is_fatal:
        return find_signature(message) or ("engine-crash", message.strip().splitlines()[0])
    # A sticky device error is fatal whoever logs it; others may have been survived.
    found = find_signature(_describe(error)) if error else None
    return found if found and found[0] in ("illegal-memory-access", "device-assert") else None


def write_report(path: Path, report: Report) -> bool:
    """Write the report unless a cause as deep stands there; True when it was written.

    The file is never created: without a mounted one there is nobody to read it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if _depth(_read_cause(file.read(MAX_MESSAGE_BYTES) or b"")) <= _depth(report.cause):
            return False
        file.seek(0)
        file.truncate()
        file.write(report.to_json())
    return True


def _depth(cause: str | None) -> int:
    return DEPTH.index(cause) if cause in DEPTH else len(DEPTH)


def _read_cause(content: bytes) -> str | None:
    try:
        fields = json.loads(content)
    except ValueError:
        return None
    cause = fields.get("cause") if isinstance(fields, dict) else None
    return cause if isinstance(cause, str) else None


class TerminationHandler(logging.Handler):
    """Writes a report for each fatal log record; whatever goes wrong stays in here."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(level=logging.WARNING)
        self._path = path
        self._clock = clock

    def emit(self, record: logging.LogRecord) -> None:
        """Write what the record tells, if it tells of a fatal error."""
        try:
            self._write(classify_record(record))
        except Exception:
            self.handleError(record)

    def handle_uncaught(self, error: BaseException) -> None:
        """Write what an exception tells that nobody caught; Ctrl-C and exits tell nothing."""
        if isinstance(error, Exception):
            self._write(classify_exception(error, starting=True))

    def handleError(self, record: logging.LogRecord) -> None:
        """Stay silent: logging about a failure to log is how processes hang."""

    def _write(self, found: tuple[str, str] | None) -> None:
        if found is None:
            return
        cause, line = found
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._clock()))
        write_report(self._path, Report(cause, line, multiprocessing.current_process().name, at))


def install(environment: Mapping[str, str] = os.environ) -> TerminationHandler:
    """Attach the handler to the logger `vllm` and to uncaught exceptions; once per process."""
    logger = logging.getLogger("vllm")
    for handler in logger.handlers:
        if isinstance(handler, TerminationHandler):
            return handler
    path = environment.get("SPECDECODE_TERMINATION_LOG") or DEFAULT_TERMINATION_LOG
    handler = TerminationHandler(Path(path))
    logger.addHandler(handler)
    _chain_excepthook(handler)
    return handler


def _chain_excepthook(handler: TerminationHandler) -> None:
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            handler.handle_uncaught(error)
        finally:
            previous(kind, error, trace)

    sys.excepthook = hook

"""Termination messages: which cause a log record tells, and which of several is kept."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdecode_vllm import termination

PLUGIN = Path(__file__).parents[2] / "vllm-image" / "plugin"
IMA = "CUDA error: an illegal memory access was encountered"
IMA_TEXT = (
    f"{IMA}\nSearch for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda for more.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


class AcceleratorError(RuntimeError):
    """Stands in for torch's error of this name."""


class EngineDeadError(Exception):
    """Stands in for vLLM's error of this name."""


class ValidationError(ValueError):
    """Stands in for pydantic's error of this name."""


@pytest.fixture
def message_file(tmp_path: Path) -> Path:
    path = tmp_path / "termination-log"
    path.touch()
    return path


@pytest.fixture
def logger(message_file: Path) -> Iterator[logging.Logger]:
    logger = logging.Logger("vllm")
    logger.addHandler(termination.TerminationHandler(message_file, clock=lambda: 0.0))
    yield logger
    logger.handlers.clear()


def log_exception(logger: logging.Logger, message: str, error: Exception) -> None:
    try:
        raise error
    except Exception:
        logger.exception(message)


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text() or "{}")
    return content


def test_a_workers_memory_fault_is_written_as_it_is_logged(
    logger: logging.Logger, message_file: Path
) -> None:
    log_exception(logger, "WorkerProc hit an exception.", AcceleratorError(IMA_TEXT))
    message = read(message_file)
    assert message["line"].endswith(f"AcceleratorError: {IMA}")
    assert {key: message[key] for key in ("schema", "cause", "process", "at")} == {
        "schema": 1,
        "cause": "illegal-memory-access",
        "process": "MainProcess",
        "at": "1970-01-01T00:00:00Z",
    }


@pytest.mark.parametrize(
    ("cause", "message", "error"),
    [
        (
            "illegal-memory-access",
            "EngineCore encountered a fatal error.",
            RuntimeError(f"Worker failed with error '{IMA_TEXT}', please check the stack trace"),
        ),
        (
            "illegal-memory-access",
            "Error getting async model runner output",
            RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        ),
        (
            "illegal-memory-access",
            "EngineCore encountered a fatal error.",
            RuntimeError("CUDA driver error: CUDA_ERROR_ILLEGAL_ADDRESS"),
        ),
        (
            "device-assert",
            "WorkerProc hit an exception.",
            AcceleratorError("CUDA error: device-side assert triggered\n"),
        ),
        (
            "cuda-out-of-memory",
            "EngineCore failed to start.",
            RuntimeError("CUDA out of memory. Tried to allocate 1.86 GiB."),
        ),
        (
            "collective-timeout",
            "WorkerProc hit an exception.",
            RuntimeError("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(...)"),
        ),
        (
            "gpu-hardware",
            "WorkerProc hit an exception.",
            RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        ),
        (
            "engine-hang",
            "EngineCore encountered a fatal error.",
            TimeoutError("RPC call to sample_tokens timed out."),
        ),
        (
            "config-refused",
            "EngineCore failed to start.",
            ValidationError("1 validation error for VllmConfig"),
        ),
        ("engine-crash", "EngineCore encountered a fatal error.", AssertionError()),
        (
            "engine-crash",
            "WorkerProc hit an exception.",
            AcceleratorError("CUDA error: an illegal instruction was encountered"),
        ),
        (
            "engine-crash",
            "Exception occurred while running API servers: died",
            RuntimeError("Process ApiServer_0 (PID: 7) died with exit code -9"),
        ),
        (
            "engine-crash",
            "AsyncLLM output_handler failed.",
            ValueError("Counters can only be incremented by non-negative amounts."),
        ),
    ],
)
def test_the_exception_of_a_fatal_record_is_classified(
    logger: logging.Logger, message_file: Path, cause: str, message: str, error: Exception
) -> None:
    log_exception(logger, message, error)
    assert read(message_file)["cause"] == cause


@pytest.mark.parametrize(
    ("level", "line"),
    [
        (
            logging.ERROR,
            "Worker proc VllmWorker-1 died unexpectedly (exit code: -6), shutting down executor.",
        ),
        (
            logging.WARNING,
            "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup",
        ),
    ],
)
def test_a_process_that_died_natively_is_an_engine_crash(
    logger: logging.Logger, message_file: Path, level: int, line: str
) -> None:
    logger.log(level, line)
    assert read(message_file) | {"process": "", "at": ""} == {
        "schema": 1,
        "cause": "engine-crash",
        "line": line,
        "process": "",
        "at": "",
    }


@pytest.mark.parametrize(
    ("situation", "level", "message"),
    [
        ("a request about it", logging.INFO, f"Received request: prompt: '{IMA}'"),
        ("a warning about it", logging.WARNING, f"a prompt says: {IMA}"),
        ("dumped input of a request", logging.ERROR, f"Dumping input data: prompt '{IMA}'"),
        ("an ordinary error", logging.ERROR, "Error in preprocessing prompt inputs"),
    ],
)
def test_a_record_that_tells_of_nothing_fatal_writes_nothing(
    logger: logging.Logger, message_file: Path, situation: str, level: int, message: str
) -> None:
    logger.log(level, message)
    assert message_file.read_text() == "", situation


@pytest.mark.parametrize(
    "error",
    [
        EngineDeadError("EngineCore encountered an issue. See stack trace (above) for the root."),
        RuntimeError("Engine core initialization failed. See root cause above."),
        RuntimeError("EngineDeadError('EngineCore encountered an issue')"),
    ],
)
def test_a_mere_echo_writes_nothing(
    logger: logging.Logger, message_file: Path, error: Exception
) -> None:
    log_exception(logger, "AsyncLLM output_handler failed.", error)
    assert message_file.read_text() == ""


def test_a_survived_error_of_a_request_writes_nothing(
    logger: logging.Logger, message_file: Path
) -> None:
    log_exception(logger, "Error while handling a request", ValueError("bad prompt"))
    log_exception(logger, "Could not warm up", RuntimeError("CUDA out of memory."))
    assert message_file.read_text() == ""


def test_a_device_fault_is_written_whoever_logs_it(
    logger: logging.Logger, message_file: Path
) -> None:
    log_exception(logger, "Failed to reset the cache", AcceleratorError(IMA_TEXT))
    assert read(message_file)["cause"] == "illegal-memory-access"


def test_the_deeper_cause_replaces_a_shallow_one_and_not_the_other_way_round(
    logger: logging.Logger, message_file: Path
) -> None:
    logger.error("Worker proc VllmWorker-0 died unexpectedly, shutting down executor.")
    assert read(message_file)["cause"] == "engine-crash"
    log_exception(logger, "WorkerProc hit an exception.", AcceleratorError(IMA_TEXT))
    assert read(message_file)["cause"] == "illegal-memory-access"
    log_exception(logger, "EngineCore encountered a fatal error.", RuntimeError("Worker failed"))
    assert read(message_file)["cause"] == "illegal-memory-access"


def test_among_equals_the_first_stays(logger: logging.Logger, message_file: Path) -> None:
    for line in ("first", "second"):
        log_exception(logger, "EngineCore encountered a fatal error.", RuntimeError(line))
    assert read(message_file)["line"] == "RuntimeError: first"


def test_of_a_chain_the_link_with_a_signature_decides() -> None:
    error = RuntimeError("cleanup failed")
    error.__context__ = AcceleratorError(IMA_TEXT)
    found = termination.classify_exception(error, starting=False)
    assert found is not None
    assert found[0] == "illegal-memory-access"


def test_a_chain_that_leads_back_to_itself_ends() -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__context__, second.__context__ = second, first
    found = termination.classify_exception(first, starting=False)
    assert found == ("engine-crash", "RuntimeError: first")


def test_the_file_is_never_created(tmp_path: Path) -> None:
    path = tmp_path / "absent"
    report = termination.Report("engine-crash", "line", "MainProcess", "now")
    assert not termination.write_report(path, report)
    assert not path.exists()


def test_what_stood_in_the_file_before_is_replaced_even_when_longer(message_file: Path) -> None:
    message_file.write_text("not JSON " * 100)
    termination.write_report(message_file, termination.Report("engine-crash", "line", "p", "now"))
    assert read(message_file)["cause"] == "engine-crash"


@pytest.mark.parametrize("line", ["x" * 100_000, "\u2028" * 5_000, "\\" * 5_000])
def test_a_message_is_valid_json_within_what_kubernetes_keeps(line: str) -> None:
    content = termination.Report("engine-crash", line, "p", "now").to_json()
    assert len(content) <= termination.MAX_MESSAGE_BYTES
    assert json.loads(content)["cause"] == "engine-crash"


def test_secrets_do_not_reach_the_message() -> None:
    line = "401 for hf_abcdefghijkl at https://me:secret@hub/x with Bearer abc.def"
    content = termination.Report("engine-crash", line, "p", "now").to_json().decode()
    for secret in ("hf_abcdefghijkl", "me:secret", "abc.def"):
        assert secret not in content


SCRIPT = """
import logging, sys
from specdecode_vllm import plugin
plugin.register()
plugin.register()
assert len(logging.getLogger("vllm").handlers) == 1
{body}
"""


@pytest.mark.parametrize(
    ("situation", "body", "cause"),
    [
        ("uncaught in the server", "raise ValueError('max_num_seqs is wrong')", "config-refused"),
        ("interrupted", "raise KeyboardInterrupt", None),
        ("a plain exit", "sys.exit(3)", None),
        (
            "logged by a child logger",
            "try: raise RuntimeError('boom')\n"
            "except Exception: logging.getLogger('vllm.v1.core').exception("
            "'EngineCore encountered a fatal error.')",
            "engine-crash",
        ),
    ],
)
def test_a_process_with_the_plugin_tells_why_it_ends(
    message_file: Path, situation: str, body: str, cause: str | None
) -> None:
    environment = {"PYTHONPATH": str(PLUGIN), "SPECDECODE_TERMINATION_LOG": str(message_file)}
    command = [sys.executable, "-c", SCRIPT.format(body=body)]
    subprocess.run(command, env=environment, capture_output=True, check=False)
    assert read(message_file).get("cause") == cause, situation


def test_many_processes_at_once_leave_the_deepest_cause(message_file: Path) -> None:
    body = (
        "from pathlib import Path; from specdecode_vllm import termination as t\n"
        "for cause in ('engine-crash', sys.argv[1]):\n"
        "    t.write_report(Path(sys.argv[2]), t.Report(cause, 'x' * 500, 'p', 'now'))"
    )
    causes = ["engine-crash"] * 5 + ["illegal-memory-access"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"import sys\n{body}", cause, str(message_file)],
            env={"PYTHONPATH": str(PLUGIN)},
        )
        for cause in causes
    ]
    assert [process.wait(timeout=60) for process in processes] == [0] * len(processes)
    assert read(message_file)["cause"] == "illegal-memory-access"

"""One situation per rule of the classifier, in spellings that the case files do not have."""

# ruff: noqa: E501 - lines of logs are long

from __future__ import annotations

import json
from textwrap import dedent
from typing import Any

import pytest

from specdecode_operator.decide import faults
from specdecode_operator.domain.evidence import Evidence, FaultClass, Termination

IMA = FaultClass.ILLEGAL_MEMORY_ACCESS
OOM = FaultClass.CUDA_OUT_OF_MEMORY
CRASH = FaultClass.ENGINE_CRASH

CORE = "(EngineCore_DP0 pid=107) ERROR 08-14 03:12:30 [core.py:844] "
WORKER = "(Worker_TP1 pid=168) ERROR 08-14 03:12:30 [multiproc_executor.py:703] "
SERVER = "(APIServer pid=1) ERROR 08-14 03:12:31 [async_llm.py:480] "
INFO = "(APIServer pid=1) INFO 08-14 03:12:20 [loggers.py:123] "
TOKENS = INFO + "Engine 000: Avg generation throughput: 3845.4 tokens/s, Running: 9 reqs"
ASKED = "(APIServer pid=1) INFO 08-14 03:12:25 [launcher.py:140] [shutdown] API server: shutdown triggered"
FAULT = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
FATAL = "EngineCore encountered a fatal error."
TRACE = "Traceback (most recent call last):"
FRAME = (
    '  File "/usr/local/lib/python3.12/dist-packages/vllm/v1/worker/gpu_worker.py", line 702, in f'
)
WATCHDOG = (
    "[rank0]:[E818 07:00:18.600 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=88121, OpType=ALLREDUCE, Timeout(ms)=600000)"
)


def end(exit_code: int | None = 1, reason: str = "Error", message: str = "") -> Termination:
    return Termination(exit_code, None, reason, message, None, None)


def classify(*lines: str, **known: Any) -> FaultClass:
    known.setdefault("termination", end())
    known.setdefault("ever_ready", True)
    return faults.classify(Evidence(log="\n".join(lines), **known)).fault_class


MEMORY_FAULTS = {
    "the driver's name of the error": "[E] cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS",
    "only the pointer to the documentation is left": (
        "Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda/ for more information."
    ),
    "only the number": "CUDA error 700 at /src/kernels/attention.cu:221",
    "the number as a code": "cudaEventSynchronize(event) returned error code 700",
    "the number of an error type": "copy failed, cudaError_t: 700",
    "both names": "CUDA_ERROR_ILLEGAL_ADDRESS (cudaErrorIllegalAddress) in step",
    "the number in parentheses": "CUDA Runtime failure: status code=700",
    "NCCL reports it as a warning": (
        "gpu-7:213:880 [1] enqueue.cc:1556 NCCL WARN Cuda failure 700 'an illegal memory access was "
        "encountered'"
    ),
    "the custom all-reduce": (
        "Failed: Cuda error /workspace/csrc/custom_all_reduce.cuh:455 'an illegal memory access was "
        "encountered'"
    ),
    "TensorRT's words": "[TRT] [E] Error Code 1: Cuda Runtime (an illegal memory access was encountered)",
    "TensorRT-LLM": (
        "[05/27/2025-21:12:36] [TRT-LLM] [E] Failed to initialize executor on rank 3: "
        "[TensorRT-LLM][ERROR] CUDA runtime error in cudaMemsetAsync(ptr, 0, n): an illegal memory "
        "access was encountered (/src/moe_kernels.cu:1282)"
    ),
    "an older PyTorch's watchdog": (
        "[rank0]:[E ProcessGroupNCCL.cpp:1414] [PG 0 Rank 0] Process group watchdog thread terminated "
        "with exception: CUDA error: an illegal memory access was encountered"
    ),
    "an older vLLM's prefix": f"ERROR 09-27 06:46:46 engine.py:157] Runtime{FAULT[17:]}",
    "ROCm's runtime": (
        "Memory access fault by GPU node-2 (Agent handle: 0x55d0) on address 0x7f00. Reason: Unknown."
    ),
    "HIP": "RuntimeError: HIP error: an illegal memory access was encountered",
    "HIP's name of the error": "hipErrorIllegalAddress in hipStreamSynchronize",
    "Triton on HIP": "RuntimeError: Triton Error [HIP]: an illegal memory access was encountered",
    "as information": INFO + f"worker 3 reported: {FAULT}",
    "as a warning in a destructor": (
        "[W802 20:20:42.071 CUDAEvent.h:93] Warning: CUDA warning: an illegal memory access was "
        "encountered (function ~CUDAEvent)"
    ),
    "wrapped in an exception that asks to look above": (
        CORE + "RuntimeError: Worker failed with error 'CUDA error: an illegal memory access was "
        "encountered', please check the stack trace above for the root cause"
    ),
    "in the representation of an exception": (
        WORKER + "AcceleratorError('CUDA error: an illegal memory access was encountered\\nCUDA kernel "
        "errors might be asynchronously reported at some other API call')"
    ),
    "in an exception group": "  | " + FAULT,
    "in colours": f"\x1b[0;31m{WORKER}\x1b[1mCUDA error: an illegal \x1b[4mmemory\x1b[0m access was "
    "encountered\x1b[0m",
    "in upper case": "CUDA ERROR: AN ILLEGAL MEMORY ACCESS WAS ENCOUNTERED",
    "from Ray's own logger": (
        "[2025-04-24 07:01:01,220 E 1203 1377] logging.cc:115: Unhandled exception: "
        "N3c1016DistBackendErrorE. what(): CUDA error: an illegal memory access was encountered"
    ),
    "with the pod's name in front": f"[pod/chat-7d9f-x2x/vllm] {WORKER}{FAULT}",
    "with the shipper's time in front": f"2026-08-14T03:12:31.118242922Z {WORKER}{FAULT}",
    "as a structured line": json.dumps({"level": "ERROR", "message": FAULT, "logger": "vllm"}),
    "a whole traceback in one structured line": json.dumps(
        {"severity": "ERROR", "msg": f"{TRACE}\n{FRAME}\n    x.synchronize()\n{FAULT}"}
    ),
    "as Docker keeps lines": json.dumps({"log": WORKER + FAULT + "\n", "stream": "stderr"}),
    "behind a carriage return of a progress bar": f"Capturing CUDA graphs:  4%\rCapturing: 6%\r{FAULT}",
    "in a wide encoding": "\x00".join(WORKER + FAULT),
    "with broken bytes beside it": f"\ufffd\ufffd{WORKER}\ufffd {FAULT} \ufffd",
}  # fmt: skip


@pytest.mark.parametrize("line", MEMORY_FAULTS.values(), ids=MEMORY_FAULTS)
def test_a_memory_fault_is_seen(line: str) -> None:
    assert classify(TOKENS, line, SERVER + "AsyncLLM output_handler failed.") is IMA


TALK = {
    "a prompt": INFO + f"Received request cmpl-1: prompt: 'why {FAULT}', params: SamplingParams(n=1)",
    "an answer": INFO + f"Generated response cmpl-1: output: 'It says {FAULT}', finish_reason: stop",
    "a body": "request body: " + json.dumps({"messages": [{"role": "user", "content": FAULT}]}),
    "a logged request object": f"Receive: obj=GenerateReqInput(text='{FAULT}', input_ids=None)",
    "a dumped scheduler state": CORE + f"Dumping scheduler output: NewRequestData(prompt='{FAULT}')",
    "an error that quotes the request": (
        SERVER + 'Error in request: {"messages": [{"content": "' + FAULT + '"}]}'
    ),
    "an error that says what the prompt contains": (
        SERVER + f"Error in preprocessing: the prompt contains '{FAULT}', which is no JSON"),
    "a stop word": INFO + f"Added request cmpl-1 with SamplingParams(stop=['{FAULT}'])",
    "the arguments": INFO + "non-default args: {'served_model_name': ['cudaErrorIllegalAddress']}",
    "a metric": 'engine_errors_total{name="cudaErrorIllegalAddress"} 0',
    "a query string": '10.0.0.1 - "GET /search?q=cudaErrorIllegalAddress HTTP/1.1" 404 Not Found',
    "the end of a prompt whose beginning is lost": FAULT + "', params: SamplingParams(n=1)",
    "a prompt in several lines": (
        INFO + f"Received request cmpl-1: prompt: 'Explain\n{FAULT}\nplease', params: n=1"
    ),
    "a structured request": json.dumps({"event": "request", "prompt": FAULT, "message": FAULT}),
    "a comment": "    # otherwise: CUDA error: an illegal memory access was encountered",
    "a hint": "Hint: CUDA error: an illegal memory access was encountered often means a bad index.",
    "a help text": "  --enforce-eager  Use when CUDA error: an illegal memory access was encountered.",
    "advice in a warning": (
        "WARNING 08-14 03:12:00 [cuda.py:1] If you see CUDA error: an illegal memory access was "
        "encountered, upgrade the driver."
    ),
    "what may come": (
        "WARNING 08-14 03:12:00 [x.py:1] This backend may cause 'CUDA error: an illegal memory access "
        "was encountered' on this GPU."
    ),
    "a report of the boot before": INFO + f"The previous instance ended with {FAULT}",
    "how to find one": "To debug CUDA error: an illegal memory access was encountered, set X=1.",
    "a table of codes": "700 cudaErrorIllegalAddress, 710 cudaErrorAssert, 719 cudaErrorLaunchFailure",
    "the plain words": "FAQ: if you hit an illegal memory access, read the docs.",
    "a raise in a traceback": '\n'.join((
        WORKER + TRACE, WORKER + FRAME,
        WORKER + '    raise RuntimeError("CUDA error: an illegal memory access was encountered")',
        WORKER + "           ^^^^^^^^^^^^^^^^^")),
    "a source line in a traceback": '\n'.join((
        TRACE, FRAME, '    check(status, "an illegal memory access was encountered")')),
    "another number": "CUDA graph pool error margin 700 MiB",
    "a port": '10.0.0.1:700 - "GET /health HTTP/1.1" 200 OK',
    "what every CUDA error is followed by": (
        "CUDA kernel errors might be asynchronously reported at some other API call\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", TALK.values(), ids=TALK)
def test_talk_of_a_memory_fault_is_no_evidence(text: str) -> None:
    assert classify(TOKENS, text, CORE + "KeyError: 'x'", CORE + FATAL) is CRASH
    assert classify(TOKENS, text, termination=end(137)) is FaultClass.PROBE_KILLED


OTHER_FAULTS = {
    "an illegal instruction": ("RuntimeError: CUDA error: an illegal instruction was encountered", CRASH),
    "a misaligned address": ("torch.AcceleratorError: CUDA error: misaligned address", CRASH),
    "a failed launch": ("RuntimeError: CUDA error: unspecified launch failure", CRASH),
    "a failed launch in TensorRT-LLM": (
        "[TensorRT-LLM][ERROR] CUDA runtime error in cudaStreamSynchronize(s): unspecified launch failure",
        CRASH,
    ),
    "a segmentation fault": ("!!!!!!! Segfault encountered !!!!!!!", CRASH),
    "ROCm out of memory": ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB.", OOM),
    "cuBLAS without memory": ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED in cublasCreate", OOM),
    "NCCL without memory": ("RuntimeError: NCCL error: Cuda failure 2 'out of memory'", OOM),
    "llama.cpp without memory": ("ggml_cuda_device_malloc: cudaMalloc failed: out of memory", OOM),
    "no room for the cache": (CORE + "ValueError: No available memory for the cache blocks. Try", OOM),
    "an assertion of HIP": ("RuntimeError: HIP error: device-side assert triggered", FaultClass.DEVICE_ASSERT),
    "an assertion's number": ("CUDA error 710: cudaErrorAssert", FaultClass.DEVICE_ASSERT),
    "a collective": (WATCHDOG, FaultClass.COLLECTIVE_TIMEOUT),
    "a heartbeat": (
        "[rank2]:[F1019 01:14:03.356 ProcessGroupNCCL.cpp:1224] [PG 3 Rank 2] ProcessGroupNCCL's watchdog "
        "got stuck for 600 seconds without making progress in monitoring enqueued collectives. This "
        "typically indicates a NCCL/CUDA API hang",
        FaultClass.COLLECTIVE_TIMEOUT,
    ),
    "a heartbeat monitor": (
        "[rank0]:[E1019 01:04:03.356 ProcessGroupNCCL.cpp:1413] [PG 3 Rank 0] Heartbeat monitor timed out! "
        "Process will be terminated after dumping debug info.",
        FaultClass.COLLECTIVE_TIMEOUT,
    ),
    "the engine's own time-out": (
        CORE + "TimeoutError: RPC call to execute_model timed out.", FaultClass.ENGINE_HANG),
    "SGLang's own watchdog": (
        "[2026-08-19 12:05:44 TP0] Watchdog timeout (self.watchdog_timeout=300)", FaultClass.ENGINE_HANG),
    "an ECC error as CUDA tells it": (
        "RuntimeError: CUDA error: uncorrectable ECC error encountered", FaultClass.GPU_HARDWARE),
    "a problem detector's words": ("XID 79 detected on GPU 3", FaultClass.GPU_HARDWARE),
    "a lost GPU": ("kernel: NVRM: Xid (PCI:0000:01:00): 119, pid=7, Timeout waiting for RPC from GSP",
                   FaultClass.GPU_HARDWARE),
    "the kernel kills a worker": (
        "2026-06-17T05:07:49Z kernel: Memory cgroup out of memory: Killed process 31877 (VLLM::Worker_TP)",
        FaultClass.OOM_KILLED),
    "a worker ended by SIGKILL": (
        CORE + "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.",
        FaultClass.OOM_KILLED),
    "Ray's memory monitor": (
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        FaultClass.OOM_KILLED),
    "a worker ended by another signal": (
        CORE + "Worker proc VllmWorker-1 died unexpectedly (exit code: -11), shutting down executor.", CRASH),
    "Ray guesses at causes": (
        "ray.exceptions.ActorDiedError: The actor died. There are some potential root causes. (1) The process "
        "is killed by SIGKILL by OOM killer due to high memory usage. (2) it crashed", CRASH),
    "the host's allocator": (
        CORE + "RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory",
        CRASH),
    "Xid 13, 43 and 45 alone": (
        "kernel: NVRM: Xid (PCI:0000:02:00): 13, pid=3\nkernel: NVRM: Xid (PCI:0000:02:00): 43, pid=3\n"
        "kernel: NVRM: Xid (PCI:0000:02:00): 45, pid=3\nAborted (core dumped)", CRASH),
    "somebody else's process was killed": (
        "kernel: Out of memory: Killed process 99 (prometheus)\n" + CORE + "KeyError: 'a'", CRASH),
}  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), OTHER_FAULTS.values(), ids=OTHER_FAULTS)
def test_every_class_has_its_spellings(line: str, expected: FaultClass) -> None:
    assert (
        classify(TOKENS, line, CORE + FATAL, SERVER + "AsyncLLM output_handler failed.") is expected
    )


IN_TIME = {
    "an assertion, then a memory fault in the destructors": (
        ("x.cu:16: f: block: [3,0,0], thread: [0,0,0] Assertion `i < n` failed.", WORKER + FAULT),
        FaultClass.DEVICE_ASSERT),
    "a memory fault, then out of memory": ((WORKER + FAULT, CORE + "CUDA out of memory."), IMA),
    "out of memory, then a memory fault": (
        (WORKER + "torch.OutOfMemoryError: CUDA out of memory.", WORKER + FAULT), OOM),
    "a rank fails, the others wait for it in vain": (
        (WORKER + TRACE, WORKER + FRAME, WORKER + "AssertionError", CORE + FATAL, WATCHDOG), CRASH),
    "a rank dies without a word, the others wait": (
        (CORE + "Worker proc VllmWorker-1 died unexpectedly (exit code: -11)", TOKENS, WATCHDOG), CRASH),
    "a rank faults, then the call times out": (
        (WORKER + FAULT, CORE + "TimeoutError: RPC call to sample_tokens timed out."), IMA),
    "a broken GPU, then a memory fault": (
        ("kernel: NVRM: Xid (PCI:0000:81:00): 48, pid=1, DBE", WORKER + FAULT), FaultClass.GPU_HARDWARE),
    "a memory fault, then the GPU is reset": (
        (WORKER + FAULT, "kernel: NVRM: Xid (PCI:0000:81:00): 154, pid=1, recovery action changed"), IMA),
    "a program error is named before the engine's end": (
        (CORE + TRACE, CORE + FRAME, CORE + "TypeError: f() missing x", CORE + FATAL, WORKER + FAULT), CRASH),
    "the engine's end is told before its cause": (
        (CORE + FATAL, CORE + TRACE, CORE + FRAME, CORE + FAULT), IMA),
    "a request's exception was survived": (
        (SERVER + TRACE, SERVER + "ValueError: bad request", TOKENS, TOKENS, WORKER + FAULT), IMA),
    "a request's exception right before the end is not its cause": (
        (SERVER + TRACE, SERVER + "ValueError: bad request", CORE + FATAL, CORE + TRACE, CORE + FAULT), IMA),
    "a survived out-of-memory": (
        ("ERROR 08-14 03:00:00 [x.py:1] CUDA out of memory in preprocessing", TOKENS, TOKENS, WORKER + FAULT),
        IMA),
    "out of memory as a warning": (
        ("WARNING 08-14 03:00:00 [x.py:1] CUDA out of memory, trying a smaller pool", WORKER + FAULT), IMA),
    "a library fails without saying why, then the device does": (
        (WORKER + "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling g", WORKER + FAULT),
        IMA),
    "only the library fails": (
        (WORKER + "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling g", CORE + FATAL),
        CRASH),
    "a call that the engine survives": (
        (CORE + "Invocation of add_lora method failed", CORE + TRACE, CORE + "ValueError: no such adapter",
         WORKER + FAULT), IMA),
    "the watchdog's exception is only what it reports": (
        ("terminate called after throwing an instance of 'c10::DistBackendError'",
         "  what():  [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)"),
        FaultClass.COLLECTIVE_TIMEOUT),
    "a buffered rank tells late what came first": (
        (WATCHDOG, "(Worker_TP3 pid=9) ERROR 08-18 06:50:12 [multiproc_executor.py:703] " + FAULT), IMA),
    "a buffered rank tells late what came later": (
        (WATCHDOG, "(Worker_TP3 pid=9) ERROR 08-18 07:00:19 [multiproc_executor.py:703] " + FAULT),
        FaultClass.COLLECTIVE_TIMEOUT),
    "newest line first": (
        ("INFO 07-02 04:11:19 [launcher.py:1] Finished", "ERROR 07-02 04:11:18 [e.py:1] CUDA out of memory",
         "ERROR 07-02 04:11:17 [e.py:1] " + FAULT, "INFO 07-02 04:11:10 [m.py:1] Avg"), IMA),
    "the log was split inside the signature": (
        ("2026-08-14T03:12:31.1Z stderr P (Worker_TP1 pid=164) ERROR 08-14 03:12:29 [m.py:1] CUDA error: an il",
         "2026-08-14T03:12:31.1Z stdout F (APIServer pid=1) INFO 08-14 03:12:29 [m.py:1] hello",
         "2026-08-14T03:12:31.1Z stderr P legal memory acc", "2026-08-14T03:12:31.1Z stderr F ess was encountered"),
        IMA),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "expected"), IN_TIME.values(), ids=IN_TIME)
def test_the_first_fatal_line_in_time_decides(lines: tuple[str, ...], expected: FaultClass) -> None:
    assert classify(*lines) is expected


ENDINGS: dict[str, tuple[tuple[str, ...], dict[str, Any], FaultClass]] = {
    "asked to end, being deleted": (
        (TOKENS, ASKED, SERVER + "EngineDeadError: see above"),
        {"termination": end(0, "Completed"), "deletion_requested": True}, FaultClass.GRACEFUL_SHUTDOWN),
    "a memory fault while being taken down": (
        (TOKENS, ASKED, WORKER + FAULT), {"deletion_requested": True}, FaultClass.GRACEFUL_SHUTDOWN),
    "a memory fault before being taken down": (
        (TOKENS, WORKER + FAULT, ASKED), {"deletion_requested": True}, IMA),
    "a crash before being taken down": (
        (CORE + "KeyError: 1", CORE + FATAL, TOKENS, ASKED), {"deletion_requested": True}, CRASH),
    "deleted, and killed at the end of its grace period": (
        (TOKENS,), {"termination": end(137), "deletion_requested": True}, FaultClass.GRACEFUL_SHUTDOWN),
    "asked to end, not being deleted": (
        (TOKENS, ASKED), {"termination": end(0, "Completed")}, FaultClass.PROBE_KILLED),
    "asked to end, and loud about it": (
        (ASKED, SERVER + TRACE, SERVER + "EngineDeadError: x", SERVER + "output_handler failed"),
        {"termination": end(143)}, FaultClass.PROBE_KILLED),
    "killed": ((TOKENS,), {"termination": end(137)}, FaultClass.PROBE_KILLED),
    "killed, as the signal tells": (
        (TOKENS,), {"termination": Termination(None, 9, "Error", "", None, None)}, FaultClass.PROBE_KILLED),
    "killed by a probe, as the event tells": (
        (TOKENS,), {"termination": end(0, "Completed"),
                    "events": ("Killing: Container vllm failed liveness probe, will be restarted",)},
        FaultClass.PROBE_KILLED),
    "killed after a request's exception": (
        (SERVER + TRACE, SERVER + "ValueError: bad request"), {"termination": end(137)},
        FaultClass.PROBE_KILLED),
    "killed after the scheduler failed": (
        ("[2026-08-19 12:00:14 TP5] Scheduler hit an exception: " + TRACE, FRAME, "KeyError: 'x'"),
        {"termination": end(137)}, CRASH),
    "out of the host's memory": ((TOKENS,), {"termination": end(137, "OOMKilled")}, FaultClass.OOM_KILLED),
    "out of the host's memory, and the server heard of it": (
        (CORE + "Worker proc VllmWorker-1 died unexpectedly, shutting down executor.",),
        {"termination": end(137, "OOMKilled")}, FaultClass.OOM_KILLED),
    "a memory fault before the memory ran out": (
        (WORKER + FAULT,), {"termination": end(137, "OOMKilled")}, IMA),
    "evicted": ((TOKENS,), {"termination": end(137), "pod_reason": "Evicted"}, FaultClass.EVICTED),
    "evicted after a memory fault": ((WORKER + FAULT,), {"pod_reason": "Evicted"}, IMA),
    "the container was lost": (
        (), {"termination": end(137, "ContainerStatusUnknown", "could not be located")}, CRASH),
    "the server ended in order, nobody asked": (
        ("INFO:     Shutting down", "INFO:     Finished server process [1]"),
        {"termination": end(0, "Completed")}, CRASH),
    "taken down by an older server's words": (
        (TOKENS, "INFO:     Shutting down", WORKER + FAULT), {"deletion_requested": True},
        FaultClass.GRACEFUL_SHUTDOWN),
    "ended without a word and without being asked": ((), {"termination": end(0, "Completed")}, CRASH),
    "no log at all": ((), {"termination": end(139)}, CRASH),
    "never ended": ((TOKENS,), {"termination": None, "hang": True}, FaultClass.ENGINE_HANG),
    "never ended, requests failed": (
        (SERVER + TRACE, SERVER + "ValueError: bad"), {"termination": None, "hang": True},
        FaultClass.ENGINE_HANG),
    "never ended, for its memory fault": ((WORKER + FAULT,), {"termination": None, "hang": True}, IMA),
    "Xid in an event of the node": (
        (WORKER + FAULT,), {"events": ("GPUXidError: NVRM: Xid (PCI:0000:81:00): 79, GPU lost",)},
        FaultClass.GPU_HARDWARE),
    "nothing is known": ((), {"termination": None}, CRASH),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "known", "expected"), ENDINGS.values(), ids=ENDINGS)
def test_the_status_decides_what_no_line_does(
    lines: tuple[str, ...], known: dict[str, Any], expected: FaultClass
) -> None:
    assert classify(*lines, **known) is expected


REFUSALS = {
    "an unknown option": "vllm serve: error: unrecognized arguments: --speculate-more",
    "a bad choice": "api_server.py: error: argument --dtype: invalid choice: 'fp7'",
    "an option that click does not know": "Error: No such option: --speculate-more",
    "a validation": (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig"
    ),
    "a combination": CORE
    + "NotImplementedError: Speculative decoding is not supported with PP > 1.",
    "a limit": "ValueError: User-specified max_model_len (9) is greater than the derived (4).",
    "a backend": CORE + "ValueError: FlashInfer does not support this head size.",
    "a check of the arguments": (
        f'{TRACE}\n  File "/sgl/srt/server_args.py", line 9, in check\n    assert x\nAssertionError: no'
    ),
}


@pytest.mark.parametrize("line", REFUSALS.values(), ids=REFUSALS)
def test_arguments_are_refused_before_the_first_ready(line: str) -> None:
    failed = CORE + "EngineCore failed to start."
    assert classify(line, failed, ever_ready=False) is FaultClass.CONFIG_REFUSED
    assert classify(line, failed, ever_ready=True) is CRASH


@pytest.mark.parametrize(
    "error",
    [
        "AssertionError",
        "TypeError: got None",
        "ValueError: too many values to unpack",
        "KeyError: 'x'",
    ],
)
def test_a_bug_at_start_up_is_no_refusal(error: str) -> None:
    lines = (CORE + "EngineCore failed to start.", CORE + TRACE, CORE + FRAME, CORE + error)
    assert classify(*lines, ever_ready=False) is CRASH


def report(cause: str, line: str = "the line") -> str:
    return json.dumps({"schema": 1, "cause": cause, "line": line, "process": "EngineCore"})


MESSAGES = {
    "the plugin names a memory fault": (report("illegal-memory-access", FAULT), "", IMA),
    "and the log was read too": (report("illegal-memory-access", FAULT), CORE + FATAL, IMA),
    "but the GPU was broken": (
        report("illegal-memory-access"), "kernel: NVRM: Xid (PCI:1): 48, x", FaultClass.GPU_HARDWARE),
    "the plugin names something else, the log more": (
        report("engine-crash"), WORKER + FAULT, IMA),
    "the plugin names an assertion": (report("device-assert"), CORE + FATAL, FaultClass.DEVICE_ASSERT),
    "the plugin names a cause that nobody knows": (report("witchcraft"), "", CRASH),
    "torn JSON": ('{"schema": 1, "cause": "illegal-mem', "", CRASH),
    "JSON of another kind": ("[1, 2]", "", CRASH),
    "the end of the log": (f"{WORKER}{FAULT}\n{CORE}{FATAL}", "", IMA),
    "the end of the log, cut inside the signature": (f"emory access was encountered\n{CORE}{FATAL}", "", CRASH),
    "the end of the log, and the log tells an earlier fault": (
        WORKER + FAULT, "x.cu:1: f: block: [0,0,0], thread: [1,0,0] Assertion `a` failed.",
        FaultClass.DEVICE_ASSERT),
    "a prompt": (INFO + f"Received request c: prompt: '{FAULT}', params: x", "", CRASH),
    "garbage": ("\x00\ufffd{{{\x1b[", "", CRASH),
}  # fmt: skip


@pytest.mark.parametrize(("message", "log", "expected"), MESSAGES.values(), ids=MESSAGES)
def test_the_termination_message_is_heard(message: str, log: str, expected: FaultClass) -> None:
    assert classify(log, termination=end(message=message)) is expected


def test_the_line_is_the_first_fatal_one_without_its_prefixes() -> None:
    log = f"""\
        2026-08-14T03:12:31.1Z stdout F \x1b[31m{WORKER}{TRACE}\x1b[0m
        2026-08-14T03:12:31.2Z stdout F \x1b[31m{WORKER}{FAULT}\x1b[0m
        2026-08-14T03:12:31.3Z stdout F {CORE}{FATAL}"""
    found = faults.classify(Evidence(termination=end(), log=dedent(log)))
    assert found.line == FAULT
    assert found.reported_by == "Worker_TP1 pid=168"

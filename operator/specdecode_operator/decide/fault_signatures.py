"""What engines, drivers and kernels print when they fail, as tables that a person can check.

Everything that knows a spelling stands here; the reading of logs (fault_log) and the rules
(faults) know none. All patterns are searched in one cleaned line, case-insensitively.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

from specdecode_operator.domain.evidence import FaultClass


@dataclass(frozen=True)
class Spelling:
    """Alternatives that are searched only in a line that holds one of the hints (lower case).

    A regular expression costs a hundred times what looking for a word costs.
    """

    hints: tuple[str, ...]
    alternatives: tuple[str, ...]

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The alternatives as one expression."""
        return re.compile("|".join(f"(?:{each})" for each in self.alternatives), re.IGNORECASE)

    def search(self, text: str, low: str) -> re.Match[str] | None:
        """Search a text, given in lower case too."""
        return self.pattern.search(text) if any(hint in low for hint in self.hints) else None


class Weight(Enum):
    """What a line decides by itself."""

    CAUSE = auto()  # names the fault: the first of these in time decides
    CONSEQUENCE = auto()  # names the fault only when nothing failed before it


@dataclass(frozen=True)
class Signature:
    """One spelling of a fault.

    `any_level`: counts on a line logged as information or warning too (a sticky device error is
    never survived); the others are only fatal where they are logged as an error.
    """

    fault_class: FaultClass
    spelling: Spelling
    weight: Weight = Weight.CAUSE
    any_level: bool = False


def _any_of(hints: str, *alternatives: str) -> Spelling:
    return Spelling(tuple(hints.split("|")), alternatives)


def _plain(*alternatives: str) -> re.Pattern[str]:
    return Spelling((), alternatives).pattern


HARDWARE_XIDS = (48, 62, 63, 64, 79, 94, 95, 119, 154, 171)
_XID = r"\bXid\b(?:\s*\([^()]*\))?(?:\s+(?:errors?|code|event))?\s*[:=#]?\s*"
_DRIVER_CALL = r"cu(?:da)?(?:Ctx|Event|Graph|Launch|Mem|Module|Stream)\w*"
_DEVICE = rf"(?:CUDA|HIP|Triton|{_DRIVER_CALL})"
_ENGINE = r"(?:llm|engine|worker|python|pt_main|sgl|ray|trt|tensorrt|triton|mpi|llama|torch|server)"
_NOT_A_QUANTITY = r"\b(?![.,]\d|\s*(?:[KMGT]i?B|m?s|tok\w*|req\w*|%)\b)"

# In one line the first row that matches names the class: a watchdog that ends "with exception:
# CUDA error: an illegal memory access" is a memory fault, not a timeout.
SIGNATURES: tuple[Signature, ...] = (
    Signature(
        FaultClass.GPU_HARDWARE,
        _any_of(
            "xid|fallen off|gpu is lost|uncorrectable|ecc error",
            rf"{_XID}(?:{'|'.join(map(str, HARDWARE_XIDS))})\b",
            rf"{_XID}31\b.{{0,300}}UNRECOGNIZED_CLIENT",
            r"fallen off the bus",
            r"\bGPU is lost\b",
            r"uncorrectable (?:ECC|NVLink) error",
            r"(?:double.bit|uncontained) ECC error",
            r"cudaErrorECCUncorrectable|CUDA_ERROR_ECC_UNCORRECTABLE",
            r"cudaErrorNvlinkUncorrectable|CUDA_ERROR_NVLINK_UNCORRECTABLE",
        ),
        any_level=True,
    ),
    Signature(
        FaultClass.ILLEGAL_MEMORY_ACCESS,
        _any_of(
            "illegal|700|memory access fault|hsa_status",
            r"an illegal memory access was encountered",
            rf"{_DEVICE}\b[^:]{{0,60}}:\s*(?:an )?illegal memory access\b",
            r"(?:cuda|hip)ErrorIllegalAddress",
            r"(?:CUDA|HIP)_ERROR_ILLEGAL_ADDRESS",
            rf"\b(?:CUDA\w*|{_DRIVER_CALL})\b.{{0,60}}\b(?:error|errno|failure|failed|status|code|returned)\W{{0,4}}"
            rf"(?:code\W{{0,3}})?700{_NOT_A_QUANTITY}",
            r"\b(?:cuda_?err(?:or)?(?:_t)?|CUresult)\W{0,4}700" + _NOT_A_QUANTITY,
            r"Memory access fault by GPU",
            r"HSA_STATUS_ERROR_MEMORY_(?:APERTURE_VIOLATION|FAULT)",
        ),
        any_level=True,
    ),
    Signature(
        FaultClass.DEVICE_ASSERT,
        _any_of(
            "assert",
            r"device-side assert triggered",
            r"block: \[\d+, ?\d+, ?\d+\], thread: \[\d+, ?\d+, ?\d+\].{0,300}\bassert",
            r"(?:cuda|hip)ErrorAssert\b|CUDA_ERROR_ASSERT\b",
        ),
        any_level=True,
    ),
    Signature(
        FaultClass.OOM_KILLED,
        _any_of(
            "memory|oom",
            # The host's memory: Ray's monitor and the kernel.
            r"ray\.exceptions\.OutOfMemoryError",
            r"killed due to (?:the node running low on memory|memory pressure)",
            rf"oom-kill:.{{0,300}}\btask=[^,]*{_ENGINE}",
            rf"System OOM encountered, victim process: \S*{_ENGINE}",
            rf"out of memory: killed process \d+ \([^)]*{_ENGINE}",
        ),
        any_level=True,
    ),
    Signature(
        FaultClass.CUDA_OUT_OF_MEMORY,
        _any_of(
            "memory|alloc|exhausted",
            r"\b(?:CUDA|HIP|XPU|NPU|GPU|MPS|Triton)\b.{0,200}\bout of memory",
            r"(?<!ray\.exceptions\.)\bOutOfMemoryError\b",
            r"(?:cuda|hip)ErrorMemoryAllocation|(?:cuda|hip)ErrorOutOfMemory",
            r"(?:CUDA|HIP)_ERROR_OUT_OF_MEMORY|\b(?:CU|HIP)BLAS_STATUS_ALLOC_FAILED",
            r"cudaMalloc\w* failed",
            r"lack of device memory|(?:device|GPU) memory (?:is )?exhausted",
            r"GPU memory.{0,60}could not be allocated",
            r"not enough memory\b.{0,80}(?:mem-fraction|KV cache)",
            r"RESOURCE_EXHAUSTED\b.{0,300}(?:hbm|memory)",
            # vLLM's own words, before anything was allocated
            r"no available memory for the cache blocks",
            r"free memory on device.{0,200}less than desired GPU memory utilization",
            r"KV cache is needed.{0,200}larger than the available KV cache memory",
        ),
    ),
    Signature(
        FaultClass.COLLECTIVE_TIMEOUT,
        _any_of(
            "watchdog|heartbeat|collective|timing out|timed out|timeout",
            r"watchdog caught collective operation timeout",
            r"ProcessGroupNCCL's watchdog got stuck",
            r"heartbeat ?monitor.{0,200}(?:timed out|terminating the process)",
            r"dump signal due to a collective timeout",
            r"NCCL operations have failed or timed out",
            r"WorkNCCL\(.{0,300}before timing out",
            r"no heartbeat of its watchdog",
            r"timed out waiting \d+ ?ms for (?:recv|send) operation",  # Gloo's
            r"\bNCCL (?:operation|collective|communicator|watchdog)s?\b.{0,60}\btime(?:out|d out)",
        ),
        weight=Weight.CONSEQUENCE,
    ),
    Signature(
        FaultClass.ENGINE_HANG,
        _any_of(
            "timed out|timeout|hang detected",
            r"RPC call to \w+ timed out",
            r"(?:engine|executor) (?:iteration|step|core)\b.{0,20}timed out",
            r"^Watchdog timeout\b",  # SGLang's: its scheduler stands still
            r"Hang detected on rank",  # TensorRT-LLM's
        ),
        weight=Weight.CONSEQUENCE,
    ),
    Signature(
        FaultClass.OOM_KILLED,
        # SIGKILL that nobody in the pod sends: the kernel's memory killer.
        _any_of(
            "-9|signal",
            r"exit ?code:? ?-9\b",
            r"Failed core proc\(s\): \{.{0,300}: -9\b",
            r"(?:killed by|died from|exited (?:with|on)) signal (?:9\b|SIGKILL)",
        ),
        weight=Weight.CONSEQUENCE,
    ),
    Signature(
        FaultClass.CONFIG_REFUSED,
        _any_of(
            "error: ",
            r"^(?:[\w./-]+ )*[\w./-]+: error: (?:unrecognized arguments|argument |ambiguous option"
            r"|the following arguments|invalid |unknown )",
            r"^error: (?:no such option|invalid value|missing |got unexpected)",
            r"^error: (?:invalid|unknown) argument",
        ),
    ),
    Signature(
        FaultClass.ENGINE_CRASH,
        _any_of(
            "error|segfault|segmentation|illegal instruction",
            r"\b(?:CUDA|HIP) (?:runtime |driver )?error\b.{0,200}?: \S",
            r"Triton Error \[\w+\]: \S",
            r"\bsegfault encountered\b|segmentation fault|\bbus error\b|illegal instruction",
        ),
    ),
)

# Says that the engine ended, and nothing about why: the cause stands before it, or in the
# traceback right behind it.
MARKERS = _any_of(
    "enginecore|workerproc|engine |died|output_handler|background loop|sigquit|fatal python"
    "|core dumped|aborted|noticed|childfailed|terminated",
    r"EngineCore (?:encountered a fatal error|failed to start)",
    r"WorkerProc (?:failed to start|initialization failed)",
    r"engine core (?:initialization failed|proc \S+ died)",
    r"engine process (?:failed to start|.{0,80}died)",
    r"died unexpectedly|\bdied, exit ?code",
    r"output_handler failed",
    r"background loop (?:has errored|is stopped)",
    r"engine loop is not running|engine is already dead",
    r"received sigquit from a child process",
    r"fatal python error|core dumped|^Aborted\b",
    r"(?:mpirun|mpiexec) noticed that process",
    r"ChildFailedError|process \d+ terminated with signal",
)
# A library met an error of the device and does not say which: what the device says decides.
UNSPECIFIC = _any_of(
    "unhandled|_status_|previous error",
    r"unhandled cuda error|unhandled system error",
    r"\b(?:CU|HIP|ROC)[A-Z]{2,8}_STATUS_(?:\w*_)?(?:FAILED|ERROR)\b",
    r"previous error during capture",
)
# The exception that follows from the same process ended it.
OPENERS = _any_of(
    "exception|executing|terminate called",
    r"\bhit an exception\b",
    r"Error executing method",
    r"Exception in worker",
    r"terminate called after throwing",
)
# An exception that only repeats somebody else's end, or a client that went away.
ECHO_EXCEPTIONS = _any_of(
    "engine|ray|actordied|workercrashed|cancelled|connection|brokenpipe|eoferror|interrupt|exit"
    "|disconnect|worker failed",
    r"Engine(?:Dead|Gen\w*)?Error\b.{0,300}(?:see stack trace|encountered an issue)",
    r"EngineDeadError",
    r"Engine core initialization failed|Engine process \(pid \d+\) died",
    r"RayTaskError|ActorDiedError|WorkerCrashedError|RayActorError",
    r"^(?:[\w.]+\.)?(?:CancelledError|ConnectionResetError|ConnectionRefusedError|BrokenPipeError"
    r"|EOFError|KeyboardInterrupt|SystemExit|GeneratorExit|ClientDisconnect)\b",
    r"Worker failed with error.{0,2000}please check the stack trace",
)
# The exceptions of calls that the engine answers with an error and survives.
SURVIVED = _any_of(
    "invocation|asgi|error |failed to",
    r"Invocation of \S+ method failed",
    r"Exception in ASGI application",
    r"Error (?:in|while) (?:preprocessing|handling|processing) (?:prompt|request|chat)",
    r"failed to (?:preprocess|load lora|add lora)",
)
TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
FRAME = re.compile(r'^\s*(?:\|\s*)*File "(?P<file>[^"]*)", line \d+(?:, in (?P<function>\S+))?')
EXCEPTION = re.compile(
    r"^(?:\|\s*)*(?:what\(\):\s*\S|(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Failure|Exit|Interrupt)"
    r"\b(?=:|\(|\s*$))"
)

# The engine was asked to end. `Shutting down` alone is uvicorn's, which says it after a crash too.
ASKED_TO_END = _any_of(
    "shutdown|sigterm|signal|shutting down",
    r"\[shutdown\].{0,200}(?:triggered|SIGTERM)",
    r"\b(?:received|got|caught)\b.{0,20}\b(?:SIGTERM|signal[= ]15|15 death signal)\b",
    r"SIGTERM received",
    r"^Shutting down\.?$",
)
# Tokens come out: what was logged before did not end the engine.
ALIVE_HINT = "throughput"
ALIVE = re.compile(r"gen(?:eration)? throughput(?: \(token/s\))?: (?!0\.0\b)\d", re.IGNORECASE)

# Refusals: the exception's own kind, and either words of refusal or a frame in the
# configuration code.
REFUSING_EXCEPTIONS = re.compile(
    r"^(?:[\w.]+\.)?(?:ValueError|NotImplementedError|ValidationError|Argument\w*Error"
    r"|Config\w*Error)\b"
)
REFUSING_IN_CONFIG = re.compile(r"^(?:[\w.]+\.)?(?:AssertionError|OSError|TypeError)\b")
REFUSAL_WORDS = _plain(
    r"not\b.{0,20}\b(?:support|compatible|allowed|implemented|valid|recogni[sz]ed)",
    r"unsupported|incompatible|unrecognized|unknown|invalid|mutually exclusive",
    r"only (?:be )?(?:support|compatible|allowed|valid)",
    r"must (?:be|not|match|have)|should be|cannot (?:be|use|enable|have)|can't (?:be|use|enable)",
    r"requires?\b|is required|exceeds|(?:greater|larger|less|smaller) than|at (?:least|most)\b",
    r"validation errors? for \w*(?:Config|Args)",
)
CONFIG_FRAMES = _plain(
    r"arg_utils|argparse|server_args|llm_args|/config/\w+\.py|/config\.py|arguments?\.py",
)

# Text that talks about an error. What stands before the words decides; see fault_log.
REQUEST_BEFORE = _plain(
    r"received request|generated response|request body|GenerateReqInput|SamplingParams\(",
    r"dumping (?:input|scheduler)|non-default args|LLM engine \(.{0,40}with config",
    r"\b(?:prompt|request|input|message|query|question)s?\b.{0,40}"
    r"\b(?:contain|include|quote|sa[iy])(?:s|d|ing)?\b",
    r"\w\{[^{}]{0,200}=[\"']$",  # a metric's label
    r"\bprompt['\"]?\s*[:=]",
    r"['\"]?\b(?:content|messages|inputs?|prompts|text|query|question|instruction|payload|body|user|system"
    r"|assistant|completion|response|output"
    r"|answer|generated_text|reasoning_content|arguments|stop)['\"]?\s*[:=]\s*['\"\[{]",
    r"\"(?:GET|POST|PUT|PATCH|DELETE|HEAD) /",
)
REQUEST_AFTER = _plain(
    r"SamplingParams\(", r"\bfinish_reason\b", r"\blora_request\b", r'HTTP/\d\.\d"'
)
CODE = _plain(
    r"^\s*(?:#|//|/\*|\* |>>>|\"\"\"|''')",
    r"^\s*(?:raise|assert|def|class|except|throw)\s|^\s*(?:logger\.|print\(|TORCH_CHECK\()",
    r"^\s*return f?[\"'(]|^\s*(?:if|elif|while)\b.*:\s*$",
)
HELP_BEFORE = _plain(
    r"^\s*(?:--|FAQ\b|Q:|A:|(?:hint|tip|note|usage|help|see)\b)",
    r"\b(?:if|when|whenever|in case|unless)\s+(?:you|this|it|the|there|we|an?|of|see\w*|hit\w*)\b",
    r"\b(?:may|might|can|could|would|otherwise)\b(?:\s+\w+){0,3}?\s+"
    r"(?:cause|trigger|lead|result|crash|hit|raise|produce)\b",
    r"\b(?:avoid\w*|prevent\w*|fix(?:es)?|work ?arounds?|troubleshoot\w*|mitigat\w+|causes?"
    r"|causing)\b.{0,30}$",
    r"\bto (?:debug|diagnose|reproduce|investigate)\b",
    r"\b(?:previous|last|earlier|prior) (?:boot|run|instance|container|restart|session)",
    r"\b(?:known (?:issue|bug|to)|such as|e\.g\.|for example|release notes?|changelog)\b",
    r"\b(?:no|not an?|never|without)\s*['\"`]?$",
    r"\bpotential (?:root )?causes?\b",
)
HELP_AFTER = re.compile(
    r"^['\"`)\]]*\s*(?:errors?|faults?)?\s*(?:means|usually|indicates|is an? known|are an? known"
    r"|can|may|might|could)\b",
    re.IGNORECASE,
)
ERROR_NAMES = re.compile(r"\b(?:cuda|hip)Error[A-Z]\w+|\bCUDA_ERROR_[A-Z_]+")

# What a line must contain to be looked at closely: letters, blanks and _ only, in lower case.
NEEDLES: tuple[bytes, ...] = (
    b"error",
    b"exception",
    b"fail",
    b'file "',
    b"traceback",
    b"memory",
    b"illegal instruction",
    b"hsa_status",
    b"xid",
    b"fallen off",
    b"gpu is lost",
    b"uncorrectable",
    b"assert",
    b"exhausted",
    b"oom",
    b"exit code",
    b"exitcode",
    b"killed",
    b"died",
    b"fatal",
    b"terminate",
    b"core dumped",
    b"abort",
    b"noticed that",
    b"segfault",
    b"segmentation",
    b"watchdog",
    b"heartbeat",
    b"timed out",
    b"timing out",
    b"timeout",
    b"sigterm",
    b"sigquit",
    b"sigkill",
    b"signal",
    b"shutdown",
    b"shutting down",
    b"not running",
    b"already dead",
    b"hang detected",
    b"what ",
)

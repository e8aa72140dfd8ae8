"""Whether this CPU computes in half precision, found out where a trap does no harm.

Some virtual machines advertise AMX and trap on its instructions: torch's first bfloat16 product
then ends the process with SIGILL. So a child process (`half_trial.py`) runs such products once, and
the answer is remembered in the user's cache folder. Where the child dies it is started again with
smaller instruction sets for oneDNN, which torch multiplies with; if one of them helps, this
process uses it too. Otherwise memfit trains on this CPU without half precision.

Only CPUs with AMX are tried. AMX has registers of its own, which the kernel and the hypervisor
enable apart from all others, and that is what some of them get wrong. All other half-precision
instructions (AVX512-BF16, AVX512-FP16, AVX-NE-CONVERT) work on the vector registers of float32, and
x86 offers no means to trap on them alone: where those did not work, nothing in torch would.

oneDNN reads ONEDNN_MAX_CPU_ISA once: at the first product or GELU, or when torch is asked whether
it supports bfloat16, and not when torch is imported. After that the variable has no effect, and
nothing says so. Therefore a fork of this process tries a product before half precision is used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from memfit.config.files import remember, remembered
from memfit.i18n import N_, Message, t

VARIABLE = "ONEDNN_MAX_CPU_ISA"

SMALLER_SETS = ("AVX512_CORE_FP16", "AVX512_CORE")
"""What oneDNN may be limited to: all but AMX, then the least that multiplies in bfloat16."""

READY = "ready"
"""The child's first word, once torch is imported."""

Half = Literal["bfloat16", "float16"]

TYPES: tuple[Half, ...] = ("bfloat16", "float16")

_TRIAL = Path(__file__).with_name("half_trial.py")

_TRIAL_SECONDS = 120.0
"""The import of torch takes most of it: 2 s, or 20 s from a cold disk."""

_FORK_SECONDS = 20.0

_ALSO_DECIDE = ("DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")

_PROBLEMS = {
    "late": N_(
        "this CPU advertises AMX instructions that it does not run, and torch has begun to use "
        "them: memfit goes on without half precision; set {variable} before Python starts to "
        "have it"
    ),
    "untried": N_(
        "whether this CPU runs half precision could not be tried: memfit goes on without it"
    ),
}


@dataclass(frozen=True, slots=True)
class HalfOnCpu:
    """Which half precisions this process can compute in on the CPU, and at what price."""

    bfloat16: bool = True
    float16: bool = True
    instruction_set: str = ""
    """What oneDNN had to be limited to for that; empty where nothing had to be done."""
    problem: Literal["", "late", "untried"] = ""
    """`late`: oneDNN had started before it could be limited. `untried`: no child answered."""

    def works(self, dtype: str) -> bool:
        """Whether products in this type can be run; other types than the halves always can."""
        return bool(getattr(self, dtype)) if dtype in TYPES else True

    def reason(self, dtype: str) -> str:
        """Why this type cannot be used, as strategies refuse; empty where it can."""
        if self.works(dtype):
            return ""
        return Message("this CPU advertises {dtype} instructions that it does not run", dtype=dtype)

    def sentence(self) -> str:
        """What a user should know of it; empty where everything is as usual."""
        if self.problem:
            return t(_PROBLEMS[self.problem], variable=f"{VARIABLE}={self.instruction_set}")
        lost = [dtype for dtype in TYPES if not self.works(dtype)]
        if self.instruction_set and not lost:
            return t(
                "this CPU advertises AMX instructions that it does not run: half precision "
                "does without them ({variable})",
                variable=f"{VARIABLE}={self.instruction_set}",
            )
        return (
            t(
                "this CPU advertises half-precision instructions that it does not run: memfit "
                "goes on without {types}",
                types=", ".join(lost),
            )
            if lost
            else ""
        )


_asking = threading.Lock()

_said: set[HalfOnCpu] = set()


def half_on_cpu(*, say: bool = True) -> HalfOnCpu:
    """The answer for this machine; the first call in a process may limit oneDNN, and warns of it.

    Ask before the first product, and only where half precision on a CPU is in question: a machine
    whose CPU has AMX takes some seconds when it is asked for the first time. Without `say` the
    caller tells the user.
    """
    with _asking:
        answer = _answer()
    sentence = answer.sentence()
    if sentence and answer not in _said:
        _said.add(answer)
        if say:
            warnings.warn(sentence, UserWarning, stacklevel=2)
    return answer


@functools.cache
def _answer() -> HalfOnCpu:
    if not _has_amx():
        return HalfOnCpu()
    answer = _remembered() or _tried()
    if not answer.instruction_set:
        return answer
    os.environ[VARIABLE] = answer.instruction_set
    if _product_works_in_fork():
        return answer
    return replace(answer, bfloat16=False, float16=False, problem="late")


def _has_amx() -> bool:
    """Whether the CPU says so."""
    import torch

    asked: Any = torch.cpu
    return bool(asked._is_amx_tile_supported())


# ---- remembered ----


def _remembered() -> HalfOnCpu | None:
    """What an earlier process found out."""
    given = os.environ.get(VARIABLE, "")
    if given:
        # A parent process has limited oneDNN already, or the user has done as was advised.
        usual = _read(_name_for(""))
        if usual is not None and usual.instruction_set == given:
            return replace(usual, instruction_set="")
    return _read(_name_for(given))


def _read(name: str) -> HalfOnCpu | None:
    values = remembered(name) or {}
    bfloat16, float16 = (values.get(dtype) for dtype in TYPES)
    chosen = values.get("instruction_set")
    if not isinstance(bfloat16, bool) or not isinstance(float16, bool):
        return None
    return HalfOnCpu(bfloat16, float16, chosen) if chosen in ("", *SMALLER_SETS) else None


def _name_for(given: str) -> str:
    """The file of the answer: for this CPU, kernel, torch and these settings."""
    import torch

    about = [torch.__version__, platform.machine(), platform.release(), platform.version(), given]
    about += [os.environ.get(name, "") for name in _ALSO_DECIDE]
    digest = hashlib.sha256("\n".join([*about, *_cpu()]).encode()).hexdigest()
    return f"half-on-cpu-{digest[:16]}.json"


def _cpu() -> list[str]:
    """The CPU's model and features, as far as the system tells."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        about = [line for line in lines if line.startswith(("model name", "flags"))]
        return sorted(set(about))
    return [platform.processor()]


# ---- tried ----


def _tried() -> HalfOnCpu:
    """Tries oneDNN as it is, then with smaller instruction sets; takes the first that runs most."""
    given = os.environ.get(VARIABLE, "")
    best = HalfOnCpu(bfloat16=False, float16=False)
    for limit in ("", *SMALLER_SETS):
        done = _child(limit)
        if done is None:
            return replace(best, bfloat16=False, float16=False, problem="untried")
        one = HalfOnCpu("bfloat16" in done, "float16" in done, limit)
        if (one.bfloat16, one.float16) > (best.bfloat16, best.float16):
            best = one
        if one.bfloat16 and one.float16:
            break
    values = asdict(best)
    del values["problem"]
    remember(_name_for(given), values)
    return best


def _child(limit: str) -> list[str] | None:
    """The types a child got through before it ended; None where it did not come to trying."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    if limit:
        environment[VARIABLE] = limit
    try:
        # -P: the modules beside the file are memfit's, and no top-level modules.
        child = subprocess.run(
            [sys.executable, "-P", str(_TRIAL)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TRIAL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = child.stdout.decode(errors="replace").split()
    return said[1:] if said[:1] == [READY] else None


# ---- in this process ----


def _product_works_in_fork() -> bool:
    """Whether a bfloat16 product survives in a copy of this process, its oneDNN included."""
    if not hasattr(os, "fork"):
        return False  # Windows: the sentence says how to limit oneDNN from the beginning
    with warnings.catch_warnings():
        # Python warns of forks beside threads; the child only multiplies, on one thread.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _multiply_and_exit()
    until = time.monotonic() + _FORK_SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


def _multiply_and_exit() -> None:
    """In the fork: no thread but this one exists, so nothing may wait for another."""
    code = 1
    try:
        import faulthandler
        import resource

        import torch

        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        torch.set_num_threads(1)
        for rows, width in ((64, 512), (192, 768)):
            x = torch.ones(rows, width, dtype=torch.bfloat16)
            torch.mm(x, torch.ones(width, width, dtype=torch.bfloat16))
        code = 0
    finally:
        os._exit(code)

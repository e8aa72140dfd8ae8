"""Whether this CPU computes in half precision, found out where a trap does no harm.

Some virtual machines advertise AMX and trap on its instructions: torch's first bfloat16 product
then ends the process with SIGILL, which no Python code can catch. So a child process
(`half_trial.py`) runs such products once, and the answer is remembered in the user's cache folder.
If it dies, memfit trains on this CPU without half precision and says how to get it: oneDNN, which
torch multiplies with, leaves AMX out if ONEDNN_MAX_CPU_ISA is set before its first product.

Only CPUs with AMX are tried. AMX has its own registers, which the kernel and the hypervisor enable
apart from all others. All other half-precision instructions work on the vector registers of
float32, and x86 has no means to trap on them alone.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.config.files import cache_digest, remember, remembered
from memfit.i18n import Message, t

VARIABLE = "ONEDNN_MAX_CPU_ISA"

WITHOUT_AMX = "AVX512_CORE_FP16"

TYPES = ("bfloat16", "float16")

_TRIAL = Path(__file__).with_name("half_trial.py")

_TRIAL_SECONDS = 120.0
"""The import of torch takes most of it: 2 s, or 20 s from a cold disk."""


@dataclass(frozen=True, slots=True)
class HalfOnCpu:
    """Which half precisions this process can compute in on the CPU."""

    bfloat16: bool = True
    float16: bool = True
    instruction_set: str = ""
    """What oneDNN should be limited to before Python starts, if one of them does not run."""

    def works(self, dtype: str) -> bool:
        """Whether products in this type can be run; other types than the halves always can."""
        return bool(getattr(self, dtype)) if dtype in TYPES else True

    def reason(self, dtype: str) -> str:
        """Why this type cannot be used, as strategies refuse; empty where it can."""
        return "" if self.works(dtype) else Message("{dtype} does not run on this CPU", dtype=dtype)

    def sentence(self) -> str:
        """What a user should know of it; empty where everything is as usual."""
        lost = [dtype for dtype in TYPES if not self.works(dtype)]
        if not lost:
            return ""
        return t(
            "{types} did not run when it was tried on this CPU: memfit goes on without it; setting "
            "{variable} before Python starts may give it back",
            types=", ".join(lost),
            variable=f"{VARIABLE}={self.instruction_set}",
        )


@functools.cache
def half_on_cpu() -> HalfOnCpu:
    """The answer for this machine; the first call in a process warns of what does not run.

    A machine whose CPU has AMX takes some seconds when it is asked for the first time.
    """
    import torch

    asked: Any = torch.cpu
    if not asked._is_amx_tile_supported():
        return HalfOnCpu()
    about = {"kernel": platform.uname(), "torch": torch.__version__, "isa": os.getenv(VARIABLE)}
    name = f"half-on-cpu-{cache_digest(about)}.json"
    works = remembered(name) or {}
    if not all(isinstance(works.get(dtype), bool) for dtype in TYPES):
        said = _said_by_a_child()
        works = {dtype: dtype in said for dtype in TYPES}
        if said:  # a child that did not come to trying tells nothing of the CPU
            remember(name, works)
    bfloat16, float16 = works["bfloat16"], works["float16"]
    answer = HalfOnCpu(bfloat16, float16, "" if bfloat16 and float16 else WITHOUT_AMX)
    if sentence := answer.sentence():
        warnings.warn(sentence, UserWarning, stacklevel=2)
    return answer


def _said_by_a_child() -> list[str]:
    """Returns what the trial printed before it ended."""
    try:
        # -P: the modules beside the file are memfit's, and no top-level modules.
        child = subprocess.run(
            [sys.executable, "-P", str(_TRIAL)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TRIAL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return child.stdout.decode(errors="replace").split()

"""Which of a command's processes this one is, as the launcher that started it says.

Launchers number their processes in the environment, and this module only reads it. What the
processes send each other once they are connected goes through `Peers` in `engine/exchange.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import current_process

from memfit.errors import ConfigError

SHARE_CARDS = "MEMFIT_SHARE_GPU"
"""Set to 1, several ranks may use one GPU: for tests, it is never faster."""

_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""What torch reads; set by torchrun, `--gpus`, `accelerate launch` on GPUs, `notebook_launcher`."""

_LAUNCHERS = (
    _TORCH,
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
     "MV2_COMM_WORLD_LOCAL_SIZE"),
)  # fmt: skip
"""`mpirun` of Open MPI, of Intel MPI and MPICH, of MVAPICH; `accelerate launch` calls them."""


@dataclass(frozen=True, slots=True)
class LaunchedRank:
    """The number of this process among those of its command; alone unless a launcher says so."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0


def cards_are_shared() -> bool:
    """Whether several ranks may use one GPU."""
    return os.environ.get(SHARE_CARDS) == "1"


def launched_rank(environment: Mapping[str, str] = os.environ) -> LaunchedRank:
    """Reads what a launcher tells the processes it starts."""
    found = [names for names in _LAUNCHERS if any(environment.get(one) for one in names[:2])]
    if not found and "ACCELERATE_USE_CPU" in environment and environment.get("MASTER_ADDR"):
        raise ConfigError(
            "accelerate launch was asked for several processes and has started one, as it "
            "does on a CPU and on a single GPU; start them with memfit train --gpus 2, or with "
            "torchrun --nproc-per-node 2 (to train in one process, unset MASTER_ADDR)"
        )
    names = found[0] if found else _TORCH
    world_size = _number(environment, names[1], 1, least=1)
    rank = _number(environment, names[0], 0)
    local_world_size = _number(environment, names[3], world_size, least=1)
    local_rank = _number(environment, names[2], rank % local_world_size)
    if rank >= world_size or local_rank >= local_world_size:
        raise ConfigError(
            "the environment says {rank_name}={rank} and {size_name}={world_size}; start the "
            "processes with torchrun, accelerate launch or --gpus",
            rank_name=names[0],
            rank=rank,
            size_name=names[1],
            world_size=world_size,
        )
    return LaunchedRank(rank, world_size, local_rank, local_world_size)


def number_for_torch(launched: LaunchedRank) -> None:
    """Tells torch and accelerate in torchrun's variables what another launcher said in its own."""
    numbers = (
        launched.rank, launched.world_size, launched.local_rank, launched.local_world_size
    )  # fmt: skip
    os.environ |= dict(zip(_TORCH, map(str, numbers), strict=True))
    if launched.world_size == launched.local_world_size:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            "the ranks are on several machines; set MASTER_ADDR to the name of the first"
        )
    os.environ.setdefault("MASTER_PORT", "29500")


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def is_fork() -> bool:
    """Whether this process is a fork of another Python process, as `notebook_launcher` makes."""
    return type(current_process()).__name__ == "ForkProcess"


def _number(environment: Mapping[str, str], name: str, default: int, *, least: int = 0) -> int:
    written = environment.get(name, "")
    if not written:
        return default
    if not written.isdecimal() or int(written) < least:
        raise ConfigError(
            "the variable {name} is {value}; it is a number that torchrun sets, unset it",
            name=name,
            value=repr(written),
        )
    return int(written)

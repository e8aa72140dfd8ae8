"""`finetune(..., gpus=2)` in a notebook: ranks that accelerate's `notebook_launcher` forks.

A fork has everything the notebook has, callbacks included. It cannot use the GPU if the notebook
has, nor can accelerate start it once an Accelerator is there (`cannot_fork` says so); memfit then
starts fresh processes, as it does for a script.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from memfit._compat import is_in_bad_fork
from memfit.errors import MemfitError
from memfit.i18n import Message, t
from memfit.run.rank_agent import (
    RanksEndedError,
    end_with_launcher,
    first_rank_speaks,
    kept_for_launcher,
    ready_for_ranks,
)
from memfit.run.signals import Stopped, handled, stop_at_once


def cannot_fork() -> Message | None:
    """Why ranks cannot be forks of this process; None where they can."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import are_libraries_initialized

    if AcceleratorState._shared_state or are_libraries_initialized("bitsandbytes"):
        return Message("something was trained in this notebook before")
    if not hasattr(os, "fork"):
        return Message("this system cannot fork a process")
    if _fork_cannot_use_cuda():
        return Message("the GPU was used in this notebook before")
    return None


def _fork_cannot_use_cuda() -> bool:
    """Asks a fork; in this process torch does not say whether CUDA's runtime was ever called."""
    process = os.fork()
    if process == 0:
        os._exit(int(is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != 0


def fork_ranks(count: int, train: Callable[[], Any]) -> None:
    """Runs `train` in so many forks of this process; RanksEndedError where one of them fails."""
    from accelerate import notebook_launcher
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with ready_for_ranks(count):
        try:
            notebook_launcher(
                _as_rank,
                (train,),
                num_processes=count,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                rdzv_id="memfit",
            )
        except SignalException as stopped:
            raise RanksEndedError(128 + int(stopped.sigval)) from None
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
            words = (
                failure.message
                if rank == 0
                else t("rank {rank}: {words}", rank=rank, words=failure.message)
            )
            raise RanksEndedError(code, words) from None


def _as_rank(train: Callable[[], Any]) -> None:
    """What a fork does; an error of memfit's ends it with its sentence and exit code."""
    end_with_launcher()
    logging.disable(logging.NOTSET)
    with contextlib.ExitStack() as held:
        held.enter_context(first_rank_speaks())
        held.enter_context(handled(stop_at_once))
        try:
            train()
        except Stopped as stopped:
            kept_for_launcher(t("interrupted"))
            sys.exit(stopped.exit_code)
        except MemfitError as error:
            kept_for_launcher(str(error))
            sys.exit(error.exit_code)

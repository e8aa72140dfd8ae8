"""Starts ranks on this machine by torchrun's own agent, as `--gpus N` asks for."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.config.launched import cards_are_shared, in_notebook, launched_rank
from memfit.errors import ConfigError, MemfitError
from memfit.i18n import ENVIRONMENT as LANGUAGE
from memfit.i18n import language, t
from memfit.printing import printable

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

SHUTDOWN_SECONDS = 600
"""How long ranks may take to save and end after a signal, before they are killed."""

_LAUNCHER = "MEMFIT_LAUNCHER"

_PR_SET_PDEATHSIG = 1

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

_SHOWN_LINES = 20


class RanksEndedError(MemfitError):
    """The ranks of a training failed; without words of theirs they have said why on stderr."""

    def __init__(self, exit_code: int, words: str = "") -> None:
        super().__init__(
            words
            or t("the training ended with exit code {code}; its words stand above", code=exit_code)
        )
        self.exit_code = exit_code


def count_of(gpus: str | int) -> int:
    """How many ranks `--gpus` asks for: a number, or `auto` for one for each GPU that is here.

    On a machine without a GPU they are so many processes on the CPU, and `auto` is one.
    """
    import torch

    cards = torch.cuda.device_count()
    if gpus == "auto":
        return max(cards, 1)
    if not str(gpus).isdecimal() or int(gpus) < 1:
        raise ConfigError(t("--gpus is {gpus}; write a number such as 2, or auto", gpus=repr(gpus)))
    count = int(gpus)
    if 0 < cards < count and not cards_are_shared():
        raise ConfigError(
            t("--gpus is {gpus}, and {cards} are here; write auto", gpus=count, cards=cards)
        )
    return count


def start_ranks(count: int, argv: Sequence[str], *, results: bool = True) -> int:
    """Runs `memfit argv...` as so many ranks on this machine; returns the exit code.

    Rank 0 has the terminal, the others write into files that are removed; without `results` only
    its stderr is shown. SIGINT and SIGTERM go on to all ranks. When a rank fails the others are
    stopped, and its code and words are passed on.
    """
    from torch.distributed.elastic.multiprocessing import (
        DefaultLogsSpecs,
        SignalException,
        Std,
    )
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="memfit-ranks-") as logs, ready_for_ranks(count):
        kept: dict[int, Any] = dict.fromkeys(range(1, count), Std.ALL)
        kept[0] = Std.NONE if results else Std.OUT
        # What a process of a notebook writes to its terminal is not shown in the notebook.
        shown: dict[int, Any] = {0: Std.ERR} if in_notebook() else {}
        # torch 2.11 has no such argument: it waits for 30 seconds.
        waits: Any = {"shutdown_timeout": SHUTDOWN_SECONDS}
        if "shutdown_timeout" not in LaunchConfig.__dataclass_fields__:
            waits = {}
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id="memfit",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            # The name of this machine need not lead anywhere.
            local_addr="127.0.0.1",
            max_restarts=0,
            signals_to_handle="SIGINT,SIGTERM",
            **waits,
            logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=kept, tee=shown),
            log_line_prefix_template=" ",
        )
        try:
            # -P: what lies in the folder one works in is data, and no module.
            elastic_launch(config, sys.executable)("-P", "-m", "memfit", *argv)
        except SignalException as stopped:
            return 128 + int(stopped.sigval)
        except ChildFailedError as failed:
            return _tell(failed, Path(logs))
    return 0


@contextmanager
def ready_for_ranks(count: int) -> Iterator[None]:
    """The environment that torch's agent hands on; afterwards all is as it was before."""
    with _environment_for(count), _signals_given_back():
        yield


@contextmanager
def _signals_given_back() -> Iterator[None]:
    """Puts the handlers back that torch's agent replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _environment_for(count: int) -> Iterator[None]:
    """Shares the cores between the ranks, and holds back what the launcher logs."""
    import torch

    before = dict(os.environ)
    threads = max(torch.get_num_threads() // count, 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ[LANGUAGE] = language()
    os.environ[_LAUNCHER] = str(os.getpid())
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        os.environ.clear()
        os.environ.update(before)


def end_with_launcher() -> None:
    """Has Linux send this rank SIGTERM when the process that started it dies, however it dies.

    Ranks that are left over would go on writing what the same command, given again, writes.
    """
    if sys.platform != "linux" or os.environ.get(_LAUNCHER) != str(os.getppid()):
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


@contextmanager
def first_rank_speaks() -> Iterator[None]:
    """Of the processes that share a command only the first says anything, until one fails."""
    if launched_rank().is_first:
        yield
        return
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        yield


def kept_for_launcher(sentence: str) -> bool:
    """Writes why this rank failed where torchrun's agent looks for it.

    Returns whether the agent is to say it: rank 0 says it itself, and most often all fail alike.
    """
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return False
    with suppress(OSError):
        word = {"message": sentence, "timestamp": time.time()}
        Path(path).write_text(json.dumps(word), encoding="utf-8")
        return not launched_rank().is_first
    return False


def _tell(failed: ChildFailedError, logs: Path) -> int:
    """Says why the first rank that failed did so, unless rank 0 has said it; returns its code.

    The others fail when their connection to it ends, often before anybody has seen it end.
    """
    rank, failure = failed.get_first_failure()
    words = {
        int(path.parent.name): json.loads(path.read_text(encoding="utf-8"))
        for path in logs.glob("*/attempt_0/*/error.json")
    }
    killed = {one: found for one, found in failed.failures.items() if found.exitcode < 0}
    if killed:
        rank, failure = next(iter(killed.items()))
        said = t("signal {number} ended it", number=-failure.exitcode)
    elif words:
        rank = min(words, key=lambda one: float(words[one]["timestamp"]))
        said = words[rank]["message"]
        failure = failed.failures.get(rank, failure)
    else:
        said = "\n".join(_last_lines(logs, rank))
    code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    told = words.get(0, {}).get("message", "")  # it may quote another rank's
    if killed or (rank != 0 and not (said and said in told)):
        said = t("rank {rank}: {words}", rank=rank, words=said or t("exit code {code}", code=code))
        print(printable(f"memfit: {said}"), file=sys.stderr, flush=True)
    return code


def _last_lines(logs: Path, rank: int) -> list[str]:
    for path in logs.glob(f"*/attempt_0/{rank}/stderr.log"):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
    return []

"""Several processes for one command: started by `--gpus 2`, by a launcher, or by a notebook.

`--gpus` and `finetune(..., gpus=2)` start fresh processes by torchrun's own agent, with the command
`memfit train` and a TOML file of the settings. So a script needs no guard around its main part. A
notebook's ranks are forks of it, by accelerate's `notebook_launcher`, and have its callbacks; where
it cannot be forked (`_cannot_fork`) they are fresh processes too. This process waits, and reads the
result from the run's folder.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from memfit._compat import is_in_bad_fork
from memfit.config import RunConfig, files
from memfit.config.launched import (
    cards_are_shared,
    in_notebook,
    launched_rank,
    number_for_torch,
)
from memfit.config.training_fields import SECRET_FIELDS
from memfit.errors import ConfigError, MemfitError, OutputError
from memfit.i18n import ENVIRONMENT as LANGUAGE
from memfit.i18n import Message, language, t
from memfit.printing import printable
from memfit.run.signals import Stopped, handled, stop_at_once
from memfit.waiting import shown_by_bar

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from memfit.engine.ranks import Ranks
    from memfit.planner.plan import Plan

SHUTDOWN_SECONDS = 600
"""How long ranks may take to save and end after a signal, before they are killed."""

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

_LAUNCHER = "MEMFIT_LAUNCHER"

_PR_SET_PDEATHSIG = 1

_SHOWN_LINES = 20


class RanksEndedError(MemfitError):
    """The ranks of a training failed; without words of theirs they have said why on stderr."""

    def __init__(self, exit_code: int, words: str = "") -> None:
        super().__init__(
            words
            or t("the training ended with exit code {code}; its words stand above", code=exit_code)
        )
        self.exit_code = exit_code


# ---- in every rank ----


@contextmanager
def joined(*, on_cpu: bool = False) -> Iterator[Ranks]:
    """Joins the other ranks that a launcher has started; alone without one."""
    from memfit.engine.ranks import Ranks

    launched = launched_rank()
    if launched.world_size > 1:
        number_for_torch(launched)
        _initialize(on_cpu=on_cpu)
    yield Ranks.here()


def _initialize(*, on_cpu: bool) -> None:
    """Makes torch's process group, unless a script has made it: gloo on a CPU, NCCL on GPUs."""
    import torch.distributed as dist

    from memfit.memory.device import has_cuda

    if dist.is_initialized():
        return
    shared = cards_are_shared()
    if shared:
        os.environ["LOCAL_RANK"] = "0"  # accelerate takes the GPU of this number
    backend = "nccl" if has_cuda() and not on_cpu and not shared else "gloo"
    # A launcher ends the ranks that wait for one which failed: Python would not see the signal.
    with _signals_given_back():
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        dist.init_process_group(backend, timeout=timedelta(seconds=1800))


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


def end_with_launcher() -> None:
    """Has Linux send this rank SIGTERM when the process that started it dies, however it dies.

    Ranks that are left over would go on writing what the same command, given again, writes.
    """
    if sys.platform != "linux" or os.environ.get(_LAUNCHER) != str(os.getppid()):
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


# ---- in the process that starts them ----


def count_of(gpus: str | int) -> int:
    """How many ranks `--gpus` asks for: a number, or `auto` for one for each GPU that is here.

    On a machine without a GPU they are so many processes on the CPU, and `auto` is one.
    """
    import torch

    cards = torch.cuda.device_count()
    if gpus == "auto":
        return max(cards, 1)
    if not str(gpus).isdecimal() or int(gpus) < 1:
        raise ConfigError("--gpus is {gpus}; write a number such as 2, or auto", gpus=repr(gpus))
    count = int(gpus)
    if 0 < cards < count and not cards_are_shared():
        raise ConfigError(
            "--gpus is {gpus}, and {cards} are here; write auto", gpus=count, cards=cards
        )
    return count


def ranks_to_start(config: RunConfig) -> int:
    """How many ranks this process is to start: 1 if a launcher has started it as one of several."""
    is_launched = os.environ.get("LOCAL_RANK") or launched_rank().world_size > 1
    if config.gpus is None or is_launched:
        return 1
    return count_of(config.gpus)


def train_on_ranks(
    count: int,
    config: RunConfig,
    *,
    resume: bool,
    quiet: bool,
    watch: bool,
    callbacks: Sequence[Any],
    plan: Plan | None,
) -> None:
    """Trains in so many processes; RanksEndedError where they fail."""
    if config.output_dir is None:
        raise OutputError("no output folder given; name one with --output-dir")
    reason = _cannot_fork() if in_notebook() else None
    if in_notebook() and reason is None:
        from memfit.run.train import train_classifier

        how: dict[str, Any] = {"resume": resume, "quiet": quiet, "watch": watch, "plan": plan}
        _fork_ranks(count, partial(train_classifier, config, callbacks=callbacks, **how))
        return
    if callbacks and reason is not None:
        raise ConfigError(
            "gpus={count} trains in forks of this notebook, which get your callbacks, but "
            "{reason}; restart the notebook and call finetune first, or leave callbacks out",
            count=count,
            reason=reason,
        )
    if callbacks:
        raise ConfigError(
            "gpus={count} trains in other processes, which callbacks cannot be sent to; start "
            "the script with torchrun --nproc-per-node {count} and leave gpus out",
            count=count,
        )
    with tempfile.TemporaryDirectory(prefix="memfit-settings-") as name, ExitStack() as held:
        settings = Path(name) / "run.toml"
        if plan is not None:
            plan.write(Path(name) / "plan.toml")
            config = replace(config, plan=str(Path(name) / "plan.toml"), named_plan={})
        settings.write_text(config.to_toml(), encoding="utf-8")
        words = ["train", "--config", str(settings), "--output-dir", str(config.output_dir)]
        flags = {
            "--resume": resume,
            "--quiet": quiet,
            "--watch": watch,
            "--no-cache": not files.cache_is_used(),
        }
        words += [flag for flag, is_set in flags.items() if is_set]
        # A token goes by the variable that hubs read, and is written to no file.
        tokens = [config.training[name] for name in SECRET_FIELDS & config.training.keys()]
        secrets = {} if not tokens or tokens[0] is None else {"HF_TOKEN": str(tokens[0])}
        shown_by_bar(True)  # rank 0 has the terminal
        held.callback(shown_by_bar, False)
        if code := start_ranks(count, words, results=False, environment=secrets):
            raise RanksEndedError(code)


def start_ranks(
    count: int,
    argv: Sequence[str],
    *,
    results: bool = True,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> int:
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

    with (
        tempfile.TemporaryDirectory(prefix="memfit-ranks-") as logs,
        _ready_for_ranks(count, environment),
    ):
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
        written = [
            path.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
            for path in logs.glob(f"*/attempt_0/{rank}/stderr.log")
        ]
        said = "\n".join(line for lines in written for line in lines)
    told = words.get(0, {}).get("message", "")  # it may quote another rank's
    code = _code_of(failure.exitcode)
    if killed or (rank != 0 and not (said and said in told)):
        said = t("rank {rank}: {words}", rank=rank, words=said or t("exit code {code}", code=code))
        print(printable(f"memfit: {said}"), file=sys.stderr, flush=True)
    return code


def _code_of(exit_code: int) -> int:
    return exit_code if exit_code >= 0 else 128 - exit_code


@contextmanager
def _ready_for_ranks(count: int, environment: Mapping[str, str]) -> Iterator[None]:
    """What torch's agent hands on: shared cores, and no log of its own. Puts all back after it."""
    import torch

    before = dict(os.environ)
    threads = max(torch.get_num_threads() // count, 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ |= {LANGUAGE: language(), _LAUNCHER: str(os.getpid()), **environment}
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with _signals_given_back():
            yield
    finally:
        logging.disable(disabled)
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _signals_given_back() -> Iterator[None]:
    """Puts handlers back that are replaced inside."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- forks of a notebook ----


def _cannot_fork() -> Message | None:
    """Why ranks cannot be forks of this process; None where they can.

    In this process torch does not say whether CUDA's runtime was ever called: a fork is asked.
    """
    from accelerate.state import AcceleratorState
    from accelerate.utils import are_libraries_initialized

    if AcceleratorState._shared_state or are_libraries_initialized("bitsandbytes"):
        return Message("something was trained in this notebook before")
    if not hasattr(os, "fork"):
        return Message("this system cannot fork a process")
    process = os.fork()
    if process == 0:
        os._exit(int(is_in_bad_fork()))
    if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
        return Message("the GPU was used in this notebook before")
    return None


def _fork_ranks(count: int, train: Callable[[], Any]) -> None:
    """Runs `train` in so many forks of this process; RanksEndedError where one of them fails."""
    from accelerate import notebook_launcher
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    where = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "rdzv_id": "memfit"}
    with _ready_for_ranks(count, {}):
        try:
            notebook_launcher(_as_rank, (train,), num_processes=count, **where)
        except SignalException as stopped:
            raise RanksEndedError(128 + int(stopped.sigval)) from None
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            words = failure.message
            if rank:
                words = t("rank {rank}: {words}", rank=rank, words=words)
            raise RanksEndedError(_code_of(failure.exitcode), words) from None


def _as_rank(train: Callable[[], Any]) -> None:
    """What a fork does; an error of memfit's ends it with its sentence and exit code."""
    end_with_launcher()
    logging.disable(logging.NOTSET)
    with first_rank_speaks(), handled(stop_at_once):
        try:
            train()
        except Stopped as stopped:
            kept_for_launcher(t("interrupted"))
            sys.exit(stopped.exit_code)
        except MemfitError as error:
            kept_for_launcher(str(error))
            sys.exit(error.exit_code)

"""One run on several ranks: what they tell each other beside the gradients.

Rank 0 decides, speaks and writes: `share` sends its answers to the others. The first rank of each
machine reads and tokenizes, and the others map its files: `from_first_here`. Every rank prepares
the rest for itself. `agreed` surrounds work that may fail on one rank, such as reading a table: all
ranks fail together at its end. In training they meet in every step, so a rank that fails there
tells the others, which would wait for it (`failing_together`); one that is killed is missed by the
others, since its connections close.

All of it goes over gloo, whatever carries the gradients: it needs no device, and it reports a
closed connection at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

from memfit.config.launched import (
    LaunchedRank,
    cards_are_shared,
    launched_rank,
    number_for_torch,
)
from memfit.errors import MemfitError, RunStoppedError
from memfit.i18n import t
from memfit.printing import printable
from memfit.run.signals import Stopped
from memfit.waiting import make_way

T = TypeVar("T")

_ARRIVAL_SECONDS = 1800.0
"""How long the first ranks wait for the last to start, as long as torch itself waits."""

_VERDICT_SECONDS = 10.0
"""How long a rank waits to hear why its connections were closed."""

_END_SECONDS = 20.0
"""How long a rank may take to leave a step that will never end, once it knows so."""

_MESSAGE_BYTES = 4096


class RankError(MemfitError):
    """Another rank failed; the exit code is that rank's."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(what)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How a rank ended: with which words and exit code, or by which signal."""

    rank: int
    sentence: str
    exit_code: int
    signal_number: int = 0

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankFailure:
        """What the other ranks are told of an error."""
        if isinstance(error, KeyboardInterrupt):
            stopped = error if isinstance(error, Stopped) else Stopped()
            return cls(rank, "", stopped.exit_code, stopped.signal_number)
        if isinstance(error, MemfitError):
            what = error.what if isinstance(error, RunStoppedError) else str(error)
            return cls(rank, what, error.exit_code)
        return cls(rank, f"{type(error).__name__}: {error}", 1)

    @classmethod
    def unexplained(cls, rank: int) -> RankFailure:
        """The failure of a rank whose connections closed before it said why."""
        return cls(rank, t("it ended without a word: it was killed, or its machine was lost"), 1)

    def shortened(self) -> RankFailure:
        """With words that fit a message, whose characters may take six bytes each."""
        return replace(self, sentence=self.sentence[: _MESSAGE_BYTES // 8])

    def error(self) -> BaseException:
        """What the other ranks raise."""
        if self.signal_number:
            return Stopped(self.signal_number)
        if self.rank == 0:
            return RankError(self.sentence, self.exit_code)
        return RankError(
            t("rank {rank}: {words}", rank=self.rank, words=self.sentence), self.exit_code
        )


class RankGroup:
    """The ranks of a run; alone it is rank 0, and agrees with itself."""

    def __init__(self, ranks: LaunchedRank) -> None:
        self.ranks = ranks
        self.is_first = ranks.is_first
        self.is_alone = ranks.world_size == 1
        self._watch: _RankWatch | None = None
        if not self.is_alone:
            from memfit.engine.exchange import Peers, host_group

            self.peers = Peers.here()
            self._watch = _RankWatch(ranks, host_group())

    def gathered(self, value: T) -> list[T]:
        """Returns what each rank gives, in the order of ranks."""
        return [value] if self.is_alone else self.peers.gathered(value)

    def largest(self, value: int) -> int:
        """Returns the largest value of all ranks; cheap enough for every step."""
        return value if self.is_alone else self.peers.highest([value])[0]

    def smallest(self, value: int) -> int:
        """Returns the smallest value of all ranks."""
        return -self.largest(-value)

    def share(self, make: Callable[[], T]) -> T:
        """Returns what rank 0 makes, to all ranks; where rank 0 fails, all fail."""
        if self.is_alone:
            return make()
        error: Exception | None = None

        def attempt() -> tuple[T | None, RankFailure | None]:
            nonlocal error
            try:
                return make(), None
            except Exception as raised:
                error = raised
                return None, RankFailure.of(0, raised)

        made, failure = self.peers.from_first(attempt)
        if failure is not None:
            raise error or failure.error()
        return cast(T, made)

    @property
    def is_first_here(self) -> bool:
        """Whether this rank makes what the ranks of its machine have in common."""
        return self.ranks.local_rank == 0

    def from_first_here(self, value: T | None) -> T:
        """Returns what the first rank of this machine has, to all ranks of the machine."""
        if self.is_alone:
            return cast(T, value)
        mine = self.ranks.rank - self.ranks.local_rank
        found = None
        for first in sorted(set(self.gathered(mine))):
            told = self.peers.from_rank(first, value)
            found = told if first == mine else found
        return cast(T, found)

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Where one rank fails inside, all ranks fail; ranks exchange nothing inside."""
        if self.is_alone:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        mine = None if error is None else RankFailure.of(self.ranks.rank, error)
        failures = [one for one in self.gathered(mine) if one is not None]
        if not failures:
            return
        if error is not None and len({one.sentence for one in failures}) == 1:
            raise error
        raise failures[0].error() from error

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """A rank that fails inside ends the others, which raise its words as their own."""
        if self._watch is None:
            yield
            return
        try:
            yield
        except BaseException as error:
            cause = self._watch.ended_by(error)
            if cause is error:
                raise
            raise cause from error

    def leave(self) -> None:
        """Waits until all ranks have come to their end."""
        if self._watch is not None:
            self._watch.done()


@contextlib.contextmanager
def joined(*, on_cpu: bool = False, timeout_seconds: float = 1800) -> Iterator[RankGroup]:
    """Joins the other ranks that a launcher has started; alone without one."""
    ranks = launched_rank()
    if ranks.world_size > 1:
        number_for_torch(ranks)
        _initialize(on_cpu=on_cpu, timeout=timedelta(seconds=timeout_seconds))
    group = RankGroup(ranks)
    with group.failing_together():
        yield group
        group.leave()


def _initialize(*, on_cpu: bool, timeout: timedelta) -> None:
    """Makes torch's process group, unless a script has made it: gloo on a CPU, NCCL on GPUs.

    The ranks wait for each other in Python, where a signal reaches them: a launcher ends the
    others when one has failed before it came here.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    from memfit.memory.device import has_cuda

    if dist.is_initialized():
        return
    shared = cards_are_shared()
    if shared:
        os.environ["LOCAL_RANK"] = "0"  # accelerate takes the GPU of this number
    backend = "nccl" if has_cuda() and not on_cpu and not shared else "gloo"
    store, rank, world_size = next(iter(rendezvous("env://")))
    store.add("memfit/here", 1)
    waited_until = time.monotonic() + _ARRIVAL_SECONDS
    while (here := store.add("memfit/here", 0)) < world_size:
        if time.monotonic() > waited_until:
            raise RankError(
                t("only {here} of {count} ranks have started", here=here, count=world_size), 1
            )
        time.sleep(0.05)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


class _RankWatch:
    """Threads that hear how other ranks end: rank 0 of each, the others of rank 0."""

    def __init__(self, ranks: LaunchedRank, group: Any) -> None:
        self._ranks, self._group = ranks, group
        self._verdict: RankFailure | None = None
        """The first failure of any rank."""
        self._told, self._ending = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._others = range(1, ranks.world_size) if ranks.is_first else range(1)
        self._threads = [
            threading.Thread(target=self._listen, args=(rank,), daemon=True)
            for rank in self._others
        ]
        for thread in self._threads:
            thread.start()

    def done(self) -> None:
        """Says that this rank has come to its end, and waits for the others to."""
        self._ending.set()
        for rank in self._others:
            self._send(rank, None)
        for thread in self._threads:
            thread.join()

    def ended_by(self, error: BaseException) -> BaseException:
        """Returns what this rank raises for an error: another rank's failure, if that was first."""
        if self._ending.is_set():
            return error
        self._ending.set()
        if _is_lost_connection(error):
            self._told.wait(_VERDICT_SECONDS)
        verdict, mine = self._verdict, RankFailure.of(self._ranks.rank, error)
        if verdict is not None and verdict.signal_number != mine.signal_number:
            return verdict.error()
        if verdict is not None and verdict.sentence != mine.sentence:
            return verdict.error()
        if self._ranks.is_first:
            self._judge(mine)
        else:
            self._send(0, mine)
            self._told.wait(_VERDICT_SECONDS)
        return error

    def _listen(self, rank: int) -> None:
        import torch
        import torch.distributed as dist

        heard = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        try:
            dist.recv(heard, src=rank, group=self._group)
            values = json.loads(bytes(heard.tolist()).rstrip(b"\0"))
            failure = None if values is None else RankFailure(**values)
        except RuntimeError:
            failure = RankFailure.unexplained(rank)
        if failure is not None:
            self._judge(failure)

    def _judge(self, failure: RankFailure) -> None:
        """Records the first failure; rank 0 passes it on."""
        with self._lock:
            if self._verdict is not None:
                return
            self._verdict = failure
        if self._ranks.is_first:
            for rank in self._others:
                self._send(rank, failure)
        self._told.set()
        if threading.current_thread() in self._threads and not self._ending.wait(_END_SECONDS):
            self._leave(failure)

    def _send(self, rank: int, failure: RankFailure | None) -> None:
        import torch
        import torch.distributed as dist

        words = json.dumps(None if failure is None else asdict(failure.shortened())).encode()
        message = torch.tensor(list(words.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):  # the rank is gone
            dist.send(message, dst=rank, group=self._group)

    def _leave(self, failure: RankFailure) -> None:
        """Ends a process that waits in a library for a rank that is gone."""
        if self._ranks.is_first:
            make_way()
            said = printable(f"memfit: {failure.error()}")
            print(said, file=sys.__stderr__ or sys.stderr, flush=True)
        os._exit(failure.exit_code)


def _is_lost_connection(error: BaseException | None) -> bool:
    """Whether a collective failed: its words are gloo's or NCCL's, or torch says so."""
    import torch.distributed as dist

    while error is not None:
        words = str(error).lower()
        if isinstance(error, dist.DistError) or "gloo" in words or "nccl" in words:
            return True
        error = error.__cause__ or error.__context__
    return False

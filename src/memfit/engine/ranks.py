"""The processes that train one model together, and what they tell each other.

torch's DDP sums the gradients, or FSDP2 where weights are divided. Here is the rest: counts by
which losses are weighed, flags, and what the first rank decides for all. It goes over gloo,
whatever carries the gradients: that needs no device, and reports at once that a process has ended.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from memfit.config.launched import is_fork, launched_rank
from memfit.errors import MemfitError, RankLostError
from memfit.i18n import t

if TYPE_CHECKING:
    from torch import Tensor

# torch is imported where ranks talk: a wrong path of a single process is told without it.
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The number of this rank, and how many there are. Alone, everything here costs nothing.

    Every rank must call a method that tells the others something at the same place.
    """

    number: int = 0
    count: int = 1
    local_number: int = 0
    """Among the ranks of this machine."""
    local_count: int = 1

    @classmethod
    def here(cls) -> Ranks:
        """Those of this process's group."""
        if "torch.distributed" not in sys.modules:
            return cls()  # nobody has made a group
        import torch
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        if is_fork():
            # The parent's OpenMP threads do not exist here, and a parallel loop would wait for them
            # forever. torch does the same for the workers of a DataLoader.
            torch.set_num_threads(1)
        launched = launched_rank()
        return cls(
            dist.get_rank(), dist.get_world_size(), launched.local_rank, launched.local_world_size
        )

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self.count == 1

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.number == 0

    @property
    def is_first_here(self) -> bool:
        """Whether this rank makes what the ranks of its machine have in common."""
        return self.local_number == 0

    def numbers(self, *values: float) -> list[tuple[float, ...]]:
        """The values of every rank."""
        if self.is_alone:
            return [values]
        import torch
        import torch.distributed as dist

        told = [torch.zeros(len(values), dtype=torch.float64) for _ in range(self.count)]
        with meeting():
            dist.all_gather(told, torch.tensor(values, dtype=torch.float64), group=_by_host())
        return [tuple(one.tolist()) for one in told]

    def largest(self, *values: float) -> tuple[float, ...]:
        """The largest of all ranks, of each value."""
        return tuple(map(max, zip(*self.numbers(*values), strict=True)))

    def gathered(self, value: T) -> list[T]:
        """What every rank gives, in their order."""
        found: list[Any] = [value] * self.count
        if not self.is_alone:
            import torch.distributed as dist

            with meeting():
                dist.all_gather_object(found, value, group=_by_host())
        return found

    def share(self, make: Callable[[], T]) -> T:
        """What the first rank makes, on all; where it fails, all fail."""
        if self.is_alone:
            return make()
        import torch.distributed as dist

        told: list[Any] = [None]
        if self.is_first:
            try:
                told = [(make(), None)]
            except Exception as error:
                told = [(None, _sendable(error))]
        with meeting():
            dist.broadcast_object_list(told, src=0, group=_by_host())
        made, failed = told[0]
        if failed is not None:
            raise failed
        return made  # type: ignore[no-any-return]

    def from_first_here(self, value: T | None) -> T:
        """What the first rank of this machine gives, on all ranks of the machine."""
        return self.gathered(value)[self.number - self.local_number]  # type: ignore[return-value]

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Where a rank fails inside, all ranks fail; they tell each other nothing inside."""
        if self.is_alone:
            yield
            return
        mine: list[Exception] = []
        try:
            yield
        except Exception as error:
            mine.append(error)
        for rank, other in enumerate(self.gathered([_sendable(error) for error in mine])):
            if other and str(other[0]) not in map(str, mine):
                words = t("rank {rank}: {words}", rank=rank, words=str(other[0]))
                raised = MemfitError(words if rank else str(other[0]))
                raised.exit_code = getattr(other[0], "exit_code", 1)
                raise raised
        if mine:
            raise mine[0]

    def averaged(self, value: Tensor) -> Tensor:
        """The mean over the ranks, where the tensor lies."""
        if not self.is_alone:
            import torch.distributed as dist

            value = value.detach().clone()
            with meeting():
                dist.all_reduce(value)
            value /= self.count
        return value

    def same(self, tensors: Sequence[Tensor]) -> None:
        """Gives every rank the first one's values, where they differ."""
        if self.is_alone or not tensors:
            return
        import torch.distributed as dist

        sums = [float(one.detach().double().sum()) for one in tensors]
        every = zip(*self.numbers(*sums), strict=True)
        for tensor, found in zip(tensors, every, strict=True):
            if any(one != found[0] for one in found):
                copied = tensor.detach().cpu().contiguous()
                with meeting():
                    dist.broadcast(copied, src=0, group=_by_host())
                tensor.detach().copy_(copied)


def _by_host() -> Any:
    import torch.distributed as dist

    return _host_group(dist.group.WORLD)


@cache
def _host_group(_: Any) -> Any:
    """All ranks, over gloo. Without a timeout: planning may take minutes on one rank."""
    import torch.distributed as dist

    return dist.new_group(backend="gloo", timeout=timedelta(days=1000))


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    """Inside, an error of the connection to other ranks says that one has ended."""
    try:
        yield
    except RuntimeError as error:
        import torch.distributed as dist

        words = str(error).strip()
        of_connection = "gloo" in words.lower() or "connection closed" in words.lower()
        if not isinstance(error, dist.DistError) and not of_connection:
            raise
        raise RankLostError(
            t(
                "another process of this training has ended or no longer answers (this is "
                "process {rank} of {count}): {reason}",
                rank=dist.get_rank() + 1,
                count=dist.get_world_size(),
                reason=words.splitlines()[0][:200] if words else type(error).__name__,
            ),
        ) from error


def _sendable(error: Exception) -> Exception:
    """The error itself, or its words where it cannot be pickled."""
    try:
        pickle.dumps(error)
        copy.copy(error)  # made again from its arguments, as where it arrives
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error

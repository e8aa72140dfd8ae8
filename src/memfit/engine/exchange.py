"""The processes that train one model together, each with its share of every effective batch.

    weight     what the whole batch's loss is a mean of, before the step           Peers.total
    backward   each gradient is summed over the ranks once it is whole here        GradientExchange
    loss       of the whole batch, on every rank                                   Peers.summed
    decisions  stop, save, evaluate: what one rank wants, all do                   Peers.highest

A rank that runs out of memory runs its own part again, smaller; the others wait for its gradients
and notice nothing. What it had sent by then was whole, and is not sent again. So a step needs no
agreement on whether it went well.

Gradients travel in the order of the parameters, last first, which is about the order in which
backward makes them, whatever a rank recomputes or leaves out. Every rank then holds the same sum to
the last bit, so the same update leaves the same weights.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from memfit.config.launched import is_fork
from memfit.engine.step_state import on_gradient
from memfit.errors import RankLostError
from memfit.i18n import t
from memfit.memory.out_of_memory import is_out_of_memory, retrying

_Made = TypeVar("_Made")

IN_FLIGHT_BYTES = 32 * 2**20
"""Gradients on their way between ranks before a sink waits for the oldest."""

_SMALL_NUMEL = 1 << 16
"""Smaller gradients travel together: each message costs the same, however short."""

_POOLED = 32
"""The most gradients in one message."""


def host_group() -> Any:
    """A group of all ranks that needs no device, and notices at once that one has ended.

    It has no timeout: planning may take minutes on one rank, and a run weeks.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(days=1000))


class Peers:
    """What the processes of a training send each other, over torch.distributed.

    Alone, everything here does nothing and costs nothing. Which number a launcher has given this
    process is read by `config/launched.py`; a whole run's ranks agree, and fail, by way of
    `run/rank_group.py`.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, control: Any = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._control = control
        self._apart = False
        self.step = 0
        """Counts effective batches; a step that is run again is the same one."""
        self._total: tuple[int, float] | None = None
        self.waited_seconds = 0.0
        """By this process, for the others."""

    @classmethod
    def here(cls) -> Peers:
        """Those of this process's group; every rank must ask at the same place in its program."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        if is_fork():
            # The parent's OpenMP threads do not exist here, and a parallel loop would wait for them
            # forever. torch does the same for the workers of a DataLoader.
            torch.set_num_threads(1)
        # A group of its own: gradients on their way must not get between a question and its answer.
        return cls(dist.get_rank(), dist.get_world_size(), host_group())

    @property
    def together(self) -> bool:
        """Whether other ranks take part in what this rank does now."""
        return self.world_size > 1 and not self._apart

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, this rank is by itself, as in a rehearsal."""
        before, self._apart = self._apart, True
        try:
            yield
        finally:
            self._apart = before

    def begin_step(self) -> None:
        """Another effective batch follows."""
        self.step += 1

    # ---- numbers and decisions, by way of the host ----

    def total(self, weight: float) -> float:
        """The sum of the ranks' weights of this step; asked for once, however often it is run."""
        if not self.together:
            return weight
        if self._total is None or self._total[0] != self.step:
            given = torch.tensor(weight, dtype=torch.float64)
            self._waiting(lambda: dist.all_reduce(given, group=self._control))
            self._total = (self.step, float(given))
        return self._total[1]

    def highest(self, values: Sequence[int]) -> list[int]:
        """Each value's maximum over the ranks."""
        if not self.together:
            return list(values)
        given = torch.tensor(list(values), dtype=torch.int64)
        self._waiting(lambda: dist.all_reduce(given, dist.ReduceOp.MAX, group=self._control))
        return [int(one) for one in given.tolist()]

    def gathered(self, value: _Made) -> list[_Made]:
        """What every rank has here, in their order."""
        if not self.together:
            return [value]
        found: list[Any] = [None] * self.world_size
        self._waiting(lambda: dist.all_gather_object(found, value, group=self._control))
        return found

    def from_first(self, make: Callable[[], _Made]) -> _Made:
        """What the first rank makes, on all; an error of its making is raised on all, too."""
        if not self.together:
            return make()
        made: list[Any] = [None]
        if self.rank == 0:
            try:
                made = [(make(), None)]
            except Exception as error:
                made = [(None, _sendable(error))]
        self._waiting(lambda: dist.broadcast_object_list(made, src=0, group=self._control))
        value, failed = made[0]
        if failed is not None:
            raise failed
        return value  # type: ignore[no-any-return]

    def from_rank(self, rank: int, value: _Made) -> _Made:
        """What one rank has here, on all."""
        if not self.together:
            return value
        told: list[Any] = [value if self.rank == rank else None]
        self._waiting(lambda: dist.broadcast_object_list(told, src=rank, group=self._control))
        return told[0]  # type: ignore[no-any-return]

    def raised(self, error: Exception | None) -> None:
        """Raises on all ranks the error that one of them met, the lowest rank's first."""
        if not self.together:
            found = [error]
        else:
            found = self.gathered(None if error is None else _sendable(error))
        for one in found:
            if one is not None:
                raise error or one

    # ---- tensors ----

    def summed(self, value: Tensor) -> Tensor:
        """The sum over the ranks, where the tensor lies; nobody waits for it but the device."""
        if self.together:
            with retrying(value.device):
                value = value.detach().clone()
            self._waiting(lambda: dist.all_reduce(value))
        return value

    def same_weights(self, model: nn.Module) -> None:
        """Give every rank the first one's parameters and buffers, where they differ."""
        self.same_tensors([*model.parameters(), *model.buffers()])

    @torch.no_grad()
    def same_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank the first one's values, where they differ."""
        if not self.together or not tensors:
            return
        here = [float(one.detach().double().sum()) for one in tensors]
        first = self.from_first(lambda: here)
        differs = [a != b and not (a != a and b != b) for a, b in zip(here, first, strict=True)]
        for tensor, send in zip(tensors, self.highest([int(one) for one in differs]), strict=True):
            if send:
                copied = tensor.detach().cpu().contiguous()
                self._waiting(lambda c=copied: dist.broadcast(c, src=0, group=self._control))  # type: ignore[misc]
                tensor.copy_(copied)

    def launch(self, tensor: Tensor) -> Any:
        """Begin to sum a tensor in place; `wait` on what is returned, or leave it to `settle`."""
        return self._called(lambda: dist.all_reduce(tensor, async_op=True))

    def launch_from(self, owner: int, tensor: Tensor) -> Any:
        """Begin to give every rank one rank's values, in place; `settle` waits for them."""
        return self._called(lambda: dist.broadcast(tensor, src=owner, async_op=True))

    def to_first(self, tensor: Tensor, sender: int) -> None:
        """Bring one rank's values into the first rank's tensor, which is in host memory."""
        if self.rank == sender:
            copied = tensor.detach().cpu().contiguous()
            self.settle(self.launch_to_first(copied))
        elif self.rank == 0:
            self.receive(tensor, sender)

    def launch_to_first(self, tensor: Tensor) -> Any:
        """Begin to send a tensor in host memory to the first rank, which calls `receive`."""
        return self._called(lambda: dist.isend(tensor, dst=0, group=self._control))

    def receive(self, tensor: Tensor, sender: int) -> None:
        """Waits for what a rank sends to this one, of the size of this tensor in host memory."""
        self._waiting(lambda: dist.recv(tensor, src=sender, group=self._control))

    def settle(self, work: Any) -> None:
        """Until the sum is there; on a card the stream waits, not the host."""
        self._waiting(work.wait)

    def _waiting(self, call: Callable[[], Any]) -> None:
        started = time.perf_counter()
        self._called(call)
        self.waited_seconds += time.perf_counter() - started

    def meeting(self, call: Callable[[], _Made]) -> _Made:
        """Calls what meets the other ranks somewhere inside, and may fail for other reasons too."""
        try:
            return call()
        except RuntimeError as error:
            if not _is_of_connection(error):
                raise
            raise self._lost(error) from error

    def _called(self, call: Callable[[], _Made]) -> _Made:
        try:
            return call()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> RankLostError:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return RankLostError(
            t(
                "another process of this training has ended or no longer answers (this is "
                "process {rank} of {count}): {reason}",
                rank=self.rank + 1,
                count=self.world_size,
                reason=reason[:200],
            ),
        )


def _is_of_connection(error: RuntimeError) -> bool:
    """Whether a backend says that it cannot reach another rank."""
    said = str(error).lower()
    return isinstance(error, dist.DistError) or "gloo" in said or "connection closed" in said


def _sendable(error: Exception) -> Exception:
    """The error itself, or its words where it cannot be pickled."""
    try:
        pickle.dumps(error)
        copy.copy(error)  # made again from its arguments, as where it arrives
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@dataclass(slots=True)
class _Flight:
    """Gradients on their way, in one message."""

    unit: tuple[Tensor, ...]
    gradients: list[Tensor]
    message: Tensor
    work: Any

    def land(self, ranks: Peers) -> None:
        ranks.settle(self.work)
        if len(self.gradients) > 1:
            parts = torch.split(self.message, [g.numel() for g in self.gradients])
            for gradient, part in zip(self.gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


class GradientExchange:
    """Sums the gradients of one step over the ranks, each rank in the same order."""

    def __init__(self, ranks: Peers) -> None:
        self.ranks = ranks
        self._units: list[tuple[Tensor, ...]] = []
        self._params: list[Tensor] = []
        self._step = -1
        self._is_open = False
        """Whether a step is on its way."""
        self._begin([])

    def _begin(self, params: Iterable[Tensor]) -> None:
        params = list(params)
        if len(params) != len(self._params) or any(
            a is not b for a, b in zip(params, self._params, strict=True)
        ):
            self._params, self._units = params, list(in_messages(params))
        self._next = 0
        self._offered: dict[Tensor, Tensor] = {}
        self._flying: deque[_Flight] = deque()
        self._sent: set[Tensor] = set()

    def begin(self, params: Iterable[Tensor]) -> bool:
        """Starts the exchange of their gradients; returns False if the step is repeated."""
        self._is_open = True
        if self._step == self.ranks.step:
            self._offered.clear()  # made by an attempt that failed
            return False
        self._step = self.ranks.step
        self._begin(params)
        return True

    def has_sent(self, p: Tensor) -> bool:
        """Whether this rank's gradient of a parameter is with the others already."""
        return self._is_open and p in self._sent

    @torch.no_grad()
    def offer(self, p: Tensor, gradient: Tensor) -> None:
        """A parameter's gradient is whole here; it will be summed in place."""
        self._offered[p] = gradient
        while self._next < len(self._units):
            unit = self._units[self._next]
            if any(one not in self._offered for one in unit):
                return
            self._launch(unit, [self._offered.pop(one) for one in unit])

    def landed(self, most_bytes: int = IN_FLIGHT_BYTES) -> list[tuple[Tensor, Tensor]]:
        """The sums that are there, in order; so many bytes may still be on their way."""
        found = []
        flying = sum(flight.message.nbytes for flight in self._flying)
        while self._flying and flying > most_bytes:
            flight = self._flying.popleft()
            flying -= flight.message.nbytes
            flight.land(self.ranks)
            found += list(zip(flight.unit, flight.gradients, strict=True))
        return found

    @torch.no_grad()
    def finish(
        self,
        rest: Callable[[Tensor], Tensor | None],
        take: Callable[[list[tuple[Tensor, Tensor]]], None],
        buffers: Sequence[Tensor] = (),
        flags: Sequence[bool] = (),
    ) -> list[bool]:
        """Have the other sums taken, in order, few of them on their way at a time.

        `rest` gives a gradient that was not offered, None where there is none. A parameter without
        a gradient on any rank gets none, as in a process by itself. `buffers` are summed in place;
        returns for each of `flags` whether it is true on any rank. Where memory is short single
        operators are repeated: the others have been told, so the step cannot be.
        """
        with retrying(self._params[0].device) if self._params else nullcontext():
            return self._finish(rest, take, buffers, flags)

    def _finish(
        self,
        rest: Callable[[Tensor], Tensor | None],
        take: Callable[[list[tuple[Tensor, Tensor]]], None],
        buffers: Sequence[Tensor],
        flags: Sequence[bool],
    ) -> list[bool]:
        missing: set[Tensor] = set()
        held: list[tuple[Tensor, Tensor]] = []
        while self._next < len(self._units):
            unit = self._units[self._next]
            gradients = []
            for p in unit:
                gradient = self._offered.pop(p, None)
                gradient = rest(p) if gradient is None else gradient
                if gradient is None:
                    missing.add(p)
                    gradient = torch.zeros(p.numel(), dtype=p.dtype, device=p.device)
                gradients.append(gradient)
            self._launch(unit, gradients)
            landed = self.landed()
            if missing:  # whether the others have one is not known yet
                held += landed
            else:
                take(landed)
        works = [self.ranks.launch(buffer) for buffer in buffers]
        there = [p not in missing for p in self._params]
        anywhere = self.ranks.highest([int(one) for one in (*there, *flags)])
        learned = {p for p, some in zip(self._params, anywhere, strict=False) if some}
        take([pair for pair in (*held, *self.landed(most_bytes=-1)) if pair[0] in learned])
        for work in works:
            self.ranks.settle(work)
        self._is_open = False
        return [bool(one) for one in anywhere[len(self._params) :]]

    def _launch(self, unit: tuple[Tensor, ...], gradients: list[Tensor]) -> None:
        (message, *more) = gradients
        if more:
            message = torch.cat([gradient.reshape(-1) for gradient in gradients])
        work = self.ranks.launch(message)
        self._flying.append(_Flight(unit, gradients, message, work))
        self._sent.update(unit)
        self._next += 1


def in_messages(params: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """What travels in one message, last parameter first: a large gradient, or some small ones."""
    pool: list[Tensor] = []
    for p in reversed(params):
        if p.numel() >= _SMALL_NUMEL:
            yield (p,)
            continue
        if pool and (len(pool) == _POOLED or pool[0].dtype != p.dtype):
            yield tuple(pool)
            pool = []
        pool.append(p)
    if pool:
        yield tuple(pool)


def leave_in_grad(sums: list[tuple[Tensor, Tensor]]) -> None:
    """Puts the sums where optimizer and callbacks look."""
    for p, gradient in sums:
        p.grad = gradient.view_as(p)


class WatchedGrads:
    """Offers gradients that stay in `.grad` to an exchange, beside the rest of backward."""

    def __init__(self, exchange: GradientExchange) -> None:
        self._exchange = exchange
        self.armed = False
        """Whether the next backward is the rank's last of the step, so that gradients are whole."""
        self._handles: dict[Tensor, RemovableHandle] = {}

    def watch(self, params: Iterable[Tensor]) -> None:
        """Puts hooks on those that have none yet."""
        for p in params:
            if p not in self._handles:
                self._handles[p] = on_gradient(p, self._receive)

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _receive(self, p: Tensor) -> None:
        if not self._exchange.ranks.together or p.grad is None:
            return
        if self._exchange.has_sent(p):
            p.grad = None  # of a step that is run again
        elif self.armed:
            self._exchange.offer(p, p.grad)


class ExchangedGrads:
    """The exchange for gradients that stay in `.grad`, where optimizer and callbacks look."""

    def __init__(self, ranks: Peers, model: nn.Module) -> None:
        self._model = model
        self._exchange = GradientExchange(ranks)
        self._watched = WatchedGrads(self._exchange)

    def begin(self) -> None:
        """Before the first micro-batch of a step, or of its repetition."""
        learning = [p for p in self._model.parameters() if p.requires_grad]
        self._watched.watch(learning)
        self._watched.armed = False
        self._exchange.begin(learning)

    def arm(self) -> None:
        """The next backward is this rank's last of the step."""
        self._watched.armed = True

    def finish(self) -> None:
        """Leaves the sums in `.grad`."""
        self._watched.armed = False
        self._exchange.finish(lambda p: p.grad, leave_in_grad)

    def remove(self) -> None:
        """Takes the hooks off."""
        self._watched.remove()

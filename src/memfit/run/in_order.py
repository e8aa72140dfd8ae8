"""The work of several ranks, collected by the first in the order it was dealt."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle
from typing import TYPE_CHECKING, Any

from memfit.config.launched import LaunchedRank
from memfit.errors import MemfitError
from memfit.text import t

if TYPE_CHECKING:
    import torch

_AHEAD = 4
"""Pieces a rank may be ahead of the first: enough that no rank waits for a long piece of another,
few enough to lie in memory."""

_PATIENCE = timedelta(days=7)
"""A piece may take hours; a rank that died is noticed at once, by its connection."""

_END = -1


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows as the output holds them; at least one."""

    data: bytes
    rows: int
    empty_rows: int


class Exchange:
    """Carries numbers and pieces between ranks over gloo; alone it carries nothing."""

    def __init__(self, ranks: LaunchedRank, group: Any) -> None:
        self.ranks = ranks
        self._group = group

    def from_first(self, number: int) -> int:
        """Returns the first rank's number on every rank."""
        import torch
        import torch.distributed as dist

        if self.ranks.world_size == 1:
            return number
        told = torch.tensor([number], dtype=torch.int64)
        dist.broadcast(told, src=0, group=self._group)
        return int(told.item())

    def in_order(self, mine: Iterable[Piece]) -> Iterator[Piece]:
        """Yields the pieces of all ranks on the first, and none on the others.

        Piece number i of all is made by rank i modulo the number of ranks; `mine` are this rank's.
        """
        if self.ranks.world_size == 1:
            yield from mine
        elif self.ranks.is_first:
            yield from self._collect(iter(mine))
        else:
            self._send(mine)

    def _collect(self, mine: Iterator[Piece]) -> Iterator[Piece]:
        ended = 0
        for rank in cycle(range(self.ranks.world_size)):
            piece = next(mine, None) if rank == 0 else self._receive(rank)
            if piece is not None:
                yield piece
                continue
            ended += 1  # then all others have come to their ends, too
            if ended == self.ranks.world_size:
                return

    def _receive(self, rank: int) -> Piece | None:
        import torch
        import torch.distributed as dist

        head = torch.empty(3, dtype=torch.int64)
        dist.recv(head, src=rank, group=self._group)
        size, rows, empty_rows = head.tolist()
        if size == _END:
            return None
        data = torch.empty(size, dtype=torch.uint8)
        dist.recv(data, src=rank, group=self._group)
        return Piece(data.numpy().tobytes(), rows, empty_rows)

    def _send(self, mine: Iterable[Piece]) -> None:
        import torch
        import torch.distributed as dist

        under_way: deque[list[tuple[Any, torch.Tensor]]] = deque()

        def send(*tensors: torch.Tensor) -> None:
            under_way.append([(dist.isend(one, 0, self._group), one) for one in tensors])
            while len(under_way) > _AHEAD:
                for work, _ in under_way.popleft():
                    work.wait()

        for piece in mine:
            head = torch.tensor([len(piece.data), piece.rows, piece.empty_rows])
            send(head, torch.frombuffer(bytearray(piece.data), dtype=torch.uint8))
        send(torch.tensor([_END, 0, 0]))
        while under_way:
            for work, _ in under_way.popleft():
                work.wait()


@contextmanager
def exchange(ranks: LaunchedRank) -> Iterator[Exchange]:
    """Connects the ranks for as long as it lasts; a process group that is there stays."""
    if ranks.world_size == 1:
        yield Exchange(ranks, None)
        return
    import torch.distributed as dist

    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", timeout=_PATIENCE)
    group = dist.group.WORLD if ours else dist.new_group(backend="gloo", timeout=_PATIENCE)
    try:
        yield Exchange(ranks, group)
    except RuntimeError as error:
        if "gloo" not in str(error).lower():
            raise
        raise MemfitError(t("the other processes of this command have ended")) from None
    finally:
        if ours:
            dist.destroy_process_group()

"""The work of several ranks, collected by the first in the order it was dealt."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

from memfit.run.rank_group import RankGroup

if TYPE_CHECKING:
    import torch

    from memfit.engine.exchange import Peers

_AHEAD = 4
"""Pieces a rank may be ahead of the first: enough that no rank waits for a long piece of another,
few enough to lie in memory."""

_END = -1


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows as the output holds them; at least one."""

    data: bytes
    rows: int
    empty_rows: int


def in_order(group: RankGroup, mine: Iterable[Piece]) -> Iterator[Piece]:
    """Yields the pieces of all ranks on the first, and none on the others.

    Piece number i of all is made by rank i modulo the number of ranks; `mine` are this rank's.
    """
    if group.is_alone:
        yield from mine
    elif group.is_first:
        yield from _collected(group.peers, iter(mine))
    else:
        _send(group.peers, mine)


def _collected(peers: Peers, mine: Iterator[Piece]) -> Iterator[Piece]:
    ended = 0
    for rank in cycle(range(peers.world_size)):
        piece = next(mine, None) if rank == 0 else _received(peers, rank)
        if piece is not None:
            yield piece
            continue
        ended += 1  # then all others have come to their ends, too
        if ended == peers.world_size:
            return


def _received(peers: Peers, rank: int) -> Piece | None:
    import torch

    head = torch.empty(3, dtype=torch.int64)
    peers.receive(head, rank)
    size, rows, empty_rows = head.tolist()
    if size == _END:
        return None
    data = torch.empty(size, dtype=torch.uint8)
    peers.receive(data, rank)
    return Piece(data.numpy().tobytes(), rows, empty_rows)


def _send(peers: Peers, mine: Iterable[Piece]) -> None:
    import torch

    under_way: deque[list[tuple[Any, torch.Tensor]]] = deque()

    def send(*tensors: torch.Tensor, ahead: int = _AHEAD) -> None:
        under_way.append([(peers.launch_to_first(one), one) for one in tensors])
        while len(under_way) > ahead:
            for work, _ in under_way.popleft():
                peers.settle(work)

    for piece in mine:
        head = torch.tensor([len(piece.data), piece.rows, piece.empty_rows])
        send(head, torch.frombuffer(bytearray(piece.data), dtype=torch.uint8))
    send(torch.tensor([_END, 0, 0]), ahead=0)

"""Ranks as threads of one process, which hand each other their tensors."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seko_export.families.layers.rank_split import RankSplit
from seko_export.media.row_split import RowSplit


@dataclass(frozen=True)
class Meeting:
    """Where the threads of one test put what they send."""

    ranks: int
    barrier: threading.Barrier
    sent: dict[int, Tensor] = field(default_factory=dict)

    def of_all(self, rank: int, x: Tensor) -> list[Tensor]:
        """Return what each rank's thread hands in here, by rank; ``x`` is this one's."""
        self.sent[rank] = x
        self.barrier.wait(30)
        parts = [self.sent[source] for source in range(self.ranks)]
        self.barrier.wait(30)
        return parts

    def share(self, rank: int, x: Tensor) -> None:
        """Copy rank 0's tensor into this thread's."""
        first, *_ = self.of_all(rank, x)
        if rank:
            x.copy_(first)
        self.barrier.wait(30)


@dataclass(frozen=True)
class InThreads(RankSplit):
    """`RankSplit` of one thread, whose collectives are a dictionary and a barrier."""

    rank: int
    meeting: Meeting

    def _exchanged(self, x: Tensor) -> Tensor:
        return torch.stack([parts[self.rank] for parts in self.meeting.of_all(self.rank, x)])

    def _gathered(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.of_all(self.rank, x))


@dataclass(frozen=True)
class RowsInThreads(RowSplit):
    """`RowSplit` of one thread, likewise."""

    meeting: Meeting

    def _gathered(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.of_all(int(self.rank), x))

"""Rows that compute nothing, over ranks that hold a part of one tensor: their interface, one rank's rows, and the
program of a rank's process.

python -m tests.parallel.toy_rows DESCRIPTOR
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import HostBytes
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.parallel.channel import inherited_channel
from seko_runtime.parallel.records import STAYS, record
from seko_runtime.parallel.worker import Handler, serve
from seko_runtime.sessions.over_ranks import OverRanks
from seko_runtime.sessions.ranked_rows import RankCommands
from seko_runtime.sessions.row_state import RowLayout, RowState, StateForm
from seko_runtime.sessions.rows import Rows

ROWS, HEADS, WIDTH = 2, 4, 3
FORM = StateForm(lambda fields: fields.integer("runs"))


@record
@dataclass(frozen=True)
class Note:
    """A dataclass as a new method may take or return it."""

    words: str
    places: tuple[int, ...] = ()
    picture: object = None
    here: object = field(default=None, metadata=STAYS)


class ToyRows(Rows[int, int], Protocol):
    """`Rows` with the methods that a workload might add: nothing but this declaration and the method itself."""

    @property
    def runs(self) -> int:
        """Number of calls so far."""

    def noted(self, row: int, note: Note, *, times: int = 1) -> list[Note]:
        """Return the note some times, and remember the words."""

    def read_later(self, row: int) -> Callable[[], NDArray[np.float32]]:
        """Return a function that returns a row's numbers."""

    @OverRanks(join=lambda _, parts: sum(parts))
    def heads(self) -> int:
        """Return the number of heads that this rank has: of all ranks together."""

    @OverRanks(first=True)
    def who(self) -> tuple[int, list[str]]:
        """Return the rank and the words of notes."""


def manifest_of(ranks: int) -> Any:
    """Return what ranked rows read of a manifest: a cache [2, 4 / ranks, 3] for each row, split by its heads."""
    cache = SimpleNamespace(name="cache", rank_axis=1, role="cache")
    return SimpleNamespace(ranks=ranks, buffers=[cache])


class LocalToyRows:
    """One rank's rows, a `ToyRows`."""

    form = FORM

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.manifest, self._rank = manifest_of(ranks), rank
        whole = np.arange(ROWS * 2 * HEADS * WIDTH, dtype=np.float32).reshape(ROWS, 2, HEADS, WIDTH)
        own = HEADS // ranks
        self._cache = whole[:, :, rank * own :][:, :, :own].copy()
        self._words: list[str] = []
        self.owners: list[str | None] = [None] * ROWS
        self.runs, self.closed = 0, False

    def run(self, rows: Sequence[int], inputs: Sequence[int] | None) -> list[int]:
        self.runs += 1
        self._cache[list(rows)] += 1
        return [row + (inputs[place] if inputs else 0) for place, row in enumerate(rows)]

    def check(self, rows: Sequence[int], inputs: Sequence[int]) -> None:
        if len(rows) != len(inputs):
            raise UsageError(f"{len(inputs)} inputs, expected {len(rows)}")

    def variants(self, rows: Sequence[int]) -> list[Hashable]:
        return [(row > 0, "all") for row in rows]

    def calls_done(self) -> Callable[[], None]:
        return lambda: None

    def begin_owner(self, row: int, tenant: str | None) -> None:
        self.owners[row] = tenant

    def reserve(self, row: int) -> None:
        self._words.append(f"reserved {row}")

    def forget(self, row: int) -> None:
        self._cache[row] = 0

    def store(self, row: int) -> RowState:
        cache = self._cache[row].reshape(-1).view(np.uint8).copy()
        words = np.frombuffer(" ".join(self._words).encode(), np.uint8)
        return RowState(self.runs, HostBytes({"cache": cache}), {"words": words})

    def load(self, row: int, state: RowState) -> None:
        self._cache[row] = state.tensors.arrays()["cache"].view(np.float32).reshape(self._cache[row].shape)
        self._words = state.arrays["words"].tobytes().decode().split(" ")

    def layout(self) -> RowLayout:
        tensors = {"cache": TensorSpec("cache", self._cache.shape[1:], "float32")}
        return RowLayout(tensors, {"words": TensorSpec("words", (9,), "uint8")})

    def free_bytes(self) -> int:
        return 1000 + self._rank

    def check_open(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def noted(self, row: int, note: Note, *, times: int = 1) -> list[Note]:
        if times < 0:
            raise UsageError(f"times is {times}, expected at least 0")
        self._words.append(f"{note.words}@{row}")
        return [Note(note.words, note.places, note.picture, self)] * times

    def read_later(self, row: int) -> Callable[[], NDArray[np.float32]]:
        numbers = self._cache[row].copy()
        return lambda: numbers

    def heads(self) -> int:
        return self._cache.shape[2]

    def who(self) -> tuple[int, list[str]]:
        return self._rank, self._words

    def secret(self) -> str:
        """Return what no caller may ask for: the interface does not have it."""
        return "secret"


def begin(rank: int, facts: Mapping[str, Any]) -> tuple[Handler, object]:
    """Return the commands of one rank's rows."""
    return RankCommands(rank, ToyRows, lambda _: LocalToyRows(rank, facts["ranks"])), None


if __name__ == "__main__":
    from tests.parallel import toy_rows

    serve(
        inherited_channel(int(sys.argv[1])), toy_rows.begin
    )  # its classes have the names that the caller knows
    os._exit(0)

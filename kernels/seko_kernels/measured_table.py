"""Tables of kernels that were measured on GPUs: JSON lists, which benchmarks write and builds read."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from seko_kernels.errors import TilesError

KeyT = TypeVar("KeyT", bound=tuple[Any, ...])
TilesT = TypeVar("TilesT")


class Rival(NamedTuple):
    """What a kernel of a table was faster than: the fields of a row with both times, and the rival's name."""

    own: str
    other: str
    name: str


class MeasuredTable(Generic[KeyT, TilesT]):
    """The form of one table. It has only kernels that `scripts/kernel_admission` admitted on their GPU, each with its
    error and its bound.

    Parameters
    ----------
    entry : callable
        Function that returns the key and the tile sizes of a row; its KeyError, TypeError or ValueError becomes a
        TilesError.
    rival : Rival, optional
        What each kernel must have been faster than.
    """

    def __init__(
        self, entry: Callable[[dict[str, Any]], tuple[KeyT, TilesT]], rival: Rival | None = None
    ) -> None:
        self._entry, self._rival = entry, rival

    def read(self, file: Path) -> dict[KeyT, TilesT]:
        """Return the tile sizes of a table, by key.

        Raises
        ------
        TilesError
            If the file is no such table, or a kernel was not admitted or was not faster than its rival.
        """
        table: dict[KeyT, TilesT] = {}
        with _faults(file):
            for row in json.loads(file.read_text(encoding="utf-8")):
                if not row["error"] <= row["bound"]:  # NaN too
                    raise TilesError(f"{file.name}: error {row['error']} is above its bound {row['bound']}")
                if (rival := self._rival) and not row[rival.own] < row[rival.other]:
                    times = f"{row[rival.own]} {rival.own} is no less than {rival.name} {row[rival.other]}"
                    raise TilesError(f"{file.name}: {times}")
                key, tiles = self._entry(row)
                table[key] = tiles
        return table

    def write(self, file: Path, rows: Sequence[dict[str, Any]], dropped: Collection[KeyT] = ()) -> None:
        """Add ``rows`` to a table, each in place of an older row of its key, and remove the rows of the keys in
        ``dropped``; raises the errors of `read`."""
        old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
        with _faults(file):
            merged = {self._entry(row)[0]: row for row in [*old, *rows]}
        kept = [json.dumps(merged[key], sort_keys=True) for key in sorted(merged) if key not in dropped]
        file.write_text("[\n" + ",\n".join(kept) + "\n]\n" if kept else "[]\n", encoding="utf-8")
        self.read(file)


@contextmanager
def _faults(file: Path) -> Iterator[None]:
    try:
        yield
    except TilesError:
        raise
    except (KeyError, TypeError, ValueError) as fault:
        raise TilesError(f"{file.name} is no table of measured kernels: {fault!r}") from fault

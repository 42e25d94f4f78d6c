"""Programs with passes, rows and buckets filled in: which tensors each engine call takes and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of a call: `weight`, `buffer` or `value`, indexed along its leading axes.

    Parameters
    ----------
    kind, name, index
        The tensor, and an index for each of its leading axes.
    by_pass, by_row : bool
        Whether it is a table's entry for the pass; whether it is a row. A cache of the pass is no such entry: an
        engine that writes it must know its address as a constant.
    leading : int
        If not 0, only so many entries of the axis after the indices: what a small bucket uses of the largest one's
        buffer.
    """

    kind: str
    name: str
    index: tuple[int, ...] = ()
    by_pass: bool = False
    by_row: bool = False
    leading: int = 0


@dataclass(frozen=True, slots=True)
class ResolvedCall:
    """A call with its pass, row and bucket filled in."""

    engine: str
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]


Programs = Mapping[str, tuple[tuple[ResolvedCall, ...], ...]]

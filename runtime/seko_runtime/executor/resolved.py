"""Programs with passes, rows and buckets filled in: which tensors each engine call takes and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a tensor of a call: a weight, buffer or value, indexed along its leading axes.

    Parameters
    ----------
    kind, name, index
        The tensor, and an index for each of its leading axes.
    by_pass, by_row : bool
        Whether the reference is a table's entry for the pass; whether the reference is a row of a buffer. The cache of
        a pass does not count as such an entry, because an engine that writes it needs its address as a constant.
    leading : int
        If not 0, the reference takes only this many leading entries of the next axis: the part of the largest
        bucket's buffer that a smaller bucket uses.
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

"""Programs with layers, passes and rows filled in: which tensors each engine call takes and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of a call: `weight`, `buffer` or `value`, indexed along its leading axes.

    With ``leading``, only so many entries of the axis after the indices: what a small bucket uses of the largest
    one's buffer.
    """

    kind: str
    name: str
    index: tuple[int, ...] = ()
    by_pass: bool = False
    by_row: bool = False
    leading: int = 0


@dataclass(frozen=True, slots=True)
class ResolvedCall:
    """A call with its layer and pass filled in."""

    engine: str
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]


Programs = Mapping[str, tuple[tuple[ResolvedCall, ...], ...]]

"""Programs with every layer, pass and row put in: which tensors each call of an engine takes and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor that a call takes or gives: `weight`, `buffer` or `value`, indexed along leading axes.

    With ``leading`` only so many entries of the axis behind the indices: what a bucket takes of a larger one's.
    """

    kind: str
    name: str
    index: tuple[int, ...] = ()
    by_pass: bool = False
    by_row: bool = False
    leading: int = 0


@dataclass(frozen=True, slots=True)
class ResolvedCall:
    """A call with its layer and pass put in."""

    engine: str
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]


Programs = Mapping[str, tuple[tuple[ResolvedCall, ...], ...]]

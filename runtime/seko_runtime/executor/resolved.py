"""Resolved programs: engine calls whose tensors are known for one pass, one choice of rows and one bucket.

A program of the manifest refers to "the tensor of this pass" or "of this row"; a resolved program has numbers instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a tensor of an engine call: a weight, buffer or value, indexed along its leading axes.

    Parameters
    ----------
    kind, name, index
        The kind and name of the tensor, and one index for each of the tensor's leading axes that are indexed.
    by_pass, by_row : bool
        ``by_pass``: whether the reference is a table's entry for the pass. ``by_row``: whether the reference is a row
        of a buffer. ``by_pass`` is false for the KV cache of a pass, because an engine that writes the cache needs the
        cache's address as a constant.
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
    """An engine call whose tensors are known for one pass, one choice of rows and one bucket."""

    engine: str
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]


Programs = Mapping[str, tuple[tuple[ResolvedCall, ...], ...]]

"""The contract of a workload with the executor: its programs, how each runs, and the buffers it may write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from seko_runtime.format.manifest import Buffer

CALL_ROWS = "rows"  # a host buffer: the pool's row of each batch index of a call
RANK = "rank"  # [1], a host buffer: the number of the process, where several run a call together


@dataclass(frozen=True)
class ProgramRule:
    """The rule by which one program runs.

    Parameters
    ----------
    reads, writes : frozenset of str
        Roles of the buffers that it may take, and of those that it may write.
    counts : str
        What its runs count: ``pass`` or ``row``, a mark in its references; empty if it has one run without a number.
    numbers : range
        The number of each run.
    bucket : int
        Leading entries that ``[bucket]`` selects; 0 if its references may not have that mark.
    by_row : bool
        Whether it may take a buffer only by row, since the runs of its rows are queued one by one beside other work.
    required : bool
        Whether an artifact without it is refused.
    """

    reads: frozenset[str]
    writes: frozenset[str]
    counts: str = ""
    numbers: range = range(1)
    bucket: int = 0
    by_row: bool = False
    required: bool = True


@dataclass(frozen=True)
class Contract:
    """The programs of a workload, as one manifest has them.

    Parameters
    ----------
    programs : mapping of str to ProgramRule
        Every program that the workload knows, by name.
    together : tuple of tuple of str
        Names of programs of which an artifact has all or none.
    units : tuple of tuple of str
        Programs that run one after another in one call, for each kind of call. Only they may use an offloaded cache,
        whose layers they take in turn.
    fed : frozenset of str
        Buffers that the host fills, although programs may write others of their role.
    anywhere : frozenset of str
        Buffers that every program may take, whatever its roles.
    check_buffers : callable
        Takes the buffers by name; raises a ManifestError if one that the host writes, reads or splits into rows has
        another shape, dtype or role than the workload's code expects.
    """

    programs: Mapping[str, ProgramRule]
    together: tuple[tuple[str, ...], ...] = ()
    units: tuple[tuple[str, ...], ...] = ()
    fed: frozenset[str] = field(default_factory=frozenset)
    anywhere: frozenset[str] = field(default_factory=frozenset)
    check_buffers: Callable[[Mapping[str, Buffer]], None] = lambda buffers: None  # noqa: ARG005 - nothing to check

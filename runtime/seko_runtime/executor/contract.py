"""The contract between a workload and the executor: the programs of the workload, how each program runs, and the
buffers that each program may write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from seko_runtime.format.manifest import Buffer

CALL_ROWS = "rows"  # host buffer with the pool's row number for each batch index of a call
RANK = "rank"  # host buffer [1] with the rank of this process, if several run each call together


@dataclass(frozen=True)
class ProgramRule:
    """The rule by which one program of a workload runs.

    Parameters
    ----------
    reads, writes : frozenset of str
        Roles of the buffers that the program may read, and roles of the buffers that it may write.
    counts : str
        The mark in the program's references for which the number of a run is inserted: ``pass`` or ``row``. Empty if
        the program has a single run without a number.
    numbers : range
        The numbers of the program's runs, such as the numbers of its passes.
    bucket : int
        Number of leading entries that the mark ``[bucket]`` selects; 0 if references may not have that mark.
    by_row : bool
        Whether the program may refer only to single rows of buffers. Each run of such a program is for one row, and is
        queued at the same time as other work.
    required : bool
        Whether an artifact must have this program.
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
    """The programs that an artifact of a workload must or may have, and the buffers that these programs may use.

    Parameters
    ----------
    programs : mapping of str to ProgramRule
        Every program that the workload knows, by name, with its rule.
    together : tuple of tuple of str
        Groups of programs. An artifact has either all programs of a group or no program of it.
    units : tuple of tuple of str
        For each kind of call, the programs that run one after another in the call. Only the programs in ``units`` may
        use an offloaded cache, layer after layer.
    fed : frozenset of str
        Names of buffers that only the host may write, although programs may write other buffers of the same role.
    anywhere : frozenset of str
        Names of buffers that every program may read, even if the buffer's role is not in the program's ``reads``.
    check_buffers : callable
        Function that takes the buffers by name, and raises a ManifestError if a buffer that the host writes, reads or
        splits into rows has a shape, dtype or role that the workload's code does not expect.
    """

    programs: Mapping[str, ProgramRule]
    together: tuple[tuple[str, ...], ...] = ()
    units: tuple[tuple[str, ...], ...] = ()
    fed: frozenset[str] = field(default_factory=frozenset)
    anywhere: frozenset[str] = field(default_factory=frozenset)
    check_buffers: Callable[[Mapping[str, Buffer]], None] = lambda buffers: None  # noqa: ARG005 - nothing to check

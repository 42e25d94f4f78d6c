"""The whole state of one row of a pool, on the host, as it is stored and as it travels between processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import HostBytes, Parked
from seko_runtime.format.json_fields import Fields
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.parallel.records import record


@dataclass(frozen=True)
class RowState:
    """The whole state of a row of a pool, on the host. A row into which a `RowState` is loaded makes the same further
    results, byte for byte, as the row from which the `RowState` was copied.

    Parameters
    ----------
    numbers : dataclass
        The numbers that the host keeps for the row, in a frozen dataclass of the workload. Snapshot files hold the
        numbers as JSON.
    tensors : Parked
        Bytes of the row's part of each device tensor, by name.
    arrays : mapping of str to numpy.ndarray
        Bytes, uint8 [n], of the arrays that the host keeps for the row, by name.
    """

    numbers: Any
    tensors: Parked
    arrays: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)


@record
@dataclass(frozen=True)
class RowLayout:
    """Name, shape and dtype of all device tensors and host arrays in the state of a row.

    Parameters
    ----------
    tensors, arrays : mapping of str to TensorSpec
        Name, shape and dtype of each device tensor and host array. If states differ in size, the shapes are those of
        the largest state.
    sized : callable, optional
        Function that takes a row's `RowState.numbers` and returns the layout of that row's state. None if all states
        have the same size.
    """

    tensors: Mapping[str, TensorSpec]
    arrays: Mapping[str, TensorSpec] = field(default_factory=dict)
    sized: Callable[[Any], RowLayout] | None = None

    def of(self, numbers: Any) -> RowLayout:
        """Return the layout of a row's state; the state's ``numbers`` decide its size."""
        return self if self.sized is None else self.sized(numbers)

    @property
    def everything(self) -> dict[str, TensorSpec]:
        """All tensors and arrays of a row's state, by name."""
        return {**self.tensors, **self.arrays}

    @property
    def nbytes(self) -> int:
        """Size in bytes of one row's state."""
        return sum(spec.nbytes for spec in self.everything.values())


@dataclass(frozen=True)
class StateForm:
    """How a workload reads the state of a row from files.

    Parameters
    ----------
    read_numbers : callable
        Function that parses `RowState.numbers` from untrusted JSON; raises a SnapshotError or ManifestError.
    """

    read_numbers: Callable[[Fields], Any]


def _fields(state: RowState) -> Mapping[str, Any]:
    """Return a state's fields for a message, when the copies of its tensors are done."""
    return {**vars(state), "tensors": HostBytes(state.tensors.arrays())}


for kind in (HostBytes, TensorSpec):
    record(kind)
record(RowState, _fields)

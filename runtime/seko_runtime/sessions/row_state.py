"""The whole state of one row, on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import Parked
from seko_runtime.format.json_fields import Fields
from seko_runtime.format.manifest import TensorSpec


@dataclass(frozen=True)
class RowState:
    """A row's state; another row that gets it goes on with the same bytes.

    Parameters
    ----------
    numbers : dataclass
        Numbers that the host keeps, of the workload's own frozen dataclass; JSON in a file.
    tensors : Parked
        Bytes of the row's part of each tensor on the device, by name.
    arrays : mapping of str to numpy.ndarray
        uint8 [n], by name: what the host keeps as arrays.
    beside : object
        What the host keeps and no file holds.
    """

    numbers: Any
    tensors: Parked
    arrays: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    beside: Any = None


@dataclass(frozen=True)
class RowLayout:
    """Name, shape and dtype of everything in a row's state: of tensors on the device, and of arrays on the host.

    Parameters
    ----------
    tensors, arrays : mapping of str to TensorSpec
        By name; of the largest state, where rows differ in size.
    sized : callable, optional
        Returns the layout of a state with some `RowState.numbers`, where rows differ in size.
    """

    tensors: Mapping[str, TensorSpec]
    arrays: Mapping[str, TensorSpec] = field(default_factory=dict)
    sized: Callable[[Any], RowLayout] | None = None

    def of(self, numbers: Any) -> RowLayout:
        """Return the layout of a state with these numbers."""
        return self if self.sized is None else self.sized(numbers)

    @property
    def everything(self) -> dict[str, TensorSpec]:
        """Tensors and arrays by name."""
        return {**self.tensors, **self.arrays}

    @property
    def nbytes(self) -> int:
        """Bytes of one row's state."""
        return sum(spec.nbytes for spec in self.everything.values())


@dataclass(frozen=True)
class StateForm:
    """The form of a workload's part of a row's state.

    Parameters
    ----------
    read_numbers : callable
        Returns `RowState.numbers` from JSON, untrusted; raises a SnapshotError or ManifestError.
    pack, unpack : callable
        Turn `RowState.beside` into what a message to another process can hold, and back.
    """

    read_numbers: Callable[[Fields], Any]
    pack: Callable[[Any], Any] = lambda beside: beside
    unpack: Callable[[Any], Any] = lambda packed: packed

"""A device tensor as an address with shape and strides; strided copies; conversion between numbers and bytes. The
module itself uses no device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import ArtifactError
from seko_runtime.format.manifest import DTYPE_BYTES, Buffer, TensorSpec

# dtypes that numpy lacks, with a numpy dtype of the same size that carries their bits
_RAW = {"float8_e4m3fn": "uint8"}
BFLOAT16 = "bfloat16"


@dataclass(frozen=True, eq=False)
class DeviceTensor:
    """A view of device memory as a tensor: address, shape, dtype and strides.

    Parameters
    ----------
    address : int
        Address of the tensor's first number.
    shape : tuple of int
        Sizes of the tensor's axes.
    dtype : str
        The manifest's dtype name.
    strides : tuple of int
        Distance in bytes between neighbouring entries, for each axis.
    owner : object
        Object that keeps the memory allocated.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    owner: object = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensor's numbers, without the gaps between rows or layers."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        contiguous = contiguous_strides(self.shape, self.dtype)
        pairs = zip(self.shape, self.strides, contiguous, strict=True)
        return all(size == 1 or stride == packed for size, stride, packed in pairs)

    def at(self, index: Sequence[int]) -> DeviceTensor:
        """Return the view ``tensor[i][j]...`` of the device tensor."""
        offset = sum(i * stride for i, stride in zip(index, self.strides, strict=False))
        rest = len(index)
        return DeviceTensor(
            self.address + offset, self.shape[rest:], self.dtype, self.strides[rest:], self.owner
        )

    def cut(self, axis: int, first: int, size: int, step: int = 1) -> DeviceTensor:
        """Return a view of ``size`` entries of an axis, ``step`` entries apart."""
        shape, strides = [*self.shape], [*self.strides]
        offset = first * strides[axis]
        shape[axis] = size
        strides[axis] *= step
        return DeviceTensor(self.address + offset, tuple(shape), self.dtype, tuple(strides), self.owner)


def contiguous_strides(shape: Sequence[int], dtype: str) -> tuple[int, ...]:
    """Return the strides, in bytes, of a contiguous tensor."""
    strides = [DTYPE_BYTES[dtype]]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


def indexed_axes(spec: TensorSpec) -> int:
    """Return the number of leading axes that engines' arguments index: the layers of a buffer, or the rows that lanes
    use."""
    return (spec.row_axis or int(spec.role == "lane")) if isinstance(spec, Buffer) else 0


def aligned_strides(shape: Sequence[int], dtype: str, indexed: int, alignment: int) -> tuple[int, ...]:
    """Return the strides, in bytes, of a tensor whose parts begin at multiples of an alignment.

    Parameters
    ----------
    shape : sequence of int
        The tensor's shape.
    dtype : str
        The manifest's dtype name.
    indexed : int
        Number of leading axes that engines' arguments index. An index on these axes selects a part of the tensor. A
        part is contiguous, and unused bytes may follow each part.
    alignment : int
        The alignment in bytes, a multiple of the size of a number.
    """
    strides = [*contiguous_strides(shape, dtype)]
    if 0 < indexed < len(shape):
        strides[indexed - 1] = -(-strides[indexed - 1] // alignment) * alignment
        for axis in reversed(range(indexed - 1)):
            strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


@dataclass(frozen=True)
class Rows:
    """A two-dimensional copy of ``height`` runs of ``width`` bytes, with an offset and a pitch for source and
    target."""

    offsets: tuple[int, int]
    pitches: tuple[int, int]
    width: int
    height: int


def rows_of(shape: Sequence[int], item: int, strides: Sequence[int], others: Sequence[int]) -> Iterator[Rows]:
    """Yield the smallest number of two-dimensional copies that move a tensor between two layouts.

    Parameters
    ----------
    shape : sequence of int
        The tensor's shape.
    item : int
        Number of bytes of one number.
    strides, others : sequence of int
        Strides of source and target, in bytes.
    """
    if 0 in shape:
        return
    axes = [axis for axis in zip(shape, strides, others, strict=True) if axis[0] > 1]
    width = item
    while axes and axes[-1][1] == axes[-1][2] == width:
        width *= axes.pop()[0]
    height, pitches = 1, (width, width)
    if axes:
        height, *steps = axes.pop()
        pitches = (steps[0], steps[1])
    for place in product(*(range(size) for size, _, _ in axes)):
        offsets = [sum(i * axis[side] for i, axis in zip(place, axes, strict=True)) for side in (1, 2)]
        yield Rows((offsets[0], offsets[1]), pitches, width, height)


def host_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype for a manifest's dtype; if numpy lacks the dtype, an integer dtype of the same size."""
    return np.dtype({BFLOAT16: "uint16", **_RAW}.get(name, name))


def to_bytes(values: Any, dtype: str) -> NDArray[np.uint8]:
    """Convert numbers to the bytes of a dtype, [nbytes]; bfloat16 is rounded to nearest, ties to even.

    Raises
    ------
    ArtifactError
        If only engines can compute with the dtype.
    """
    if dtype in _RAW:
        raise ArtifactError(f"the host cannot write numbers of {dtype}; rebuild the artifact")
    if dtype != BFLOAT16:
        return np.ascontiguousarray(values, np.dtype(dtype)).reshape(-1).view(np.uint8)
    bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    # rounding may have turned the bits of a NaN into those of an infinity: restore the NaN
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, (bits >> 16).astype(np.uint16) | 0x40, rounded).view(np.uint8)


def to_floats(content: NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> NDArray[np.float32]:
    """Convert the bytes of a dtype to float32 numbers; a float8 byte becomes its value as an unsigned integer."""
    if dtype == BFLOAT16:
        bits = content.view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(shape)
    return content.view(np.dtype(_RAW.get(dtype, dtype))).astype(np.float32).reshape(shape)

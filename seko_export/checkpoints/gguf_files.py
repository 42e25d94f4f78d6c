"""Opening of GGUF files. Opening lists the tensors of a file; the package gguf expands a quantised tensor when the
tensor is read.

The header of a GGUF file is read by this module, within the bounds of the file, because a damaged header makes the
reader of the package gguf loop. The package gguf dequantises the blocks of a tensor.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from seko_export.checkpoints.errors import DamagedCheckpointError, NotACheckpointError
from seko_export.checkpoints.sources import Layout, OpenedFiles, TensorSource, shown
from seko_export.errors import CheckpointError, MachineError

if TYPE_CHECKING:
    import torch

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 16 << 20  # that of a model of 14B takes 0.1 MB
MAX_ENTRIES = 1 << 16  # fields, tensors, strings of an array; it has 1,100 tensors
MAX_DIMENSIONS = 8
_ARCHITECTURE, _ALIGNMENT = "general.architecture", "general.alignment"
_SHAPE = "comfy.gguf.orig_shape."  # of a tensor whose rows were regrouped to fit the blocks
_WAN = "wan"
# Value types of the header by their number, as struct spells them; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Header:
    """A cursor in the bytes of a GGUF header; reading behind the end of the bytes is an error."""

    def __init__(self, content: memoryview) -> None:
        self._content, self.at = content, 0

    def take(self, count: int) -> bytes:
        """Return the next bytes of the GGUF header."""
        if count > len(self._content) - self.at:
            raise ValueError(f"{count} bytes at {self.at}, of {len(self._content)}")
        self.at += count
        return bytes(self._content[self.at - count : self.at])

    def number(self, kind: str) -> Any:
        """Return the next number of the GGUF header, of a little-endian type of Python's `struct`."""
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def text(self) -> str:
        """Return the next string of the GGUF header."""
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """Return the next value of the GGUF header, of a given type; of an array, only the first numbers."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"a value of type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner == _STRING and count <= MAX_ENTRIES:
            return [self.text() for _ in range(count)]
        if inner not in _SCALARS:
            raise ValueError(f"an array of type {inner}")
        content = self.take(count * struct.calcsize(f"<{_SCALARS[inner]}"))
        some = min(count, MAX_DIMENSIONS)
        return [*struct.unpack_from(f"<{some}{_SCALARS[inner]}", content)]


def open_gguf(path: Path, layout: Layout) -> OpenedFiles:
    """List the tensors of a GGUF file.

    Raises
    ------
    MachineError
        If the package gguf is not installed.
    DamagedCheckpointError
        If the GGUF file is truncated or damaged.
    NotACheckpointError
        If the GGUF file is for another model than Wan's.
    """
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        raise MachineError(
            f"{path} is a GGUF file, and the package gguf is not installed: pip install gguf"
        ) from None
    with path.open("rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        header = _Header(content[:MAX_HEADER_BYTES])
        header.take(len(MAGIC))
        version, tensors, fields = header.number("I"), header.number("Q"), header.number("Q")
        if version not in (2, 3):
            raise ValueError(f"version {version}, expected 2 or 3")
        if max(tensors, fields) > MAX_ENTRIES:
            raise ValueError(f"{tensors} tensors and {fields} fields, at most {MAX_ENTRIES} are read")
        facts: dict[str, Any] = {}
        for _ in range(fields):
            name = header.text()
            facts[name] = header.value(header.number("I"))
            if name == _ARCHITECTURE and facts[name] != _WAN:
                raise _another(path, facts[name], layout)
        entries = [_entry(header) for _ in range(tensors)]
        alignment = facts.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise ValueError(f"{_ALIGNMENT} {alignment!r}")
        start = -(-header.at // alignment) * alignment
        kind_of = {int(kind): kind for kind in GGMLQuantizationType}
        sources = []
        for name, sizes, number, offset in entries:
            if number not in kind_of:
                raise ValueError(f"{name[:80]!r} has the tensor type {number}")
            kind = kind_of[number]
            _check_kind(path, kind)
            block, block_bytes = GGML_QUANT_SIZES[kind]
            columns, rows = sizes[-1], int(np.prod(sizes[:-1], dtype=object))
            if columns % block:
                raise ValueError(f"{name[:80]!r} has rows of {columns}, no multiple of {block}")
            size = rows * columns // block * block_bytes
            if start + offset + size > len(content):
                raise ValueError(f"{name[:80]!r} ends behind the file")
            shape = _shape(facts, name, sizes)
            data = content[start + offset : start + offset + size]
            read = partial(_expand, data, kind, (rows, columns // block * block_bytes), shape)
            dtype = "float16" if kind.name == "F16" else "float32"
            bare, spelled, in_blocks = layout.bare(name), f"GGUF {kind.name}", block > 1
            sources.append(TensorSource(bare, name, shape, spelled, dtype, read, quantised=in_blocks))
    except (ValueError, struct.error, OverflowError, MemoryError) as fault:
        raise DamagedCheckpointError(
            f"{path} is no whole GGUF file: cut short or damaged ({len(content)} bytes found; {shown(str(fault))}); "
            "fetch it again"
        ) from fault
    if _ARCHITECTURE not in facts:
        raise _another(path, None, layout)
    return OpenedFiles("gguf", "all", len(content), tuple(sources))


def _another(path: Path, architecture: object, layout: Layout) -> NotACheckpointError:
    return NotACheckpointError(
        f"{path} is a GGUF file of the architecture {shown(repr(architecture))}; GGUF files are read only of Wan's "
        f"transformer ({_WAN!r}); expected {layout.formats}"
    )


def _check_kind(path: Path, kind: Any) -> None:
    """Refuse a GGUF tensor type that the package gguf cannot expand."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        raise CheckpointError(
            f"{path} has GGUF tensors of the type {kind.name}, which are not read: take one of Q2_K to Q8_0, F16, BF16"
        ) from None


def _entry(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape, type and offset of the next tensor in a GGUF header; the file has its sizes from the last
    axis on."""
    name, count = header.text(), header.number("I")
    if not 1 <= count <= MAX_DIMENSIONS:
        raise ValueError(f"{name[:80]!r} has {count} dimensions")
    sizes = tuple(header.number("Q") for _ in range(count))[::-1]
    return name, sizes, header.number("I"), header.number("Q")


def _shape(facts: Mapping[str, Any], name: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a GGUF tensor: the stored shape, or the shape before the tensor's rows were regrouped."""
    stated = facts.get(f"{_SHAPE}{name}")
    if stated is None:
        return sizes
    if not isinstance(stated, list) or not all(isinstance(size, int) and size > 0 for size in stated):
        raise ValueError(f"{_SHAPE}{name[:80]}")
    if np.prod(stated, dtype=object) != np.prod(sizes, dtype=object):
        raise ValueError(f"{_SHAPE}{name[:80]} is {stated}, of {list(sizes)}")
    return tuple(stated)


def _expand(data: memoryview, kind: Any, layout: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    """Return the numbers of a GGUF tensor: F16 as it is stored, other types in float32."""
    import torch
    from gguf.quants import dequantize

    plain: Mapping[str, Callable[[], Any]] = {
        "F32": lambda: np.frombuffer(data, "<f4"),
        "F16": lambda: np.frombuffer(data, "<f2"),
    }
    if kind.name in plain:
        numbers = plain[kind.name]().copy()
    else:
        # Damaged scales give numbers that are not finite, which are refused later.
        with np.errstate(all="ignore"):
            numbers = dequantize(np.frombuffer(data, np.uint8).reshape(layout), kind)
    return torch.from_numpy(np.ascontiguousarray(numbers)).reshape(shape)

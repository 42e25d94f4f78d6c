"""Strict reader of safetensors in numpy, whose tensors are views of the bytes that were hashed; and what a writer puts
before the tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import (
    ArtifactError,
    ManifestError,
    UsageError,
)
from seko_runtime.format.json_fields import Fields, as_integer, as_text, parse_json
from seko_runtime.format.manifest import DTYPE_BYTES, TensorSpec

MAX_HEADER_BYTES = 16 << 20  # most bytes of a header; 40 layers of Wan 14B need about 0.15 MB
PREFIX_BYTES = 8
DTYPE_NAMES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "U8": "uint8",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
    "BOOL": "bool",
}


def safetensors_head(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the length and the header of a safetensors file; the bytes of the tensors follow, without gaps.

    Parameters
    ----------
    tensors : iterable of (str, str, sequence of int, int)
        Name, dtype as the format writes it (``"F32"``), shape and number of bytes of each tensor, in the file's order.
    metadata : Mapping[str, str], optional
        Texts for ``__metadata__``.
    """
    table: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape, nbytes in tensors:
        end = offset + nbytes
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(PREFIX_BYTES, "little") + header


@dataclass(frozen=True)
class MappedTensor:
    """A tensor inside a mapped file, stored at ``data[offset : offset + nbytes]``, contiguous, little-endian."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: memoryview
    offset: int
    nbytes: int

    def to_numpy(self) -> NDArray[np.generic]:
        """Return a copy of the tensor as a numpy array. A bfloat16 tensor becomes float32, which represents all
        bfloat16 values.

        Raises
        ------
        UsageError
            For a float8 tensor, because numpy has no float8.
        """
        raw = self.data[self.offset : self.offset + self.nbytes]
        if self.dtype == "float8_e4m3fn":
            raise UsageError(f"{self.name} is float8_e4m3fn, which numpy cannot hold; read it through torch")
        if self.dtype == "bfloat16":
            words = np.frombuffer(raw, "<u2").astype("<u4") << 16
            return words.view(np.float32).reshape(self.shape)
        array: NDArray[np.generic] = np.frombuffer(raw, np.dtype(self.dtype)).reshape(self.shape).copy()
        return array


def map_safetensors(data: memoryview, file: str) -> dict[str, MappedTensor]:
    """Parse the header of a safetensors file and return its tensors.

    Parameters
    ----------
    data : memoryview
        Content of the whole file, as bytes.
    file : str
        Name of the file, for error messages.

    Returns
    -------
    dict[str, MappedTensor]
        The tensors by name, which together cover the file's data without gaps and overlaps.

    Raises
    ------
    ArtifactError
        If the header is too large or malformed, or a tensor's range is invalid.
    """
    return map_header(data, len(data), file)


def map_header(data: memoryview, size: int, file: str) -> dict[str, MappedTensor]:
    """Parse the header of a safetensors file of ``size`` bytes; return its tensors as `map_safetensors` does.

    ``data`` are the file's first bytes, at least `header_end` of them. The returned tensors can be read only if
    ``data`` is the whole file.
    """
    begin = header_end(data, size, file)
    try:
        fields = Fields(parse_json(bytes(data[PREFIX_BYTES:begin]), f"{file} header", MAX_HEADER_BYTES), file)
        if "__metadata__" in fields:
            fields.entries("__metadata__", as_text)
        tensors = {
            name: _place(Fields(fields.value(name), f"{file}[{name[:80]!r}]"), name, data, begin, size)
            for name in fields.names()
            if name != "__metadata__"
        }
    except ManifestError as error:  # the JSON reader raises a ManifestError if the JSON is malformed
        raise ArtifactError(str(error)) from None
    end = begin
    for tensor in sorted(tensors.values(), key=lambda item: (item.offset, item.nbytes)):
        if tensor.offset != end:
            raise ArtifactError(
                f"{file}: tensor {tensor.name} begins at byte {tensor.offset}, expected {end}: "
                "tensors must neither overlap nor leave holes"
            )
        end += tensor.nbytes
    if end != size:
        raise ArtifactError(f"{file} has {size} bytes, its tensors end at {end}")
    return tensors


def header_end(data: memoryview, size: int, file: str) -> int:
    """Return the offset at which the header of a safetensors file ends, from the file's first `PREFIX_BYTES` and the
    file's size; ArtifactError if the header is longer than the file or `MAX_HEADER_BYTES`."""
    if size < PREFIX_BYTES:
        raise ArtifactError(f"{file} has {size} bytes, too few for a safetensors header")
    header_bytes = int.from_bytes(data[:PREFIX_BYTES], "little")
    if header_bytes > MAX_HEADER_BYTES or PREFIX_BYTES + header_bytes > size:
        raise ArtifactError(
            f"{file} announces a header of {header_bytes} bytes in a file of {size}, "
            f"at most {MAX_HEADER_BYTES} are read"
        )
    return PREFIX_BYTES + header_bytes


def check_tensor(tensors: Mapping[str, MappedTensor], wanted: TensorSpec, file: str) -> MappedTensor:
    """Return the tensor of a file that the manifest describes as ``wanted``.

    Raises
    ------
    ArtifactError
        If the tensor is missing or differs in shape or dtype; the message has the found and the expected values.
    """
    tensor = tensors.get(wanted.name)
    if tensor is None:
        raise ArtifactError(f"{file} holds no tensor {wanted.name}, which the manifest lists; rebuild it")
    if tensor.shape != wanted.shape:
        raise ArtifactError(
            f"{wanted.name} in {file} has shape {list(tensor.shape)}, "
            f"the manifest says {list(wanted.shape)}; rebuild the artifact"
        )
    if tensor.dtype != wanted.dtype:
        raise ArtifactError(
            f"{wanted.name} in {file} is {tensor.dtype}, the manifest says {wanted.dtype}; rebuild the artifact"
        )
    return tensor


def _place(fields: Fields, name: str, data: memoryview, begin: int, size: int) -> MappedTensor:
    dtype = DTYPE_NAMES.get(fields.text("dtype"))
    if dtype is None:
        raise ManifestError(
            f"{fields.where}.dtype is {fields.text('dtype')[:20]!r}, expected one of {[*DTYPE_NAMES]}"
        )
    shape = fields.items("shape", as_integer)
    offsets = fields.items("data_offsets", as_integer)
    if len(offsets) != 2 or len(shape) > 16:
        raise ManifestError(f"{fields.where}.data_offsets or shape has too many or too few numbers")
    nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes or begin + offsets[1] > size:
        raise ManifestError(
            f"{fields.where} lies at {list(offsets)} of {size - begin} data bytes, its shape needs {nbytes}"
        )
    return MappedTensor(name, shape, dtype, data, begin + offsets[0], nbytes)

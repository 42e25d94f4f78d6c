"""Reader of .npy files: the header is checked before memory is allocated, and nothing is unpickled."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import InputFileError
from seko_runtime.format.manifest import MAX_PIXELS
from seko_runtime.host.faults import fault_text
from seko_runtime.media_files.containers import read_head

MAX_ARRAY_BYTES = 1 << 31
_CHANNELS = 4  # most bytes of a picture's array
_MAX_HEADER_BYTES = 10_000  # most bytes of a header: numpy's own bound for untrusted files


def load_array(path: Path, option: str, *, most_bytes: int = MAX_ARRAY_BYTES) -> NDArray[Any]:
    """Read an array file that ``option`` names.

    Raises
    ------
    InputFileError
        If the file cannot be read, is not an .npy file, has no numbers, is shorter than its header states, or holds
        more than ``most_bytes``.
    """
    what = f"{option} {path}"
    read_head(path, what)
    formats: Any = np.lib.format  # untyped
    try:
        with path.open("rb") as file:
            version = formats.read_magic(file)
            _check_units(file, version, what)
            read = formats.read_array_header_1_0 if version == (1, 0) else formats.read_array_header_2_0
            shape, _, dtype = read(file, max_header_size=_MAX_HEADER_BYTES)
            if min(shape, default=0) < 0:
                raise ValueError(f"its shape is {list(shape)[:8]}")
            size = math.prod(shape) * dtype.itemsize
            if dtype.kind not in "biuf":
                raise InputFileError(f"{what} holds {str(dtype)[:40]}, expected an array of numbers")
            if size > most_bytes:
                raise InputFileError(
                    f"{what} is {dtype} {list(shape)[:8]}, {size} bytes; at most {most_bytes} are read"
                )
            if os.fstat(file.fileno()).st_size - file.tell() < size:
                raise InputFileError(f"{what} ends before its {size} bytes of numbers")
            file.seek(0)
            array: NDArray[Any] = formats.read_array(
                file, allow_pickle=False, max_header_size=_MAX_HEADER_BYTES
            )
            return array
    except (InputFileError, MemoryError):
        raise
    except Exception as fault:  # of numpy's, or of the library for tokens that reads a header
        raise InputFileError(f"{what} is no .npy file of numbers: {fault_text(fault)[:120]}") from None


def _check_units(file: BinaryIO, version: tuple[int, int], what: str) -> None:
    """Raise an InputFileError if the header that follows has a dtype with brackets, written out or escaped: numpy
    divides by what stands in those of a unit of time, also by 0, which ends the process. The file's place stays."""
    place = file.tell()
    length = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
    header = file.read(min(length, _MAX_HEADER_BYTES))
    if b"[" in header or b"\\" in header:
        raise InputFileError(f"{what} holds units or fields, expected an array of numbers")
    file.seek(place)


def load_pictures(path: Path, option: str) -> NDArray[np.uint8]:
    """Read an array file of pictures, uint8 [H, W, 3] or [B, H, W, 3].

    Raises
    ------
    InputFileError
        If `load_array` refuses the file, or the array is not a picture.
    """
    array = load_array(path, option, most_bytes=MAX_PIXELS * _CHANNELS)
    if array.dtype != np.uint8 or array.ndim not in (3, 4) or array.shape[-1] != 3:
        raise InputFileError(
            f"{option} {path} is {array.dtype} {list(array.shape)}, expected uint8 [rows, columns, 3]"
        )
    return array.astype(np.uint8, copy=False)

"""EXIF orientation of picture files: how the camera was held, and a function that turns the picture upright.

FFmpeg reads EXIF, too, but PyAV returns only the angle of FFmpeg's display matrix. The angle alone does not show
whether a picture is mirrored.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

ORIENTATION = 0x0112  # tag of the field
_SHORT = 3  # type of the field
_UPRIGHT = 1
_EXIF = b"Exif\0\0"
_APP1, _SCAN = 0xE1, 0xDA  # markers of a JPEG
_ORDERS: Mapping[bytes, str] = {b"II": "<", b"MM": ">"}
# What turns a picture [H, W, 3] of each orientation upright.
_TURNS: Mapping[int, Callable[[NDArray[Any]], NDArray[Any]]] = {
    1: lambda picture: picture,
    2: lambda picture: picture[:, ::-1],
    3: lambda picture: picture[::-1, ::-1],
    4: lambda picture: picture[::-1],
    5: lambda picture: picture.swapaxes(0, 1),
    6: lambda picture: np.rot90(picture, -1),
    7: lambda picture: picture[::-1, ::-1].swapaxes(0, 1),
    8: lambda picture: np.rot90(picture),
}


def turned_upright(picture: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Return a view of a picture [H, W, 3], turned upright. The picture was stored in ``orientation``, one of EXIF's
    orientations 1 to 8."""
    return _TURNS[orientation](picture)


def orientation_of(path: Path, form: str) -> int:
    """Return the EXIF orientation of a picture file, 1 to 8. A picture without an EXIF orientation is upright, which is
    1.

    Parameters
    ----------
    path : Path
        The picture file.
    form : str
        FFmpeg's name of the file's format, from `picture_format`.
    """
    find = _PLACES.get(form)
    if find is None:
        return _UPRIGHT
    with path.open("rb") as file:
        begin = find(file)
        try:
            orientation = _UPRIGHT if begin is None else _read_orientation(file, begin)
        except struct.error:  # the file ends before the field
            return _UPRIGHT
    return orientation if orientation in _TURNS else _UPRIGHT


def _read_orientation(file: BinaryIO, begin: int) -> int:
    """Return the value of the field in the first directory of the TIFF that begins at this byte; struct.error if the
    file is too short."""
    file.seek(begin)
    order = _ORDERS.get(file.read(2))
    if order is None:
        return _UPRIGHT
    _, directory = struct.unpack(f"{order}HI", file.read(6))
    file.seek(begin + directory)
    (fields,) = struct.unpack(f"{order}H", file.read(2))
    for _ in range(fields):
        tag, kind, _, value = struct.unpack(f"{order}HHIHxx", file.read(12))
        if (tag, kind) == (ORIENTATION, _SHORT):
            return int(value)
    return _UPRIGHT


def _in_jpeg(file: BinaryIO) -> int | None:
    """Return the place of the TIFF with the EXIF fields in a JPEG: in the first segment APP1 that is EXIF's."""
    file.seek(2)
    while len(head := file.read(4)) == 4 and head[0] == 0xFF and head[1] != _SCAN:
        if head[1] == 0xFF:  # filling
            file.seek(-3, 1)
            continue
        begin = file.tell()
        if head[1] == _APP1 and file.read(len(_EXIF)) == _EXIF:
            return file.tell()
        file.seek(begin + int.from_bytes(head[2:]) - 2)
    return None


def _in_png(file: BinaryIO) -> int | None:
    file.seek(8)
    while len(head := file.read(8)) == 8:
        if head[4:] == b"eXIf":
            return file.tell()
        file.seek(int.from_bytes(head[:4]) + 4, 1)
    return None


def _in_webp(file: BinaryIO) -> int | None:
    file.seek(12)
    while len(head := file.read(8)) == 8:
        size, begin = int.from_bytes(head[4:], "little"), file.tell()
        if head[:4] == b"EXIF":  # some writers keep the mark of a JPEG
            return begin + len(_EXIF) if file.read(len(_EXIF)) == _EXIF else begin
        file.seek(begin + size + size % 2)
    return None


_PLACES: Mapping[str, Callable[[BinaryIO], int | None]] = {
    "jpeg_pipe": _in_jpeg,
    "png_pipe": _in_png,
    "webp_pipe": _in_webp,
    "tiff_pipe": lambda _: 0,
}

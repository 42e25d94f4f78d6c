"""Reader of one picture from a file."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import InputFileError
from seko_runtime.media_files.arrays import load_pictures
from seko_runtime.media_files.containers import (
    MAX_PIXELS,
    PICTURE_FORMATS,
    opened,
    picture_format,
    read_head,
)
from seko_runtime.media_files.orientation import orientation_of, turned_upright

MIN_SIDE = 8  # pixels of one latent cell
BLACK, WHITE = 0, 255
_CHANNELS = 3
_HDR_CURVES = (16, 18)  # FFmpeg's numbers of the transfer curves PQ and HLG
_MAX_BRANDS = 1 << 10  # bytes of the brands of a film
_MAX_DIRECTORIES = 16  # of a TIFF, smaller copies of the first page
_SUBFILE_TYPE = 254  # tag of the field whose lowest bit marks a smaller copy
_FILMS = ("mov", "matroska")  # formats whose first picture is taken


def load_image(path: Path, option: str = "--image", *, background: int = WHITE) -> NDArray[np.uint8]:
    """Read a picture, uint8 [H, W, 3]: an array file, a picture of a known format, or the first picture of a film.

    If the EXIF data of a photo says that the photo is stored rotated or mirrored, the result is upright. Pixels that
    are not opaque are laid over a background, a level of gray from 0 to 255.

    Raises
    ------
    InputFileError
        If the file is no picture, has CMYK or HDR colours or is animated, or if the picture has more than `MAX_PIXELS`
        pixels or a side below `MIN_SIDE`.
    VideoWriterError
        If reading the file needs PyAV, and PyAV is not installed.
    """
    what = f"{option} {path}"
    picture = (
        load_pictures(path, option) if path.suffix == ".npy" else _decoded(path, option, what, background)
    )
    rows, columns = picture.shape[-3:-1]
    if min(rows, columns) < MIN_SIDE:
        raise InputFileError(
            f"{what} has {columns} x {rows} pixels, expected at least {MIN_SIDE} along each side"
        )
    return picture


def _decoded(path: Path, option: str, what: str, background: int) -> NDArray[np.uint8]:
    head = read_head(path, what)
    if not head:
        raise InputFileError(f"{what} is empty: it has 0 bytes")
    form = picture_format(head)
    if form is None:
        raise InputFileError(
            f"{what} is no picture: its first bytes are of none of {PICTURE_FORMATS}; convert it, or give a .npy"
        )
    if _says_animated(path, form):
        raise InputFileError(_animated(what))
    no_picture = f"{what} is no picture of at most {MAX_PIXELS} pixels"
    with opened(path, form, no_picture, f"{option} takes a .npy without it, or pip install av") as container:
        if not container.streams.video:
            raise InputFileError(f"{what} holds no picture")
        if form not in _FILMS and container.streams.video[0].frames > 1:
            raise InputFileError(_animated(what))
        frame = next(container.decode(video=0))
        if colours := _odd_colours(frame, form):
            raise InputFileError(f"{what} has {colours} colours; convert it to sRGB")
        picture = _opaque(frame, background)
    if form in _FILMS:  # both count quarter turns to the left
        return np.ascontiguousarray(np.rot90(picture, frame.rotation // 90))
    return np.ascontiguousarray(turned_upright(picture, orientation_of(path, form)))


def _opaque(frame: Any, background: int) -> NDArray[np.uint8]:
    """Return a decoded picture without its alpha channel; what lies behind transparent pixels is no part of it."""
    if frame.format.name != "pal8" and not any(part.is_alpha for part in frame.format.components):
        colours: NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
        return colours
    layers = frame.to_ndarray(format="rgba").astype(np.float32)
    alpha = layers[:, :, 3:] / WHITE
    laid: NDArray[np.uint8] = np.rint(layers[:, :, :3] * alpha + background * (1 - alpha)).astype(np.uint8)
    return laid


def _animated(what: str) -> str:
    return f"{what} is animated; give one of its pictures"


def _says_animated(path: Path, form: str) -> bool:
    """Return whether a file says that it has several pictures to show in turn, or several pages, which FFmpeg does not
    tell. A film is no animated picture."""
    find = _SEVERAL.get(form)
    if find is None:
        return False
    with path.open("rb") as file:
        try:
            return find(file)
        except struct.error:  # the file ends before it
            return False


def _png_is_animated(file: BinaryIO) -> bool:
    """Return whether a chunk ``acTL`` is before the pixels; texts of any length may precede it."""
    file.seek(8)
    while len(head := file.read(8)) == 8 and head[4:] != b"IDAT":
        if head[4:] == b"acTL":
            return True
        file.seek(int.from_bytes(head[:4]) + 4, 1)
    return False


def _webp_is_animated(file: BinaryIO) -> bool:
    head = file.read(21)
    return head[12:16] == b"VP8X" and bool(head[20:] and head[20] & 2)


def _tiff_has_pages(file: BinaryIO) -> bool:
    """Return whether a directory behind the first describes another page, and not a smaller copy of the first."""
    order = {b"II": "<", b"MM": ">"}[file.read(2)]
    _, directory = struct.unpack(f"{order}HI", file.read(6))
    for place in range(_MAX_DIRECTORIES):
        file.seek(directory)
        (count,) = struct.unpack(f"{order}H", file.read(2))
        fields = [struct.unpack(f"{order}HHII", file.read(12)) for _ in range(count)]
        reduced = any(tag == _SUBFILE_TYPE and value & 1 for tag, _, _, value in fields)
        if place and not reduced:
            return True
        (directory,) = struct.unpack(f"{order}I", file.read(4))
        if not directory:
            break
    return False


def _avif_is_animated(file: BinaryIO) -> bool:
    """Return whether ``avis``, an AVIF of several pictures, is among the brands of a file of this container."""
    size = min(int.from_bytes(file.read(4)), _MAX_BRANDS)
    brands = file.read(max(0, size - 4))[4:]
    return any(brands[at : at + 4] == b"avis" for at in range(0, len(brands), 4))


_SEVERAL: Mapping[str, Callable[[BinaryIO], bool]] = {
    "png_pipe": _png_is_animated,
    "webp_pipe": _webp_is_animated,
    "tiff_pipe": _tiff_has_pages,
    "mov": _avif_is_animated,
}


def _odd_colours(frame: Any, form: str) -> str:
    """Return the name of a decoded picture's colours if they are not red, green and blue of a screen; otherwise
    ``""``."""
    pixels = frame.format
    # FFmpeg's own conversion of CMYK knows no inks: JPEGs have four channels, TIFFs a channel without meaning.
    if (form == "jpeg_pipe" and len(pixels.components) > _CHANNELS) or (
        form == "tiff_pipe" and pixels.name == "rgb0"
    ):
        return "CMYK"
    if frame.color_trc in _HDR_CURVES or pixels.name.startswith(
        ("gbrpf", "gbrapf", "grayf", "rgbf", "rgbaf")
    ):
        return "HDR"
    return ""

"""Reader of one picture from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import InputFileError
from seko_runtime.format.manifest import MAX_PIXELS
from seko_runtime.media_files.arrays import load_pictures
from seko_runtime.media_files.containers import (
    PICTURE_FORMATS,
    opened,
    picture_format,
    read_head,
)
from seko_runtime.media_files.picture_heads import PictureHead, picture_head, turned_upright

MIN_SIDE = 8  # pixels of one latent cell
BLACK, WHITE = 0, 255
_CHANNELS = 3
_HDR_CURVES = (16, 18)  # FFmpeg's numbers of the transfer curves PQ and HLG
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
        If reading the file needs PyAV or Pillow, which is not installed.
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
    no_picture = f"{what} is no picture of at most {MAX_PIXELS} pixels"
    said = picture_head(path, form, MAX_PIXELS) or PictureHead(0, 0, is_animated=_is_sequence(head, form))
    if said.width * said.height > MAX_PIXELS:
        raise InputFileError(f"{no_picture}: it has {said.width} x {said.height}")
    if said.is_animated:
        raise InputFileError(f"{what} is animated; give one of its pictures")
    with opened(path, form, no_picture, f"{option} takes a .npy without it, or pip install av") as container:
        if not container.streams.video:
            raise InputFileError(f"{what} holds no picture")
        frame = next(container.decode(video=0))
        if colours := odd_colours(frame, form):
            raise InputFileError(f"{what} has {colours} colours; convert it to sRGB")
        picture = opaque(frame, background)
    if form in _FILMS:  # both count quarter turns to the left
        return np.ascontiguousarray(np.rot90(picture, frame.rotation // 90))
    return np.ascontiguousarray(turned_upright(picture, said.orientation))


def opaque(frame: Any, background: int) -> NDArray[np.uint8]:
    """Return a frame that PyAV decoded as uint8 [rows, columns, 3], without its alpha channel: what lies behind
    transparent pixels is no part of it, and ``background``, a level of gray from 0 to 255, takes its place."""
    if frame.format.name != "pal8" and not any(part.is_alpha for part in frame.format.components):
        colours: NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
        return colours
    layers = frame.to_ndarray(format="rgba").astype(np.float32)
    alpha = layers[:, :, 3:] / WHITE
    laid: NDArray[np.uint8] = np.rint(layers[:, :, :3] * alpha + background * (1 - alpha)).astype(np.uint8)
    return laid


def _is_sequence(head: bytes, form: str) -> bool:
    """Return whether ``avis``, an AVIF of several pictures, is among the brands of a film."""
    brands = head[8 : int.from_bytes(head[:4])]
    return form == "mov" and any(brands[at : at + 4] == b"avis" for at in range(0, len(brands), 4))


def odd_colours(frame: Any, form: str) -> str:
    """Return the name of the colours of a frame that PyAV decoded from a file of the format ``form``, if they are not
    red, green and blue of a screen; otherwise ``""``."""
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

"""Heads of picture files, which Pillow reads: size, pages, and how the camera was held. Pixels are read elsewhere."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import VideoWriterError

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

ORIENTATION = 0x0112  # tag of EXIF
_SUBFILE_TYPE = 254  # tag of TIFF, whose lowest bit marks a smaller copy of the first page
_MAX_PAGES = 16  # of a TIFF that are looked at
# Pillow's module and class of each format, by FFmpeg's name of it. `Image.open` would refuse large sizes itself.
_READERS: Mapping[str, tuple[str, str]] = {
    "png_pipe": ("PngImagePlugin", "PngImageFile"),
    "jpeg_pipe": ("JpegImagePlugin", "JpegImageFile"),
    "webp_pipe": ("WebPImagePlugin", "WebPImageFile"),
    "gif": ("GifImagePlugin", "GifImageFile"),
    "bmp_pipe": ("BmpImagePlugin", "BmpImageFile"),
    "tiff_pipe": ("TiffImagePlugin", "TiffImageFile"),
}


@dataclass(frozen=True)
class PictureHead:
    """What the head of a picture file says.

    Parameters
    ----------
    width, height : int
        Pixels along each side, as they are stored.
    is_animated : bool
        Whether the file has several pictures to show in turn, or several pages.
    orientation : int
        EXIF's orientation; 1, upright, if the file does not say one.
    """

    width: int
    height: int
    is_animated: bool = False
    orientation: int = 1


def picture_head(file: Path | BinaryIO, form: str, most_pixels: int) -> PictureHead | None:
    """Read the head of a picture; None if it cannot be read, or Pillow does not read the format.

    Nothing is decoded of a picture with more than ``most_pixels`` pixels, of which only the size is told.

    Parameters
    ----------
    file : Path or file
        The picture.
    form : str
        FFmpeg's name of the format, from `picture_format`.
    most_pixels : int
        The largest number of pixels that the caller takes.

    Raises
    ------
    VideoWriterError
        If Pillow is not installed.
    """
    if form not in _READERS:
        return None
    module, name = _READERS[form]
    try:
        reader: Any = getattr(importlib.import_module(f"PIL.{module}"), name)
    except ImportError:
        raise VideoWriterError(
            "pictures need Pillow, which is not installed; give a .npy, or pip install pillow"
        ) from None
    with warnings.catch_warnings(), suppress(Exception):  # whatever is said of a stranger's bytes
        warnings.filterwarnings("ignore", module="PIL")
        with reader(file) as picture:
            width, height = picture.size
            if width * height > most_pixels:
                return PictureHead(width, height)
            animated, orientation = False, 1
            with suppress(Exception):
                animated = _is_animated(picture)
            with suppress(Exception):
                orientation = int(picture.getexif().get(ORIENTATION, 1))
            return PictureHead(width, height, animated, orientation)
    return None


def turned_upright(picture: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Return a picture [H, W, 3] that was stored in one of EXIF's orientations, turned upright."""
    if orientation == 1:
        return picture
    from PIL import Image, ImageOps

    stored = Image.fromarray(picture)
    stored.getexif()[ORIENTATION] = orientation
    return np.asarray(ImageOps.exif_transpose(stored))


def _is_animated(picture: ImageFile) -> bool:
    if picture.format != "TIFF":
        return bool(getattr(picture, "is_animated", False))
    for page in range(1, min(getattr(picture, "n_frames", 1), _MAX_PAGES)):
        picture.seek(page)
        if not getattr(picture, "tag_v2", {}).get(_SUBFILE_TYPE, 0) & 1:
            return True
    picture.seek(0)
    return False

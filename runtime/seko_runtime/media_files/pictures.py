"""Reader of one picture from a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import UsageError
from seko_runtime.media_files.arrays import load_pictures
from seko_runtime.media_files.containers import (
    MAX_PIXELS,
    PICTURE_FORMATS,
    opened,
    picture_format,
    read_head,
)


def load_image(path: Path, option: str = "--image") -> NDArray[np.uint8]:
    """Read a picture, uint8 [H, W, 3]: an array file, or the first picture of a file of a known format.

    Raises
    ------
    UsageError
        If the file is not a picture, or the picture has more than `MAX_PIXELS` pixels.
    VideoWriterError
        If reading the file needs PyAV, and PyAV is not installed.
    """
    if path.suffix == ".npy":
        return load_pictures(path, option)
    what = f"{option} {path}"
    form = picture_format(read_head(path, what))
    if form is None:
        raise UsageError(
            f"{what} is no picture: its first bytes are of none of {PICTURE_FORMATS}; convert it, or give a .npy"
        )
    no_picture = f"{what} is no picture of at most {MAX_PIXELS} pixels"
    with opened(path, form, no_picture, f"{option} takes a .npy without it, or pip install av") as container:
        if not container.streams.video:
            raise UsageError(f"{what} holds no picture")
        picture: NDArray[np.uint8] = next(container.decode(video=0)).to_ndarray(format="rgb24")
    return picture

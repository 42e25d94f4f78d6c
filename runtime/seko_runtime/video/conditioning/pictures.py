"""Fits a picture of any size to an artifact: as the picture that a stream begins with, or as a reference."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import UsageError
from seko_runtime.video.conditioning.conditioning_frames import NO_ENCODER
from seko_runtime.video.contract import IMAGE, PICTURE_LEVELS, picture_input
from seko_runtime.video.fitting import fit_levels, fit_pictures
from seko_runtime.video.manifest import VideoManifest

TOKEN_SIDE = 16  # pixels of the video


def fit_start_picture(
    manifest: VideoManifest, picture: NDArray[np.uint8], what: str = "image"
) -> tuple[NDArray[Any], str]:
    """Return a picture cropped and resized as `Pool.open_session` takes it for ``image``, and a description of crop and
    resize.

    For a model with a picture input the picture is resized as the model's authors do: the size follows the picture's
    aspect ratio, in whole tokens.

    Raises
    ------
    UsageError
        If ``picture`` is no picture, or the artifact encodes no pictures; ``what`` is the picture's name in the
        message.
    """
    takes_levels = picture_input(manifest) is not None
    shape = _shape(manifest, PICTURE_LEVELS if takes_levels else IMAGE)
    if not {"encode", "condition"} & set(manifest.programs):
        raise UsageError(NO_ENCODER)
    _check(picture, what)
    if takes_levels:
        return fit_levels(picture, *shape, bicubic=True, stretch=TOKEN_SIDE)
    return fit_pictures(picture, *shape)


def fit_reference(
    manifest: VideoManifest, pictures: NDArray[np.uint8], what: str = "reference"
) -> tuple[NDArray[np.uint8], str]:
    """Return reference pictures cropped and resized as `Pool.open_session` takes them for ``reference``; see
    `fit_start_picture`."""
    _check(pictures, what)
    return fit_pictures(pictures, *_shape(manifest, IMAGE))


def _shape(manifest: VideoManifest, name: str) -> tuple[int, int]:
    shape = next((buffer.shape for buffer in manifest.buffers if buffer.name == name), None)
    if shape is None:
        raise UsageError(NO_ENCODER)
    return shape[0], shape[1]


def _check(pictures: NDArray[Any], what: str) -> None:
    if pictures.ndim < 3 or pictures.shape[-1] != 3 or 0 in pictures.shape:
        raise UsageError(f"{what} is {list(pictures.shape)}, expected [rows, columns, 3]")

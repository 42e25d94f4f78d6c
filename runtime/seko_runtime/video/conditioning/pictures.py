"""Crops and resizes a picture of any size to the picture size of an artifact, as a start picture or a reference
picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.controls.fitting import cover_pictures, fit_levels, fit_pictures
from seko_runtime.errors import UsageError
from seko_runtime.video.conditioning.conditioning_frames import NO_ENCODER
from seko_runtime.video.contract import IMAGE, PICTURE_LEVELS, picture_input, start_pictures
from seko_runtime.video.manifest import VideoManifest

LAST_FRAME_KIND = (
    "last_frame"  # kind of the input that numbers the latent frame of the last picture; 0 for none
)
TOKEN_SIDE = 16  # pixels of the video


def fit_start_picture(
    manifest: VideoManifest, picture: NDArray[np.uint8], what: str = "image"
) -> tuple[NDArray[Any], str]:
    """Return a picture cropped and resized as `Pool.open_session` takes it for ``image``, and a description of crop and
    resize.

    The picture is resized as the models' authors do. For a model with a picture input, the picture is resized by cubic
    convolution, and stretched if a crop would cut off less than a token. For other models, such as Wan 2.2 5B, the
    picture is resized by Lanczos' filter.

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
    return cover_pictures(picture, *shape)


def fit_start_pictures(
    manifest: VideoManifest, pictures: Sequence[NDArray[np.uint8]], names: Sequence[str]
) -> tuple[NDArray[Any], list[str]]:
    """Return the pictures with which a session begins, as `Pool.open_session` takes them for ``image``, and a
    description of crop and resize for each picture. The pictures may have different sizes.

    Parameters
    ----------
    manifest : VideoManifest
        The artifact's manifest.
    pictures : sequence of array
        The first picture; for a model that takes a last picture, the first picture and the last picture.
    names : sequence of str
        The pictures' names in messages.

    Raises
    ------
    UsageError
        If the model takes another number of pictures, or `fit_start_picture` refuses a picture.
    """
    count = start_pictures(manifest)
    if len(pictures) > count:
        raise UsageError(f"{names[count]}: this artifact's model takes no last picture; leave it out")
    if len(pictures) < count:
        raise UsageError(f"{names[0]}: this artifact's model takes a last picture, too; give --last-image")
    fitted = [
        fit_start_picture(manifest, picture, name) for picture, name in zip(pictures, names, strict=True)
    ]
    arrays, done = [array for array, _ in fitted], [words for _, words in fitted]
    if count == 1:
        return arrays[0], done
    same = np.uint8 if all(array.dtype == np.uint8 for array in arrays) else np.float32
    return np.stack([array.astype(same) for array in arrays], axis=-4), done


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

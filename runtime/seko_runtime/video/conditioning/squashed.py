"""Pictures for an image encoder (CLIP), resized to the encoder's square input without a crop, as Wan's code does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import as_array, mapping_of
from seko_runtime.controls.fitting import fit_levels
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import InputSpec
from seko_runtime.video.contract import PICTURE_CHANNELS
from seko_runtime.video.inputs import Inputs
from seko_runtime.video.manifest import VideoManifest

KIND = "squashed_pictures"  # kind of the input
_AXES = 3  # axes of a picture: rows, columns, channels


def squashed_input(manifest: VideoManifest) -> InputSpec | None:
    """Return the input for the image encoder's pictures; None if the artifact has no image encoder."""
    return next((spec for spec in manifest.caller_inputs if spec.kind == KIND), None)


def squashed_pictures(manifest: VideoManifest, pictures: Sequence[NDArray[Any]]) -> Inputs:
    """Return the image encoder's pictures by the name of their input; empty if the artifact has no image encoder.

    Parameters
    ----------
    manifest : VideoManifest
        The artifact's manifest.
    pictures : sequence of array
        As many pictures as the model takes, uint8 or float32 [..., rows, columns, 3], of any sizes. The pictures are
        resized by cubic convolution over four pixels, without a crop, a low-pass filter or rounding.

    Raises
    ------
    UsageError
        If the model takes another number of pictures.
    """
    spec = squashed_input(manifest)
    if spec is None:
        return {}
    count, height, width, _ = spec.shape
    if len(pictures) != count:
        raise UsageError(f"found {len(pictures)} pictures, this artifact's model takes {count}")
    squashed = [fit_levels(picture, height, width, bicubic=True, stretch=math.inf)[0] for picture in pictures]
    return {spec.name: np.stack([picture.astype(np.float32) for picture in squashed], axis=-1 - _AXES)}


def with_squashed(manifest: VideoManifest, inputs: Inputs | None, image: object) -> Inputs:
    """Return the caller's inputs; if the image encoder's pictures are missing, add them from ``image``, the start
    pictures of a session."""
    by_name, spec = mapping_of(inputs, "inputs"), squashed_input(manifest)
    if spec is None or image is None or spec.name in by_name:
        return by_name
    array, count = as_array(image, "image"), spec.shape[0]
    if array.ndim < _AXES or array.shape[-1] != PICTURE_CHANNELS or 0 in array.shape:
        raise UsageError(f"image is {list(array.shape)}, expected [rows, columns, {PICTURE_CHANNELS}]")
    several = count > 1 and array.ndim > _AXES
    pictures = list(np.moveaxis(array, -1 - _AXES, 0)) if several else [array]
    return {**by_name, **squashed_pictures(manifest, pictures)}

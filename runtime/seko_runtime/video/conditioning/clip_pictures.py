"""Pictures for an image encoder (CLIP), resized to the encoder's square input without a crop, as Wan's code does."""

from __future__ import annotations

import numpy as np

from seko_runtime.arguments import as_array, mapping_of
from seko_runtime.controls.pictures import SEEN_KIND, squashed
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import InputSpec
from seko_runtime.video.contract import PICTURE_CHANNELS
from seko_runtime.video.inputs import Inputs
from seko_runtime.video.manifest import VideoManifest

KIND = SEEN_KIND
_AXES = 3  # axes of a picture: rows, columns, channels


def clip_input(manifest: VideoManifest) -> InputSpec | None:
    """Return the input for the image encoder's pictures; None if the artifact has no image encoder."""
    return next((spec for spec in manifest.caller_inputs if spec.kind == KIND), None)


def with_clip_pictures(manifest: VideoManifest, inputs: Inputs | None, image: object) -> Inputs:
    """Return the caller's inputs; if the image encoder's pictures are missing, add them from ``image``, the start
    pictures of a session."""
    by_name, spec = mapping_of(inputs, "inputs"), clip_input(manifest)
    if spec is None or image is None or spec.name in by_name:
        return by_name
    array, count = as_array(image, "image"), spec.shape[0]
    if array.ndim < _AXES or array.shape[-1] != PICTURE_CHANNELS or 0 in array.shape:
        raise UsageError(f"image is {list(array.shape)}, expected [rows, columns, {PICTURE_CHANNELS}]")
    several = count > 1 and array.ndim > _AXES
    pictures = list(np.moveaxis(array, -1 - _AXES, 0)) if several else [array]
    return {**by_name, spec.name: squashed(spec, pictures)}

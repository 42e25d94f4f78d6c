"""Speaker masks: which speaker's voice each token of the picture attends to, from a mask picture of each speaker.
Numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import as_array, items_of
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import InputSpec
from seko_runtime.video.conditioning.voice import FEATURES, KINDS
from seko_runtime.video.fitting import fit_levels
from seko_runtime.video.manifest import VideoManifest

# kind of the input per session with the masks, float32 [speakers, tokens of a latent frame]
KIND = "speaker_masks"
_MIDDLE = 127.5


def masks_input(manifest: VideoManifest) -> InputSpec | None:
    """Return the manifest's input that takes speaker masks, for an artifact with several speakers."""
    return next((spec for spec in manifest.caller_inputs if spec.kind == KIND), None)


def speaker_masks(pictures: Sequence[NDArray[np.uint8]], manifest: VideoManifest) -> NDArray[np.float32]:
    """Return masks of 0 and 1, float32 [speakers, tokens].

    Parameters
    ----------
    pictures : sequence of numpy.ndarray
        A mask picture for each speaker, uint8 [rows, columns, 3] of any size; the red channel is bright where the
        speaker is. Masks are cut and resized like the portrait, then resized by cubic convolution to one pixel a token.
    manifest : VideoManifest
        The artifact's manifest.

    Raises
    ------
    UsageError
        If the artifact takes no masks, or the number, shape or dtype of the masks does not fit.
    """
    spec = masks_input(manifest)
    if spec is None and any(input_spec.kind in (*KINDS, FEATURES) for input_spec in manifest.caller_inputs):
        raise UsageError("this artifact has one speaker, who is the whole picture: it takes no masks")
    if spec is None:
        raise UsageError("this artifact's model hears no speakers: it takes no masks")
    masks_given = [
        as_array(picture, "a mask")
        for picture in items_of(pictures, "expected a list of masks, one for each speaker")
    ]
    if len(masks_given) != spec.shape[0]:
        raise UsageError(f"{len(masks_given)} masks given for {spec.shape[0]} speakers, expected one each")
    stream = manifest.workload.stream
    _, rows, columns = stream.latent_shape
    # height and width of a token, in latent cells
    side = round((rows * columns / stream.frame_tokens) ** 0.5)
    masks = []
    for picture in masks_given:
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3 or 0 in picture.shape:
            raise UsageError(
                f"a mask is {picture.dtype} {list(picture.shape)}, expected uint8 [rows, columns, 3]"
            )
        fitted, _ = fit_levels(picture, stream.height, stream.width)
        small, _ = fit_levels(fitted, rows // side, columns // side, bicubic=True)
        masks.append((small[..., 0] > _MIDDLE).astype(np.float32).ravel())
    return np.stack(masks)

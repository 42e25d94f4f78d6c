"""Previews of latents as labelled pictures, for artifacts without a decoder."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from seko_runtime.video.manifest import Stream

LABEL = "LATENT PREVIEW"  # label of the preview, stored in the file's comment
# share of the full scale for one standard deviation: two of them reach from grey to black or white
CONTRAST = 0.22


def preview_frames(latents: NDArray[np.float32], stream: Stream) -> Iterator[NDArray[np.uint8]]:
    """Turn latents into preview pictures by a fixed linear map from their channels to RGB. A preview is no replacement
    for a decoder.

    Parameters
    ----------
    latents : numpy.ndarray
        Latents, float32 [B, C, F, h, w], distributed about as N(0, 1).
    stream : Stream
        Layout of the video stream: picture size, and how often each latent frame is repeated.

    Yields
    ------
    numpy.ndarray
        Pictures, uint8 [height, B * width, 3], with the B streams side by side.
    """
    _, channels, frames, latent_rows, latent_columns = latents.shape
    angle = np.arange(channels)[:, None] * np.arange(1, 4)[None] / channels + np.arange(3)[None] / 3
    # [C, 3]: map from channels to RGB, whose columns have unit length
    to_rgb = np.cos(2 * np.pi * angle) * np.sqrt(2 / channels)
    row_of = np.arange(stream.height) * latent_rows // stream.height
    column_of = np.arange(stream.width) * latent_columns // stream.width
    for frame in range(frames):
        colour = np.einsum("bchw,ck->bhwk", np.nan_to_num(latents[:, :, frame]), to_rgb)
        pixels = np.clip((0.5 + CONTRAST * colour) * 255, 0, 255).round().astype(np.uint8)
        picture = np.concatenate(list(pixels[:, row_of][:, :, column_of]), axis=1)
        for _ in range(stream.video_frames_per_latent):
            yield picture

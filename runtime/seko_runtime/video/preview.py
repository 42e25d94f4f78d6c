"""A labelled picture of latents, where no decoder shows what they are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from seko_runtime.format.manifest import Stream

LABEL = "LATENT PREVIEW"
CONTRAST = 0.22  # of full scale per standard deviation: two of them reach from grey to black or white
GLYPHS = {  # 3 x 5 pixels, rows from the top, the high bit on the left
    "A": (2, 5, 7, 5, 5),
    "E": (7, 4, 6, 4, 7),
    "I": (7, 2, 2, 2, 7),
    "L": (4, 4, 4, 4, 7),
    "N": (5, 7, 7, 7, 5),
    "P": (6, 5, 6, 4, 4),
    "R": (6, 5, 6, 5, 5),
    "T": (7, 2, 2, 2, 2),
    "V": (5, 5, 5, 5, 2),
    "W": (5, 5, 7, 7, 5),
    " ": (0, 0, 0, 0, 0),
}


def preview_frames(latents: NDArray[np.float32], stream: Stream) -> Iterator[NDArray[np.uint8]]:
    """Picture latents by a fixed linear map of their channels to RGB; it is not what a decoder would show.

    Parameters
    ----------
    latents : numpy.ndarray
        float32 [B, C, F, h, w], about N(0, 1).
    stream : Stream
        Picture size, and how often a latent frame is repeated.

    Yields
    ------
    numpy.ndarray
        uint8 [height, B * width, 3], rows of the batch side by side, labelled.
    """
    rows, channels, frames, latent_rows, latent_columns = latents.shape
    angle = np.arange(channels)[:, None] * np.arange(1, 4)[None] / channels + np.arange(3)[None] / 3
    to_rgb = np.cos(2 * np.pi * angle) * np.sqrt(2 / channels)  # [C, 3], columns of unit length
    row_of = np.arange(stream.height) * latent_rows // stream.height
    column_of = np.arange(stream.width) * latent_columns // stream.width
    label = _label_mask(stream.height, rows * stream.width)
    for frame in range(frames):
        colour = np.einsum("bchw,ck->bhwk", np.nan_to_num(latents[:, :, frame]), to_rgb)
        pixels = np.clip((0.5 + CONTRAST * colour) * 255, 0, 255).round().astype(np.uint8)
        picture = np.concatenate(list(pixels[:, row_of][:, :, column_of]), axis=1)
        picture[: label.shape[0], : label.shape[1]][label] = 255
        for _ in range(stream.video_frames_per_latent):
            yield picture


def _label_mask(height: int, width: int) -> NDArray[np.bool_]:
    """Pixels of `LABEL` for the top left corner, cut to the picture."""
    scale = max(1, width // 160)
    bits = np.zeros((7, 1 + 4 * len(LABEL)), dtype=bool)
    for place, letter in enumerate(LABEL):
        for row, word in enumerate(GLYPHS[letter]):
            for column in range(3):
                bits[1 + row, 1 + 4 * place + column] = bool(word >> (2 - column) & 1)
    return bits.repeat(scale, axis=0).repeat(scale, axis=1)[:height, :width]

"""Fits pictures of any size to the encoder's size: centre crop, then resize."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def fit_pictures(pictures: NDArray[np.uint8], height: int, width: int) -> tuple[NDArray[np.uint8], str]:
    """Return pictures in the wanted size, and a description of what was done.

    Parameters
    ----------
    pictures : numpy.ndarray
        uint8 [..., rows, columns, 3], all of one size.
    height, width : int
        Wanted size in pixels.

    Returns
    -------
    numpy.ndarray
        uint8 [..., height, width, 3]: the largest centred crop with the wanted aspect, resized with a triangle
        filter. Pictures of the right size are returned unchanged.
    str
        Such as ``640x480: centre crop to 480x480, resized to 96x96``; empty if nothing was done.
    """
    rows, columns = pictures.shape[-3:-1]
    if (rows, columns) == (height, width):
        return pictures, ""
    cut_rows = min(rows, max(1, round(columns * height / width)))
    cut_columns = min(columns, max(1, round(rows * width / height)))
    top, left = (rows - cut_rows) // 2, (columns - cut_columns) // 2
    cut = pictures[..., top : top + cut_rows, left : left + cut_columns, :]
    done = []
    if (cut_rows, cut_columns) != (rows, columns):
        done.append(f"centre crop to {cut_columns}x{cut_rows}")
    if (cut_rows, cut_columns) != (height, width):
        done.append(f"resized to {width}x{height}")
        down = np.einsum("hr,...rck->...hck", _triangles(cut_rows, height), cut, optimize=True)
        across = np.einsum("wc,...hck->...hwk", _triangles(cut_columns, width), down, optimize=True)
        cut = np.clip(across.round(), 0, 255).astype(np.uint8)
    return np.ascontiguousarray(cut), f"{columns}x{rows}: {', '.join(done)}"


def _triangles(found: int, wanted: int) -> NDArray[np.float32]:
    """Weights [wanted, found] of a linear resize; rows sum to 1."""
    scale = found / wanted
    centres = (np.arange(wanted) + 0.5) * scale - 0.5
    weights = np.maximum(0.0, 1.0 - np.abs(np.arange(found)[None] - centres[:, None]) / max(scale, 1.0))
    normed: NDArray[np.float32] = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return normed

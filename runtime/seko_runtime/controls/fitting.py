"""Fitting of pictures to the size that the encoder takes: a centre crop and a resize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

PICTURE_SCHEMA = {"type": "array", "description": "uint8 [rows, columns, 3], of any size"}  # in an event

# takes sizes ``found`` and ``wanted``; returns the matrix [wanted, found] of a resize along one side
Weights = Callable[[int, int], NDArray[np.float32]]
_LOBES = 3  # of Lanczos' filter, on either side
_UNIT = 1 << 22  # the weight 1, in Pillow's sums of bytes


def cover_pictures(pictures: NDArray[np.uint8], height: int, width: int) -> tuple[NDArray[np.uint8], str]:
    """Return pictures in the requested size, and a description of resize and crop.

    The whole picture is resized until it covers the size, then its centre is cut out, as Wan 2.2's code does with a
    start picture. The resize is that of Pillow 13 with Lanczos' filter: first along pixel rows, then along pixel
    columns, or the other way round if the height shrinks by more than twice as many pixels as the width. After each of
    these two steps the pixel levels are rounded to whole numbers and clipped, so that the order is seen at edges.

    Parameters
    ----------
    pictures : numpy.ndarray
        uint8 [..., rows, columns, 3], all of one size.
    height, width : int
        Requested size in pixels.

    Returns
    -------
    numpy.ndarray
        uint8 [..., height, width, 3].
    str
        A description such as ``640x480: resized to 128x96, centre crop to 96x96``; empty if the size was right before.
    """
    rows, columns = pictures.shape[-3:-1]
    if (rows, columns) == (height, width):
        return pictures, ""
    scale = max(width / columns, height / rows)
    whole_columns, whole_rows = round(columns * scale), round(rows * scale)
    if (whole_rows, whole_columns) == (rows, columns):
        top, left = (rows - height) // 2, (columns - width) // 2
        cut = pictures[..., top : top + height, left : left + width, :]
        return np.ascontiguousarray(cut), f"{columns}x{rows}: centre crop to {width}x{height}"
    across, from_columns = _lanczos(columns, whole_columns, width)
    down, from_rows = _lanczos(rows, whole_rows, height)
    cut = pictures[..., from_rows, from_columns, :]
    steps = [("wc,...rck->...rwk", across), ("hr,...rck->...hck", down)]
    if rows - whole_rows > max(0, 2 * (columns - whole_columns)):
        steps.reverse()
    for axes, weights in steps:
        cut = _levels(np.floor(np.einsum(axes, weights, cut, optimize=True) / _UNIT + 0.5))
    done = []
    if (whole_rows, whole_columns) != (rows, columns):
        done.append(f"resized to {whole_columns}x{whole_rows}")
    if (whole_rows, whole_columns) != (height, width):
        done.append(f"centre crop to {width}x{height}")
    return np.ascontiguousarray(cut), f"{columns}x{rows}: {', '.join(done)}"


def fit_pictures(
    pictures: NDArray[np.uint8], height: int, width: int, *, bicubic: bool = False, stretch: float = 0
) -> tuple[NDArray[np.uint8], str]:
    """Return pictures in the requested size as uint8, and a description of crop and resize.

    Parameters are those of `fit_levels`. Resized pixel levels are rounded and clipped to 0 to 255.

    Returns
    -------
    numpy.ndarray
        The pictures in the requested size, uint8 [..., height, width, 3].
    str
        The description of crop and resize that `fit_levels` returns.
    """
    levels, done = fit_levels(pictures, height, width, bicubic=bicubic, stretch=stretch)
    if levels.dtype == np.uint8:
        return levels, done
    return _levels(levels), done


def fit_levels(
    pictures: NDArray[Any], height: int, width: int, *, bicubic: bool = False, stretch: float = 0
) -> tuple[NDArray[Any], str]:
    """Return pictures in the requested size, and a description of crop and resize.

    Parameters
    ----------
    pictures : numpy.ndarray
        The pictures, uint8 or float32 [..., rows, columns, 3], all of one size.
    height, width : int
        Requested size in pixels.
    bicubic : bool
        Whether to resize by cubic convolution over four pixels, as torch's ``interpolate`` does, instead of by a
        triangle filter over all pixels. Some models were trained on start pictures that were resized by cubic
        convolution.
    stretch : float
        If the crop, scaled to the result, would cut off fewer pixels than ``stretch``, the picture is stretched instead
        of cropped.

    Returns
    -------
    numpy.ndarray
        The resized pictures, [..., height, width, 3]: the largest centred crop with the wanted aspect ratio, resized. A
        resized picture is float32, neither rounded nor clipped, and a bicubic resize may leave the range 0 to 255. A
        picture that needs no resize keeps its dtype.
    str
        A description such as ``640x480: centre crop to 480x480, resized to 96x96``; empty if the size was right before.
    """
    rows, columns = pictures.shape[-3:-1]
    if (rows, columns) == (height, width):
        return pictures, ""
    cut_rows = min(rows, max(1, round(columns * height / width)))
    cut_columns = min(columns, max(1, round(rows * width / height)))
    if max((rows - cut_rows) * height / cut_rows, (columns - cut_columns) * width / cut_columns) < stretch:
        cut_rows, cut_columns = rows, columns
    top, left = (rows - cut_rows) // 2, (columns - cut_columns) // 2
    cut = pictures[..., top : top + cut_rows, left : left + cut_columns, :]
    done = []
    if (cut_rows, cut_columns) != (rows, columns):
        done.append(f"centre crop to {cut_columns}x{cut_rows}")
    if (cut_rows, cut_columns) != (height, width):
        done.append(f"resized to {width}x{height}")
        weights: Weights = _cubics if bicubic else _triangles
        down = np.einsum("hr,...rck->...hck", weights(cut_rows, height), cut, optimize=True)
        across = np.einsum("wc,...hck->...hwk", weights(cut_columns, width), down, optimize=True)
        cut = across.astype(np.float32, copy=False)
    return np.ascontiguousarray(cut), f"{columns}x{rows}: {', '.join(done)}"


def _levels(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    """Return pixel levels as bytes, rounded and clipped."""
    return np.clip(numbers.round(), 0, 255).astype(np.uint8)


def _lanczos(size: int, whole: int, middle: int) -> tuple[NDArray[np.float64], slice]:
    """Matrix [middle, read] of the ``middle`` central pixels of a resize to ``whole`` pixels by Lanczos' filter, and
    the pixels that the matrix reads. The weights are Pillow's whole numbers; a row sums to `_UNIT`, but for their
    rounding."""
    scale = size / whole
    reach = _LOBES * max(scale, 1.0)
    centres = ((whole - middle) // 2 + np.arange(middle) + 0.5) * scale - 0.5
    read = slice(max(0, int(centres[0] - reach)), min(size, int(centres[-1] + reach) + 2))
    x = (np.arange(size)[None, read] - centres[:, None]) / max(scale, 1.0)
    weights = np.where(np.abs(x) < _LOBES, np.sinc(x) * np.sinc(x / _LOBES), 0.0)
    whole_weights: NDArray[np.float64] = np.rint(weights / weights.sum(1, keepdims=True) * _UNIT)
    return whole_weights, read


def _triangles(size: int, wanted: int) -> NDArray[np.float32]:
    """Matrix [wanted, found] of a linear resize from ``found`` to ``wanted`` pixels; each row of the matrix sums to
    1."""
    scale = size / wanted
    centres = (np.arange(wanted) + 0.5) * scale - 0.5
    weights = np.maximum(0.0, 1.0 - np.abs(np.arange(size)[None] - centres[:, None]) / max(scale, 1.0))
    normed: NDArray[np.float32] = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return normed


def _cubics(size: int, wanted: int) -> NDArray[np.float32]:
    """Matrix [wanted, found] of a resize by cubic convolution with a = -0.75; beyond an edge the edge pixel is
    repeated."""
    a = -0.75
    centres = (np.arange(wanted) + 0.5) * (size / wanted) - 0.5
    first = np.floor(centres).astype(np.int64) - 1
    weights = np.zeros((wanted, size), np.float32)
    for tap in range(4):
        x = np.abs(centres - (first + tap))
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = a * (((x - 5) * x + 8) * x - 4)
        np.add.at(
            weights, (np.arange(wanted), np.clip(first + tap, 0, size - 1)), np.where(x <= 1, near, far)
        )
    return weights

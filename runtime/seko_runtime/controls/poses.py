"""Camera poses relative to the previous pose, and camera intrinsics for a picture's size. The poses and intrinsics of
this module are float64.

A pose [4, 4] transforms points from the camera to the world. x points right, y down, z forward.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import as_array, check_magnitude, real_number
from seko_runtime.errors import UsageError

Array = NDArray[np.float64]
# Picture size in pixels to which recorded intrinsics refer, whatever the video's size.
REFERENCE_HEIGHT, REFERENCE_WIDTH = 480, 832
VIDEO_PER_LATENT = 4  # video frames, each with a pose, for each latent frame after the first
_ROUNDED = 1e-3  # tolerance for a rotation matrix in a file, of R R^T = 1


def framewise(poses: Array, before: Array | None = None) -> Array:
    """Return each camera's pose relative to the camera before it.

    Parameters
    ----------
    poses : numpy.ndarray
        Camera poses, [N, 4, 4].
    before : numpy.ndarray, optional
        The pose before the first of ``poses``, [4, 4]; default: the identity.

    Returns
    -------
    numpy.ndarray
        The relative poses, [N, 3, 4]: rotation and translation, independent of the world's coordinate frame.
    """
    first = poses[:1] if before is None else before[None]
    earlier = np.concatenate((first, poses[:-1]))
    back = earlier[:, :3, :3].swapaxes(1, 2)  # a rotation's inverse
    turn = back @ poses[:, :3, :3]
    move = back @ (poses[:, :3, 3:] - earlier[:, :3, 3:])
    return np.concatenate((turn, move), 2)


def checked_unit(unit: object) -> float:
    """Return ``unit``, the length by which a camera's translations are divided, as a float.

    Raises
    ------
    UsageError
        If ``unit`` is not a positive finite number.
    """
    length = real_number(unit, "unit", "a positive length")
    if length <= 0:
        raise UsageError(f"unit is {length}, expected a positive length")
    return length


def checked_poses(poses: object) -> Array:
    """Return camera poses as float64 [N, 4, 4].

    Raises
    ------
    UsageError
        If the array has another shape, a number that is not finite, or a matrix that is no rotation and translation.
    """
    array = as_array(poses, "poses")
    if array.ndim != 3 or array.shape[1:] != (4, 4) or not len(array) or array.dtype.kind not in "fiu":
        raise UsageError(f"poses are {array.dtype} {list(array.shape)}, expected numbers of [N, 4, 4]")
    checked = array.astype(np.float64)
    turn = checked[:, :3, :3]
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(turn @ turn.swapaxes(1, 2) - np.eye(3)).max()
        proper = np.abs(checked[:, 3] - [0, 0, 0, 1]).max() <= _ROUNDED and np.linalg.det(turn).min() > 0
    if not (np.isfinite(checked).all() and off <= _ROUNDED and proper):
        raise UsageError(
            "poses hold a matrix that is not a rotation and a translation over a row 0, 0, 0, 1: expected cameras to "
            "the world"
        )
    return checked


def checked_intrinsics(intrinsics: object, count: int) -> Array:
    """Return camera intrinsics (focal lengths x and y, centre x and y) as float64 [count, 4]; an array [4] is used for
    all frames.

    Raises
    ------
    UsageError
        If the intrinsics have another shape, or a focal length is not positive.
    """
    array = as_array(intrinsics, "intrinsics")
    if array.shape not in ((4,), (count, 4)) or array.dtype.kind not in "fiu":
        raise UsageError(
            f"intrinsics are {array.dtype} {list(array.shape)}, expected numbers of [4] or [{count}, 4]: focal "
            "lengths x and y, centre x and y"
        )
    checked = np.broadcast_to(array.astype(np.float64), (count, 4))
    check_magnitude(checked, "intrinsics")
    if (checked[:, :2] <= 0).any():
        raise UsageError("intrinsics hold a focal length that is not positive")
    return checked


def recorded_intrinsics(intrinsics: object, height: int, width: int, count: int | None = None) -> Array:
    """Convert recorded camera intrinsics to pixels of the video.

    Parameters
    ----------
    intrinsics : array
        Camera intrinsics, [4] or [N, 4]: focal lengths x and y, centre x and y, in pixels of a picture of 480 x 832.
    height, width : int
        The video's size in pixels.
    count : int, optional
        Expected number N of intrinsics; default: any number.

    Returns
    -------
    numpy.ndarray
        The intrinsics in pixels of the video, [N, 4] float64. Intrinsics [4] are repeated N times, once by default.

    Raises
    ------
    UsageError
        If the intrinsics have another shape, or a focal length is not positive.
    """
    array = as_array(intrinsics, "intrinsics")
    if count is None:
        count = max(1, len(array)) if array.ndim == 2 else 1
    x, y = width / REFERENCE_WIDTH, height / REFERENCE_HEIGHT
    scaled: Array = checked_intrinsics(array, count) * np.array([x, y, x, y])
    return scaled


def magnitudes_checked(poses: Array, intrinsics: Array) -> None:
    """Raise a UsageError if a number of relative poses [F, 3, 4] or intrinsics [F, 4] is not finite, or larger in
    magnitude than `seko_runtime.arguments.LARGEST`."""
    check_magnitude(poses, "the camera's movement, in its unit,")
    check_magnitude(intrinsics, "intrinsics, in pixels of the video,")

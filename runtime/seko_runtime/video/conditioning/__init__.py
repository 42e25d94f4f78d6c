"""Conditions of a video stream besides text: conditioning frames, and cameras from keys or recorded paths. Numpy
only."""

from seko_runtime.video.conditioning.camera_path import CameraPath
from seko_runtime.video.conditioning.conditioning_frames import (
    NO_ENCODER,
    ConditioningFrames,
    of_one_row,
)
from seko_runtime.video.conditioning.keyboard import KeyboardCamera, KeySettings, key_rows
from seko_runtime.video.conditioning.steering import Camera, steered

__all__ = [
    "NO_ENCODER",
    "Camera",
    "CameraPath",
    "ConditioningFrames",
    "KeySettings",
    "KeyboardCamera",
    "key_rows",
    "of_one_row",
    "steered",
]

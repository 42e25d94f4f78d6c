"""Conditions of a video stream besides text and controls: conditioning frames. Numpy only."""

from seko_runtime.video.conditioning.conditioning_frames import (
    ConditioningFrames,
    of_one_row,
)

__all__ = ["ConditioningFrames", "of_one_row"]

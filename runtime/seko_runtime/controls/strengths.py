"""What a strength of input video means for a chunk: its noise, and the times and noise levels of its passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from seko_runtime.format.records import Within

# StreamDiffusionV2: the first pass is told an earlier time than that of its noise, and less noise is added where the
# video moves.
EARLIER = 100  # of 1000
_MOST_MOTION = 0.2  # root mean square of a frame's change, of levels in -1..1, that counts as all
MOTION, _SMOOTHED = 0.1, 0.9  # what all motion takes from the strength, and the weight of the new strength


@dataclass(frozen=True)
class VideoInParameters:
    """The parameters of an input video in the manifest.

    Parameters
    ----------
    height, width, fps : int
        Size of the frames in pixels, and video frames a second.
    first_frames : int
        Video frames of a stream's first chunk.
    strength : float
        The strength of a session that says none.
    least : float
        Smallest strength.
    first_time : float
        Time of the first pass as built, if the strength changes that pass alone and follows the video's motion
        (StreamDiffusionV2). 0: the strength scales the times of all passes.
    shift : float
        Warp of the times of training, among which the first pass looks up its noise level; only with ``first_time``.
    """

    height: Annotated[int, Within(1, 1 << 16)]
    width: Annotated[int, Within(1, 1 << 16)]
    fps: Annotated[int, Within(1, 1 << 16)]
    first_frames: Annotated[int, Within(1, 1 << 16)]
    strength: float
    least: float = 0.0
    first_time: float = 0.0
    shift: float = 1.0

    def levels(self, strength: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the share of noise [1], and the factors of times and noise levels [2], of a strength."""
        factors = [strength, strength]
        if self.first_time:
            time = int(1000 * strength) - EARLIER
            factors = [
                time / self.first_time,
                trained_level(time, self.shift) / trained_level(self.first_time, self.shift),
            ]
        return np.array([strength], np.float32), np.array(factors, np.float32)


def trained_level(time: float, shift: float) -> float:
    """Return the noise level of the training time that is nearest to a time in 0..1000. The times of training are the
    whole numbers 1 to 1000, warped by ``shift``."""
    return min((_warped(step, shift) for step in range(1, 1001)), key=lambda level: abs(1000 * level - time))


def _warped(step: int, shift: float) -> float:
    part = step / 1000
    return shift * part / (1 + (shift - 1) * part)


def moved(strength: float, before: float, frames: NDArray[np.uint8]) -> float:
    """Return the strength of a chunk by the motion of its video, as StreamDiffusionV2 does.

    Parameters
    ----------
    strength, before : float
        The strength without motion, and that of the chunk before.
    frames : numpy.ndarray
        The chunk's frames, uint8 [N, H, W, 3], and the frame before them, if there is one, in front.
    """
    levels = frames.astype(np.float32) / 127.5 - 1
    changes = np.sqrt(np.square(np.diff(levels, axis=0)).mean((1, 2, 3)))
    motion = min(1.0, float(changes.max(initial=0.0)) / _MOST_MOTION)
    return _SMOOTHED * (strength - MOTION * motion) + (1 - _SMOOTHED) * before

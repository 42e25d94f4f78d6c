"""Camera inputs of each chunk, computed from a recorded camera path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import flag, shown, whole_number
from seko_runtime.errors import UsageError
from seko_runtime.video.conditioning.poses import (
    VIDEO_PER_LATENT,
    checked_poses,
    checked_size,
    checked_unit,
    framewise,
    inputs_of,
    recorded_intrinsics,
)


class CameraPath:
    """A recorded camera path as the camera inputs of a stream's chunks.

    Latent frame i takes the pose of video frame 4*i. Poses at the end of the path that do not fill a whole latent frame
    or chunk are left out.

    Parameters
    ----------
    poses : array
        Camera poses, [N, 4, 4], camera to world, one for each video frame.
    intrinsics : array
        Camera intrinsics, [4] or [N, 4]: focal lengths and centre in pixels of a picture of 480 x 832.
    height, width : int
        The video's size in pixels.
    chunk_frames : int
        Latent frames of a chunk.
    unit : float, optional
        Length in the poses' units that becomes 1 in the model's input. Default: the longest move between two latent
        frames, as in the authors' code, or 1 if the camera only turns.
    own_intrinsics : bool
        Whether each latent frame has its own intrinsics, instead of those of the path's first pose.

    Raises
    ------
    UsageError
        If an array has a wrong shape or invalid numbers, or there are too few poses for one chunk.
    """

    def __init__(
        self,
        poses: object,
        intrinsics: object,
        *,
        height: int,
        width: int,
        chunk_frames: int,
        unit: float | None = None,
        own_intrinsics: bool = False,
    ) -> None:
        height, width, chunk_frames = checked_size(height, width, chunk_frames)
        every = checked_poses(poses)
        every_intrinsics = recorded_intrinsics(intrinsics, height, width, len(every))
        chunks = ((len(every) - 1) // VIDEO_PER_LATENT + 1) // chunk_frames
        if not chunks:
            need = VIDEO_PER_LATENT * (chunk_frames - 1) + 1
            raise UsageError(
                f"{len(every)} poses, expected {need} or more for a chunk of {chunk_frames} latent frames"
            )
        taken = slice(0, VIDEO_PER_LATENT * chunks * chunk_frames, VIDEO_PER_LATENT)
        self._frames = framewise(every[taken][: chunks * chunk_frames])
        self._intrinsics = (
            every_intrinsics[taken][: len(self._frames)]
            if flag(own_intrinsics, "own_intrinsics")
            else every_intrinsics[:1].repeat(len(self._frames), 0)
        )
        longest = float(np.linalg.norm(self._frames[:, :, 3], axis=1).max()) or 1.0
        self._frames[:, :, 3] /= checked_unit(longest if unit is None else unit)
        self._chunk_frames, self._next = chunk_frames, 0

    def __len__(self) -> int:
        """Return the number of chunks that the camera path covers."""
        return len(self._frames) // self._chunk_frames

    def next_chunk(self) -> dict[str, NDArray[np.float32]]:
        """Return the camera inputs of the next chunk on the path; see `chunk`."""
        chunk = self.chunk(self._next)
        self._next += 1
        return chunk

    def reset(self) -> None:
        """Return to the first chunk of the path."""
        self._next = 0

    def state(self) -> dict[str, Any]:
        """Return the position on the path as a JSON value, for `load`."""
        return {"next_chunk": self._next}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue at a position that `state` of a path with the same poses returned.

        Raises
        ------
        UsageError
            If the value is no state of a camera path.
        """
        next_chunk = state.get("next_chunk") if isinstance(state, Mapping) else None
        if type(next_chunk) is not int or not 0 <= next_chunk <= len(self):
            raise UsageError("this state does not fit this camera's path; take what state() gave")
        self._next = next_chunk

    def chunk(self, number: int) -> dict[str, NDArray[np.float32]]:
        """Return the camera inputs of a chunk by name: poses ``camera`` [F, 3, 4], and ``intrinsics`` [F, 4].

        Raises
        ------
        UsageError
            If the camera path ends before this chunk.
        """
        if whole_number(number, "number", 0) >= len(self):
            raise UsageError(
                f"chunk {shown(number)} of a camera's path of {len(self)} chunks: give more poses"
            )
        part = slice(number * self._chunk_frames, (number + 1) * self._chunk_frames)
        return inputs_of(self._frames[part], self._intrinsics[part])

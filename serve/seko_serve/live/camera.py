"""The camera that a viewer steers, by held keys or by poses that are sent in advance."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import UsageError
from seko_runtime.video.conditioning import KeyboardCamera
from seko_runtime.video.conditioning.poses import (
    INTRINSICS,
    checked_poses,
    framewise,
    inputs_of,
    recorded_intrinsics,
)
from seko_runtime.video.manifest import Stream

KEYS = {f"Key{letter}": letter.lower() for letter in "WASDIJKL"} | {
    "ArrowUp": "i",
    "ArrowDown": "k",
    "ArrowLeft": "j",
    "ArrowRight": "l",
}
MAX_POSES_AHEAD = 4_096  # latent frames


class ViewersCamera:
    """A camera that follows the poses that a viewer has sent in advance. When no pose is left, the keys that the viewer
    holds steer the camera.

    Parameters
    ----------
    stream : Stream
        The layout of the artifact's stream, of which the video's size and the number of latent frames in a chunk are
        used.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._keyboard = KeyboardCamera(stream.height, stream.width, stream.chunk_frames)
        self._held: frozenset[str] = frozenset()
        self._poses: deque[NDArray[np.float64]] = deque()  # [4, 4] each, of the latent frames to come
        self._before: NDArray[np.float64] | None = None  # of the last latent frame that took a pose
        self._intrinsics: NDArray[np.float64] | None = None

    def hold(self, codes: Sequence[str]) -> None:
        """Set the keys that are held, named by `KeyboardEvent.code`; all other keys are released. Keys that do not
        steer the camera are ignored."""
        keys = frozenset(KEYS[code] for code in codes if code in KEYS)
        self._keyboard.press(keys - self._held)
        self._keyboard.release(self._held - keys)
        self._held = keys

    def follow(self, poses: Sequence[Sequence[float]], intrinsics: Sequence[float] | None) -> None:
        """Append camera poses, one for each of the coming latent frames.

        Parameters
        ----------
        poses : sequence of 16 numbers
            Matrices [4, 4] from camera to world, row by row; a translation of length 1 is the model's unit.
        intrinsics : sequence of 4 numbers, optional
            Focal lengths and centre of the camera, in pixels of a picture of 480 x 832; default: the last intrinsics
            that were sent.

        Raises
        ------
        UsageError
            If a matrix is not a camera pose, or too many poses wait.
        """
        checked = checked_poses(np.asarray(poses, np.float64).reshape(-1, 4, 4))
        if len(self._poses) + len(checked) > MAX_POSES_AHEAD:
            raise UsageError(
                f"{len(self._poses)} poses wait, at most {MAX_POSES_AHEAD} do: send them as they are shown"
            )
        if intrinsics is not None:
            stream = self._stream
            self._intrinsics = recorded_intrinsics(intrinsics, stream.height, stream.width)[0]
        self._poses.extend(checked)

    def next_chunk(self) -> Mapping[str, NDArray[np.float32]]:
        """Move the camera on by a chunk, and return the chunk's inputs by name; if the poses end inside the chunk, the
        camera rests from there on.
        """
        steered = self._keyboard.next_chunk()
        if not self._poses:
            self._before = None
            return steered
        count = self._stream.chunk_frames
        poses = [self._poses.popleft() for _ in range(min(count, len(self._poses)))]
        poses += [poses[-1]] * (count - len(poses))
        moved = framewise(np.stack(poses), self._before)
        self._before = poses[-1]
        own = self._intrinsics
        return inputs_of(
            moved, steered[INTRINSICS].astype(np.float64) if own is None else np.broadcast_to(own, (count, 4))
        )

    def reset(self) -> None:
        """Return the camera to its start pose and drop the poses that were sent; held keys stay held."""
        self._keyboard.reset()
        self._keyboard.press(self._held)
        self._poses.clear()
        self._before = self._intrinsics = None

    def state(self) -> dict[str, Any]:
        """Return the camera's state as a JSON value, for `load`."""
        return {
            "keyboard": self._keyboard.state(),
            "held": sorted(self._held),
            "poses": [pose.tolist() for pose in self._poses],
            "before": None if self._before is None else self._before.tolist(),
            "intrinsics": None if self._intrinsics is None else self._intrinsics.tolist(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a camera state that `state` returned."""
        self._keyboard.load(state["keyboard"])
        self._held = frozenset(state["held"])
        self._poses = deque(np.asarray(pose, np.float64) for pose in state["poses"])
        before, intrinsics = state["before"], state["intrinsics"]
        self._before = None if before is None else np.asarray(before, np.float64)
        self._intrinsics = None if intrinsics is None else np.asarray(intrinsics, np.float64)

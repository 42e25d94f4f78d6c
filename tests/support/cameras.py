"""Cameras of tests: the runtime's control, on its own or of an artifact. No tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from seko_runtime.controls.camera import CameraControl
from seko_runtime.video.manifest import VideoManifest

LETTERS = "wasdijkl"


def camera(height: int, width: int, chunk_frames: int, keys: Any = None, **settings: Any) -> CameraControl:
    """A camera at rest, or one that follows a text of keys, or steps of letters."""
    control = CameraControl.without_artifact(height, width, chunk_frames, **settings)
    if keys is not None and not isinstance(keys, str):
        keys = text_of(keys)
    control.take({"held": []} if not keys else {"keys": keys})
    return control


def camera_of(manifest: VideoManifest, keys: str = "") -> CameraControl:
    """A camera for an artifact."""
    s = manifest.workload.stream
    return camera(s.height, s.width, s.chunk_frames, keys)


def text_of(steps: Iterable[Iterable[str]]) -> str:
    return ",".join(f"{''.join(sorted(step)) or 'none'}-1" for step in steps)


def chunk_of(control: CameraControl) -> dict[str, np.ndarray]:
    """The inputs of a chunk, and the camera moved on by it."""
    inputs = dict(control.next_chunk())
    control.advance()
    return inputs

"""The options ``--keys``, ``--poses`` and ``--intrinsics`` of `run`, from which the host computes the camera inputs of
every chunk."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import UsageError
from seko_runtime.media_files.arrays import load_array
from seko_runtime.video.conditioning import CameraPath, KeyboardCamera
from seko_runtime.video.conditioning.poses import INTRINSICS, POSES
from seko_runtime.video.manifest import VideoManifest

DEFAULT_CHUNKS = 4


def camera_inputs(
    options: argparse.Namespace, manifest: VideoManifest, files: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Return the camera inputs of all chunks of a run by name, each [chunks, ...], made from the options.

    Without ``--chunks`` the function sets ``options.chunks`` to the number of chunks for which keys or poses last;
    without keys and poses, to 4.

    Raises
    ------
    UsageError
        If the options contradict each other, the artifact has no camera, or a file has invalid poses, intrinsics or
        keys.
    """
    keys, poses = options.keys, options.poses
    if keys is None and poses is None:
        if options.intrinsics is not None:
            raise UsageError("--intrinsics belongs to --poses or --keys: give one of them")
        options.chunks = options.chunks or DEFAULT_CHUNKS
        return {}
    if keys is not None and poses is not None:
        raise UsageError("--keys and --poses both say where the camera goes; give one")
    names = {spec.name for spec in manifest.caller_inputs}
    if not {POSES, INTRINSICS} <= names:
        option = "--keys" if poses is None else "--poses"
        raise UsageError(
            f"{option}: this artifact's model has no camera; its inputs: {', '.join(names) or 'none'}"
        )
    if both := sorted({POSES, INTRINSICS} & set(files)):
        raise UsageError(
            f"--input {both[0]} contradicts {'--keys' if poses is None else '--poses'}; give one"
        )
    s = manifest.workload.stream
    intrinsics = None if options.intrinsics is None else load_array(options.intrinsics, "--intrinsics")
    if poses is None:
        camera: Any = KeyboardCamera(s.height, s.width, s.chunk_frames, keys=keys, intrinsics=intrinsics)
        latent_frames = -(-camera.steps_left // camera.settings.steps_per_frame) + 1
        chunks = -(-latent_frames // s.chunk_frames)
    else:
        if intrinsics is None:
            raise UsageError(
                "--poses needs --intrinsics FILE.npy: focal lengths and centre for 480 x 832 pixels"
            )
        camera = CameraPath(
            load_array(poses, "--poses"),
            intrinsics,
            height=s.height,
            width=s.width,
            chunk_frames=s.chunk_frames,
        )
        chunks = len(camera)
    options.chunks = options.chunks or chunks
    camera_chunks = [camera.next_chunk() for _ in range(options.chunks)]
    return {name: np.stack([chunk[name] for chunk in camera_chunks]) for name in (POSES, INTRINSICS)}

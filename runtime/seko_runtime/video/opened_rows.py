"""Opening of a pool's video streams in this process, with the pool's own number of denoise passes or timestep shift."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import Memory, Tensor
from seko_runtime.errors import ArtifactError, UsageError
from seko_runtime.executor.resolved import Programs
from seko_runtime.sessions.loaded import Loaded
from seko_runtime.sessions.rows import opened_rows
from seko_runtime.video.contract import resolve_video
from seko_runtime.video.local_rows import LocalVideoRows
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.options import VideoOptions
from seko_runtime.video.schedule import rescheduled


def open_video_rows(loaded: Loaded[VideoManifest], options: VideoOptions) -> LocalVideoRows:
    """Return the streams of a pool in this process, ready to run.

    Raises
    ------
    UsageError
        If an option of the pool is impossible for the artifact.
    DeviceMemoryError
        If the pool's tensors do not fit on the device; nothing was allocated.
    """

    def open_rows(memory: Memory) -> LocalVideoRows:
        return LocalVideoRows(_with_schedule(loaded, options, memory), options, memory)

    manifest = loaded.manifest
    return opened_rows(loaded, open_rows, check=manifest.pool is not None or manifest.target.device != "cpu")


def _with_schedule(
    loaded: Loaded[VideoManifest], options: VideoOptions, memory: Memory
) -> Loaded[VideoManifest]:
    """Return the artifact with the denoise passes and timesteps of a pool's options."""
    manifest, tables = rescheduled(loaded.manifest, options.steps, options.shift)
    if not tables:
        return loaded
    weights = {**loaded.weights, **_uploaded(manifest, tables, memory)}
    return replace(loaded, manifest=manifest, programs=_resolved_anew(manifest), weights=weights)


def _resolved_anew(manifest: VideoManifest) -> Programs:
    """Return the programs of a manifest with another number of denoise passes; UsageError if anything else depends on
    that number."""
    try:
        return resolve_video(manifest)
    except ArtifactError as error:
        passes = manifest.workload.schedule.denoise_passes
        raise UsageError(f"this artifact cannot run {passes} denoise passes: {error}") from None


def _uploaded(
    manifest: VideoManifest, tables: Mapping[str, NDArray[np.generic]], memory: Memory
) -> dict[str, Tensor]:
    """Upload to the device the tables that replace weights."""
    with memory.ordered():
        tensors = {
            weight.name: memory.allocate(weight) for weight in manifest.weights if weight.name in tables
        }
        for name, tensor in tensors.items():
            memory.write(tensor, tables[name])
    return tensors

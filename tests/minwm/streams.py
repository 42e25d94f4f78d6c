"""Small minWM streams for the tests, beside their reference; no tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.layers.choice import INTRINSICS, POSES
from seko_export.families.minwm.family import FAMILY
from seko_export.families.minwm.keys import minwm_shapes
from seko_export.families.minwm.model import MinwmModel
from seko_export.families.minwm.presets import PRESETS, TINY
from tests.truth.eager_stream import EagerStream, Pass, random_tensors
from tests.truth.naive_minwm import NaiveMinwm, camera_matrix

PRESET = PRESETS[TINY]
MODEL = MinwmModel.of(PRESET.model)


def minwm_config(
    scheme: str = "fp32", *, layout: Mapping[str, Any] | None = None, **changes: Any
) -> VideoBuild:
    """Return a build of the tiny preset for the CPU."""
    assert PRESET.schedule is not None
    stream = replace(PRESET.stream, **(layout or {}))
    config = VideoBuild(PRESET.model, VideoConfig(stream, PRESET.schedule, scheme), TargetConfig("cpu"))
    return config.changed(**changes)


def random_checkpoint(seed: int = 0) -> dict[str, Tensor]:
    """Return random weights by the checkpoint's names, scaled so that every one shows in the output: the camera's
    projection, which training begins at zero, too."""
    return random_tensors(minwm_shapes(PRESET.model), seed)


def naive_of(config: VideoBuild, checkpoint: Mapping[str, Tensor], text: Tensor) -> NaiveMinwm:
    """Return the reference of one row."""
    return NaiveMinwm(checkpoint, PRESET.model.heads, config.workload.stream.ring_frames, text)


def first_velocity(stream: EagerStream, first: int, feed: Sequence[Tensor] | None = None) -> Tensor:
    """Run a chunk, and return the velocity of its first pass."""
    velocity = stream.run_chunk([first], [3], feed=feed)[0].velocity
    assert velocity is not None
    return velocity


def look(stream: EagerStream, cameras: Mapping[str, Tensor]) -> None:
    """Give the cameras of the next chunk."""
    for name, values in cameras.items():
        stream.buffers[f"input.{name}"].copy_(values)


def cameras_of(config: VideoBuild, chunk: int) -> dict[str, Tensor]:
    """Return the goldens' cameras, [B, F, ...] by name."""
    return dict(FAMILY.golden_inputs(config, chunk))


def naive_velocity(
    naive: NaiveMinwm, config: VideoBuild, done: Pass, row: int, first: int, cameras: Mapping[str, Tensor]
) -> Tensor:
    """Return the reference's velocity of a row's pass, and have it keep the chunk's last pass."""
    s = config.workload.stream
    matrices = [
        camera_matrix(pose.numpy(), float(lens[0]) / s.width, float(lens[1]) / s.height)
        for pose, lens in zip(cameras[POSES][row], cameras[INTRINSICS][row], strict=True)
    ]
    return naive.step(done.latents[row], done.timestep, first, matrices, commit=done.kept)

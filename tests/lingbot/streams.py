"""Small lingbot streams for the tests, beside their reference; no tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.layers.choice import INTRINSICS, POSES
from seko_export.families.lingbot.family import FAMILY
from seko_export.families.lingbot.keys import lingbot_shapes
from seko_export.families.lingbot.presets import PRESETS, TINY
from seko_export.families.wan_layout import picture_condition as condition
from tests.truth.eager_stream import random_tensors
from tests.truth.naive_lingbot import NaiveLingbot, Window, naive_plucker

PRESET = PRESETS[TINY]
INPUTS = {
    POSES: "input.camera",
    INTRINSICS: "input.intrinsics",
    condition.TABLE: "input.condition",
}


def lingbot_config(
    scheme: str = "fp32", *, how: str = "chunk", layout: Mapping[str, Any] | None = None, **changes: Any
) -> VideoBuild:
    """Return a build of the tiny preset for the CPU; ``how`` it uses the camera."""
    stream = replace(PRESET.stream, **(layout or {}))
    config = VideoBuild(
        replace(PRESET.model, camera=how), VideoConfig(stream, PRESET.schedule, scheme), TargetConfig("cpu")
    )
    return config.changed(**changes)


def random_checkpoint(seed: int = 0) -> dict[str, Tensor]:
    """Return random weights by the checkpoint's names, scaled so that every one shows in the output."""
    # Rays are numbers of 0.5, and the same ones over and over: kept small, the layers stay far from overflow.
    return {
        name: 0.3 * weight if "cam_s" in name else weight
        for name, weight in random_tensors(lingbot_shapes(PRESET.model), seed).items()
    }


class Reference:
    """The naive model of one row, fed the inputs of each chunk as the stream under test is."""

    def __init__(
        self, config: VideoBuild, checkpoint: Mapping[str, Tensor], text: Tensor, table: Tensor
    ) -> None:
        s = config.workload.stream
        window = Window(s.chunk_frames, s.sink_frames, s.ring_frames)
        self.config, self.table = config, table
        self.model = NaiveLingbot(checkpoint, config.model.heads, window, text)
        self.has_camera = config.model.camera != "none"
        self.clean: list[Tensor] = []
        self.clean_time = 0.0
        self.plucker: list[Tensor] = []

    def begin(self, inputs: Mapping[str, Tensor]) -> None:
        """Take the camera of the next chunk, [F, 3, 4] and [F, 4]."""
        s = self.config.workload.stream
        if self.has_camera:
            poses, intrinsics = inputs[POSES].numpy(), inputs[INTRINSICS].numpy()
            self.plucker.append(naive_plucker(poses, intrinsics, s.height, s.width))

    def velocity(self, latents: Tensor, time: float) -> Tensor:
        """Return the velocity of the chunk [16, F, h, w] at a time, behind all chunks that were committed."""
        every = torch.cat([*self.clean, latents], 1)
        frames, f = every.shape[1], latents.shape[1]
        times = torch.full((frames,), self.clean_time)
        times[-f:] = time
        rows = self.table[:, [min(frame, 29) for frame in range(frames)]]
        plucker = torch.cat(self.plucker) if self.has_camera else None
        return self.model.velocity(every, times, rows, plucker)[:, -f:]

    def commit(self, latents: Tensor, time: float = 0.0) -> None:
        """Keep the latents of a pass that later chunks see, and its time, which is the same in all chunks."""
        self.clean.append(latents.clone())
        self.clean_time = time


def given_of(config: VideoBuild, chunk: int | None) -> dict[str, Tensor]:
    """Return the goldens' inputs: they move and turn the camera."""
    return dict(FAMILY.golden_inputs(config, chunk))

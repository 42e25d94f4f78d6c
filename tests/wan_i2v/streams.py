"""Small image-to-video streams for the tests, beside their reference; no tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seko_export.checkpoints.random import random_weight
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.wan_i2v.family import FAMILY
from seko_export.families.wan_i2v.keys import i2v_shapes
from seko_export.families.wan_i2v.presets import PRESETS, TINY, TINY_LAST
from seko_export.families.wan_layout import picture_branch, picture_condition
from seko_export.families.wan_layout.keys import spread
from tests.truth.eager_stream import EagerStream
from tests.truth.naive_i2v import NaiveI2v, naive_condition
from tests.truth.naive_lingbot import Window

ONE, TWO, BARE = "one picture", "two pictures", "no picture branch"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    ONE: (TINY, {}),
    TWO: (TINY_LAST, {}),
    BARE: (TINY, {"image_dim": 0}),  # the form of Wan 2.2 A14B
}


def i2v_config(
    kind: str = ONE,
    scheme: str = "fp32",
    *,
    text_tokens: int = 8,
    layout: Mapping[str, Any] | None = None,
    **changes: Any,
) -> VideoBuild:
    """Return a build of a tiny preset for the CPU."""
    name, sizes = KINDS[kind]
    preset = PRESETS[name]
    stream = replace(preset.stream, **(layout or {}))
    schedule = PRESETS["wan-i2v-14b"].schedule
    assert schedule is not None
    config = VideoBuild(
        replace(preset.model, text_tokens=text_tokens, **sizes),
        VideoConfig(stream, schedule, scheme),
        TargetConfig("cpu"),
    )
    return config.changed(**changes)


def random_checkpoint(config: VideoBuild, seed: int = 0) -> dict[str, Tensor]:
    """Return random weights by Wan's names, scaled so that every one shows in the output."""
    return {
        name: random_weight(name, shape, seed=seed, dtype=torch.float32, spread=spread)
        for name, shape in i2v_shapes(config.model).items()
    }


def begun(config: VideoBuild, checkpoint: Mapping[str, Tensor], text: Tensor, last_frame: int) -> EagerStream:
    """Return a stream of eager pieces with the golden's condition and features, and a last picture at a frame."""
    stream = EagerStream(config, checkpoint, text)
    for name, value in FAMILY.golden_inputs(config, None).items():
        stream.buffers[f"input.{name}"].copy_(value)
    if f"input.{picture_condition.LAST_FRAME}" in stream.buffers:
        stream.buffers[f"input.{picture_condition.LAST_FRAME}"].fill_(last_frame)
    stream.set_text(text)
    return stream


class Reference:
    """The naive model of one row in float64, which sees what went into each pass."""

    def __init__(
        self, config: VideoBuild, checkpoint: Mapping[str, Tensor], text: Tensor, last_frame: int
    ) -> None:
        s, z = config.workload.stream, config.model.out_channels
        steady = {name: value[0].double() for name, value in FAMILY.golden_inputs(config, None).items()}
        table = steady[picture_condition.TABLE]
        self.first, self.last = table[4 : 4 + z], table[4 + z :] if len(table) > 4 + z else None
        self.last_frame, self.chunk_frames = last_frame, s.chunk_frames
        self.model = NaiveI2v(
            {name: weight.double() for name, weight in checkpoint.items()},
            config.model.heads,
            Window(s.chunk_frames, s.sink_frames, s.ring_frames),
            text.double(),
            steady.get(picture_branch.FEATURES),
        )
        self.clean: list[Tensor] = []
        self.clean_time = 0.0

    def condition(self, frames: int) -> Tensor:
        """Return the condition [20, frames, h, w]."""
        return naive_condition(self.first, self.last, self.last_frame, frames)

    def velocity(self, latents: Tensor, time: float) -> Tensor:
        """Return the velocity of the chunk [16, F, h, w] at a time, behind all chunks that were committed."""
        every = torch.cat([*self.clean, latents.double()], 1)
        times = torch.full((every.shape[1],), self.clean_time, dtype=torch.float64)
        times[-self.chunk_frames :] = time
        whole = self.model.velocity(every, times, self.condition(every.shape[1]), None)
        return whole[:, -self.chunk_frames :]

    def commit(self, latents: Tensor, time: float = 0.0) -> None:
        """Keep the latents of a pass that later chunks see, and its time, which is the same in all chunks."""
        self.clean.append(latents.double())
        self.clean_time = time

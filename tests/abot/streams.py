"""Small ABot-World streams for the tests, beside their reference; no tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.abot.actions import ACTIONS
from seko_export.families.abot.family import FAMILY
from seko_export.families.abot.keys import abot_shapes
from seko_export.families.abot.presets import PRESETS, TINY
from tests.truth.eager_stream import EagerStream, Pass, random_tensors
from tests.truth.naive_abot import NaiveAbot

PRESET = PRESETS[TINY]
UNSHUFFLE = 2  # of the tiny adapter: 32 channels times 2 x 2 pixels


def abot_config(
    scheme: str = "fp32", *, layout: Mapping[str, Any] | None = None, **changes: Any
) -> VideoBuild:
    """Return a build of the tiny preset for the CPU."""
    stream = replace(PRESET.stream, **(layout or {}))
    config = VideoBuild(PRESET.model, VideoConfig(stream, PRESET.schedule, scheme), TargetConfig("cpu"))
    return config.changed(**changes)


def random_checkpoint(seed: int = 0) -> dict[str, Tensor]:
    """Return random weights by the checkpoint's names, scaled so that every one shows in the output."""
    return random_tensors(abot_shapes(PRESET.model), seed)


def naive_of(config: VideoBuild, checkpoint: Mapping[str, Tensor], text: Tensor) -> NaiveAbot:
    """Return the reference of one row."""
    m, s = PRESET.model, config.workload.stream
    return NaiveAbot(checkpoint, m.heads, s.ring_frames, m.reference_side, UNSHUFFLE, text)


def press(stream: EagerStream, keys: Sequence[Tensor] | Tensor) -> None:
    """Give the keys [B, F, 8] of the next chunk."""
    stream.buffers[f"input.{ACTIONS}"].copy_(torch.stack(list(keys)))


def keys_of(config: VideoBuild, chunk: int) -> Tensor:
    """Return the goldens' keys, [B, F, 8] uint8."""
    return FAMILY.golden_inputs(config, chunk)[ACTIONS]


def naive_velocity(
    naive: NaiveAbot, done: Pass, row: int, first_frame: int, keys: Tensor, still: int = 0
) -> Tensor:
    """Return the reference's velocity of a row's pass, and have it keep the chunk's last pass; ``still`` conditioning
    frames begin the chunk."""
    latents = done.latents[row]
    times = [0.0] * still + [done.timestep] * (latents.shape[1] - still)
    return naive.step(latents, times, first_frame, keys, commit=done.kept)

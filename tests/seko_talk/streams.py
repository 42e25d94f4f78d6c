"""Small Seko-Talk streams for the tests, beside their reference; no tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seko_export.checkpoints.random import random_weight
from seko_export.config.build import BuildConfig
from seko_export.families.seko_talk import audio, picture
from seko_export.families.seko_talk.family import FAMILY
from seko_export.families.seko_talk.keys import seko_shapes, spread, to_theirs
from seko_export.families.seko_talk.presets import PRESETS, TINY
from tests.truth.eager_stream import EagerStream
from tests.truth.naive_seko_talk import NaiveTalk, Window, by_pass

PRESET = PRESETS[TINY]
BUFFERS = {name: f"input.{name}" for name in (audio.AUDIO, audio.MASKS, picture.FEATURES)}


def talk_config(
    scheme: str = "fp32",
    *,
    model: Mapping[str, Any] | None = None,
    layout: Mapping[str, Any] | None = None,
    **changes: Any,
) -> BuildConfig:
    """Return a build of the tiny preset for the CPU; latents are not rounded, so that float32 can be compared."""
    schedule = replace(PRESET.schedule, sampler="euler")
    stream = replace(PRESET.stream, **(layout or {}))
    config = BuildConfig(replace(PRESET.model, **(model or {})), stream, schedule, scheme, "cpu")
    return replace(config, **changes)


def random_checkpoint(config: BuildConfig, seed: int = 0) -> dict[str, Tensor]:
    """Return random weights by the exporter's names, scaled so that every one shows in the output."""
    return {
        name: random_weight(name, shape, seed=seed, dtype=torch.float32, spread=spread)
        for name, shape in seko_shapes(config.model).items()
    }


def weights_of(config: BuildConfig, checkpoint: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the artifact's weights and tables of a build whose cache is exact."""
    graph = FAMILY.graph(config)
    made = dict(FAMILY.weights(graph.pieces, checkpoint)) | FAMILY.tables(config, checkpoint)
    return made | config.schedule.tables(config.as_batch.stream)


def random_reference(config: BuildConfig, seed: int = 4) -> Tensor:
    """Return latents [B, C, R, h, w] of the portraits."""
    s = config.stream
    shape = (s.batch, config.model.in_channels, s.reference_frames, s.latent_height, s.latent_width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def begun(
    config: BuildConfig, checkpoint: Mapping[str, Tensor], text: Tensor, reference: Tensor
) -> EagerStream:
    """Return a stream of eager pieces whose picture, masks and reference are set."""
    stream = EagerStream(config, checkpoint, text)
    for name, value in FAMILY.golden_inputs(config, None).items():
        stream.buffers[BUFFERS[name]].copy_(value)
    stream.set_text(text)
    stream.write_references(reference)
    return stream


class Reference:
    """One naive model for each pass, which sees what went into that pass: as many histories as passes."""

    def __init__(
        self,
        config: BuildConfig,
        checkpoint: Mapping[str, Tensor],
        text: Tensor,
        reference: Tensor,
        row: int = 0,
    ) -> None:
        s, model = config.stream, config.model
        steady = FAMILY.golden_inputs(config, None)
        features, masks = steady.get(picture.FEATURES), steady.get(audio.MASKS)
        self.model = NaiveTalk(
            {to_theirs(name): tensor for name, tensor in checkpoint.items()},
            model.heads,
            model.audio_heads,
            Window(s.chunk_frames, s.sink_frames, s.layer_rings or (s.ring_frames,), s.reference_frames),
            text[row],
            None if features is None else features[row],
            model.ref_state,
        )
        self.masks = None if masks is None else masks[row]
        self.reference, self.row, self.frames = reference[row], row, s.chunk_frames
        self.history: list[list[Tensor]] = [[] for _ in config.schedule.timesteps]
        self.audio: list[Tensor] = []

    def begin(self, features: Tensor) -> None:
        """Take the audio of the next chunk, [B, S, F, M, width]."""
        self.audio.append(features[self.row])

    def velocity(self, number: int, latents: Tensor, time: float) -> Tensor:
        """Return the velocity of the chunk [16, F, h, w] in pass ``number``, and keep what went in."""
        self.history[number].append(latents[self.row].clone())
        every = self.model.velocity(
            by_pass(self.history[number]), time, self.reference, torch.cat(self.audio, 1), self.masks
        )
        return every[:, -self.frames :]

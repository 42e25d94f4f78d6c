"""Small Matrix-Game streams for the tests, beside their reference; no tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seko_export.checkpoints.random import random_weight
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.matrix_game import actions
from seko_export.families.matrix_game.family import FAMILY
from seko_export.families.matrix_game.keys import matrix_game_shapes
from seko_export.families.matrix_game.model import MatrixGameModel
from seko_export.families.matrix_game.presets import PRESETS, TINY, TINY_GTA, TINY_TEMPLE_RUN
from seko_export.families.wan_layout import picture_branch, picture_condition
from seko_export.families.wan_layout.keys import spread
from tests.truth.eager_stream import EagerStream, Pass
from tests.truth.naive_matrix_game import NaiveMatrixGame

GAMES = {"universal": TINY, "gta": TINY_GTA, "templerun": TINY_TEMPLE_RUN}
HISTORY = 15  # video frames of the inputs before the one that a chunk's first latent frame ends with


def game_config(
    game: str = "universal",
    scheme: str = "fp32",
    *,
    layout: Mapping[str, Any] | None = None,
    action_layers: int = 1,
    **changes: Any,
) -> VideoBuild:
    """Return a build of a tiny preset for the CPU."""
    preset = PRESETS[GAMES[game]]
    assert preset.schedule is not None
    stream = replace(preset.stream, **(layout or {}))
    model = replace(MatrixGameModel.of(preset.model), action_layers=action_layers)
    config = VideoBuild(model, VideoConfig(stream, preset.schedule, scheme), TargetConfig("cpu"))
    return config.changed(**changes)


def random_checkpoint(config: VideoBuild, seed: int = 0) -> dict[str, Tensor]:
    """Return random weights by the authors' names, scaled so that every one shows in the output: the action modules'
    projections are away from zero, and the stored norms, which are not used, are far from 1."""
    weights = {}
    for name, shape in matrix_game_shapes(config.model).items():
        weights[name] = random_weight(name, shape, seed=seed, dtype=torch.float32, spread=spread)
        if "_attn_" in name and "_norm" in name:
            weights[name] += 2.0
        if (
            ".proj_" in name or name == "img_emb.proj.4.weight"
        ):  # residuals of about the size that a text's has
            weights[name] *= 0.5
    return weights


class Played:
    """The actions of a stream's video frames, by the frame's number, and what a chunk's inputs hold of them."""

    def __init__(self, config: VideoBuild, seed: int = 0, frames: int = 1200) -> None:
        model, self.stream = MatrixGameModel.of(config.model), config.workload.stream
        generator = torch.Generator().manual_seed(seed)
        self.keyboard = list(torch.rand(frames, model.keyboard, generator=generator).round())
        self.mouse = list(0.2 * torch.rand(frames, 2, generator=generator) - 0.1) if model.mouse else None

    def inputs(self, first: int) -> dict[str, np.ndarray]:
        """Return the inputs of the chunk whose first latent frame has this number."""
        frames = [max(0, 4 * first - HISTORY + at) for at in range(12 + 4 * self.stream.chunk_frames)]
        parts = {actions.KEYBOARD_INPUT: self.keyboard, actions.MOUSE_INPUT: self.mouse}
        return {
            name: torch.stack([part[frame] for frame in frames]).numpy()
            for name, part in parts.items()
            if part is not None
        }


class GameStream(EagerStream):
    """A stream of eager pieces with the golden's condition and features."""

    def __init__(self, config: VideoBuild, checkpoint: Mapping[str, Tensor]) -> None:
        self.played: list[Played] = [Played(config, row) for row in range(config.workload.stream.batch)]
        super().__init__(config, checkpoint, None)
        for name, value in FAMILY.golden_inputs(config, None).items():
            self.buffers[f"input.{name}"].copy_(value)
        self.set_text(None)

    def run_chunk(
        self,
        first_frames: Sequence[int],
        seeds: Sequence[int],
        feed: Sequence[Tensor] | None = None,
        conditioning: tuple[Sequence[int], Tensor] | None = None,
    ) -> list[Pass]:
        """Run one chunk with the actions of its video frames."""
        self._play(first_frames)
        return super().run_chunk(first_frames, seeds, feed, conditioning)

    def write_cache(self, first: int, latents: Tensor) -> None:
        """Write a finished chunk's part of the caches: its context pass alone."""
        self._play([first])
        self._stand_at([first])
        self._run(self.programs["begin"], number=0)
        self.buffers["latents"].copy_(latents)
        self._run(self.programs["context"], len(self.config.workload.schedule.timesteps))

    def _play(self, first_frames: Sequence[int]) -> None:
        each = [played.inputs(first) for played, first in zip(self.played, first_frames, strict=True)]
        for name in each[0]:
            self.buffers[f"input.{name}"].copy_(torch.stack([torch.from_numpy(row[name]) for row in each]))


class Reference:
    """The naive model of one row in float64, which sees what went into each pass."""

    def __init__(
        self, config: VideoBuild, checkpoint: Mapping[str, Tensor], played: Played, row: int = 0
    ) -> None:
        steady = {name: value[row].double() for name, value in FAMILY.golden_inputs(config, None).items()}
        self.played = played
        self.model = NaiveMatrixGame(
            {name: weight.double() for name, weight in checkpoint.items()},
            config.model.heads,
            config.workload.stream.ring_frames,
            steady[picture_branch.FEATURES],
            steady[picture_condition.TABLE][4:],
        )

    def velocity(self, latents: Tensor, time: float, first: int, *, commit: bool = False) -> Tensor:
        """Return the velocity of the chunk [16, F, h, w] whose first latent frame is ``first``."""
        return self.model.velocity(
            latents.double(), time, first, self.played.keyboard, self.played.mouse, commit=commit
        )

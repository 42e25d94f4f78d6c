"""VoxCPM2 as a model family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from seko_export.checkpoints.errors import CheckpointNotFoundError
from seko_export.checkpoints.key_table import KeyTable, Naming
from seko_export.checkpoints.load import Checkpoint
from seko_export.checkpoints.random import random_checkpoint
from seko_export.checkpoints.sources import AS_STORED, LoadOptions
from seko_export.engines.piece import Piece
from seko_export.engines.weight_source import WeightSource
from seko_export.errors import CheckpointError, UsageError
from seko_export.families.base import MediaTensors, ModelGraph
from seko_export.families.layers.weights import model_weights
from seko_export.families.speech.config import SpeechBuild
from seko_export.families.speech.family import SpeechFamily
from seko_export.families.voxcpm2.config import VoxCpm2Config
from seko_export.families.voxcpm2.graph import speech_graph
from seko_export.families.voxcpm2.keys import FORMATS, load_voxcpm2, voxcpm2_shapes
from seko_export.families.voxcpm2.presets import PRESETS
from seko_export.families.voxcpm2.recognise import recognise
from seko_export.families.voxcpm2.solver import still_steps
from seko_export.families.voxcpm2.weights import SpeechWeights, speech_tables
from seko_export.media.audio_vae.files import BOUNDARIES, audio_vae_shapes, load_audio_vae, spread

TOKENIZER_FILE = "tokenizer.json"
VAE_FILE = "audiovae."  # before the keys of the audio VAE's file


class VoxCpm2Family(SpeechFamily):
    """The family of VoxCPM2 models, whose checkpoint is a folder that also holds an audio VAE."""

    name = "voxcpm2"
    presets = PRESETS

    @property
    def keys(self) -> KeyTable:
        """Names of the tensors in the model's file; the audio VAE has a file of its own."""
        namings = (Naming(self.name, str, str),)
        return KeyTable(FORMATS, voxcpm2_shapes, namings, (), "base_lm.embed_tokens.weight", subfolders=())

    def recognise(self, folder: Path) -> VoxCpm2Config | None:
        """Return the config of the model in a folder, or None if the folder's config.json describes another model."""
        return recognise(folder)

    def tokenizer(self, folder: Path) -> Path:
        """Return the tokenizer's file in the model's folder."""
        file = folder / TOKENIZER_FILE
        if not file.is_file():
            raise CheckpointNotFoundError(
                f"no {TOKENIZER_FILE} in {folder}: put the model's own there, or name one with --tokenizer"
            )
        return file

    def moving_steps(self, steps: int) -> int:
        """Return the number of solver steps that evaluate a velocity. The first steps of the flow-matching solver
        evaluate no velocity and only move the time."""
        return steps - still_steps(steps)

    def load(self, path: Path, model: Any, options: LoadOptions = AS_STORED) -> Checkpoint:
        """Open the two weight files in a model's folder and check all keys, shapes and dtypes; keys of the audio VAE
        get a prefix.
        """
        if not path.is_dir():
            raise CheckpointError(f"{path} is no folder: give that of the model, which holds {FORMATS}")
        if any(asked is not None for asked in (options.entry, options.first_entry, options.companion)):
            raise UsageError(f"{path} is of {self.name}, whose files have neither entries nor companions")
        weights, vae = load_voxcpm2(path, model, dtype=options.dtype), load_audio_vae(path, model.vae)
        return _with_vae(weights, vae)

    def random(self, model: Any, seed: int) -> Checkpoint:
        """Return random weights of a model, and of its audio VAE in float32, as `load` returns them."""
        shapes = audio_vae_shapes(model.vae)
        del shapes[BOUNDARIES]  # no weight
        vae = random_checkpoint(model.vae, shapes, seed=seed, spread=spread, dtype=torch.float32)
        return _with_vae(super().random(model, seed), vae)

    def graph(self, config: SpeechBuild) -> ModelGraph:
        """Return the engines, programs and buffers of a VoxCPM2 build."""
        return speech_graph(config)

    def weights(
        self, pieces: Mapping[str, Piece], checkpoint: WeightSource, media: MediaTensors | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of all engines by name."""
        return model_weights(pieces, _weights(checkpoint), media)

    def tables(self, config: SpeechBuild, checkpoint: WeightSource) -> Mapping[str, Tensor]:
        """Return the constants of a build: rotary tables, and time tokens and step sizes of the solver."""
        model = cast(VoxCpm2Config, config.model)
        tables = speech_tables(checkpoint, model, config.workload.steps, config.target.dtype)
        return {name: table.contiguous() for name, table in tables.items()}


def _with_vae(weights: Checkpoint, vae: Checkpoint) -> Checkpoint:
    named = {f"{VAE_FILE}{name}": source for name, source in vae.sources.items()}
    return replace(weights, sources={**weights.sources, **named})


class _OfVae:
    """The audio VAE's tensors among all tensors of a checkpoint folder."""

    def __init__(self, folder: WeightSource) -> None:
        self._folder = folder

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor of the audio VAE by its name in the file, in float32, the VAE's compute dtype."""
        return self._folder[f"{VAE_FILE}{name}"].float()


def _weights(checkpoint: WeightSource) -> SpeechWeights:
    """Return the weights of a checkpoint folder that `VoxCpm2Family.load` opened, by the engines' names."""
    model = cast(VoxCpm2Config, cast(Checkpoint, checkpoint).config)
    return SpeechWeights(checkpoint, _OfVae(checkpoint), model)


FAMILY = VoxCpm2Family()

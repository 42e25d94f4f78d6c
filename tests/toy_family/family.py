"""A model family of its own: a camera beside the latents, and attention to it behind each feed-forward.

The camera is an input of the caller, `CAMERA` numbers a latent frame. Nothing outside of `tests` knows of this file: a
build finds it by ``ModelConfig.family``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from seko_export.checkpoints.key_table import KeyTable, Naming
from seko_export.checkpoints.sources import OpenedFiles
from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.engines.piece import Piece
from seko_export.engines.weight_source import WeightSource
from seko_export.families.base import MediaTensors, ModelGraph
from seko_export.families.layers.block import attention
from seko_export.families.layers.causal_dit import Embed
from seko_export.families.layers.choice import LayerChoice
from seko_export.families.layers.layer_pieces import BLOCK
from seko_export.families.layers.pieces import make_buffers, make_pieces, make_programs
from seko_export.families.layers.weights import BEFORE
from seko_export.families.recognition import NAMES, Fact, Recognised, Source, stream_facts
from seko_export.families.video import CacheProbe, Preset, VideoFamily
from seko_runtime.format.manifest import InputSpec

NAME = "tests.toy_family.family:FAMILY"
CAMERA = 3
MODEL = ModelConfig(
    name="toy-camera",
    layers=2,
    dim=64,
    heads=2,
    ffn_dim=96,
    in_channels=4 + CAMERA,
    out_channels=4,
    text_dim=24,
    text_tokens=6,
    freq_dim=32,
    family=NAME,
)
STREAM = StreamConfig(32, 32, chunk_frames=2, sink_frames=1, ring_frames=4)
# The checkpoint's own words for those of the shared layers.
WORDS = {"blocks": "layer", "self_attn": "past", "cross_attn": "words", "tail": "camera", "ffn": "mix"}


class CameraEmbed(Embed):
    """Embeds the latents and, as further channels of every patch, the camera."""

    def with_extra_channels(self, latents: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        """Return [B, C + CAMERA, F, h, w] from latents [B, C, F, h, w] and a camera [B, F, CAMERA]."""
        camera = conditioning["camera"].transpose(1, 2)[..., None, None]  # [B, CAMERA, F, 1, 1]
        return torch.cat((latents, camera.expand(-1, -1, -1, *latents.shape[3:])), 1)


class CameraAttention(nn.Module):
    """One more attention term: from the hidden state to the camera of the chunk's frames."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = (model.heads, model.head_dim)
        self.query = nn.Linear(model.dim, model.dim, dtype=dtype)
        self.pose = nn.Linear(CAMERA, 2 * model.dim, dtype=dtype)
        self.out = nn.Linear(model.dim, model.dim, dtype=dtype)

    def forward(self, hidden: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        """Return the next hidden state [B, T, d]; the camera is [B, F, CAMERA]."""
        q = self.query(hidden).unflatten(-1, self.heads)
        k, v = self.pose(conditioning["camera"].to(hidden.dtype)).chunk(2, -1)  # [B, F, d] each
        seen = attention(q, k.unflatten(-1, self.heads), v.unflatten(-1, self.heads), None)
        return hidden + self.out(seen)


class CameraFamily(VideoFamily):
    """The family object."""

    name = NAME

    @property
    def presets(self) -> Mapping[str, Preset]:
        """Named defaults."""
        return {MODEL.name: Preset(MODEL, STREAM)}

    @property
    def keys(self) -> KeyTable:
        """The checkpoint's own words; its sizes are not read off them."""
        return KeyTable("safetensors", _shapes, (Naming("camera", str, str),), (), "patch_embedding.weight")

    def recognise(
        self, where: str, opened: OpenedFiles, stored: Mapping[str, Any] | None
    ) -> Recognised | None:
        """Return the one model that there is, if these are its tensors."""
        del where, stored
        if self.keys.naming_of(opened).shapes_in(opened) != _shapes(MODEL):
            return None
        model = {name: Fact(value, Source.SHAPES) for name, value in vars(MODEL).items() if name not in NAMES}
        return Recognised(NAME, "camera", model, stream_facts(STREAM, Source.FAMILY, NAME))

    def graph(self, config: VideoBuild) -> ModelGraph:
        """Return engines, programs, buffers and inputs of a build."""
        camera = InputSpec(
            "camera",
            (config.workload.stream.chunk_frames, CAMERA),
            "float32",
            "input.camera",
            "chunk",
            kind="pose",
        )
        names = (camera.name,)
        choice = LayerChoice((camera,), CameraEmbed, names, CameraAttention, names)
        pieces = make_pieces(config, choice)
        programs = make_programs(pieces, config.workload.stream)
        return ModelGraph(pieces, programs, make_buffers(config, choice), choice.inputs)

    def weights(
        self, pieces: Mapping[str, Piece], checkpoint: WeightSource, media: MediaTensors | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the artifact's weights by name: the checkpoint's, in the dtype that the engines take."""
        del media  # it has no encoder and no VAE
        for name, own, shape, dtype in _tensors(pieces):
            # The gate of the layer before meets an update of zeros: the tail stands between.
            tensor = torch.zeros(shape) if name.endswith(BEFORE) else checkpoint[own]
            yield name, tensor.to(dtype).contiguous()

    def golden_inputs(self, config: VideoBuild, chunk: int | None) -> Mapping[str, Tensor]:
        """Return a camera for a golden's chunk."""
        if chunk is None:
            return {}
        rows = [
            camera_of(config.workload.stream.chunk_frames, row, chunk)
            for row in range(config.workload.stream.batch)
        ]
        return {"camera": torch.stack(rows)}

    def cache_probe(self, config: VideoBuild) -> CacheProbe:
        """Return the layers and the embedding."""
        del config
        return CacheProbe(BLOCK, "embed")


def camera_of(frames: int, row: int, chunk: int) -> Tensor:
    """Return a camera [F, CAMERA], another one for each row and chunk."""
    generator = torch.Generator().manual_seed(1000 * row + chunk)
    return torch.randn(frames, CAMERA, generator=generator)


def random_checkpoint(model: ModelConfig = MODEL) -> dict[str, Tensor]:
    """Return random weights by the checkpoint's names, scaled so that every one shows in the output."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in _shapes(model).items():
        weight = torch.randn(shape, generator=generator)
        is_norm = "norm" in name and name.endswith("weight")
        wide = len(shape) > 1 and "modulation" not in name
        weights[name] = 1 + 0.1 * weight if is_norm else weight / shape[-1] ** 0.5 if wide else 0.1 * weight
    return weights


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a checkpoint, by the family's own words."""
    pieces = FAMILY.graph(
        VideoBuild(model, VideoConfig(STREAM, Schedule.warped((1000.0,)), "fp32"), TargetConfig("cpu"))
    ).pieces
    return {own: shape for _, own, shape, _ in _tensors(pieces)}


def _tensors(pieces: Mapping[str, Piece]) -> Iterator[tuple[str, str, tuple[int, ...], torch.dtype]]:
    """Yield the artifact's name, the checkpoint's name, shape and dtype of every weight, each once."""
    seen: set[str] = set()
    for piece in pieces.values():
        for layer in piece.served or (0,):
            for argument in piece.parameters:
                name = argument.ref.removeprefix("weight:").replace("{layer}", str(layer))
                if name not in seen:
                    seen.add(name)
                    own = ".".join(WORDS.get(word, word) for word in name.split("."))
                    yield name, own, argument.shape, argument.dtype


FAMILY = CameraFamily()

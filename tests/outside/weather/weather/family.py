"""The family: Wan's layers, and behind each feed-forward a push by the wind, which is an input of the caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from seko_export.checkpoints.key_table import KeyTable, Naming
from seko_export.checkpoints.sources import OpenedFiles
from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig
from seko_export.config.video import VideoBuild
from seko_export.families.layers.choice import LayerChoice
from seko_export.families.recognition import Recognised
from seko_export.families.video import Preset
from seko_export.families.wan_layout.family import WanLayoutFamily
from seko_export.families.wan_layout.keys import DIMENSIONS, spread, wan_shapes
from seko_export.families.wan_layout.recognise import recognise
from seko_runtime.format.manifest import ControlSpec, InputSpec
from seko_runtime.video.manifest import VideoManifest

WIND = "wind"  # the input: east and south of each latent frame, [F, 2] float32
MODEL = ModelConfig(
    name="weather-small",
    layers=2,
    dim=64,
    heads=2,
    ffn_dim=128,
    in_channels=16,
    out_channels=16,
    text_dim=128,
    text_tokens=48,
    freq_dim=64,
    family="weather",
)
STREAM = StreamConfig(48, 48, chunk_frames=3, sink_frames=3, ring_frames=6)


class Push(nn.Module):
    """Pushes each token by the wind of its latent frame."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.push = nn.Linear(2, model.dim, dtype=dtype)

    def forward(self, hidden: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        """Return the next hidden state [B, T, d]; the wind is [B, F, 2]."""
        pushed = self.push(conditioning[WIND].to(hidden.dtype))  # [B, F, d]
        return hidden + pushed.repeat_interleave(hidden.shape[1] // pushed.shape[1], 1)


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of each tensor of a checkpoint: Wan's, and the wind's of each layer."""
    own = {"weight": (model.dim, 2), "bias": (model.dim,)}
    return wan_shapes(model) | {
        f"blocks.{layer}.{WIND}.push.{name}": shape
        for layer in range(model.layers)
        for name, shape in own.items()
    }


NAMING = Naming("weather", str, str)
KEYS = KeyTable(
    formats="weather's safetensors",
    shapes=shapes,
    namings=(NAMING,),
    dimensions=DIMENSIONS,
    landmark="patch_embedding.weight",
    models={MODEL.name: MODEL},
    spread=spread,
)


class WeatherFamily(WanLayoutFamily):
    """The family object, which the entry point names."""

    name = "weather"
    presets: ClassVar[Mapping[str, Preset]] = {MODEL.name: Preset(MODEL, STREAM)}
    keys = KEYS
    module_names: ClassVar[Mapping[str, str]] = {
        "tail": WIND
    }  # a checkpoint's word for what is behind the feed-forward

    def layer_choice(self, config: VideoBuild) -> LayerChoice:
        """Return the input, and the module that takes it in each layer."""
        shape = (config.workload.stream.chunk_frames, 2)
        wind = InputSpec(WIND, shape, "float32", f"input.{WIND}", "chunk", kind=WIND)
        return LayerChoice((wind,), tail=Push, tail_inputs=(WIND,))

    def controls(self, config: VideoBuild, manifest: VideoManifest) -> tuple[ControlSpec, ...]:
        """Return the control with its keys: which way each of them blows."""
        del config, manifest
        keys = {"KeyH": [-1, 0], "KeyU": [0, -1], "KeyN": [0, 1], "KeyM": [1, 0]}
        return (ControlSpec(WIND, WIND, {WIND: WIND}, {"keys": keys}),)

    def recognise(
        self, where: str, opened: OpenedFiles, config_json: Mapping[str, Any] | None
    ) -> Recognised | None:
        """Return what the shapes say; None without the wind's tensors."""
        if all(source.key != f"blocks.0.{WIND}.push.weight" for source in opened.sources):
            return None
        return recognise(where, opened, config_json, family=self.name, keys=KEYS)

    def golden_inputs(self, config: VideoBuild, chunk: int | None) -> Mapping[str, Tensor]:
        """Return the wind of a recorded chunk."""
        if chunk is None:
            return {}
        s = config.workload.stream
        generator = torch.Generator().manual_seed(chunk)
        return {WIND: torch.randn(s.batch, s.chunk_frames, 2, generator=generator)}


FAMILY = WeatherFamily()

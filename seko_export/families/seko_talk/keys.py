"""Key names and shapes of Seko-Talk's checkpoints: Wan's keys, the keys of the picture branch, and the keys in the
audio adapter's file. Listing names and shapes reads no file."""

from __future__ import annotations

import re
from dataclasses import replace

from seko_export.checkpoints.key_table import Dimension, Naming, layer_by_layer, linear_shapes, norm_shapes
from seko_export.checkpoints.sources import Companion
from seko_export.config.model import ModelConfig
from seko_export.config.stream import PATCH
from seko_export.families.seko_talk.model import SekoTalkModel
from seko_export.families.seko_talk.presets import PRESETS
from seko_export.families.wan_layout.keys import (
    DIMENSIONS,
    TELLTALES,
    WAN_KEYS,
    picture_attention_shapes,
    projection_shapes,
    wan_shapes,
)
from seko_export.families.wan_layout.keys import spread as wan_spread
from seko_export.families.wan_layout.namings import DIFFUSERS

REFERENCE, STATE = "ref_patch_embedding", "state_embedding.weight"
PROJECTOR = "audio_proj"
DECODER = f"{PROJECTOR}.transformer_decoder.layers"
# The adapter's own time embedding, under a name that does not collide with Wan's.
TIME = "audio_time"
TIME_LAYERS = {
    f"{TIME}.linear_1": "time_embedding.time_embedder.linear_1",
    f"{TIME}.linear_2": "time_embedding.time_embedder.linear_2",
    f"{TIME}.time_proj": "time_embedding.time_proj",
}
# a layer's part of the adapter: named `blocks.N.audio.` here, `ca.N.` in the adapter's file
IN_LAYER = "audio"
_THEIRS = re.compile(r"ca\.(0|[1-9][0-9]{0,5})\.(.+)", re.ASCII)
_OURS = re.compile(rf"blocks\.(0|[1-9][0-9]{{0,5}})\.{IN_LAYER}\.(.+)", re.ASCII)


def seko_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a Seko-Talk model, by the exporter's names, layer by layer."""
    m, d = SekoTalkModel.of(config), config.dim
    shapes = wan_shapes(m) | {
        f"{REFERENCE}.weight": (d, m.in_channels, 1, PATCH, PATCH),
        f"{REFERENCE}.bias": (d,),
        STATE: (m.state_rows, d),
    }
    if m.image_dim:
        shapes |= projection_shapes(m.image_dim, d)
    shapes |= _projector_shapes(m)
    shapes |= linear_shapes(f"{TIME}.linear_1", d, m.audio_freq_dim) | linear_shapes(f"{TIME}.linear_2", d, d)
    shapes |= linear_shapes(f"{TIME}.time_proj", 3 * d, d)
    for layer in range(m.layers):
        if m.image_dim:
            shapes |= picture_attention_shapes(layer, d)
        audio = f"blocks.{layer}.{IN_LAYER}"
        shapes |= norm_shapes(f"{audio}.norm_kv", m.audio_width) | linear_shapes(
            f"{audio}.to_kv", 2 * d, m.audio_width
        )
        shapes |= linear_shapes(f"{audio}.to_q", d, d) | linear_shapes(f"{audio}.to_out", d, d)
        shapes[f"{audio}.shift_scale_gate"] = (1, 3, d)
    return layer_by_layer(shapes)


def _projector_shapes(m: SekoTalkModel) -> dict[str, tuple[int, ...]]:
    w = m.audio_width
    shapes = linear_shapes(f"{PROJECTOR}.proj_in", w, m.audio_dim)
    shapes[f"{PROJECTOR}.learnable_queries"] = (1, m.audio_tokens, w)
    for layer in range(m.audio_layers):
        at = f"{DECODER}.{layer}"
        for attention in ("self_attn", "multihead_attn"):
            shapes[f"{at}.{attention}.in_proj_weight"] = (3 * w, w)
            shapes[f"{at}.{attention}.in_proj_bias"] = (3 * w,)
            shapes |= linear_shapes(f"{at}.{attention}.out_proj", w, w)
        shapes |= linear_shapes(f"{at}.linear1", m.audio_ffn, w) | linear_shapes(
            f"{at}.linear2", w, m.audio_ffn
        )
        for norm in ("norm1", "norm2", "norm3"):
            shapes |= norm_shapes(f"{at}.{norm}", w)
    return shapes


def to_ours(key: str) -> str:
    """Return the exporter's name of a key in a checkpoint's file."""
    match = _THEIRS.fullmatch(key)
    if match:
        return f"blocks.{match[1]}.{IN_LAYER}.{match[2]}"
    for ours, theirs in TIME_LAYERS.items():
        if key.startswith(f"{theirs}."):
            return ours + key.removeprefix(theirs)
    return key


def to_theirs(name: str) -> str:
    """Return the key in a checkpoint's file for a name of the exporter."""
    match = _OURS.fullmatch(name)
    if match:
        return f"ca.{match[1]}.{match[2]}"
    for ours, theirs in TIME_LAYERS.items():
        if name.startswith(f"{ours}."):
            return theirs + name.removeprefix(ours)
    return name


def spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return the mean and the standard deviation of the random values of a weight."""
    if name.endswith(("shift_scale_gate", "learnable_queries")) or name == STATE:
        return 0.0, 0.3
    return (0.0, 0.02) if name.endswith("in_proj_bias") else wan_spread(name, shape)


SEKO = Naming("seko-talk", to_ours, to_theirs)
ADAPTER = Companion(
    (
        "audio_adapter_model.safetensors",
        "audio_adapter_model.pt",
        "audio_adapter_model.pth",
        "audio_adapter_model_fp8.safetensors",
    ),
    (f".{IN_LAYER}.", f"{PROJECTOR}.", f"{TIME}."),
    ("model_state",),
)

KEYS = replace(
    WAN_KEYS,
    formats="Seko-Talk safetensors (a file, or a folder with an index) beside audio_adapter_model.safetensors",
    shapes=seko_shapes,
    namings=(SEKO,),
    lora_namings=(DIFFUSERS,),
    dimensions=(*DIMENSIONS, Dimension("state_rows", STATE, 0)),
    telltales=(
        (
            ("prev_patch_embedding", "cont_patch_embedding"),
            "these are the keys of the Seko-Talk that is not autoregressive; take the autoregressive one",
        ),
        (
            ("audio_proj.mlp", "audio_pe"),
            "this is the older audio adapter; take that of the autoregressive model",
        ),
        *TELLTALES,
    ),
    models={name: preset.model for name, preset in PRESETS.items()},
    companions=(ADAPTER,),
    spread=spread,
)

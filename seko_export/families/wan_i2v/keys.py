"""Key names and shapes of image-to-video checkpoints: Wan's keys and the keys of the picture branch. Listing names and
shapes reads no file."""

from __future__ import annotations

from dataclasses import replace

from seko_export.config.model import ModelConfig
from seko_export.families.wan_i2v.model import WanI2vModel
from seko_export.families.wan_i2v.presets import PRESETS
from seko_export.families.wan_layout.keys import (
    WAN_KEYS,
    picture_attention_shapes,
    projection_shapes,
    wan_shapes,
)
from seko_export.families.wan_layout.namings import DIFFUSERS, ENTRIES, WAN

POSITIONS = "img_emb.emb_pos"


def i2v_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a checkpoint, by Wan's names, layer by layer."""
    model, d = WanI2vModel.of(config), config.dim
    shapes = wan_shapes(config)
    if not model.image_dim:
        return shapes
    width = model.image_dim
    outer = projection_shapes(width, d)
    if model.last_picture:
        outer[POSITIONS] = (1, model.pictures * model.image_tokens, width)
    for layer in range(config.layers):
        shapes |= picture_attention_shapes(layer, d)
    return outer | shapes


KEYS = replace(
    WAN_KEYS,
    formats="Wan safetensors (a file, or a folder with an index), or diffusers safetensors (a file, or a folder)",
    shapes=i2v_shapes,
    namings=(DIFFUSERS, WAN),
    entries=ENTRIES,
    models={name: preset.model for name, preset in PRESETS.items()},
)

"""Key names and shapes of image-to-video checkpoints: Wan's keys and the keys of the picture branch. Listing names and
shapes reads no file."""

from __future__ import annotations

from dataclasses import replace

from seko_export.checkpoints.key_table import RandomForm
from seko_export.config.model import ModelConfig
from seko_export.families.wan_i2v.model import WanI2vModel
from seko_export.families.wan_i2v.presets import PRESETS
from seko_export.families.wan_layout.keys import (
    WAN_KEYS,
    picture_attention_shapes,
    projection_shapes,
    wan_config,
    wan_shapes,
)
from seko_export.families.wan_layout.namings import DIFFUSERS, ENTRIES, WAN, diffusers_config

POSITIONS = "img_emb.emb_pos"
_TYPES = {1: "i2v", 2: "flf2v"}  # `model_type` of Wan's config.json by the number of pictures


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


def i2v_config(config: ModelConfig) -> dict[str, object]:
    """Return the content of Wan's config.json for a model, with the number of a picture's features, which the shapes of
    tensors do not show."""
    model = WanI2vModel.of(config)
    return wan_config(config) | {"model_type": _TYPES[model.pictures], "image_tokens": model.image_tokens}


def i2v_diffusers_config(config: ModelConfig) -> dict[str, object]:
    """Return the content of config.json for this model: the arguments of ``diffusers.WanTransformer3DModel``."""
    model = WanI2vModel.of(config)
    branch = {"image_dim": model.image_dim, "added_kv_proj_dim": model.dim} if model.image_dim else {}
    count = model.pictures * model.image_tokens
    return diffusers_config(config) | branch | ({"pos_embed_seq_len": count} if model.last_picture else {})


def stored_diffusers_config(config: ModelConfig) -> dict[str, object]:
    """Return the content of config.json in a random pipeline: diffusers' arguments, and the number of a picture's
    features, which shapes do not show."""
    return i2v_diffusers_config(config) | {"image_tokens": WanI2vModel.of(config).image_tokens}


KEYS = replace(
    WAN_KEYS,
    formats="Wan safetensors (a file, or a folder with an index), or diffusers safetensors (a file, or a folder)",
    shapes=i2v_shapes,
    namings=(DIFFUSERS, WAN),
    entries=ENTRIES,
    models={name: preset.model for name, preset in PRESETS.items()},
    random_forms={
        "wan-sharded": RandomForm("sharded", WAN, config=i2v_config),
        "wan": RandomForm("safetensors", WAN),
        "diffusers": RandomForm(
            "safetensors", DIFFUSERS, subfolder="transformer", config=stored_diffusers_config
        ),
    },
)

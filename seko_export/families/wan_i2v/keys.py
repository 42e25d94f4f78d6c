"""Key names and shapes of image-to-video checkpoints: Wan's keys and the keys of the picture branch. Listing names and
shapes reads no file."""

from __future__ import annotations

from seko_export.checkpoints.key_table import KeyTable, RandomForm, linear_shapes
from seko_export.config.model import ModelConfig
from seko_export.families.wan_i2v.model import WanI2vModel
from seko_export.families.wan_i2v.presets import PRESETS
from seko_export.families.wan_layout.keys import (
    DIMENSIONS,
    PREFIXES,
    TELLTALES,
    projection_shapes,
    spread,
    wan_config,
    wan_shapes,
)
from seko_export.families.wan_layout.namings import DIFFUSERS, ENTRIES, WAN, diffusers_config

POSITIONS = "img_emb.emb_pos"
_TYPES = {1: "i2v", 2: "flf2v"}  # `model_type` of Wan's config.json by the number of pictures


def i2v_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a checkpoint, by Wan's names, layer by layer."""
    model, d = i2v_model(config), config.dim
    shapes = wan_shapes(config)
    if not model.image_dim:
        return shapes
    width = model.image_dim
    outer = projection_shapes(width, d)
    if model.last_picture:
        outer[POSITIONS] = (1, model.pictures * model.image_tokens, width)
    for layer in range(config.layers):
        attention = f"blocks.{layer}.cross_attn"
        shapes |= linear_shapes(f"{attention}.k_img", d, d) | linear_shapes(f"{attention}.v_img", d, d)
        shapes[f"{attention}.norm_k_img.weight"] = (d,)
    return outer | shapes


def i2v_config(config: ModelConfig) -> dict[str, object]:
    """Return the content of Wan's config.json for a model, with the number of a picture's features, which the shapes of
    tensors do not show."""
    model = i2v_model(config)
    return wan_config(config) | {"model_type": _TYPES[model.pictures], "image_tokens": model.image_tokens}


def i2v_diffusers_config(config: ModelConfig) -> dict[str, object]:
    """Return the content of config.json for this model: the arguments of ``diffusers.WanTransformer3DModel``."""
    model = i2v_model(config)
    branch = {"image_dim": model.image_dim, "added_kv_proj_dim": model.dim} if model.image_dim else {}
    count = model.pictures * model.image_tokens
    return diffusers_config(config) | branch | ({"pos_embed_seq_len": count} if model.last_picture else {})


def stored_diffusers_config(config: ModelConfig) -> dict[str, object]:
    """Return the content of config.json in a random pipeline: diffusers' arguments, and the number of a picture's
    features, which shapes do not show."""
    return i2v_diffusers_config(config) | {"image_tokens": i2v_model(config).image_tokens}


def i2v_model(config: ModelConfig) -> WanI2vModel:
    """Return a model config typed as a `WanI2vModel`; refuse any other class of config."""
    if not isinstance(config, WanI2vModel):
        raise TypeError(f"an image-to-video build has a {type(config).__name__}, expected a WanI2vModel")
    return config


KEYS = KeyTable(
    formats="Wan safetensors (a file, or a folder with an index), or diffusers safetensors (a file, or a folder)",
    shapes=i2v_shapes,
    namings=(DIFFUSERS, WAN),
    dimensions=DIMENSIONS,
    landmark="patch_embedding.weight",
    entries=ENTRIES,
    prefixes=PREFIXES,
    telltales=TELLTALES,
    models={name: preset.model for name, preset in PRESETS.items()},
    random_forms={
        "wan-sharded": RandomForm("sharded", WAN, config=i2v_config),
        "wan": RandomForm("safetensors", WAN),
        "diffusers": RandomForm(
            "safetensors", DIFFUSERS, subfolder="transformer", config=stored_diffusers_config
        ),
    },
    spread=spread,
)

"""Key names and shapes of minWM's checkpoints: Wan's keys and a second projection behind self-attention. Listing names
and shapes reads no file."""

from __future__ import annotations

from dataclasses import replace

from seko_export.checkpoints.key_table import Naming, linear_shapes
from seko_export.config.model import ModelConfig
from seko_export.families.minwm.presets import PRESETS
from seko_export.families.wan_layout.keys import PREFIXES, WAN_KEYS, wan_shapes
from seko_export.families.wan_layout.namings import DIFFUSERS, ENTRIES

PROJECTION = "self_attn.prope_o"
WRAPPED = "_fsdp_wrapped_module."  # a prefix that training in shards leaves


def minwm_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a checkpoint of this model, by the authors' names."""
    shapes = wan_shapes(config)
    for layer in range(config.layers):
        shapes |= linear_shapes(f"blocks.{layer}.{PROJECTION}", config.dim, config.dim)
    return shapes


NAMING = Naming("minwm", str, str)

KEYS = replace(
    WAN_KEYS,
    formats="minWM's .pt, or safetensors by its names (a file, or a folder with an index)",
    shapes=minwm_shapes,
    namings=(NAMING,),
    lora_namings=(DIFFUSERS,),
    entries=ENTRIES,
    prefixes=(*PREFIXES, WRAPPED),
    models={name: preset.model for name, preset in PRESETS.items()},
)

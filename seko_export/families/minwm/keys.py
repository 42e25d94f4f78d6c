"""Key names and shapes of minWM's checkpoints: Wan's keys and a second projection behind self-attention. Listing names
and shapes reads no file."""

from __future__ import annotations

from seko_export.checkpoints.key_table import KeyTable, Naming, RandomForm, linear_shapes
from seko_export.config.model import ModelConfig
from seko_export.families.minwm.model import MinwmModel
from seko_export.families.minwm.presets import PRESETS
from seko_export.families.wan_layout.keys import (
    DIMENSIONS,
    PREFIXES,
    TELLTALES,
    spread,
    wan_config,
    wan_shapes,
)
from seko_export.families.wan_layout.namings import DIFFUSERS, ENTRIES

PROJECTION = "self_attn.prope_o"
_WRAPPED = "_fsdp_wrapped_module."  # a prefix that training in shards leaves


def minwm_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a checkpoint of this model, by the authors' names."""
    shapes = wan_shapes(config)
    for layer in range(config.layers):
        shapes |= linear_shapes(f"blocks.{layer}.{PROJECTION}", config.dim, config.dim)
    return shapes


def minwm_model(config: ModelConfig) -> MinwmModel:
    """Return a model config typed as a `MinwmModel`; refuse any other class of config."""
    if not isinstance(config, MinwmModel):
        raise TypeError(f"a minWM build has a {type(config).__name__}, expected a MinwmModel")
    return config


NAMING = Naming("minwm", str, str)

KEYS = KeyTable(
    formats="minWM's .pt, or safetensors by its names (a file, or a folder with an index)",
    shapes=minwm_shapes,
    namings=(NAMING,),
    lora_namings=(DIFFUSERS,),
    dimensions=DIMENSIONS,
    landmark="patch_embedding.weight",
    entries=ENTRIES,
    prefixes=(*PREFIXES, _WRAPPED),
    telltales=TELLTALES,
    models={name: preset.model for name, preset in PRESETS.items()},
    random_forms={
        "minwm": RandomForm("pt", NAMING, f"model.{_WRAPPED}", ("generator", "generator_ema")),
        "minwm-sharded": RandomForm("sharded", NAMING, config=wan_config),
    },
    spread=spread,
)

"""Key names and shapes of ABot-World's checkpoints: Wan's keys and the keys of the adapter. Listing names and shapes
reads no file."""

from __future__ import annotations

from dataclasses import replace

from seko_export.checkpoints.key_table import Dimension, Naming
from seko_export.config.model import ModelConfig
from seko_export.families.abot.model import AbotModel
from seko_export.families.abot.presets import PRESETS
from seko_export.families.wan_layout.keys import DIMENSIONS, WAN_KEYS, wan_shapes
from seko_export.families.wan_layout.namings import DIFFUSERS, ENTRIES

ADAPTER = "act_control_adapter"
CONV, RESIDUAL = f"{ADAPTER}.conv", f"{ADAPTER}.residual_blocks.0"


def abot_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a checkpoint of this model, by the authors' names."""
    d = config.dim
    shapes: dict[str, tuple[int, ...]] = {f"{CONV}.weight": (d, AbotModel.of(config).key_channels, 2, 2)}
    shapes |= {f"{RESIDUAL}.{conv}.weight": (d, d, 3, 3) for conv in ("conv1", "conv2")}
    shapes |= {name.removesuffix("weight") + "bias": (d,) for name in shapes}
    return shapes | wan_shapes(config)


NAMING = Naming("abot", str, str)

KEYS = replace(
    WAN_KEYS,
    formats="ABot-World safetensors (a file, or a folder with an index)",
    shapes=abot_shapes,
    namings=(NAMING,),
    lora_namings=(DIFFUSERS,),
    dimensions=(*DIMENSIONS, Dimension("key_channels", f"{CONV}.weight", 1)),
    entries=ENTRIES,
    models={name: preset.model for name, preset in PRESETS.items()},
)

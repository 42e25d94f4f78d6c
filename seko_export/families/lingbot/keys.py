"""Key names and shapes of lingbot-world's checkpoints: Wan's keys and the keys of the camera. Listing names and shapes
reads no file."""

from __future__ import annotations

from dataclasses import replace

from seko_export.checkpoints.key_table import Dimension, Naming, layer_by_layer, linear_shapes
from seko_export.config.model import ModelConfig
from seko_export.families.lingbot.model import TOKEN_PIXELS, LingbotModel
from seko_export.families.lingbot.presets import PRESETS
from seko_export.families.wan_layout.keys import DIMENSIONS, WAN_KEYS, wan_shapes
from seko_export.families.wan_layout.namings import DIFFUSERS

CONTROL = "patch_embedding_wancamctrl"
TOKEN_LAYERS = ("c2ws_hidden_states_layer1", "c2ws_hidden_states_layer2")
INJECTOR_LAYERS = ("cam_injector_layer1", "cam_injector_layer2", "cam_scale_layer", "cam_shift_layer")
# config.json fields of the second version, and of the first
FOLDERS = ("transformers", "lingbot_world_fast")


def lingbot_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a checkpoint of this model, by the authors' names, layer by layer."""
    d = config.dim
    shapes = wan_shapes(config) | linear_shapes(CONTROL, d, LingbotModel.of(config).control_width)
    for name in TOKEN_LAYERS:
        shapes |= linear_shapes(name, d, d)
    for layer in range(config.layers):
        for name in INJECTOR_LAYERS:
            shapes |= linear_shapes(f"blocks.{layer}.{name}", d, d)
    return layer_by_layer(shapes)


LINGBOT = Naming("lingbot", str, str)

KEYS = replace(
    WAN_KEYS,
    formats="lingbot-world safetensors (a file, or a folder with an index)",
    shapes=lingbot_shapes,
    namings=(LINGBOT,),
    lora_namings=(DIFFUSERS,),
    dimensions=(
        *DIMENSIONS,
        Dimension("control_channels", f"{CONTROL}.weight", 1, per=TOKEN_PIXELS),
    ),
    subfolders=FOLDERS,
    relatives=(
        (
            ("k_img", "img_emb."),
            "these are the keys of a model with an image encoder; lingbot-world has none",
        ),
    ),
    models={name: preset.model for name, preset in PRESETS.items()},
)

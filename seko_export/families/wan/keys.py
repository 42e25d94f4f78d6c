"""Key names and shapes of Wan's text-to-video checkpoints. Listing names and shapes reads no file."""

from __future__ import annotations

from dataclasses import replace

from seko_export.checkpoints.key_table import Naming
from seko_export.families.wan.presets import PRESETS
from seko_export.families.wan_layout.keys import WAN_KEYS, wan_shapes
from seko_export.families.wan_layout.namings import DIFFUSERS, ENTRIES, WAN

SELF_FORCING = Naming("self-forcing", str, str, container="pt")

KEYS = replace(
    WAN_KEYS,
    formats="a Self-Forcing .pt, Wan safetensors (a file, or a folder with an index), "
    "or diffusers safetensors (a file, or a folder)",
    shapes=wan_shapes,
    namings=(SELF_FORCING, DIFFUSERS, WAN),
    entries=ENTRIES,
    relatives=(
        (
            ("k_img", "img_emb.", "add_k_proj", "image_embedder."),
            "these are the keys of an image-to-video checkpoint; take the text-to-video one",
        ),
    ),
    models={name: preset.model for name, preset in PRESETS.items()},
)

"""Checkpoints in, by strict loading, and seeded random ones out; knows no engine and no artifact."""

from seko_export.checkpoints.keys import diffusers_to_wan, wan_shapes, wan_to_diffusers
from seko_export.checkpoints.load import Checkpoint, load_checkpoint, load_text_encoder, load_vae
from seko_export.checkpoints.random import FORMATS, write_random_checkpoint

__all__ = [
    "FORMATS",
    "Checkpoint",
    "diffusers_to_wan",
    "load_checkpoint",
    "load_text_encoder",
    "load_vae",
    "wan_shapes",
    "wan_to_diffusers",
    "write_random_checkpoint",
]

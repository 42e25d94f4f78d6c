"""File layouts of a CLIP image encoder, in a module without torch, because error messages need the layouts before torch
is loaded."""

from __future__ import annotations

from seko_export.checkpoints.sources import Layout

CLIP_LAYOUT = Layout(
    "Wan's models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth, or transformers' folder image_encoder/",
    ("image_encoder",),
)

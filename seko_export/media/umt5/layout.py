"""File layouts of a UMT5 encoder, in a module without torch, because error messages need the layouts before torch is
loaded."""

from __future__ import annotations

from seko_export.checkpoints.sources import Layout

TEXT_LAYOUT = Layout(
    "Wan's models_t5_umt5-xxl-enc-bf16.pth, or transformers safetensors (a file, or a folder)",
    ("text_encoder",),
)

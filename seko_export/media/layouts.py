"""File layouts of the encoders of text, pictures and sound, in a module without torch, because error messages need the
layouts before torch is loaded."""

from __future__ import annotations

from seko_export.checkpoints.sources import Layout

TEXT_LAYOUT = Layout(
    "Wan's models_t5_umt5-xxl-enc-bf16.pth, or transformers safetensors (a file, or a folder)",
    ("text_encoder",),
)
CLIP_LAYOUT = Layout(
    "Wan's models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth, or transformers' folder image_encoder/",
    ("image_encoder",),
)
PREPROCESSOR = "preprocessor_config.json"
HUBERT_WEIGHTS = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin")
HUBERT_LAYOUT = Layout(
    f"a HuBERT folder (config.json, {PREPROCESSOR}, and {' or '.join(HUBERT_WEIGHTS[1:])})", ()
)

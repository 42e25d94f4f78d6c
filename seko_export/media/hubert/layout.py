"""File layouts of a HuBERT encoder, in a module without torch, because error messages need the layouts before torch is
loaded."""

from __future__ import annotations

from seko_export.checkpoints.sources import Layout

WEIGHTS = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin")
PREPROCESSOR = "preprocessor_config.json"
HUBERT_LAYOUT = Layout(f"a HuBERT folder (config.json, {PREPROCESSOR}, and {' or '.join(WEIGHTS[1:])})", ())

"""Random UMT5 encoders as transformers' folders, with the sample's tokenizer, for `scripts/make_checkpoint.py
--text`."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from scripts.checkpoint_configs import umt5_config
from scripts.random_checkpoint import RandomFile, write_random_folder
from seko_export.checkpoints.json_files import CONFIG_FILE
from seko_export.config.media import TextEncoderConfig
from seko_export.media.umt5.keys import text_shapes, text_transformers_names
from seko_export.options.checks import SAMPLE_FOLDER

SIZES = {
    "umt5-xxl": TextEncoderConfig(),
    "umt5-tiny": TextEncoderConfig(
        vocab_size=64, dim=64, heads=2, head_dim=32, ffn_dim=64, layers=2
    ),  # of `tiny`
}
TOKENIZER = "tokenizer.json"


def write_random_text(
    path: Path, config: TextEncoderConfig, *, seed: int, dtype: torch.dtype, device: str
) -> int:
    """Write a text encoder of seeded random weights as a folder, and return its number of tensors.

    Raises
    ------
    UsageError
        If the path exists.
    MachineError
        If the folder cannot be written.
    """
    names, shapes = text_transformers_names(config), text_shapes(config)
    tokenizer = json.loads((SAMPLE_FOLDER / TOKENIZER).read_text(encoding="utf-8"))
    write_random_folder(
        path,
        {"model.safetensors": RandomFile({names[name]: shape for name, shape in shapes.items()}, dtype)},
        {CONFIG_FILE: umt5_config(config), TOKENIZER: tokenizer},
        seed=seed,
        device=device,
    )
    return len(shapes)

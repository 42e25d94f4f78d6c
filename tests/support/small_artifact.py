"""The smallest real artifact: two layers, an FP4 cache, the backend `compile`, nothing compiled."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from scripts.random_checkpoint import write_random_checkpoint
from scripts.random_lora import random_pairs, write_lora
from seko_export.build_steps import build_artifact
from seko_export.checkpoints.sources import LoadOptions, LoraFile
from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from tests.support.shared import made_once
from tests.support.uncompiled import leave_uncompiled

MODEL = ModelConfig(
    name="small", layers=2, dim=32, heads=2, ffn_dim=48, in_channels=4, out_channels=4,
    text_dim=16, text_tokens=4, freq_dim=16,
)  # fmt: skip
STREAM = StreamConfig(height=32, width=48, chunk_frames=2, sink_frames=1, ring_frames=3)


def build_small_artifact(output: Path, loras: Sequence[LoraFile] = ()) -> None:
    """Build it in this process. Its engines are exported programs, which torch runs op by op while it verifies."""
    config = VideoBuild(MODEL, VideoConfig(STREAM, Schedule.warped(), "fp4"), TargetConfig("cpu"))
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        leave_uncompiled(patch)
        checkpoint = Path(folder, "small.pt")
        write_random_checkpoint(checkpoint, MODEL, format="self-forcing", seed=0, dtype=torch.float32)
        build_artifact(
            config,
            checkpoint,
            output,
            backend="compile",
            compiler_cache=False,
            load_options=LoadOptions(loras=loras),
        )


def write_style(folder: Path) -> LoraFile:
    """Write a LoRA of the smallest model, the same bytes each time, to be merged at half its strength."""
    file = folder / "style.safetensors"
    write_lora(file, random_pairs(MODEL, rank=4, seed=1), "comfyui", 2.0)
    return LoraFile(file, 0.5)


def small_artifact_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the smallest artifact with `write_style`'s LoRA merged, built by the first process of this
    run that asks; not to be changed.
    """
    lora = write_style(tmp_path_factory.mktemp("style"))
    return made_once(tmp_path_factory, "small", lambda folder: build_small_artifact(folder, [lora]))

"""What only a GPU shows of lingbot-world: engines verify, from sizes that fit no tile to heads of 128 channels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.random_checkpoint import write_random_checkpoint
from seko_export.build_steps import build_artifact
from seko_runtime import open_artifact
from tests.lingbot.streams import lingbot_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("how", ["chunk", "pass", "none"])
@pytest.mark.parametrize("scheme", ["bf16", "fp4"])
def test_the_tiny_preset_verifies(scheme: str, how: str, tmp_path: Path) -> None:
    """Its window has 30 tokens, its heads 64 channels: plain layers, and nothing is a multiple of a tile."""
    config = lingbot_config(scheme, how=how).changed(device="cuda")
    write_random_checkpoint(tmp_path / "tiny", config.model, seed=0, dtype=torch.float32)
    build_artifact(config, tmp_path / "tiny", tmp_path / "artifact")
    with open_artifact(tmp_path / "artifact") as artifact:
        assert all(error.within for error in artifact.verify())


@pytest.mark.parametrize("fp8", [False, True])
def test_fused_layers_with_heads_of_128_channels_verify(fp8: bool, tmp_path: Path) -> None:
    config = lingbot_config("fp4", layout={"height": 64, "width": 96})
    model = replace(config.model, dim=256, heads=2, ffn_dim=512)
    config = config.changed(model=model, device="cuda", fused=True, attention="fp8", fp8=fp8)
    write_random_checkpoint(tmp_path / "wide", model, seed=0, dtype=torch.float32)
    build_artifact(config, tmp_path / "wide", tmp_path / "artifact")
    with open_artifact(tmp_path / "artifact") as artifact:
        assert all(error.within for error in artifact.verify())

"""What only a GPU shows of worlds that people play: captured engines verify, with plain layers and with fused ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.random_checkpoint import write_random_checkpoint
from seko_export.build_steps import build_artifact
from seko_export.config.video import VideoBuild
from seko_runtime import open_artifact
from tests.abot.streams import abot_config
from tests.matrix_game.streams import game_config
from tests.minwm.streams import minwm_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WORLDS: dict[str, Callable[[str], VideoBuild]] = {
    "abot": abot_config,
    "matrix_game": lambda scheme: game_config(scheme=scheme),
    "minwm": minwm_config,
}
FUSED: dict[str, Any] = {"fused": True, "attention": "fp8", "fp8": True, "resident_window": True}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("scheme", "how"), [("bf16", {}), ("fp4", {}), ("fp4", FUSED)], ids=["exact", "fp4", "fast"]
)
def test_the_tiny_preset_verifies(world: str, scheme: str, how: dict[str, Any], tmp_path: Path) -> None:
    config = WORLDS[world](scheme).changed(device="cuda", **how)
    write_random_checkpoint(tmp_path / "tiny", config.model, seed=0, dtype=torch.float32)
    build_artifact(config, tmp_path / "tiny", tmp_path / "artifact")
    with open_artifact(tmp_path / "artifact") as artifact:
        assert all(error.within for error in artifact.verify())

"""The tiny preset compiled by AOTInductor, whose engines write the caches of the action modules in place, and as ONNX
models, which return them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from seko_export.build_steps import build_artifact
from seko_export.families.model_files import write_random_checkpoint
from seko_runtime import open_artifact
from tests.matrix_game.streams import game_config


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "game"), [("aoti", "universal"), ("onnx", "templerun")])
def test_engines_are_verified(backend: str, game: str, tmp_path: Path) -> None:
    """In a process of its own by the build, and here; layers without an action module have an engine of their own."""
    if backend == "onnx":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    config, model = game_config(game), tmp_path / "model"
    write_random_checkpoint(model, config.model, format="matrix-game-sharded", seed=0, dtype=torch.float32)
    built = build_artifact(config, model, tmp_path / "artifact", backend=backend)
    with open_artifact(built.artifact) as opened:
        assert {"block", "block_bare"} <= {engine.name for engine in opened.manifest.engines}
        assert all(error.within for error in opened.verify())

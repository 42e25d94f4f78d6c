"""The tiny preset compiled by AOTInductor, whose engines write the caches of the action modules in place, and as ONNX
models, which return them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from seko_export.build_steps import build_artifact
from seko_export.families.model_files import write_random_checkpoint
from seko_export.options.resolve import resolve_build
from seko_runtime import open_artifact
from tests.matrix_game.streams import game_config
from tests.matrix_game.test_build import files


@pytest.mark.slow
def test_compiled_engines_are_verified(tmp_path: Path) -> None:
    """In a process of its own by the build, and here; layers without an action module have an engine of their own."""
    resolved = resolve_build(files(tmp_path))
    built = build_artifact(resolved.config, tmp_path / "model", tmp_path / "artifact", media=resolved.media)
    assert {path.stem for path in (built.artifact / "engines").glob("block*")} == {
        f"block{kind}.{rows}" for kind in ("", "_bare") for rows in (1, 2)
    }
    with open_artifact(built.artifact) as opened:
        assert all(error.within for error in opened.verify())


@pytest.mark.slow
def test_onnx_models_are_verified(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    config = game_config("templerun")
    write_random_checkpoint(
        tmp_path / "model", config.model, format="matrix-game-sharded", seed=0, dtype=torch.float32
    )
    built = build_artifact(config, tmp_path / "model", tmp_path / "artifact", backend="onnx")
    with open_artifact(built.artifact) as opened:
        assert all(error.within for error in opened.verify())

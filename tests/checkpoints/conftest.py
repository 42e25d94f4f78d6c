"""A model small enough to write in every test, and the ways to write it; holds no test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.random_checkpoint import write_random_checkpoint
from seko_export.checkpoints.random import random_weight
from seko_export.config.model import ModelConfig
from seko_export.families.wan_layout.keys import spread, wan_shapes


@pytest.fixture(scope="session")
def model() -> ModelConfig:
    return ModelConfig(
        name="test",
        layers=3,
        dim=32,
        heads=2,
        ffn_dim=48,
        in_channels=5,
        out_channels=3,
        text_dim=24,
        freq_dim=16,
    )


@pytest.fixture
def weights(model: ModelConfig) -> dict[str, torch.Tensor]:
    """What every checkpoint of seed 7 holds, in bfloat16; a fresh dict that a test may spoil."""
    return {
        name: random_weight(name, shape, seed=7, dtype=torch.bfloat16, spread=spread)
        for name, shape in wan_shapes(model).items()
    }


@pytest.fixture
def write(tmp_path: Path, model: ModelConfig) -> Callable[..., Path]:
    """Write seed 7 in a format, and give the path."""

    def write_format(format: str, dtype: torch.dtype = torch.bfloat16) -> Path:
        path = tmp_path / f"made-{format}-{str(dtype)[6:]}"
        write_random_checkpoint(path, model, format=format, seed=7, dtype=dtype)
        return path

    return write_format


@pytest.fixture
def save_pt(tmp_path: Path) -> Callable[[Any], Path]:
    """Save any object as torch does, and give the path."""

    def save(content: Any) -> Path:
        path = tmp_path / "saved.pt"
        torch.save(content, path)
        return path

    return save

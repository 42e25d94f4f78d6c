"""What only a GPU shows of Seko-Talk: engines of the tiny preset that verify."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts.random_checkpoint import write_random_checkpoint
from seko_export.build_steps import build_artifact
from seko_export.media.clip.files import clip_config_of
from seko_export.media.hubert.files import hubert_config_of
from seko_export.media.sources import MediaSources
from seko_runtime import open_artifact
from tests.seko_talk.streams import talk_config, write_clip, write_hubert

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("scheme", ["bf16", "fp4"])
def test_the_tiny_preset_verifies(scheme: str, tmp_path: Path) -> None:
    write_hubert(tmp_path / "hubert", 48)
    write_clip(tmp_path / "clip.pth", 32)
    config = talk_config(scheme, model={"image_dim": 32}).changed(
        device="cuda",
        audio=hubert_config_of(tmp_path / "hubert"),
        image=clip_config_of(tmp_path / "clip.pth"),
    )
    write_random_checkpoint(tmp_path / "tiny", config.model, seed=0, dtype=torch.float32)
    media = MediaSources(audio_encoder=tmp_path / "hubert", image_encoder=tmp_path / "clip.pth")
    build_artifact(config, tmp_path / "tiny", tmp_path / "artifact", media=media)
    with open_artifact(tmp_path / "artifact") as artifact:
        assert all(error.within for error in artifact.verify())

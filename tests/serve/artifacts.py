"""Artifacts of small models for the server, whose engines are exported programs that torch runs op by op. No tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.random_checkpoint import write_random_checkpoint
from seko_export import build_steps
from seko_export.config.pool import PoolConfig
from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.media.clip.files import clip_config_of
from seko_export.media.hubert.files import hubert_config_of
from seko_export.media.sources import MediaSources
from tests.export.media_files import TEXT, VAE, write_text_encoder, write_vae
from tests.seko_talk.streams import talk_config, write_clip, write_hubert
from tests.support.asked import resolved
from tests.support.small_artifact import MODEL, STREAM
from tests.support.uncompiled import UNCOMPILED, leave_uncompiled
from tests.wan_i2v.streams import TWO, i2v_config

from .test_uploads import coded

WORLD = Path(__file__).parents[2] / "artifacts" / "world-sample"
ENVIRONMENT = {UNCOMPILED: "1"}  # of the process that opens them
POOL = PoolConfig(2, (1, 2))


def make_world(folder: Path) -> None:
    """The trained world sample, which brings a picture and prompts along; one row, of which one viewer is shown."""
    build = resolved(None, checkpoint=WORLD)
    assert build.checkpoint is not None
    _build(build.config, build.checkpoint, folder, build.media)


def make_talk(folder: Path) -> None:
    """A tiny talking portrait of random weights, which reads sentences and hears sound, and a picture for it."""
    folder.mkdir()
    write_hubert(folder / "hubert", 48)
    config = talk_config(model={"text_dim": TEXT.dim, "image_dim": 0})
    config = config.changed(vae=VAE, text=TEXT, audio=hubert_config_of(folder / "hubert"), pool=POOL)
    write_random_checkpoint(folder / "tiny", config.model, seed=0, dtype=torch.float32)
    text = write_text_encoder(folder / "text")
    media = MediaSources(
        vae=write_vae(folder / "vae"),
        text_encoder=text,
        tokenizer=text / "tokenizer.json",
        audio_encoder=folder / "hubert",
    )
    _build(config, folder / "tiny", folder, media)
    picture = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    (folder / "picture.png").write_bytes(coded(picture, "png"))


def make_film(folder: Path) -> None:
    """A tiny model of random weights that makes video from sentences, the quickest one to open.

    At a frame in a second a busy machine is not too slow either for all of a pool's rows.
    """
    _make_film(folder, POOL, fps=1)


def _make_film(folder: Path, pool: PoolConfig | None, fps: int = STREAM.fps) -> None:
    folder.mkdir()
    model = replace(MODEL, name="film", in_channels=16, out_channels=16, text_dim=TEXT.dim)
    stream = replace(STREAM, fps=fps)
    config = VideoBuild(model, VideoConfig(stream, Schedule.warped(), "fp32"), TargetConfig("cpu"))
    config = config.changed(vae=VAE, text=TEXT, pool=pool)
    write_random_checkpoint(folder / "tiny.pt", model, format="self-forcing", seed=0, dtype=torch.float32)
    text = write_text_encoder(folder / "text")
    media = MediaSources(vae=write_vae(folder / "vae"), text_encoder=text, tokenizer=text / "tokenizer.json")
    _build(config, folder / "tiny.pt", folder, media)


def make_single(folder: Path) -> None:
    """The same model, built without ``--sessions``: a pool of one row."""
    _make_film(folder, None)


def make_way(folder: Path) -> None:
    """A tiny model of random weights that leads from one picture to another, and two pictures for it."""
    folder.mkdir()
    write_clip(folder / "clip.pth", 32)
    config = i2v_config(TWO, text_tokens=12)
    config = replace(config, model=replace(config.model, text_dim=TEXT.dim))
    config = config.changed(vae=VAE, text=TEXT, image=clip_config_of(folder / "clip.pth"), pool=POOL)
    write_random_checkpoint(folder / "tiny", config.model, seed=0, dtype=torch.float32)
    text = write_text_encoder(folder / "text")
    media = MediaSources(
        vae=write_vae(folder / "vae"),
        text_encoder=text,
        tokenizer=text / "tokenizer.json",
        image_encoder=folder / "clip.pth",
    )
    _build(config, folder / "tiny", folder, media)
    generator = np.random.default_rng(0)
    for name in ("first", "last"):
        picture = generator.integers(0, 256, (40, 70, 3), np.uint8)
        (folder / f"{name}.png").write_bytes(coded(picture, "png"))


def _build(config: object, checkpoint: Path, folder: Path, media: MediaSources) -> None:
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        leave_uncompiled(patch)
        build_steps.build_artifact(
            config,  # type: ignore[arg-type]
            checkpoint,
            folder / "artifact",
            media=media,
            backend="compile",
            compiler_cache=False,
        )

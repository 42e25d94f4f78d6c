"""`seko-run run --image --keys`, over an artifact whose engines run as they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from seko_export.build_steps import build_artifact
from seko_export.media.sources import MediaSources
from seko_runtime import open_artifact
from seko_runtime.cli.commands import main
from tests.export.media_files import VAE, write_vae
from tests.lingbot.streams import lingbot_config, random_checkpoint
from tests.support.stacked import open_stacked
from tests.support.uncompiled import leave_uncompiled

KEYS = "w-9,jl-6"


# Torch's own warnings, of what its compiler imports when a `compile` artifact is opened in this process.
@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")
def test_a_walk_from_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The latents are those of a session with the same picture and keys; another picture gives others."""
    leave_uncompiled(monkeypatch)
    save_file(random_checkpoint(), tmp_path / "tiny.safetensors")
    vae = write_vae(tmp_path / "vae")
    artifact = build_artifact(
        lingbot_config(vae=VAE), tmp_path / "tiny.safetensors", tmp_path / "artifact", backend="compile",
        compiler_cache=False, media=MediaSources(vae=vae),
    ).artifact  # fmt: skip
    picture = np.random.default_rng(5).integers(0, 256, (32, 48, 3), np.uint8)
    np.save(tmp_path / "room.npy", picture)
    out = tmp_path / "walk.npy"
    words = [
        "run",
        str(artifact),
        "--image",
        str(tmp_path / "room.npy"),
        "--keys",
        KEYS,
        "-o",
        str(out),
        "--json",
    ]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1])["chunks"] == 3
    assert "input" not in printed.err  # nothing is the golden's
    with open_artifact(artifact) as opened:
        with open_stacked(opened, seeds=[0], image=picture) as session:
            session.take("camera", {"keys": KEYS})
            wanted = np.stack([session.run_chunk().to_host() for _ in range(3)])
        with open_stacked(opened, seeds=[0], image=picture[::-1].copy()) as session:
            session.take("camera", {"keys": KEYS})
            other = session.run_chunk().to_host()
    assert np.array_equal(np.load(out), wanted)
    assert not np.array_equal(other, wanted[0])

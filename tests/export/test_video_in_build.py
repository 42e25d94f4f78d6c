"""An artifact with an input video: built, verified, run from a file; and builds that cannot have one."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.random_checkpoint import write_random_checkpoint
from seko_export.build_steps import build_artifact
from seko_export.config.model import ModelConfig
from seko_export.config.pool import PoolConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.errors import UsageError
from seko_export.families.registry import graph_of
from seko_export.media.sources import MediaSources
from seko_export.media.taehv.config import TaehvConfig
from seko_export.options.declaration import BuildOptions
from seko_export.video.plan.predict import PlanRequest, predict
from seko_runtime import open_artifact
from seko_runtime.cli.commands import main as seko_run
from seko_runtime.errors import UsageError as SessionUsageError
from tests.export.media_files import VAE, write_vae
from tests.support.shared import made_once
from tests.support.uncompiled import leave_uncompiled

MODEL = ModelConfig(
    name="turned", layers=2, dim=32, heads=2, ffn_dim=48, text_dim=16, text_tokens=4, freq_dim=16
)
STREAM = StreamConfig(32, 48, chunk_frames=2, sink_frames=1, ring_frames=3, strength=0.6)
CONFIG = VideoBuild(
    MODEL,
    VideoConfig(STREAM, Schedule.warped(), "fp4", vae=VAE, pool=PoolConfig(2, (1, 2))),
    TargetConfig("cpu"),
)
TEXT = np.zeros((1, MODEL.text_tokens, MODEL.text_dim), np.float32)


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with an FP4 cache and a pool of two."""

    def build(folder: Path) -> None:
        files = tmp_path_factory.mktemp("files")
        checkpoint = files / "turned.pt"
        write_random_checkpoint(checkpoint, MODEL, format="self-forcing", seed=0, dtype=torch.float32)
        with pytest.MonkeyPatch.context() as patch:
            leave_uncompiled(patch)
            media = MediaSources(vae=write_vae(files / "vae"))
            build_artifact(CONFIG, checkpoint, folder, media=media, backend="compile", compiler_cache=False)

    return made_once(tmp_path_factory, "turned", build)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


def film(path: Path, frames: int, rate: int = 16, size: tuple[int, int] = (32, 48)) -> Path:
    """Write a film of grey levels that rise by one a frame."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        for number in range(frames):
            picture = np.full((*size, 3), 20 + number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = seko_run(list(map(str, arguments)))
    return code, out.getvalue(), err.getvalue()


@pytest.mark.shows("input-video")
def test_a_build_is_verified_and_names_its_control(turned: Path) -> None:
    manifest = json.loads((turned / "manifest.json").read_text())
    assert {"encode_video_first", "encode_video"} <= set(manifest["programs"])
    (control,) = (control for control in manifest["controls"] if control["kind"] == "video_in")
    sizes = {"height": 32, "width": 48, "fps": 16, "first_frames": 5, "strength": 0.6}
    assert control["parameters"] == {**sizes, "least": 0, "first_time": 0, "shift": 1}
    assert manifest["workload"]["schedule"]["scaled_passes"] == 4
    code, _, err = run("verify", turned)
    assert code == 0, err


def test_seko_run_turns_a_film(turned: Path, tmp_path: Path) -> None:
    """By default as many chunks as the film lasts; strength 0 gives other frames than strength 1."""
    source = film(tmp_path / "in.mp4", 5 + 8 + 3)
    text = tmp_path / "text.npy"
    np.save(text, np.repeat(TEXT, CONFIG.workload.call_rows, 0))
    made = []
    for strength in ("0", "1"):
        out = tmp_path / f"{strength}.npy"
        code, report, err = run(
            "run", turned, "--video", source, "--strength", strength, "--text", text, "-o", out, "--json"
        )
        assert code == 0, err
        told = json.loads(report.splitlines()[-1])
        assert told["chunks"] == 3
        assert told["counts"] == {"video_in": {"frames taken": 16, "dropped": 0, "repeated": 5 + 8 + 8 - 16}}
        made.append(np.load(out))
    assert made[0].shape == made[1].shape
    assert not np.array_equal(*made)


def test_a_session_takes_frames_and_strengths_by_its_control(turned: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (13, 32, 48, 3), np.uint8)
    with open_artifact(turned) as artifact, artifact.open_pool() as pool:
        with pool.open_session(seed=1, text=TEXT) as session:
            with pytest.raises(SessionUsageError, match="no frame of the input video has come"):
                session.run_chunk()
            video = session.controls["video_in"]
            video.take({"clip": frames})
            made = [session.run_chunk().to_host()]
            video.take({"strength": 0.2})
            made.append(session.run_chunk().to_host())
            with pytest.raises(SessionUsageError, match="cannot step back"):
                session.rewind(0)
        with pool.open_session(seed=1, text=TEXT) as session:
            padded = np.concatenate((np.zeros((3, 32, 48, 3), np.uint8), frames))
            for at, strength in enumerate((0.6, 0.2)):
                level = np.array([strength], np.float32)
                inputs = {
                    "video": padded[8 * at : 8 * at + 8],
                    "strength": level,
                    "time_scale": level.repeat(2),
                }
                assert np.array_equal(session.run_chunk(inputs).to_host(), made[at])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (replace(CONFIG.workload, vae=None), "no VAE that encodes"),
        (replace(CONFIG.workload, stream=replace(STREAM, strength=None)), ""),
    ],
)
def test_an_input_video_needs_an_encoder(bad: VideoConfig, words: str) -> None:
    config = replace(CONFIG, workload=bad)
    if not words:
        assert not any(name.startswith("video_encode") for name in graph_of(config).pieces)
        return
    with pytest.raises(UsageError, match=words):
        graph_of(config)


def test_a_whole_vae_encodes_before_a_tiny_one() -> None:
    tiny = TaehvConfig(16, (8, 6, 4, 4), encoder_width=8)
    whole = replace(VAE, base_dim=8)
    for vaes, prefix in (({"vae": tiny}, "vae."), ({"vae": tiny, "vae_encoder": whole}, "vae_encoder.")):
        pieces = graph_of(replace(CONFIG, workload=replace(CONFIG.workload, **vaes))).pieces
        assert {pieces[name].prefix for name in ("video_encode_first", "video_encode")} == {prefix}
    decoder = replace(CONFIG.workload, vae=replace(tiny, encoder_width=0))
    with pytest.raises(UsageError, match=r"tiny decoder \(TAEHV\).* encodes no video"):
        graph_of(replace(CONFIG, workload=decoder))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--preset", "tiny", "--strength", "1.5"), "--strength 1.5: expected a share of noise"),
        (("--preset", "longlive-2-5b", "--strength", "0.5"), "sampler unipc"),
        (("--preset", "tiny", "--strength", "0.5", "--ranks", "2"), "--ranks 2: an input video"),
        (("--preset", "tiny", "--strength", "0.5", "--backend", "onnx"), "has no input video yet"),
        (("--preset", "seko-talk-tiny", "--strength", "0.5"), "text-to-video models"),
    ],
)
def test_impossible_combinations_are_refused(options: Sequence[str], words: str) -> None:
    from click.testing import CliRunner

    from seko_export.cli.commands import main

    done = CliRunner().invoke(
        main, ["build", *options, "--random-weights", "0", "--target", "cpu", "-o", "never"]
    )
    assert done.exit_code == 2
    assert words in done.stderr


def test_plan_counts_the_encoder() -> None:
    """Its caches are as large as the decoder's are, and its work is part of a chunk's time."""
    plain = BuildOptions(preset="self-forcing-1.3b", no_text=True)
    without, with_video = (
        predict(PlanRequest(options, "h200")) for options in (plain, replace(plain, strength=0.7))
    )
    assert with_video["session_bytes"]["decode"] > 1.5 * without["session_bytes"]["decode"]
    assert with_video["chunk_s"] > without["chunk_s"] + 0.2 * without["decode_s"]

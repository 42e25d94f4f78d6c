"""The tiny preset as an artifact: built, verified, and replayed by the runtime alone as the eager model says."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scripts.random_checkpoint import write_random_checkpoint
from seko_export.build_steps import build_artifact
from seko_export.families.model_files import load_checkpoint
from seko_export.families.seko_talk import audio
from seko_export.families.seko_talk.family import FAMILY
from seko_export.families.wan_layout import picture_branch
from seko_export.media.clip.files import clip_config_of
from seko_export.media.hubert.files import hubert_config_of
from seko_export.media.sources import MediaSources
from seko_export.video.recording import golden_reference, golden_text
from seko_runtime import OpenArtifact, open_artifact
from seko_runtime.cli.commands import main
from seko_runtime.controls import controls_of
from seko_runtime.controls.voice import AudioWindows, VoiceControl, read_voices
from seko_runtime.errors import UsageError
from tests.export.media_files import VAE, write_vae
from tests.seko_talk.streams import Reference, talk_config, weights_of, write_clip, write_hubert
from tests.support.stacked import eager_session, open_stacked
from tests.support.tolerances import relative_error
from tests.support.uncompiled import leave_uncompiled

# Two passes in float32 that feed on each other, over a few chunks: some ten times the bar of one pass.
STREAM_BAR = 5e-5
CHUNKS = 4  # past the wrap: the cache holds a reference and 5 latent frames, a chunk is 2


@pytest.mark.parametrize("scheme", ["fp32", pytest.param("fp4", marks=pytest.mark.slow)])
def test_it_is_built_verified_and_replayed(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exact one is held to the naive model fed with its own results: no eager code of ours between.
    The one with an FP4 cache hears samples of two speakers. Programs run as they are; test_gpu.py compiles them.
    """
    config = talk_config(scheme, model={"image_dim": 32, "speakers": 2 if scheme == "fp4" else 1})
    write_random_checkpoint(tmp_path / "tiny", config.model, seed=0, dtype=torch.float32)
    leave_uncompiled(monkeypatch)
    media, heard = MediaSources(), ((1, 2, 13, 48), "chunk", "audio_features")
    sight = {"picture": ((5, 32), "prompt", "picture_features")}
    if scheme == "fp4":
        heard = ((2, 2, 16_000), "chunk", "audio_windows")
        sight = {"portrait": ((32, 48, 3), "prompt", "portrait")}
        sight[audio.MASKS] = ((2, config.workload.stream.frame_tokens), "session", "speaker_masks")
        write_hubert(tmp_path / "hubert", 48)
        write_clip(tmp_path / "clip.pth", 32)
        media = MediaSources(
            write_vae(tmp_path / "vae"),
            audio_encoder=tmp_path / "hubert",
            image_encoder=tmp_path / "clip.pth",
        )
        config = config.changed(
            audio=hubert_config_of(tmp_path / "hubert"),
            image=clip_config_of(tmp_path / "clip.pth"),
            vae=VAE,
        )
    built = build_artifact(
        config, tmp_path / "tiny", tmp_path / "artifact", media=media, backend="compile", compiler_cache=False
    )
    assert built.golden_error is not None
    assert built.golden_error <= 1e-3
    text, portrait = golden_text(config), golden_reference(config)
    steady = {name: tensor.numpy() for name, tensor in FAMILY.golden_inputs(config, None).items()}
    voices = [FAMILY.golden_inputs(config, number)[audio.AUDIO] for number in range(CHUNKS)]
    opening = {"seeds": [3], "text": text.numpy(), "reference": portrait.numpy(), "inputs": steady}
    with open_artifact(built.artifact) as artifact:
        kinds = {spec.name: (spec.shape, spec.per, spec.kind) for spec in artifact.manifest.inputs}
        assert kinds == {"audio": heard, **sight}
        assert artifact.manifest.workload.schedule.sampler == "euler"
        assert not artifact.manifest.has_context
        assert all(error.within for error in artifact.verify())
        seen, *_ = sight
        blind = {name: array for name, array in steady.items() if name != seen}
        with pytest.raises(UsageError, match=f"input '{seen}' is required per prompt"):
            open_stacked(artifact, **{**opening, "inputs": blind})
        with pytest.raises(UsageError, match="audio_times was computed for the times"):
            open_stacked(artifact, **opening, shift=3.0)
        with open_stacked(artifact, **opening) as session:
            with pytest.raises(
                UsageError, match=r"input 'audio' is required for every chunk|none has come: give"
            ):
                session.run_chunk()
            chunks = [session.run_chunk({"audio": voice.numpy()}).to_host() for voice in voices]
        if config.workload.audio is not None:
            chunks += hears(artifact, opening)
            sees(artifact, opening)
    if scheme != "fp32":
        speaks(built.artifact, tmp_path)
        assert all(np.isfinite(chunk).all() for chunk in chunks)
        return
    checkpoint = dict(load_checkpoint(tmp_path / "tiny", config.model).items())
    weights = weights_of(config, checkpoint)
    reference = Reference(config, checkpoint, text, portrait)
    sigmas = (*config.workload.schedule.sigmas, 0.0)
    with eager_session(config, weights, text, [3]) as session:
        for number, (chunk, voice) in enumerate(zip(chunks, voices, strict=True)):
            eager = torch.from_numpy(session.run_chunk({"audio": voice.numpy()}).to_host())
            assert relative_error(torch.from_numpy(chunk), eager) <= STREAM_BAR
            reference.begin(voice)
            x = first_noise(config, number)
            for at, time in enumerate(config.workload.schedule.timesteps):
                x = x + (sigmas[at + 1] - sigmas[at]) * reference.velocity(at, x, time)[None]
            assert relative_error(torch.from_numpy(chunk), x) <= STREAM_BAR
    assert picture_branch.FEATURES in steady


def hears(artifact: OpenArtifact, opening: Mapping[str, Any]) -> list[np.ndarray]:
    """Make chunks of a voice that is pushed, and the same of its windows."""
    voice = np.random.default_rng(2).normal(0, 0.2, (2, 1000 * (8 * 2 + 1))).astype(np.float32)
    (control,) = controls_of(artifact.manifest).of_kind("voice")
    assert isinstance(control, VoiceControl)
    windows = control.windows
    assert windows == AudioWindows(2, 2, 1000, 4, normalised=True)
    with open_stacked(artifact, **opening) as session:
        session.push_audio(voice)
        chunks = [session.run_chunk().to_host() for _ in range(2)]
    with open_stacked(artifact, **opening) as session:
        for number, chunk in enumerate(chunks):
            inputs = {"audio": windows.of_chunk(voice, 0, 2 * number)}
            assert np.array_equal(session.run_chunk(inputs).to_host(), chunk)
    return chunks


def sees(artifact: OpenArtifact, opening: Mapping[str, Any]) -> None:
    """The reference picture is also the portrait that CLIP sees, unless another one is given."""
    photo, other = np.random.default_rng(0).integers(0, 256, (2, 32, 48, 3), np.uint8)
    windows = {"audio": np.random.default_rng(1).normal(0, 1, (2, 2, 16_000)).astype(np.float32)}
    chunks = []
    places = {audio.MASKS: opening["inputs"][audio.MASKS]}
    for inputs in ({}, {"portrait": photo}, {"portrait": other}):
        with open_stacked(artifact, **{**opening, "reference": photo, "inputs": places | inputs}) as session:
            chunks.append(session.run_chunk(windows).to_host())
    assert np.array_equal(chunks[0], chunks[1])
    assert not np.array_equal(chunks[0], chunks[2])
    with open_stacked(artifact, **{**opening, "reference": other, "inputs": places}) as session:
        assert not np.array_equal(session.run_chunk(windows).to_host(), chunks[2])
        session.restart_row(0, reference=photo)
        assert np.array_equal(session.run_chunk(windows).to_host(), chunks[0])


def speaks(artifact: Path, folder: Path) -> None:
    """The command: a portrait and two voices become a video with sound, as long as they are and in step with them."""
    av = pytest.importorskip("av", reason="PyAV is not installed")
    face, voice, silence = folder / "face.npy", folder / "voice.wav", folder / "silence.wav"
    np.save(face, np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8))
    samples = (20_000 * bursts(8500)).astype("<i2")
    for file_name, pcm in ((voice, samples), (silence, 0 * samples)):
        with wave.open(str(file_name), "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
            file.writeframes(pcm.tobytes())
    left, right = folder / "left.npy", folder / "right.npy"
    for file_name, columns in ((left, slice(48)), (right, slice(48, 96))):
        mask = np.zeros((64, 96, 3), np.uint8)
        mask[:, columns] = 255
        np.save(file_name, mask)
    out = folder / "out.mp4"
    asked = ["run", str(artifact), "--image", str(face), "-o", str(out)]
    voices = ["--audio", str(voice), "--audio", str(silence)]
    masks = ["--mask", str(left), "--mask", str(right)]
    assert main([*asked, *masks]) == UsageError.exit_code
    assert main([*asked, *masks, "--audio", str(voice)]) == UsageError.exit_code
    output = io.StringIO()
    with redirect_stderr(output):
        assert main([*asked, *voices]) == UsageError.exit_code
    assert "give --mask FILE, once or several times" in output.getvalue()
    assert main([*asked, *voices, *masks[:2]]) == UsageError.exit_code
    without = ["run", str(artifact), *voices, *masks, "-o", str(out)]
    assert main(without) == UsageError.exit_code  # nothing is taken of the golden's noise
    output = io.StringIO()
    with redirect_stdout(output):
        assert main([*asked, *voices, *masks, "--json"]) == 0
    assert json.loads(output.getvalue())["live_late_s"] > 0
    times, pictures = pictures_of(out)
    assert times[0] == 0
    assert len(times) == 13  # 9 video frames of sound are 3 latent frames, so 2 chunks of 2
    assert relative_error(*(torch.from_numpy(part) for part in heard_in(out, samples))) <= 0.05
    assert main([*asked, *voices, *masks[2:], *masks[:2]]) == 0
    assert not np.array_equal(pictures_of(out)[1], pictures)  # whoever speaks has changed sides
    as_m4a = folder / "voice.m4a"
    with av.open(str(as_m4a), "w") as container:
        track = container.add_stream("aac", rate=48_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.repeat(samples, 3)[None] / np.float32(32768), "fltp", "mono")
        frame.sample_rate = 48_000
        container.mux([*track.encode(frame), *track.encode(None)])
    read = read_voices([as_m4a])
    assert read is not None
    assert abs(read.shape[1] - len(samples)) <= 1100  # the coder's own frames


def bursts(count: int) -> np.ndarray:
    """A tone that comes and goes, float32 in -1..1, so that any shift shows."""
    at = np.arange(count)
    return (np.sin(at * 0.17) * np.hanning(4000)[at % 4000] * (at // 4000 % 3 == 1) / 2).astype(np.float32)


def pictures_of(file: Path) -> tuple[list[float], np.ndarray]:
    """The times of a video's frames, in seconds, and the frames."""
    import av

    with av.open(str(file)) as container:
        frames = [*container.decode(video=0)]
    return [float(frame.pts * frame.time_base) for frame in frames], np.stack(
        [frame.to_ndarray() for frame in frames]
    )


def heard_in(file: Path, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sound of a video at the times that it says, and these samples."""
    import av

    got, at = np.zeros(len(samples), np.float32), 0
    with av.open(str(file)) as container:
        for frame in container.decode(audio=0):
            at = round(float(frame.pts * frame.time_base) * 16_000)
            part = frame.to_ndarray()[0][max(0, -at) : max(0, len(got) - at)]
            got[max(0, at) : max(0, at) + len(part)] = part
    return got, samples.astype(np.float32) / 32768


def first_noise(config, number: int) -> torch.Tensor:
    """The latents [1, C, F, h, w] that a chunk begins with, seed 3."""
    from seko_export.families.layers.sampler import gaussian

    s = config.workload.stream
    frames = torch.arange(number * s.chunk_frames, (number + 1) * s.chunk_frames)[None]
    shape = (config.model.out_channels, s.latent_height, s.latent_width)
    return gaussian(torch.tensor([3]), frames, torch.zeros(1, dtype=torch.int64), shape)

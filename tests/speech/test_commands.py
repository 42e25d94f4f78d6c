"""An artifact of speech: `open_artifact`, `verify`, and the command line from a text to a file."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import seko_runtime
from seko_export.cli import main as seko_export
from seko_runtime.cli.commands import main
from seko_runtime.errors import ArtifactError, UsageError
from seko_runtime.media_files import sound_writer
from seko_runtime.media_files.sound import load_sound
from seko_runtime.media_files.sound_writer import SoundWriter
from seko_runtime.opening.artifact import open_artifact
from seko_runtime.speech.voice import Voice
from tests.speech.texts import said_alone, said_in_turn
from tests.speech.toy_speech import (
    GOLDEN,
    PATCH,
    VOCABULARY,
    VOICE,
    ToyBackend,
    golden_tensors,
    write_artifact,
)

Said = pytest.CaptureFixture[str]


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy's artifact, opened without native code."""
    monkeypatch.setattr("seko_runtime.opening.artifact.open_backend", lambda *_: ToyBackend())
    return write_artifact(tmp_path / "toy")


def written_wav(path: Path, samples: np.ndarray, rate: int = VOICE.sample_rate) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return path


def read_wav(file: Any) -> np.ndarray:
    with wave.open(file, "rb") as opened:
        assert (opened.getnchannels(), opened.getsampwidth(), opened.getframerate()) == (1, 2, 48_000)
        return np.frombuffer(opened.readframes(1 << 20), "<i2")


def in_16_bits(text: str, voice: Voice | None = None, **settings: Any) -> np.ndarray:
    return levels(said_alone(text, voice or Voice(), 32, **settings))


def levels(patches: Sequence[np.ndarray]) -> np.ndarray:
    return np.rint(np.clip(np.concatenate(patches), -1, 1) * 32767).astype("<i2")


def test_an_open_artifact_verifies_and_speaks(artifact: Path) -> None:
    with open_artifact(artifact) as opened:
        assert isinstance(opened, seko_runtime.SpeechArtifact)
        errors = opened.verify()
        assert [error.within for error in errors] == [True] * (1 + GOLDEN.steps + 3)
        with opened.open_session(seed=3) as session:
            session.voice = session.encode_voice(np.ones(8, np.float32))
            patches = list(session.speak("hallo"))
            wanted = said_alone("hallo", session.voice, 32, seed=3)
            assert [patch.tobytes() for patch in patches] == [patch.tobytes() for patch in wanted]
        with opened.open_pool() as pool, pool.open_session() as session:
            assert list(session.speak("abc"))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("state.base", "prefill"),
        ("samples", "step 0"),
        ("patches", "step 0"),
        ("state.patch", "prefill"),
        ("voice.latents", "voice 0"),
    ],
)
def test_another_recording_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, what: str
) -> None:
    monkeypatch.setattr("seko_runtime.opening.artifact.open_backend", lambda *_: ToyBackend())
    changed = golden_tensors()[name] * np.float32(1.01)
    with open_artifact(write_artifact(tmp_path / "toy", **{name.replace(".", "_"): changed})) as opened:
        missed = [error.what for error in opened.verify() if not error.within]
        assert missed[0] == what


def test_a_recording_of_another_shape_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seko_runtime.opening.artifact.open_backend", lambda *_: ToyBackend())
    folder = write_artifact(tmp_path / "toy", samples=golden_tensors()["samples"][:, :1])
    with pytest.raises(ArtifactError, match="samples"):
        open_artifact(folder)


@pytest.mark.parametrize("ids", [[-1], [VOCABULARY], []])
def test_recorded_token_ids_outside_the_vocabulary_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: list[int]
) -> None:
    monkeypatch.setattr("seko_runtime.opening.artifact.open_backend", lambda *_: ToyBackend())
    recorded = golden_tensors()
    changes = {
        "prompt_ids": np.array(ids, np.int64),
        "prompt_is_audio": recorded["prompt.is_audio"][: len(ids)],
        "prompt_patches": recorded["prompt.patches"][: len(ids)],
    }
    folder = write_artifact(tmp_path / "toy", **changes)
    with pytest.raises(ArtifactError, match="no list of token ids below"):
        open_artifact(folder)


def test_the_exporter_verifies_speech_too(artifact: Path) -> None:
    done = CliRunner().invoke(seko_export, ["verify", str(artifact)])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(seko_export, ["verify", str(artifact), "--json"])
    assert json.loads(done.stdout)["ok"]


def test_verify_and_info_say_what_there_is(artifact: Path, capsys: Said) -> None:
    assert main(["verify", str(artifact)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("golden   prefill: state.base 0 (at most 1e-06)")
    assert lines[-1] == f"verified {len(lines) - 1} recorded results: all within their bounds"
    assert main(["verify", str(artifact), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    assert main(["info", str(artifact)]) == 0
    assert "48000 samples a second" in capsys.readouterr().out
    assert main(["info", str(artifact), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["workload"], summary["positions"], summary["patch"]["sample_rate"]) == (
        "speech",
        32,
        48_000,
    )


def test_a_text_becomes_a_wav(artifact: Path, tmp_path: Path, capsys: Said) -> None:
    sound = np.round(np.sin(np.arange(21)), 2)
    voice_file = written_wav(tmp_path / "voice.wav", sound)
    arguments = [
        "run",
        str(artifact),
        "--text",
        "hallo",
        "--seed",
        "3",
        "-o",
        str(tmp_path / "out.wav"),
        "--json",
    ]
    assert main(arguments) == 0
    summary = json.loads(capsys.readouterr().out)
    np.testing.assert_array_equal(read_wav(str(tmp_path / "out.wav")), in_16_bits("hallo", seed=3))
    assert (summary["format"], summary["sample_rate"]) == ("wav", 48_000)
    assert summary["patches"] * PATCH.seconds == pytest.approx(summary["sound_s"])
    with open_artifact(artifact) as opened, opened.open_pool() as pool:
        heard = load_sound(voice_file)
        voices = pool.encode_voice(heard), pool.encode_voice(continued=heard, text="no")
    for voice, more in zip(voices, ([], ["--voice-text", "no"]), strict=True):
        assert main([*arguments, "--voice", str(voice_file), *more]) == 0
        np.testing.assert_array_equal(read_wav(str(tmp_path / "out.wav")), in_16_bits("hallo", voice, seed=3))
    both = [*arguments, "--voice", str(voice_file), "--voice-text", "no", "--reference", str(voice_file)]
    assert main([*both, "--save-voice", str(tmp_path / "ada.safetensors")]) == 0
    with open_artifact(artifact) as opened, opened.open_pool() as pool:
        voice = pool.encode_voice(heard, continued=heard, text="no")
    wanted = in_16_bits("hallo", voice, seed=3)
    np.testing.assert_array_equal(read_wav(str(tmp_path / "out.wav")), wanted)
    voice_file.unlink()
    (tmp_path / "out.wav").unlink()
    assert main([*arguments, "--voice", str(tmp_path / "ada.safetensors")]) == 0
    np.testing.assert_array_equal(read_wav(str(tmp_path / "out.wav")), wanted)
    capsys.readouterr()
    assert main([*arguments[:-1], "--patches", "2", "--guidance", "1", "--temperature", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    wanted = in_16_bits("hallo", seed=3, guidance=1.0, temperature=0.5)[: 2 * PATCH.samples]
    np.testing.assert_array_equal(read_wav(str(tmp_path / "out.wav")), wanted)
    assert [line.split()[0] for line in lines] == ["wrote", "speed", "cut"]


def test_a_file_is_spoken_sentence_by_sentence(
    artifact: Path, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line's end is a blank; the sound is that of --text, of stdin, and of a file that begins with a mark."""
    text, output = "abcd is\n  hallo.\nzzzz.\n\nqqqq", tmp_path / "out.wav"
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    (tmp_path / "marked.txt").write_text(text, encoding="utf-8-sig")
    wanted = said_in_turn(["abcd is hallo.", "zzzz.", "qqqq"], positions=32, seed=3)
    arguments = ["run", str(artifact), "--seed", "3", "-o", str(output)]
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    files = (["--text-file", str(tmp_path / name)] for name in ("text.txt", "marked.txt"))
    for more in (*files, ["--text-file", "-"], ["--text", text]):
        assert main([*arguments, *more]) == 0
        np.testing.assert_array_equal(read_wav(str(output)), levels(wanted))
    assert "sentences do not go on in the voice" in capsys.readouterr().out


def test_a_sentence_of_a_pipe_that_is_too_long_leaves_the_sound_before_it(
    artifact: Path, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, output = f"hallo.\n{'a' * 60}", tmp_path / "out.wav"
    arguments = ["run", str(artifact), "--seed", "3", "-o", str(output), "--text-file"]
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    assert main([*arguments, str(tmp_path / "text.txt")]) == 2  # known before the first sound
    assert not output.exists()
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main([*arguments, "-"]) == 2
    assert "speak shorter texts, or open it" in (said := capsys.readouterr().err)
    assert f"kept 0.00 s in {output}" in said
    np.testing.assert_array_equal(read_wav(str(output)), in_16_bits("hallo.", seed=3))


def test_a_text_that_does_not_fit_leaves_no_voice(artifact: Path, tmp_path: Path) -> None:
    written_wav(tmp_path / "ada.wav", np.zeros(8))
    arguments = ["run", str(artifact), "--voice", str(tmp_path / "ada.wav"), "-o", str(tmp_path / "out.wav")]
    kept = tmp_path / "ada.safetensors"
    assert main([*arguments, "--save-voice", str(kept), "--text", "x" * 40]) == 2
    assert not kept.exists()


def test_a_place_for_a_voice_is_looked_at_before_the_voice_is_encoded(
    artifact: Path, tmp_path: Path, capsys: Said
) -> None:
    (tmp_path / "file").touch()
    kept = tmp_path / "file" / "ada.safetensors"
    arguments = ["run", str(artifact), "--voice", "none.wav", "-o", str(tmp_path / "out.wav")]
    assert main([*arguments, "--save-voice", str(kept), "--text", "a"]) == 5
    assert f"{kept} cannot be written (Not a directory)" in capsys.readouterr().err


def test_a_file_without_a_voice_is_no_voice(artifact: Path, tmp_path: Path, capsys: Said) -> None:
    Voice().save(tmp_path / "none.safetensors")
    arguments = ["run", str(artifact), "--text", "a", "-o", str(tmp_path / "out.wav")]
    assert main([*arguments, "--voice", str(tmp_path / "none.safetensors")]) == 3
    assert "holds no voice" in capsys.readouterr().err


def test_a_closed_stdin_is_told(
    artifact: Path, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)  # as Python has it
    assert main(["run", str(artifact), "-o", str(tmp_path / "out.wav"), "--text-file", "-"]) == 3
    assert "reads stdin, which is closed" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["mp3", "flac"])
def test_other_formats_hold_the_same_sound(tmp_path: Path, form: str) -> None:
    pytest.importorskip("av")
    sound = (0.5 * np.sin(np.arange(48_000) / 20)).astype(np.float32)
    with SoundWriter(tmp_path / f"out.{form}", 48_000) as writer:
        for part in np.split(sound, [100, 7_780, 20_000]):
            writer.write(part)
    heard = load_sound(tmp_path / f"out.{form}", rate=48_000)
    late = {"flac": 0, "mp3": len(heard) - len(sound)}[form]
    assert late < 3000
    if form == "flac":
        np.testing.assert_allclose(heard, sound, atol=1 / 32767)
    else:
        assert np.abs(np.fft.rfft(heard)).argmax() / len(heard) == pytest.approx(
            1 / (20 * 2 * np.pi), rel=0.01
        )


def test_a_pipe_gets_16_bits_as_they_come(artifact: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(
        [sys.executable, "-c", f"print(open({str(pipe)!r}, 'rb').read().hex())"], stdout=-1
    )
    assert main(["run", str(artifact), "--text", "abc", "-o", str(pipe)]) == 0
    output, _ = reader.communicate(timeout=30)
    assert bytes.fromhex(output.decode()) == in_16_bits("abc").tobytes()
    for form, begins in (("raw", 0), ("wav", 44)):
        reader = subprocess.Popen(
            [sys.executable, "-c", f"print(open({str(pipe)!r}, 'rb').read().hex())"], stdout=-1
        )
        assert main(["run", str(artifact), "--text", "abc", "-o", str(pipe), "--format", form]) == 0
        content = bytes.fromhex(reader.communicate(timeout=30)[0].decode())
        assert content[begins:] == in_16_bits("abc").tobytes()


@pytest.mark.parametrize(
    "more",
    [
        ["--text", "a", "--voice", "missing"],
        ["--text", "a", "--voice", "missing.safetensors"],
        ["--text-file", "missing"],
    ],
    ids=["voice", "encoded", "text"],
)
def test_a_missing_file_is_named(artifact: Path, tmp_path: Path, more: list[str], capsys: Said) -> None:
    assert main(["run", str(artifact), "-o", str(tmp_path / "out.wav"), *more]) == 3
    assert f"{more[-1]} was not found" in capsys.readouterr().err
    assert not (tmp_path / "out.wav").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "give --text or --text-file, one of them"),
        (["--text", "a", "--text-file", "b"], "give --text or --text-file, one of them"),
        (["--text", "a", "--voice-text", "b"], "--voice-text are the words of --voice"),
        (["--text", "a", "--voice", "b.wav", "--reference", "c.wav"], "beside a --voice with --voice-text"),
        (["--text", "a", "--voice", "b.safetensors", "--voice-text", "c"], "leave --voice-text and --ref"),
        (["--text", "a", "--save-voice", "b.safetensors"], "give one"),
        (["--text", "a", "--voice", "b.wav", "--save-voice", "b.wav"], "does not end in .safetensors"),
        (["--text", "a", "--chunks", "3"], "--chunks is for artifacts that make video"),
        (["--text", "a", "--image", "a.png"], "--image is for artifacts that make video"),
        (["--text", "a", "--steps", "4"], "--steps is for artifacts that make video"),
        (["--text", "a", "-o", "out.mp4"], "expected .wav, .mp3 or .flac"),
        (["--text", "a", "--format", "y4m"], "expected one of wav, mp3, flac, raw"),
        (["--text-file", os.devnull], "--text-file /dev/null has nothing to say"),
        (["--text", " "], "--text has nothing to say"),
        (["--text", "😄"], "--text has nothing to say: it has no letter and no digit"),
        (["--text", "a\0b"], "--text has a zero character at place 1"),
        (["--text", "\ud83d"], "--text has half of a surrogate pair at place 0"),
        (["--text", "a", "--guidance", "1e38"], "guidance is 1e+38, expected a number from 0 to 10"),
        (["--text", "a", "--temperature", "nan"], "temperature is nan, expected a number from 0 to 2"),
        (["--text", "x" * 40], "have 41 tokens, the session has 32 positions"),
        (["--text", "a", "--seed", "-1"], "seed is -1"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_no_file(
    artifact: Path, tmp_path: Path, more: list[str], said: str, capsys: Said
) -> None:
    output = tmp_path / "out.wav"
    assert main(["run", str(artifact), "-o", str(output), *more]) == 2
    assert said in capsys.readouterr().err
    assert not output.exists()


def ended(path: Path, fault: BaseException) -> None:
    """Write half a second, then end by a fault."""
    with SoundWriter(path, 48_000) as writer:
        writer.write(np.zeros(24_000, np.float32))
        raise fault


def test_a_wav_of_more_than_four_gigabytes_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its header cannot say how much it holds."""
    monkeypatch.setattr(sound_writer, "_HEADER_BYTES", 44 - (1 << 32))
    with SoundWriter(tmp_path / "out.wav", 48_000) as writer:
        writer.write(np.zeros(24_000, np.float32))
    content = (tmp_path / "out.wav").read_bytes()
    assert content[40:44] == b"\xff" * 4
    assert len(content) == 44 + 2 * 24_000


def test_a_signal_keeps_the_sound_so_far(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        ended(tmp_path / "out.wav", KeyboardInterrupt())
    assert caught.value.__notes__ == [f"kept 0.50 s in {tmp_path / 'out.wav'}"]
    assert len(read_wav(str(tmp_path / "out.wav"))) == 24_000
    with pytest.raises(UsageError):
        ended(tmp_path / "other.wav", UsageError("planted"))
    assert not (tmp_path / "other.wav").exists()

"""`seko-run run --input NAME=FILE.npy`: which arrays fit, what is refused before anything is opened, what is fed."""

from __future__ import annotations

import argparse
import contextlib
import json
import wave
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from seko_runtime import open_artifact
from seko_runtime.cli.commands import main
from seko_runtime.cli.video.input_files import RunInputs, fit_inputs, read_inputs
from seko_runtime.controls import controls_of
from seko_runtime.controls.voice import read_voices
from seko_runtime.errors import UsageError, VideoWriterError
from seko_runtime.format.manifest import Buffer, ControlSpec, InputSpec
from seko_runtime.video.artifact import VideoArtifact
from seko_runtime.video.local_rows import LocalVideoRows
from seko_runtime.video.lockstep import Lockstep
from seko_runtime.video.manifest import VideoManifest
from tests.runtime import toy

from .conftest import Edit
from .toy import CHANNELS
from .toy_inputs import RUNS, input_manifest

Said = pytest.CaptureFixture[str]
CHUNKS = 4


@pytest.fixture(scope="module")
def manifest() -> VideoManifest:
    return input_manifest()


def fit_conditioning(
    manifest: VideoManifest, arrays: Mapping[str, NDArray[Any]], chunks: int = CHUNKS
) -> RunInputs:
    needed = {"camera": numbers(CHANNELS), "place": numbers(CHANNELS)}
    controls = [controls_of(manifest) for _ in range(manifest.call_rows)]
    options = argparse.Namespace(chunks=chunks, image=None)
    return fit_inputs({**needed, **arrays}, options, manifest, controls)


def numbers(*shape: int) -> NDArray[np.float32]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_one_chunks_array_is_for_all_rows_and_chunks(manifest: VideoManifest) -> None:
    rows = manifest.call_rows
    inputs = fit_conditioning(manifest, {"gain": numbers(RUNS, 2)})
    for number in range(CHUNKS):
        seen = inputs.of_chunk(number)
        assert set(seen) == {"camera", "gain"}
        assert np.array_equal(seen["camera"], np.stack([numbers(CHANNELS)] * rows))
        assert np.array_equal(seen["gain"], np.stack([numbers(RUNS, 2)] * rows))
    assert np.array_equal(inputs.steady["place"], np.stack([numbers(CHANNELS)] * rows))
    endless = fit_conditioning(
        manifest, {"gain": numbers(RUNS, 2)}, 10**20
    )  # of a pipe, until its reader stops
    assert np.array_equal(endless.of_chunk(10**19)["gain"], inputs.of_chunk(0)["gain"])


@pytest.mark.parametrize("spare", [0, 3])
def test_an_axis_of_chunks_and_one_of_rows(manifest: VideoManifest, spare: int) -> None:
    rows, chunks = manifest.call_rows, CHUNKS + spare
    each, apart = numbers(chunks, CHANNELS), numbers(chunks, rows, CHANNELS)
    for number in range(CHUNKS):
        seen = fit_conditioning(manifest, {"camera": each}).of_chunk(number)["camera"]
        assert np.array_equal(seen, np.stack([each[number]] * rows))
        assert np.array_equal(
            fit_conditioning(manifest, {"camera": apart}).of_chunk(number)["camera"], apart[number]
        )


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"lens": numbers(2)}, "no such input; its inputs: camera, zoom, key, gain, place"),
        ({"camera": numbers(CHUNKS - 1, CHANNELS)}, rf"\[{CHUNKS}, {CHANNELS}\] or \[{CHUNKS}, "),
        ({"camera": numbers(CHUNKS, CHANNELS + 1)}, rf"expected \[{CHANNELS}\] for every chunk"),
        ({"camera": numbers(CHANNELS).astype(np.float64)}, "is float64 .* expected float32"),
        ({"camera": np.full((CHUNKS, CHANNELS), np.nan, np.float32)}, "not finite"),
        ({"place": numbers(CHUNKS + 9, CHANNELS)}, "'place' is float32"),
    ],
)
def test_what_does_not_fit_is_refused(
    manifest: VideoManifest, arrays: Mapping[str, NDArray[Any]], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        fit_conditioning(manifest, arrays)


def test_a_required_input_without_a_golden_must_be_given(manifest: VideoManifest) -> None:
    manifest = toy.changed(manifest, golden=None)
    with pytest.raises(UsageError, match=r"'camera' is required per chunk: give --input camera=FILE\.npy"):
        fit_inputs({}, argparse.Namespace(chunks=1, image=None), manifest, [controls_of(manifest)])


@pytest.mark.parametrize("option", ["camera", "=file.npy", "camera="])
def test_an_option_of_another_form_is_refused(option: str) -> None:
    with pytest.raises(UsageError, match=r"expected NAME=FILE\.npy"):
        read_inputs([option])


@pytest.fixture
def camera_folder(whole_folder: Path, edit_manifest: Edit) -> Path:
    """The whole toy's artifact with an input that its engines do not look at."""
    spec = InputSpec("camera", (CHANNELS,), "float32", "input.camera", "chunk", "caller", "hold", "pose")

    def with_camera(manifest: VideoManifest) -> VideoManifest:
        buffers = (
            *manifest.buffers,
            Buffer("input.camera", (manifest.call_rows, CHANNELS), "float32", "host"),
        )
        return replace(manifest, inputs=(spec,), buffers=buffers)

    edit_manifest(whole_folder, with_camera)
    return whole_folder


def test_run_feeds_what_is_given_and_says_what_is_not(
    camera_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    fed: list[Mapping[str, Any]] = []
    run_chunk: Callable[..., Any] = Lockstep.run_chunk

    def watched(session: Lockstep, inputs: Mapping[str, Any]) -> Any:
        fed.append(inputs)
        return run_chunk(session, inputs)

    monkeypatch.setattr(Lockstep, "run_chunk", watched)
    camera = numbers(3, CHANNELS)
    np.save(tmp_path / "camera.npy", camera)
    command = ["run", str(camera_folder), "-o", str(tmp_path / "out.npy"), "--chunks", "2"]
    assert main(command) == 0
    assert fed == [{}, {}]
    assert "camera: as recorded in the golden; --input camera=FILE.npy" in capsys.readouterr().err
    fed.clear()
    assert main([*command, "--input", f"camera={tmp_path / 'camera.npy'}"]) == 0
    said = capsys.readouterr()
    assert [inputs["camera"].tolist() for inputs in fed] == [[camera[0].tolist()], [camera[1].tolist()]]
    assert "recorded in the golden" not in said.err
    assert "check    skipped (--input was given)" in said.out
    assert main([*command, "--input", f"lens={tmp_path / 'camera.npy'}"]) == 2
    assert "no such input; its inputs: camera" in capsys.readouterr().err


def test_a_recording_is_replayed_with_the_inputs_of_its_chunks(
    camera_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    """Those of the golden are no part of it; --input is, of one."""
    camera, other = numbers(CHANNELS), numbers(2, CHANNELS) + 1
    with (
        open_artifact(camera_folder) as artifact,
        artifact.open_session(seed=5, prompt="a red disc") as session,
    ):
        recording = session.record()
        session.run_chunk()
        session.run_chunk({"camera": camera})
    path, inputs = tmp_path / "events.jsonl", tmp_path / "camera.npy"
    path.write_text(recording.text(), encoding="utf-8")
    np.save(inputs, other)
    heard: list[Any] = []
    run_rows: Callable[..., Any] = LocalVideoRows.run

    def watched(rows: LocalVideoRows, numbers: Any, given: Any) -> Any:
        heard.append(given[0])
        return run_rows(rows, numbers, given)

    monkeypatch.setattr(LocalVideoRows, "run", watched)
    golden = {"camera": numbers(1, CHANNELS) + 2}
    monkeypatch.setattr(VideoArtifact, "golden_inputs", lambda _, chunk, __: {} if chunk is None else golden)
    command = ["run", str(camera_folder), "--events", str(path), "-o", str(tmp_path / "out.npy")]
    assert main(command) == 0
    assert "recorded in the golden" not in capsys.readouterr().err
    assert (heard[0], [*heard[1]]) == ({}, ["camera"])
    assert np.array_equal(heard[1]["camera"], camera)
    assert main([*command, "--input", f"camera={inputs}"]) == 0
    assert np.array_equal([given["camera"] for given in heard[2:]], other)


def test_info_names_the_inputs(camera_folder: Path, capsys: Said) -> None:
    assert main(["info", str(camera_folder)]) == 0
    assert f"input    camera (float32 [{CHANNELS}], per chunk, hold)" in capsys.readouterr().out
    assert main(["info", str(camera_folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["inputs"][0]["name"] == "camera"


def npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


@pytest.mark.parametrize(
    "content",
    [
        b"PK\3\4 no zip file",
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,"),
        npy("'''"),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}"),
    ],
)
def test_what_numpy_cannot_read_is_no_array_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(UsageError, match=r"--input .*is no \.npy file of numbers: \w+"):
        read_inputs([f"a={tmp_path / 'a.npy'}"])


def test_an_array_file_that_promises_more_than_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**22},)}}"))
    with pytest.raises(UsageError, match="at most 2147483648 are read"):
        read_inputs([f"a={tmp_path / 'a.npy'}"])


def test_a_wav_that_is_cut_or_damaged_is_heard_as_far_as_it_goes_or_refused(tmp_path: Path) -> None:
    path, samples = tmp_path / "a.wav", np.arange(100, dtype=np.int16)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    whole = path.read_bytes()
    for cut in (0, 1, 2, 151):
        path.write_bytes(whole[: len(whole) - cut])
        heard = read_voices([path])
        assert heard is not None
        assert np.array_equal(heard[0] * 32768, samples[: (200 - cut) // 2])
    for at in range(44):  # every byte of the header
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        with contextlib.suppress(UsageError, VideoWriterError):
            read_voices([path])


def test_run_says_which_control_is_not_installed(
    camera_folder: Path, edit_manifest: Edit, tmp_path: Path, capsys: Said
) -> None:
    steered = (ControlSpec("wind", "wind", {"wind": "camera"}),)
    edit_manifest(camera_folder, lambda manifest: replace(manifest, controls=steered))
    assert main(["run", str(camera_folder), "-o", str(tmp_path / "out.npy"), "--chunks", "1"]) == 0
    assert "as does the control 'wind', which is not installed" in capsys.readouterr().err

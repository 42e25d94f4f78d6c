"""An artifact with text, pictures and video: open, verify, and the command line from a sentence to a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seko_runtime import errors
from seko_runtime.cli.commands import main
from seko_runtime.cli.video.conditioning import MAX_SCHEDULE_BYTES, load_schedule
from seko_runtime.opening.artifact import open_artifact
from seko_runtime.video.manifest import VideoManifest
from tests.support.stacked import open_stacked

from . import toy, toy_whole
from .conftest import Edit
from .toy_whole import CHUNK_VIDEO, FIRST_FRAMES, HEIGHT, WIDTH, open_whole

Run = Callable[..., dict[str, object]]


@pytest.fixture
def run(whole_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def go(*options: str, goal: str = "out.y4m") -> dict[str, object]:
        arguments = [
            "run",
            str(whole_folder),
            "--chunks",
            "4",
            "-o",
            str(tmp_path / goal),
            "--json",
            *options,
        ]
        assert main(arguments) == 0, capsys.readouterr().err
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert isinstance(result, dict)
        return result

    return go


def y4m_frames(path: Path) -> list[bytes]:
    header, _, content = path.read_bytes().partition(b"\n")
    assert header == f"YUV4MPEG2 W{WIDTH} H{HEIGHT} F16:1 Ip A1:1 C444 XCOLORRANGE=FULL".encode()
    size = len(b"FRAME\n") + 3 * HEIGHT * WIDTH
    assert len(content) % size == 0
    return [content[place : place + size] for place in range(0, len(content), size)]


def test_verify_compares_the_video_and_tells_another_decoder(
    whole_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_artifact(whole_folder) as artifact:
        errors = artifact.verify()
        assert [(error.chunk, error.video, error.within) for error in errors] == [
            (0, 0.0, True),
            (3, 0.0, True),
        ]
    real = toy_whole.decode_frames

    def drifting(*inputs: object, first: bool) -> object:
        picture, last, total = real(*inputs, first=first)  # type: ignore[arg-type]
        return picture, last, total * 0.5

    monkeypatch.setattr(toy_whole, "decode_frames", drifting)
    with open_artifact(whole_folder) as artifact:
        first, later = artifact.verify()
        assert first.within
        assert not later.within
        assert later.golden <= later.tolerance


def test_a_golden_video_of_another_shape_is_refused(whole_folder: Path, edit_manifest: Edit) -> None:
    edit_manifest(
        whole_folder, lambda manifest: toy.changed(manifest, golden=replace(toy_whole.GOLDEN, video_step=3))
    )
    with pytest.raises(errors.ArtifactError, match=r"video\.0"):
        open_artifact(whole_folder)


def test_run_writes_decoded_frames_and_reports_them(run: Run, tmp_path: Path) -> None:
    result = run()
    frames = y4m_frames(tmp_path / "out.y4m")
    assert result["video_frames"] == len(frames) == FIRST_FRAMES + 3 * CHUNK_VIDEO
    assert result["preview"] is False
    assert result["prompt_cache"] == {"hits": 0, "misses": 0}
    assert [row["chunk"] for row in result["errors"]] == [0, 3]  # type: ignore[attr-defined]
    assert result["first_frame_s"] >= result["first_chunk_s"] > 0  # type: ignore[operator]
    assert result["passes"] == toy.PASSES


def test_run_with_a_prompt_is_the_session_with_that_prompt(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    assert run("--prompt", "a blue  ring", goal="a.npy")["errors"] == []
    with open_whole(prompt="a blue ring") as session:
        wanted = np.stack([session.run_chunk().to_host() for _ in range(4)])
    assert np.array_equal(np.load(tmp_path / "a.npy"), wanted)


def test_a_schedule_changes_prompts_at_the_chunks_that_begin_late_enough(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    schedule = [
        {"at_s": 0, "prompt": "a blue ring"},
        {"at_s": (FIRST_FRAMES + 1) / 16, "prompt": "a red disc", "recache": True},
        {"at_s": 100, "prompt": "never"},
    ]
    (tmp_path / "prompts.json").write_text(json.dumps(schedule))
    result = run("--prompts", str(tmp_path / "prompts.json"), goal="a.npy")
    assert result["prompt_cache"] == {"hits": 0, "misses": 2}
    with open_whole(prompt="a blue ring") as session:
        wanted = [session.run_chunk().to_host() for _ in range(2)]
        session.set_prompt("a red disc", recache=True)
        wanted += [session.run_chunk().to_host() for _ in range(2)]
    assert np.array_equal(np.load(tmp_path / "a.npy"), np.stack(wanted))


@pytest.mark.parametrize(
    ("late", "told"),
    [
        ([{"at_s": 100, "prompt": "red"}], "the prompt at 100 s is not used"),
        (
            [{"at_s": 1e6, "prompt": "red"}, {"at_s": 2e6, "prompt": "a"}],
            "1e+06 s and 1 behind it are not used",
        ),
        (
            [{"at_frame": 27, "prompt": "red"}, {"at_frame": 28, "prompt": "a"}],
            "at video frame 28 is not used",
        ),
        ([{"at_frame": 27, "prompt": "red"}], None),
    ],
)
def test_a_prompt_behind_the_last_chunk_is_told(
    whole_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    late: list[dict[str, object]],
    told: str | None,
) -> None:
    pytest.importorskip("tokenizers")
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(late))
    output = str(tmp_path / "a.npy")
    assert main(["run", str(whole_folder), "--chunks", "4", "--prompts", str(prompts), "-o", output]) == 0
    text = capsys.readouterr().err
    assert ("not used" not in text) if told is None else (f"{told}: the last of 4 chunks" in text)


def test_a_schedule_whose_rebuilds_cannot_be_is_refused_before_the_artifact_opens(
    whole_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(VideoManifest, "no_rebuild", "this artifact has no context pass")
    monkeypatch.setattr("seko_runtime.cli.video.run.open_artifact", lambda *_, **__: pytest.fail("it opens"))
    prompts = tmp_path / "prompts.json"
    schedule = [{"at_s": 0, "prompt": "a red disc"}, {"at_s": 1, "prompt": "a blue ring", "recache": True}]
    prompts.write_text(json.dumps(schedule))
    assert main(["run", str(whole_folder), "--prompts", str(prompts), "-o", str(tmp_path / "a.npy")]) == 2
    assert "this artifact has no context pass" in capsys.readouterr().err


def test_prompts_by_video_frame_change_at_its_latent_frame(tmp_path: Path) -> None:
    """The rule of Seko-Talk's own schedules: a segment counts from the chunk on whose first latent frame it is in."""
    stream = toy.toy_manifest().workload.stream
    assert stream.video_frames_per_latent == 4
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([{"at_frame": at, "prompt": str(at)} for at in (0, 82, 160, 240)]))
    schedule = load_schedule(file)
    for first_latent in range(80):
        due = [change for change in schedule if change.due(stream, first_latent, 0)]
        assert due[-1].prompt == str(max(at for at in (0, 82, 160, 240) if at // 4 <= first_latent))


def test_run_with_a_picture_begins_with_it(run: Run, tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    np.save(tmp_path / "image.npy", image)
    assert run("--image", str(tmp_path / "image.npy"), goal="a.npy")["errors"] == []
    latents = np.load(tmp_path / "a.npy")
    with open_whole(image=image) as session:
        assert np.array_equal(latents[0], session.run_chunk().to_host())


def test_steps_and_shift_change_the_passes(run: Run, tmp_path: Path) -> None:
    same = run(goal="a.npy")
    again = run("--steps", str(toy.PASSES), goal="b.npy")
    assert same["passes"] == again["passes"] == toy.PASSES
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()
    fewer = run("--steps", "1", "--shift", "3", goal="c.npy")
    assert fewer["passes"] == 1
    assert (tmp_path / "a.npy").read_bytes() != (tmp_path / "c.npy").read_bytes()


def test_a_session_of_other_passes_beside_one_of_the_artifacts_own(whole_folder: Path) -> None:
    with open_artifact(whole_folder) as artifact, open_stacked(artifact) as own:
        expected = [own.run_chunk().to_host().tobytes() for _ in range(4)]
        with open_stacked(artifact) as again, open_stacked(artifact, steps=1) as other:
            assert other.manifest.workload.schedule.denoise_passes == 1
            got = []
            for _ in range(4):
                got.append(again.run_chunk().to_host().tobytes())
                assert other.run_chunk().to_host().tobytes() != got[-1]
        assert got == expected


@pytest.mark.parametrize(
    "options",
    [
        ["--prompt", "a", "--text", "x.npy"],
        ["--shift", "nan"],
        ["--voice", "a.wav"],  # of speech
        ["--text-file", "a.txt"],
        ["--patches", "3"],
    ],
)
def test_options_that_cannot_be_meant_leave_nothing(
    whole_folder: Path, tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(whole_folder), "-o", str(tmp_path / "out.y4m"), *options]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert [path.name for path in tmp_path.iterdir()] == [whole_folder.name]


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"{}",
        b"[]",
        b'[{"at_s": 0}]',
        b'[{"at_s": "0", "prompt": "a"}]',
        b'[{"at_s": -1, "prompt": "a"}]',
        b'[{"at_s": 1, "prompt": "a"}, {"at_s": 1, "prompt": "b"}]',
        b'[{"at_s": 0, "prompt": "a", "recashe": true}]',
        b'[{"at_s": NaN, "prompt": "a"}]',
        b'[{"at_frame": 0.5, "prompt": "a"}]',
        b'[{"at_frame": 0, "at_s": 0, "prompt": "a"}]',
        b'[{"at_frame": 0, "prompt": "a"}, {"at_s": 1, "prompt": "b"}]',
        b"[" * 100_000,
    ],
    ids=range(13),
)
def test_what_is_no_schedule_of_prompts(tmp_path: Path, document: bytes) -> None:
    (tmp_path / "it.json").write_bytes(document)
    with pytest.raises(errors.UsageError, match="--prompts"):
        load_schedule(tmp_path / "it.json")


def test_a_large_file_is_no_schedule_and_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(errors.InputFileError, match=f"it is too long: at most {MAX_SCHEDULE_BYTES} bytes"):
        load_schedule(path)


def test_info_tells_what_may_be_given(whole_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(whole_folder), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["text"] == {"tokens": toy.TEXT_TOKENS, "truncate": True}
    assert result["video"]["first_frames"] == FIRST_FRAMES


def test_without_a_golden_text_its_prompt_is_the_default(whole_folder: Path, edit_manifest: Edit) -> None:
    pytest.importorskip("tokenizers")

    def drop(manifest: VideoManifest) -> VideoManifest:
        return toy.changed(manifest, golden=replace(toy_whole.GOLDEN, text=None))

    edit_manifest(whole_folder, drop)
    with open_artifact(whole_folder) as artifact:
        assert all(error.within for error in artifact.verify())


def test_a_missing_tokenizer_file_and_one_that_the_table_lacks(
    whole_folder: Path,
    edit_manifest: Edit,
) -> None:
    document = (whole_folder / "manifest.json").read_bytes()
    (whole_folder / toy_whole.TOKENIZER).unlink()
    with pytest.raises(errors.ArtifactError, match="tokenizer"):
        open_artifact(whole_folder)
    edit_manifest(whole_folder, lambda manifest: manifest)
    with pytest.raises(errors.ManifestError, match=r"tokenizer.json' is used but has no entry"):
        open_artifact(whole_folder)
    (whole_folder / "manifest.json").write_bytes(document)


def test_passes_that_the_artifact_cannot_have_are_the_callers_mistake(whole_folder: Path) -> None:
    with (
        open_artifact(whole_folder) as artifact,
        pytest.raises(errors.UsageError, match=r"cannot run 9 denoise passes: .*weight gain"),
    ):
        open_stacked(artifact, steps=9)


def test_an_mp4_holds_the_decoded_frames_and_no_label(run: Run, tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    result = run(goal="out.mp4")
    with av.open(str(tmp_path / "out.mp4")) as container:
        assert "comment" not in container.metadata
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert [picture.shape for picture in pictures] == [(HEIGHT, WIDTH, 3)] * result["video_frames"]  # type: ignore[operator]

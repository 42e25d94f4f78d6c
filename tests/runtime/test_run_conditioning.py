"""What `run` is given is checked before an artifact is opened; pictures are fitted; unknown words are told."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seko_runtime.cli.commands import main
from seko_runtime.cli.video import run as run_command
from seko_runtime.cli.video.conditioning import (
    Conditioning,
    PromptAt,
    with_own_picture,
)
from seko_runtime.cli.video.controls import fed_controls, read_controls
from seko_runtime.controls.fitting import cover_pictures, fit_levels, fit_pictures
from seko_runtime.controls.voice import PLAIN, WINDOW
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import FileEntry, InputSpec
from seko_runtime.opening.artifact import read_manifest
from seko_runtime.video.manifest import Viewer, ViewerPicture
from seko_runtime.video.reference_frames import check_reference
from seko_runtime.video.text import PromptIds
from tests.runtime import toy

from . import toy_whole
from .conftest import Edit
from .toy_whole import HEIGHT, WIDTH, open_whole

Said = pytest.CaptureFixture[str]
Refused = Callable[..., str]


@pytest.fixture
def refused(whole_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said) -> Refused:
    """Run a command that ends before an artifact is opened; gives what it says."""

    def opened(*_: object, **__: object) -> None:
        raise AssertionError("the artifact was opened")

    monkeypatch.setattr(run_command, "open_artifact", opened)

    def go(code: int, *options: object, goal: str = "out.npy") -> str:
        asked = ["run", str(whole_folder), "-o", str(tmp_path / goal), *map(str, options)]
        assert main(asked) == code
        assert not (tmp_path / goal).is_file()
        return capsys.readouterr().err

    return go


def test_each_mistake_is_told_before_anything_is_opened(refused: Refused, tmp_path: Path) -> None:
    np.save(tmp_path / "text.npy", np.zeros((1, 2, 3), np.float32))
    np.save(tmp_path / "grey.npy", np.zeros((8, 8), np.uint8))
    np.save(tmp_path / "image.npy", np.zeros((8, 8, 3), np.uint8))
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "file").touch()
    assert re.search(r"grey.npy is uint8 \[8, 8\], expected", refused(3, "--image", tmp_path / "grey.npy"))
    np.save(tmp_path / "clear.npy", np.zeros((8, 8, 4), np.uint8))
    assert re.search(
        r"clear.npy is uint8 \[8, 8, 4\], expected", refused(3, "--image", tmp_path / "clear.npy")
    )
    for options, words in (
        (["--text", tmp_path / "text.npy"], r"text.npy is \(1, 2, 3\), this artifact takes \(1, 5, "),
        (["--reference", tmp_path / "image.npy"], "no reference frames; rebuild it with --reference-frames"),
        (["--shift", "-1"], "a positive shift"),
        (["--device", "gpu"], "device is 'gpu', expected auto"),
        (["--seed", -(1 << 70)], "seed"),
    ):
        assert re.search(words, refused(2, *options))
    assert "is no regular file" in refused(2, goal="folder.npy")
    assert "cannot be written (Not a directory)" in refused(5, goal="file/out.npy")
    assert "expected one of .npy, .y4m, .mp4" in refused(2, goal="out.gif")


@pytest.mark.parametrize("option", ["--prompts", "--text", "--image", "--reference"])
def test_what_is_not_there_is_not_found(refused: Refused, tmp_path: Path, option: str) -> None:
    missing = tmp_path / "missing.npy"
    assert refused(3, option, missing) == f"error: {option} {missing} was not found\n"


def test_words_for_the_option_of_embeddings_are_sent_to_the_prompt(refused: Refused) -> None:
    assert "--prompt" in refused(3, "--text", "a red disc")


def test_an_artifact_that_is_not_there_is_not_found(tmp_path: Path, capsys: Said) -> None:
    for command in (["info"], ["verify"], ["run", "-o", str(tmp_path / "a.npy")]):
        assert main([*command, str(tmp_path / "nothing")]) == 4
        assert capsys.readouterr().err == f"error: {tmp_path / 'nothing'} was not found; check the path\n"
    (tmp_path / "a.tar").touch()
    assert main(["info", str(tmp_path / "a.tar")]) == 4
    assert "`seko-run unpack FILE.tar -o DIR`" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_told_first(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0o500)
    assert "cannot be written (Permission denied)" in refused(5, goal="shut/out.npy")


@pytest.mark.parametrize("document", ["{", "{}", '[{"at_s": 0}]', '[{"at_s": 99999999999999999999999999}]'])
def test_a_bad_prompts_file_is_not_told_to_mend_the_artifact(
    refused: Refused, tmp_path: Path, document: str
) -> None:
    (tmp_path / "it.json").write_text(document)
    said = refused(3, "--prompts", tmp_path / "it.json")
    assert "is no schedule of prompts: " in said
    assert "artifact" not in said
    assert said.endswith('expected [{"at_s": 0, "prompt": "..."}]\n')


def test_a_prompt_that_may_not_be_cut_is_refused_first(
    refused: Refused, whole_folder: Path, edit_manifest: Edit
) -> None:
    pytest.importorskip("tokenizers")
    edit_manifest(
        whole_folder, lambda manifest: toy.changed(manifest, text=replace(toy_whole.TABLE, truncate=False))
    )
    assert "the prompt has 7 tokens, this artifact takes 5" in refused(
        2, "--prompt", "a red disc bounces a disc"
    )


def test_a_sentence_for_an_artifact_without_a_text_encoder(
    refused: Refused, whole_folder: Path, edit_manifest: Edit
) -> None:
    def without(manifest):
        programs = {name: calls for name, calls in manifest.programs.items() if name != "text"}
        return toy.changed(manifest, text=None, programs=programs)

    edit_manifest(whole_folder, without)
    assert "no text encoder" in refused(2, "--prompt", "a red disc")


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ("", "the prompt is empty"),
        ("  ", "the prompt has no letter"),
        ("a\0b", "letter 2 of the prompt is NUL"),
    ],
)
def test_a_sentence_without_words(refused: Refused, tmp_path: Path, prompt: str, why: str) -> None:
    schedule = tmp_path / "prompts.json"
    schedule.write_text(json.dumps([{"at_s": 0, "prompt": "a"}, {"at_s": 1, "prompt": prompt}]))
    assert why in refused(2, "--prompt", prompt)
    if "\0" not in prompt:  # the schedule's reader says where it stands
        assert why in refused(2, "--prompts", str(schedule))


# -- words -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "warning"),
    [
        ("a red whale", "does not know the words 'whale'; they mean nothing to it"),
        ("ein Wal, a Wal", "does not know the words 'ein', 'Wal'; "),
        ("a red disc bounces a ring", "the prompt has 7 tokens and is cut to 5"),
        ("b c d e f g h i j k", "'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i' and 2 more"),
    ],
)
def test_what_is_not_understood_is_a_warning(
    whole_folder: Path, tmp_path: Path, prompt: str, warning: str, capsys: Said
) -> None:
    pytest.importorskip("tokenizers")
    goal = tmp_path / "a.npy"
    assert main(["run", str(whole_folder), "-o", str(goal), "--chunks", "1", "--prompt", prompt]) == 0
    said = capsys.readouterr()
    assert warning in said.err
    assert "warning" not in said.out
    assert goal.exists()


def test_every_prompt_of_a_schedule_is_looked_at(whole_folder: Path, tmp_path: Path, capsys: Said) -> None:
    pytest.importorskip("tokenizers")
    lines = [{"at_s": 0, "prompt": "a red disc"}, {"at_s": 9, "prompt": "a whale"}]
    (tmp_path / "it.json").write_text(json.dumps(lines))
    asked = ["--chunks", "1", "--prompts", str(tmp_path / "it.json")]
    assert main(["run", str(whole_folder), "-o", str(tmp_path / "a.npy"), *asked]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "warning: this artifact does not know the words 'whale'; they mean nothing to it",
        "warning: the prompt at 9 s is not used: the last of 1 chunks begins before it",
    ]


def test_known_words_are_no_warning(whole_folder: Path, tmp_path: Path, capsys: Said) -> None:
    pytest.importorskip("tokenizers")
    asked = ["--chunks", "1", "--prompt", "a red disc bounces"]
    assert main(["run", str(whole_folder), "-o", str(tmp_path / "a.npy"), *asked]) == 0
    assert "warning" not in capsys.readouterr().err


def test_words_around_unknown_pieces_of_a_sentencepiece_model() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    pieces = [
        ("<pad>", 0.0),
        ("<unk>", -9.0),
        ("\u2581a", -2.0),
        ("\u2581red", -2.0),
        ("disc", -3.0),
        ("\u2581", -4.0),
    ]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 1, byte_fallback=False))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    ids = PromptIds(toy_whole.TABLE, tokenizer.to_str().encode())
    assert ids.unknown_words("a red disc") == []
    assert ids.unknown_words("a red discs, a \u65e5\u672c disc") == ["discs", "\u65e5\u672c"]


def test_a_tokenizer_that_knows_everything_has_no_unknown_word() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    assert PromptIds(toy_whole.TABLE, tokenizer.to_str().encode()).unknown_words("a b") == []


@pytest.mark.parametrize("needed", [True, False])
def test_where_the_model_needs_a_picture_the_artifact_s_own_is_taken(
    whole_folder: Path, capsys: Said, needed: bool
) -> None:
    """By options that name none; and its first prompt, if they name no text."""
    viewer = Viewer("", ("a red disc",), (ViewerPicture("viewer/0.npy", "a disc"),))
    content = io.BytesIO()
    np.save(content, np.full((8, 8, 3), 7, np.uint8))
    path = whole_folder / "viewer/0.npy"
    path.parent.mkdir()
    path.write_bytes(content.getvalue())
    manifest, _ = read_manifest(whole_folder)
    files = {**manifest.files, "viewer/0.npy": FileEntry(sha256(path.read_bytes()).hexdigest(), 128 + 192)}
    picture = InputSpec("seen", (4,), "float32", "input.seen", "session", kind="picture_condition")
    programs = {**manifest.programs, **({"condition": ()} if needed else {})}
    manifest = toy.changed(manifest, viewer=viewer, files=files, inputs=(picture,), programs=programs)
    options = argparse.Namespace(artifact=whole_folder, image=None, reference=None, prompt=None)
    blank = Conditioning([], None)
    taken = with_own_picture(blank, options, manifest, {})
    said = capsys.readouterr().err
    if not needed:
        assert (taken, said) == (blank, "")
        return
    assert options.image == path
    assert [prompt.prompt for prompt in taken.prompts] == ["a red disc"] == [options.prompt]
    assert "image    of the artifact: a disc; --image takes another" in said
    assert "prompt   of the artifact: a red disc; --prompt takes another" in said
    options = argparse.Namespace(artifact=whole_folder, image=None, reference=None, prompt="a ring")
    with_prompt = replace(blank, prompts=[PromptAt(0.0, "a ring")])
    assert with_own_picture(with_prompt, options, manifest, {}).prompts == with_prompt.prompts
    assert with_own_picture(blank, options, manifest, {"seen": np.zeros(4)}) is blank
    options.image = path
    assert with_own_picture(blank, options, manifest, {}) is blank


# -- pictures --------------------------------------------------------------------------------------------------


def test_a_picture_of_the_right_size_is_as_it_is() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8)
    fitted, done = fit_pictures(picture, 6, 9)
    assert fitted is picture
    assert done == ""


@pytest.mark.parametrize(("size", "crop"), [((480, 640), "480x480"), ((640, 480), "480x480")])
def test_the_middle_of_a_picture_is_taken(size: tuple[int, int], crop: str) -> None:
    picture = np.zeros((*size, 3), np.uint8)
    rows, columns = size
    picture[rows // 2 - 240 : rows // 2 + 240, columns // 2 - 240 : columns // 2 + 240] = 200
    fitted, done = fit_pictures(picture, 96, 96)
    assert done == f"{columns}x{rows}: centre crop to {crop}, resized to 96x96"
    assert fitted.shape == (96, 96, 3)
    assert (fitted == 200).all()


def test_a_smaller_picture_is_the_mean_of_what_it_covers_and_a_larger_one_lies_between() -> None:
    ramp = np.repeat(np.arange(0, 256, 2, dtype=np.uint8)[None, :, None], 64, 0).repeat(3, -1)  # [64, 128, 3]
    small, done = fit_pictures(ramp, 32, 64)
    assert done == "128x64: resized to 64x32"
    inner = small[:, 1:-1].astype(int)
    assert np.abs(inner - (4 * np.arange(1, 63) + 1)[None, :, None]).max() <= 1
    large, _ = fit_pictures(ramp, 128, 256)
    assert np.array_equal(np.sort(large[0, :, 0]), large[0, :, 0])
    assert (large[:, 0].max(), large[:, -1].min()) == (0, 254)


def test_pictures_are_fitted_each_alone_and_other_aspects_by_a_crop_alone() -> None:
    pictures = np.random.default_rng(1).integers(0, 256, (2, 4, 10, 3), np.uint8)
    fitted, done = fit_pictures(pictures, 4, 6)
    assert done == "10x4: centre crop to 6x4"
    assert np.array_equal(fitted, pictures[:, :, 2:8])


@pytest.mark.parametrize("size", [(54, 96), (20, 33), (32, 48)])
def test_bicubic_is_torchs(size: tuple[int, int]) -> None:
    """What lingbot-world's authors call, on the same picture in -1..1; rounded to a byte and kept in its range."""
    torch = pytest.importorskip("torch")
    picture = np.random.default_rng(3).integers(0, 256, (*size, 3), np.uint8)
    fitted, done = fit_pictures(picture, 48, 64, bicubic=True, stretch=1000)
    assert "crop" not in done
    pixels = torch.from_numpy(picture).permute(2, 0, 1)[None].float() / 127.5 - 1
    wanted = torch.nn.functional.interpolate(pixels, size=(48, 64), mode="bicubic")[0].permute(1, 2, 0)
    wanted_levels = ((wanted + 1) * 127.5).numpy()
    assert np.abs(fitted - wanted_levels.clip(0, 255)).max() <= 0.501
    levels, _ = fit_levels(picture, 48, 64, bicubic=True, stretch=1000)
    assert levels.dtype == np.float32 if size != (48, 64) else np.uint8
    assert np.abs(levels - wanted_levels).max() <= 1e-3
    assert levels.min() < 0


def test_a_picture_is_stretched_rather_than_cropped_by_less_than_a_token() -> None:
    """16:9 at the authors' sizes: 464x832 takes all of it; a square is cropped."""
    picture = np.random.default_rng(4).integers(0, 256, (90, 160, 3), np.uint8)
    _, done = fit_pictures(picture, 464, 832, bicubic=True, stretch=16)
    assert done == "160x90: resized to 832x464"
    _, done = fit_pictures(picture, 464, 832)
    assert done == "160x90: centre crop to 160x89, resized to 832x464"
    _, done = fit_pictures(picture[:, :90], 464, 832, bicubic=True, stretch=16)
    assert done == "90x90: centre crop to 90x50, resized to 832x464"


@pytest.mark.parametrize(
    "size",
    [(90, 131), (30, 47), (64, 2000), (500, 8), (48, 64), (908, 70), (284, 72), (805, 256), (9000, 80)],
)
def test_a_start_picture_is_resized_and_cropped_as_wan_2_2_does(size: tuple[int, int]) -> None:
    """Pillow's LANCZOS to a size that covers the video's, then its centre."""
    pillow = pytest.importorskip("PIL.Image")
    if size[0] > 3 * size[1] and int(pytest.importorskip("PIL").__version__.split(".")[0]) < 13:
        pytest.skip("Pillow shrinks tall pictures along their columns first since version 13")
    picture = np.random.default_rng(5).integers(0, 256, (*size, 3), np.uint8)
    height, width = 48, 64
    scale = max(width / size[1], height / size[0])
    whole = pillow.fromarray(picture).resize(
        (round(size[1] * scale), round(size[0] * scale)), pillow.Resampling.LANCZOS
    )
    left, top = (whole.width - width) // 2, (whole.height - height) // 2
    wanted = np.asarray(whole.crop((left, top, left + width, top + height)))
    fitted, done = cover_pictures(picture, height, width)
    assert fitted.shape == (height, width, 3)
    assert np.array_equal(fitted, wanted)
    assert (f"centre crop to {width}x{height}" in done) == (whole.size != (width, height))


def test_run_fits_a_picture_and_says_how(whole_folder: Path, tmp_path: Path, capsys: Said) -> None:
    picture = np.random.default_rng(2).integers(0, 256, (30, 40, 3), np.uint8)
    np.save(tmp_path / "photo.npy", picture)
    asked = ["--chunks", "1", "--image", str(tmp_path / "photo.npy")]
    assert main(["run", str(whole_folder), "-o", str(tmp_path / "a.npy"), *asked]) == 0
    assert "photo.npy 40x30: resized to 24x18, centre crop to 24x8" in capsys.readouterr().err
    with open_whole(image=cover_pictures(picture, HEIGHT, WIDTH)[0]) as session:
        assert np.array_equal(np.load(tmp_path / "a.npy")[0], session.run_chunk().to_host())


@pytest.mark.parametrize(
    "reference", [np.zeros((3, HEIGHT, WIDTH, 3), np.uint8), "latents"], ids=["pictures", "latents"]
)
def test_reference_frames_without_room_name_the_option_of_build(reference: object) -> None:
    manifest = toy_whole.whole_manifest()
    channels, *sides = manifest.workload.stream.latent_shape
    frames = np.zeros((channels, 3, *sides), np.float32) if isinstance(reference, str) else reference
    with pytest.raises(UsageError, match="no reference frames; rebuild it with --reference-frames N"):
        check_reference(manifest, frames)
    two = toy.changed(manifest, stream=replace(manifest.workload.stream, reference_frames=2))
    with pytest.raises(UsageError, match=r"found 3 .* room for 2; rebuild it with --reference-frames 3"):
        check_reference(two, frames)


def test_a_portrait_is_told_by_the_option_that_named_it(tmp_path: Path, capsys: Said) -> None:
    """`--image` is the reference frame of a model that speaks, and its errors and notes say `--image`."""
    manifest = toy_whole.whole_manifest()
    audio = InputSpec(
        "audio", (1, toy.CHUNK, WINDOW), "float32", "audio", "chunk", "caller", "required", PLAIN
    )
    stream = replace(manifest.workload.stream, reference_frames=1)
    manifest = replace(toy.changed(manifest, stream=stream), inputs=(audio,))
    np.save(tmp_path / "face.npy", np.zeros((30, 40, 3), np.uint8))
    np.save(tmp_path / "more.npy", np.zeros((30, 40, 3), np.uint8))

    def opening(**files: Path) -> dict[str, Any]:
        options = argparse.Namespace(chunks=4, audio=None, **files)
        return fed_controls(options, manifest, read_controls(options), {"audio": 0})[0].opening()

    assert opening(image=tmp_path / "face.npy")["reference"].shape == (HEIGHT, WIDTH, 3)
    assert capsys.readouterr().err.startswith("image    face.npy 40x30: ")
    with pytest.raises(UsageError, match="--image and --reference are both the portrait"):
        opening(image=tmp_path / "face.npy", reference=tmp_path / "more.npy")
    with pytest.raises(UsageError, match="belongs to --image"):
        opening(last_image=tmp_path / "face.npy")

"""`seko-export try`: an artifact in a cache, built anew only where its files or options changed; then a video."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from scripts.random_checkpoint import write_random_checkpoint
from scripts.random_lora import random_pairs, write_lora
from seko_export.cli.commands import main
from seko_export.errors import CheckpointError, MachineError
from seko_export.errors import UsageError as BuildUsageError
from seko_export.families.registry import presets
from seko_export.families.wan.presets import PRESETS
from seko_export.host import environment
from seko_export.media.viewer import VIEWER_FILE
from seko_export.options.declaration import BuildOptions
from seko_export.tools import trial
from seko_export.tools.trial import check_shown, serve_page, try_artifact, write_video
from seko_runtime.errors import InputFileError, UsageError
from seko_runtime.format.manifest import MANIFEST_FILE
from tests.export.media_files import write_vae
from tests.support.uncompiled import UNCOMPILED

TINY = PRESETS["tiny"].model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def build(_: BuildOptions, folder: Path) -> None:
    """Stands for a build: the folder appears with a manifest."""
    folder.mkdir(parents=True)
    (folder / MANIFEST_FILE).touch()


def test_it_is_built_again_only_if_something_changed(tmp_path: Path) -> None:
    file = tmp_path / "tiny.safetensors"
    write_random_checkpoint(file, TINY, format="wan", seed=0)
    pairs = random_pairs(TINY, rank=2, seed=0)
    for name, alpha in (("a", 1.0), ("b", 2.0)):
        write_lora(tmp_path / name, pairs, "comfyui", alpha)
        folder = tmp_path / f"folder-{name}"  # as diffusers saves a LoRA
        folder.mkdir()
        write_lora(folder / "pytorch_lora_weights.safetensors", pairs, "diffusers", alpha + 2)

    def tried(**options: Any) -> tuple[Path, bool]:
        return try_artifact(BuildOptions(**{"checkpoint": file, "target": "cpu", **options}), build)

    first, built = tried()
    assert built
    assert tried() == (first, False)
    moved = tmp_path / "elsewhere.safetensors"
    moved.write_bytes(file.read_bytes())
    assert tried(checkpoint=moved) == (first, False)  # the same bytes by another name
    assert tried(fit="64GB") == (first, False)
    with pytest.raises(BuildUsageError, match="--fit 1MB"):
        tried(fit="1MB")
    others = [
        tried(kv="fp4"),
        tried(height=32),
        tried(backend="onnx"),
        tried(lora=(str(tmp_path / "a"),)),
        tried(lora=(f"{tmp_path / 'a'}:0.5",)),
        tried(lora=(str(tmp_path / "b"),)),
        tried(lora=(str(tmp_path / "folder-a"),)),
        tried(lora=(str(tmp_path / "folder-b"),)),
    ]
    state = {name: tensor.clone() for name, tensor in load_file(file).items()}
    state["head.head.bias"] += 1
    file.unlink()
    save_file(state, file)
    others.append(tried())
    assert all(built for _, built in others)
    assert len({folder for folder, _ in others} | {first}) == len(others) + 1


def test_a_build_for_a_gpu_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "local_gpu_arch", lambda: "sm_90")
    options = BuildOptions(preset="tiny", random_weights=0)
    first, built = try_artifact(options, build)
    assert (built, try_artifact(options, build)) == (True, (first, False))


def test_files_that_are_read_with_a_named_one_count(tmp_path: Path) -> None:
    """Shards of an index, which `--variant` names, and PEFT's config beside the file of a LoRA."""
    folder = tmp_path / "sharded"
    write_random_checkpoint(folder, TINY, format="wan-sharded", seed=0)
    index, shard = next(folder.glob("*.index.json")), min(folder.glob("*.safetensors"))
    write_lora(tmp_path / "style", random_pairs(TINY, rank=2, seed=0), "peft", 1.0)
    lora, config = (
        tmp_path / "style" / name for name in ("adapter_model.safetensors", "adapter_config.json")
    )

    def tried() -> tuple[Path, bool]:
        return try_artifact(BuildOptions(index, lora=(str(lora),), target="cpu"), build)

    folders = [tried()[0]]
    assert tried() == (folders[0], False)
    state = {name: tensor.clone() for name, tensor in load_file(shard).items()}
    next(iter(state.values())).add_(1)
    shard.unlink()
    save_file(state, shard)
    folders.append(tried()[0])
    config.write_text(config.read_text().replace("1.0", "2.0"))
    folders.append(tried()[0])
    assert len({*folders}) == 3


def test_what_the_artifact_brings_along_counts(tmp_path: Path) -> None:
    """Its words and its pictures."""
    file, viewer, picture = (tmp_path / name for name in ("tiny.safetensors", VIEWER_FILE, "a.png"))
    write_random_checkpoint(file, TINY, format="wan", seed=0)
    folders = []
    for words, pixels in (("", b""), ("A.", b""), ("A.", b"1"), ("B.", b"1")):
        picture.write_bytes(b"\x89PNG\r\n\x1a\n" + pixels)
        if words:
            viewer.write_text(json.dumps({"help": words, "pictures": [{"file": "a.png"}]}))
        folders.append(try_artifact(BuildOptions(file, target="cpu"), build))
    assert [built for _, built in folders] == [True] * 4
    assert len({folder for folder, _ in folders}) == 4


def test_files_that_no_build_reads_do_not_count(tmp_path: Path) -> None:
    """What a download leaves, a page, a video, another model's weights; and an entry that is taken anyway."""
    folder, index_folder = tmp_path / "model", tmp_path / "sharded"
    for path, form in ((folder, "diffusers"), (index_folder, "wan-sharded")):
        write_random_checkpoint(path, TINY, format=form, seed=0)
    index = next(index_folder.glob("*.index.json"))
    checkpoints = [folder, index_folder, index]
    before = [try_artifact(BuildOptions(path, target="cpu"), build)[0] for path in checkpoints]
    for home in (folder, index_folder):
        for name in (".cache/huggingface/download/x.metadata", "README.md", "try.mp4", "sub/a.safetensors"):
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text("x")
    assert [try_artifact(BuildOptions(path, target="cpu"), build) for path in checkpoints] == [
        (path, False) for path in before
    ]
    (index_folder / "other.safetensors").write_text("x")
    assert try_artifact(BuildOptions(index, target="cpu"), build) == (before[2], False)


def test_the_entry_that_is_taken_anyway_is_the_same_build(tmp_path: Path) -> None:
    path = tmp_path / "tiny.pt"
    write_random_checkpoint(path, TINY, format="self-forcing", seed=0)
    weights = torch.load(path, weights_only=True)["generator"]
    torch.save(
        {"generator": weights, "generator_ema": {key: weight + 1 for key, weight in weights.items()}}, path
    )
    tried = [
        try_artifact(BuildOptions(path, entry=entry, target="cpu"), build)
        for entry in (None, "generator_ema", "generator")
    ]
    assert tried[0][0] == tried[1][0]
    assert [built for _, built in tried] == [True, False, True]


def test_other_weights_of_the_same_size_and_time_are_another_model(tmp_path: Path) -> None:
    """As a copy that keeps times leaves them, over the file or in its place."""
    files = [tmp_path / "tiny", tmp_path / "other"]
    for seed, file in enumerate(files):
        write_random_checkpoint(file, TINY, format="wan", seed=seed)
        os.utime(file, ns=(10**18, 10**18))
    model = tmp_path / "model.safetensors"

    def tried() -> tuple[Path, bool]:
        return try_artifact(BuildOptions(model, target="cpu"), build)

    shutil.copy2(files[0], model)
    first = tried()
    assert tried() == (first[0], False)
    shutil.copy2(files[1], model)
    assert model.stat().st_mtime_ns == 10**18
    second = tried()
    assert second[1]
    os.replace(shutil.copy2(files[0], tmp_path / "moved"), model)
    assert tried() == (first[0], False)


def test_an_artifact_without_its_manifest_is_built_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random_checkpoint(tmp_path / "tiny", TINY, format="wan", seed=0)
    options = BuildOptions(tmp_path / "tiny", target="cpu")
    folder, _ = try_artifact(options, build)
    (folder / "engines").mkdir()
    (folder / MANIFEST_FILE).unlink()
    assert try_artifact(options, build) == (folder, True)
    assert "without manifest.json" in capsys.readouterr().err
    assert not (folder / "engines").exists()
    assert try_artifact(options, build) == (folder, False)


@pytest.mark.parametrize("place", ["trials", "artifact"])
@pytest.mark.parametrize("fault", ["link", "file", "writable", "another user's"])
def test_what_others_may_have_put_into_the_cache_is_not_run(
    place: str, fault: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random_checkpoint(tmp_path / "tiny", TINY, format="wan", seed=0)
    options = BuildOptions(tmp_path / "tiny", target="cpu")
    folder, _ = try_artifact(options, build)
    target = folder if place == "artifact" else cache / "seko" / "trials"
    moved = target.rename(tmp_path / "moved")
    if fault == "link":
        target.symlink_to(moved)
    elif fault == "file":
        target.touch()
    else:
        moved.rename(target)
    if fault == "writable":
        target.chmod(0o777)
    elif fault == "another user's":
        lstat, owner = Path.lstat, os.geteuid() + 1
        monkeypatch.setattr(
            Path, "lstat", lambda path: os.stat_result((*lstat(path)[:4], owner, *lstat(path)[5:])) if path == target
            else lstat(path),
        )  # fmt: skip
    words = {
        "link": "is a link",
        "file": "is no folder",
        "writable": "mode 0777",
        "another user's": "another user",
    }
    with pytest.raises(MachineError, match=rf"{target} .*{words[fault]}.*remove it"):
        try_artifact(options, build)


def test_a_failed_build_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    write_random_checkpoint(tmp_path / "tiny", TINY, format="wan", seed=0)

    def fail(*_: object) -> None:
        raise CheckpointError("no")

    with pytest.raises(CheckpointError):
        try_artifact(BuildOptions(tmp_path / "tiny", target="cpu"), fail)
    assert not any((cache / "seko" / "trials").iterdir())
    assert try_artifact(BuildOptions(tmp_path / "tiny", target="cpu"), build)[1]


def test_two_processes_that_build_the_same(tmp_path: Path) -> None:
    """The one that ends later takes what the other one built."""
    write_random_checkpoint(tmp_path / "tiny", TINY, format="wan", seed=0)

    def late(options: BuildOptions, folder: Path) -> None:
        build(options, folder)
        raise UsageError("exists already")

    folder, built = try_artifact(BuildOptions(tmp_path / "tiny", target="cpu"), late)
    assert not built
    assert (folder / MANIFEST_FILE).is_file()


def test_what_cannot_be_shown_is_told_before_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for output in (tmp_path / "video.avi", Path("-")):  # `try` has no --format, and its report goes to stdout
        with pytest.raises(BuildUsageError, match=r"ends in one of \.npy, \.y4m, \.mp4$"):
            check_shown(output)
    (tmp_path / "empty.png").touch()
    with pytest.raises(InputFileError, match=r"^--last-image .*empty\.png is empty"):
        check_shown(tmp_path / "video.npy", {"--image": None, "--last-image": tmp_path / "empty.png"})
    refused = CliRunner().invoke(main, ["try", "--serve", "--image", "first.png", "--seed", "1"])
    assert refused.exit_code == 2
    assert "leave out --seed, --image" in refused.stderr
    write_random_checkpoint(tmp_path / "tiny", TINY, format="wan", seed=0)
    for refused_options, sentence in (
        (("--prompt",), "--prompt: this build has no text encoder"),
        (("--image",), "--image: no VAE of this build encodes pictures"),
        (("--last-image",), "--last-image belongs to --image"),
    ):
        with pytest.raises(BuildUsageError, match=sentence):
            try_artifact(BuildOptions(tmp_path / "tiny", target="cpu"), build, refused_options)
    two, vae = tmp_path / "two", write_vae(tmp_path / "vae")
    write_random_checkpoint(two, presets()["flf2v-tiny"].model, format="wan", seed=0)
    for checkpoint, options, sentence in (
        (two, ("--image",), "takes a last picture, too"),
        (tmp_path / "tiny", ("--image", "--last-image"), "takes no last picture"),
    ):
        with pytest.raises(BuildUsageError, match=sentence):
            try_artifact(BuildOptions(checkpoint, vae=vae, target="cpu"), build, options)
    turning = BuildOptions(tmp_path / "tiny", vae=vae, target="cpu", strength=0.5)
    with pytest.raises(BuildUsageError, match="give --video FILE, or --serve"):
        try_artifact(turning, build)
    with pytest.raises(BuildUsageError, match="--video: this build takes no video"):
        try_artifact(BuildOptions(tmp_path / "tiny", target="cpu"), build, ("--video",))
    for run_options, serves in ((("--video",), False), ((), True)):
        assert try_artifact(turning, build, run_options, serves=serves)[0].is_dir()
    with pytest.raises(InputFileError, match=r"^--video .*empty\.png is empty"):
        check_shown(tmp_path / "video.npy", video=tmp_path / "empty.png")
    monkeypatch.setattr(trial, "SERVER", "no_such_server")
    with pytest.raises(MachineError, match="--serve needs the server"):
        check_shown(None)


def test_the_run_gets_the_options_of_the_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[str] = []
    monkeypatch.setattr(trial, "load_image", lambda *_: None)
    monkeypatch.setattr(trial, "try_artifact", lambda *_, **__: (tmp_path, True))
    monkeypatch.setattr(trial, "write_video", lambda *arguments: words.extend(arguments[-1]) or {})
    asked = ["--prompt", "-dog", "--image", "a.png", "--last-image", "b.png", "--chunks", "2", "--seed", "5"]
    done = CliRunner().invoke(main, ["try", "-o", str(tmp_path / "a.npy"), *asked])
    assert done.exit_code == 0, done.output
    # In one word each: a sentence may begin like an option.
    assert {*words} == {f"{option}={value}" for option, value in zip(asked[::2], asked[1::2], strict=True)}


def test_the_page_is_run_after_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page runs until it is interrupted, so that a report behind it would come too late."""
    monkeypatch.setattr(trial, "check_shown", lambda *_: None)
    monkeypatch.setattr(trial, "try_artifact", lambda *_, **__: (tmp_path, True))
    monkeypatch.setattr(trial, "serve_page", lambda _: print("the page") or 7)
    done = CliRunner().invoke(main, ["try", "--serve", "--json"])
    assert done.exit_code == 7
    report, page = done.stdout.splitlines()
    assert (json.loads(report), page) == ({"artifact": str(tmp_path), "built": True}, "the page")


@pytest.mark.slow
def test_a_video_of_an_artifact(
    small_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(UNCOMPILED, "1")
    report = write_video(small_artifact, tmp_path / "video.npy", ["--chunks", "1"])
    assert (tmp_path / "video.npy").is_file()
    assert report["format"] == "npy"


def test_an_interrupted_run_leaves_the_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trial, "run_child", interrupted)
    for run in (lambda: write_video(tmp_path, tmp_path / "video.npy"), lambda: serve_page(tmp_path)):
        with pytest.raises(KeyboardInterrupt) as caught:
            run()
        assert str(tmp_path) in caught.value.__notes__[-1]


def test_a_failed_run_says_why_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run's process prints to the same stderr."""
    monkeypatch.setattr(trial, "try_artifact", lambda *_, **__: (tmp_path / "none", True))
    done = CliRunner().invoke(main, ["try", "-o", str(tmp_path / "a.npy"), "--json"])
    sentence = f"{tmp_path / 'none'} was not found"
    assert done.exit_code == 4
    assert (
        done.stderr
        == f"  hint: {tmp_path / 'none'} is damaged: remove this folder, and try builds it again\n"
    )
    assert sentence in json.loads(done.stdout)["error"]
    assert capfd.readouterr().err.count(sentence) == 1

"""One folder with all files of a model: found by content, named by `inspect`, taken by a build."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.make_checkpoint import main as make_checkpoint
from scripts.random_checkpoint import write_random_checkpoint
from scripts.random_clip import SIZES as CLIPS
from scripts.random_clip import write_random_clip
from scripts.random_vae import SIZES, write_random_vae
from seko_export import inspect
from seko_export.checkpoints.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    NotACheckpointError,
)
from seko_export.config.video import VideoBuild
from seko_export.errors import CheckpointError, UsageError
from seko_export.families.registry import presets
from seko_export.media.clip.files import clip_config_of, load_clip
from seko_export.options.declaration import BuildOptions
from seko_export.options.model_folder import find_files
from seko_export.options.resolve import resolve_build
from seko_export.options.resolved import ResolvedBuild
from seko_export.video.media import open_media
from tests.export.media_files import TEXT, VAE, write_text_encoder, write_tokenizer, write_vae
from tests.seko_talk.streams import write_hubert

HUBERT = "TencentGameMate-chinese-hubert-large"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a talking model as they are published: shards, an adapter, .pth files, a tokenizer, a CLIP."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    home = tmp_path_factory.mktemp("whole")
    folder = home / "model"
    model = replace(presets()["seko-talk-tiny"].model, text_dim=TEXT.dim)
    write_random_checkpoint(folder, model, seed=0, dtype=torch.float32)
    write_vae(folder / "vae")
    text = write_text_encoder(home / "text")
    torch.save(load_file(text / "model.safetensors"), folder / "umt5.pth")
    (folder / "tokenizer").mkdir()
    write_tokenizer(folder / "tokenizer" / "tokenizer.json")
    torch.save({"visual.patch.weight": torch.zeros(2, 2)}, folder / "models_clip.pth")
    write_hubert(folder / HUBERT, 48)
    return folder


def test_each_file_is_found_by_its_content(whole: Path) -> None:
    files = find_files(whole)
    assert files.checkpoint == whole
    assert files.vae == whole / "vae"
    assert files.text_encoder == whole / "umt5.pth"
    assert files.tokenizer == whole / "tokenizer" / "tokenizer.json"
    assert files.audio_encoder == whole / HUBERT
    assert files.notes == ["not used, since they are of no known kind: models_clip.pth"]


def test_a_build_takes_them_all_and_says_so(whole: Path) -> None:
    """Options that name a file come first, and those that leave one out leave it out."""
    build = resolve_build(BuildOptions(model_folder=whole, window_positions=True, target="cpu"))
    assert build.checkpoint == whole
    assert build.config.model.family == "seko_talk"
    assert build.config.workload.vae == VAE
    assert build.config.workload.text is not None
    assert build.config.workload.text.dim == TEXT.dim
    assert build.config.workload.audio is not None
    assert (build.media.vae, build.media.audio_encoder) == (whole / "vae", whole / HUBERT)
    open_media(build.media, build.config)
    assert any(
        str(whole / HUBERT) in note and str(whole / "vae") in note and "umt5.pth" in note
        for note in build.notes
    )
    assert any("models_clip.pth" in note for note in build.notes)
    bare = resolve_build(
        BuildOptions(model_folder=whole, window_positions=True, no_vae=True, no_text=True, target="cpu")
    )
    assert (bare.config.workload.vae, bare.config.workload.text, bare.media.tokenizer) == (None, None, None)
    assert bare.config.workload.audio is not None
    named = BuildOptions(
        whole, model_folder=whole, vae=whole / "missing", window_positions=True, target="cpu"
    )
    with pytest.raises(CheckpointNotFoundError, match="missing"):
        resolve_build(named)
    with pytest.raises(UsageError, match="contradicts the checkpoint"):
        BuildOptions(model_folder=whole, preset="tiny", random_weights=0)


def test_inspect_says_what_was_found(whole: Path) -> None:
    report = inspect(whole)
    assert report["family"] == "seko_talk"
    assert report["beside"] == {
        "--vae": str(whole / "vae"),
        "--text-encoder": str(whole / "umt5.pth"),
        "--tokenizer": str(whole / "tokenizer" / "tokenizer.json"),
        "--audio-encoder": str(whole / HUBERT),
    }
    assert f"--audio-encoder {whole / HUBERT}" in report["command"]
    assert "not used, since they are of no known kind: models_clip.pth" in report["notes"]


def test_a_lora_and_a_gguf_in_a_folder(tmp_path: Path) -> None:
    """A LoRA is named with its option, since a folder does not say whether it is wanted."""
    pytest.importorskip("gguf", reason="gguf is not installed")
    assert make_checkpoint(["--format", "gguf", "-o", str(tmp_path / "base.gguf")]) == 0
    assert make_checkpoint(["--lora", "peft-raw", "--rank", "4", "-o", str(tmp_path / "lora.pt")]) == 0
    files = find_files(tmp_path)
    assert (files.checkpoint, files.loras, files.unknown) == (
        tmp_path / "base.gguf",
        (tmp_path / "lora.pt",),
        (),
    )
    assert files.notes == [f"lora.pt is a LoRA, which --lora {tmp_path / 'lora.pt'} merges"]


def test_two_of_a_kind_damage_and_nothing_are_refused(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "a").mkdir(parents=True)
    with pytest.raises(
        CheckpointNotFoundError, match="holds no transformer of a known family; found nothing"
    ):
        resolve_build(BuildOptions(model_folder=folder, target="cpu"))
    with pytest.raises(CheckpointNotFoundError, match="is no folder"):
        find_files(folder / "b")
    torch.save(load_file(whole / "vae" / "diffusion_pytorch_model.safetensors"), folder / "one.pth")
    vae = (folder / "one.pth").read_bytes()
    (folder / "two.pth").write_bytes(vae)
    with pytest.raises(AmbiguousCheckpointError, match=r"a VAE 2 times: one\.pth, two\.pth"):
        find_files(folder)
    (folder / "two.pth").write_bytes(vae[: len(vae) // 2])
    with pytest.raises(DamagedCheckpointError, match="two"):
        find_files(folder)
    (folder / "two.pth").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"found --vae one\.pth: name its file"):
        resolve_build(BuildOptions(model_folder=folder, target="cpu"))
    other = folder / "hubert"
    other.mkdir()
    for file in (whole / HUBERT).glob("*.json"):
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text()) | {"do_stable_layer_norm": False}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotACheckpointError, match="do_stable_layer_norm is False, expected True"):
        find_files(folder)


def test_a_whole_clip_as_transformers_stored_it_is_an_image_encoder(tmp_path: Path) -> None:
    """With its text half, and the index that old versions kept beside the weights."""
    clip = tmp_path / "clip"
    write_random_clip(clip, CLIPS["clip-tiny"], "diffusers", seed=0, dtype=torch.float32, device="cpu")
    (file,) = clip.glob("*.safetensors")
    more = {"text_model.embeddings.token_embedding.weight": torch.zeros(4, 2)}
    more |= {"text_projection.weight": torch.zeros(2, 2), "logit_scale": torch.zeros(())}
    more |= {"vision_model.embeddings.position_ids": torch.arange(5)[None]}
    plain = load_file(file)
    save_file(plain | more, file)
    config = clip_config_of(clip)
    assert config == CLIPS["clip-tiny"]
    assert load_clip(clip, config).sources.keys()


def test_an_image_to_video_pipeline_is_found_by_one_path(tmp_path: Path) -> None:
    """A diffusers folder with CLIP beside VAE and text encoder; with a variant, each of its folders has one."""
    pipeline = tmp_path / "Wan2.1-I2V-Diffusers"
    model = replace(presets()["i2v-tiny"].model, text_dim=TEXT.dim)
    write_random_checkpoint(pipeline, model, format="diffusers", seed=0)
    drawn = {"seed": 0, "dtype": torch.bfloat16, "device": "cpu"}
    write_random_vae(pipeline / "vae", SIZES["wan-2.1-tiny"], "diffusers", **drawn)
    write_random_clip(pipeline / "image_encoder", CLIPS["clip-tiny"], "diffusers", **drawn)
    write_text_encoder(pipeline / "text_encoder")
    (pipeline / "tokenizer").mkdir()
    write_tokenizer(pipeline / "tokenizer" / "tokenizer.json")

    def resolved(**options: object) -> ResolvedBuild[VideoBuild]:
        build = resolve_build(BuildOptions(pipeline, target="cpu", **options))
        assert build.config.model.family == "wan_i2v"
        open_media(build.media, build.config)
        return build

    media = resolved().media
    assert media.vae == pipeline / "vae"
    assert media.text_encoder == pipeline / "text_encoder"
    assert media.image_encoder == pipeline / "image_encoder"
    assert resolved().config.workload.image == CLIPS["clip-tiny"]
    with pytest.raises(CheckpointError, match="--variant fp16"):
        resolved(variant="fp16")
    files = {"diffusion_pytorch_model": ("transformer", "vae"), "model": ("text_encoder", "image_encoder")}
    for stem, folders in files.items():
        for folder in folders:
            (pipeline / folder / f"{stem}.safetensors").rename(pipeline / folder / f"{stem}.fp16.safetensors")
    chosen = resolved(variant="fp16").media
    assert chosen.image_encoder == pipeline / "image_encoder" / "model.fp16.safetensors"
    assert chosen.vae == pipeline / "vae" / "diffusion_pytorch_model.fp16.safetensors"


def test_an_entry_names_the_weights_of_a_file_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_random_checkpoint(tmp_path / "file", presets()["tiny"].model, format="wan", seed=0)
    torch.save({"averaged": load_file(tmp_path / "file"), "step": 1}, folder / "trained.pt")
    build = resolve_build(BuildOptions(model_folder=folder, entry="averaged", target="cpu"))
    assert (build.checkpoint, build.load_options.entry) == (folder / "trained.pt", "averaged")
    with pytest.raises(CheckpointNotFoundError, match=r"hint: .*trained\.pt holds .*'averaged'.*--entry"):
        resolve_build(BuildOptions(model_folder=folder, target="cpu"))


def test_a_pipeline_without_a_usable_transformer_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    """Folders without weights, such as that of a scheduler, are none of the reasons."""
    pipeline = tmp_path / "pipeline"
    config_file = pipeline / "transformer" / "config.json"
    write_random_checkpoint(pipeline, presets()["tiny"].model, format="diffusers", seed=0)
    write_vae(pipeline / "vae")
    (pipeline / "scheduler").mkdir()
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(config | {"num_layers": 77}))
    with pytest.raises(CheckpointNotFoundError, match=r"hint: .*num_layers") as caught:
        resolve_build(BuildOptions(pipeline, target="cpu"))
    assert str(caught.value).count("hint:") == 1

"""Files that a build cannot take: a sentence with the option's name, exit code 3, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file

from scripts.quantised_files import write_quantised
from scripts.random_checkpoint import write_random_checkpoint
from scripts.random_lora import random_pairs, write_lora
from scripts.random_vae import SIZES, write_random_vae
from seko_export import BuildOptions, build
from seko_export.errors import CheckpointError
from seko_export.families.model_files import load_checkpoint
from seko_export.families.registry import presets
from seko_export.host import environment
from tests.export.media_files import write_text_encoder
from tests.support.uncompiled import leave_uncompiled

TINY, OTHER = presets()["tiny"].model, presets()["wan-5b-tiny"].model
INDEX = "diffusion_pytorch_model.safetensors.index.json"
SECOND = "diffusion_pytorch_model-00002-of-00002.safetensors"


class TouchesFile:
    """Pickles to a call that leaves a file behind, should anyone run it."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{os.environ['SEKO_TEST_MARK']}'",)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of whole files and of those that are refused."""
    room = tmp_path_factory.mktemp("refused")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEKO_TEST_MARK", str(room / "mark"))
        torch.save({"generator": TouchesFile()}, room / "code.pt")
    write_random_checkpoint(room / "model", TINY, format="wan", seed=0)
    (room / "empty").touch()
    _write_shards(room)
    _write_quantised(room)
    _write_loras(room)
    write_random_checkpoint(room / "i2v", presets()["i2v-tiny"].model, format="wan", seed=0)
    write_text_encoder(room / "text")
    (room / "speech").mkdir()
    (room / "speech/config.json").write_text('{"architecture": "voxcpm2", "patch_size": 4}')
    for name in ("wan-2.1-tiny", "wan-2.2-tiny", "taew2_1", "taew2_2"):
        write_random_vae(
            room / f"{name}.safetensors", SIZES[name], "wan", seed=0, dtype=torch.bfloat16, device="cpu"
        )
    return room


def _write_shards(room: Path) -> None:
    write_random_checkpoint(room / "shards", TINY, format="wan-sharded", seed=0)
    for name in ("missing", "outside", "mixed"):
        shutil.copytree(room / "shards", room / name)
    (room / "missing" / SECOND).unlink()
    other = SECOND.replace("model-", "model.fp16-")
    (room / "mixed" / SECOND).rename(room / "mixed" / other)
    for name, shard in (("outside", "../model"), ("mixed", other)):
        index = json.loads((room / name / INDEX).read_text())
        moved = [key for key, there in index["weight_map"].items() if there == SECOND]
        index["weight_map"] |= dict.fromkeys(moved, shard)
        (room / name / INDEX).write_text(json.dumps(index))


def _write_quantised(room: Path) -> None:
    weights = dict(load_checkpoint(room / "model", TINY).items())
    write_quantised(room / "gguf", weights, "gguf")
    whole = (room / "gguf").read_bytes()
    (room / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    write_quantised(room / "fp8", weights, "lightx2v-fp8")
    state = load_file(room / "fp8")
    state["blocks.0.ffn.0.weight_scale"] = torch.ones(3, 2)
    save_file(state, room / "scale")


def _write_loras(room: Path) -> None:
    write_lora(room / "lora", random_pairs(TINY, rank=4, seed=1), "comfyui", 2.0)
    write_lora(room / "lora-of-another", random_pairs(OTHER, rank=4, seed=1), "comfyui", 2.0)
    state = load_file(room / "lora")
    key = next(key for key in state if "lora_up" in key)
    save_file(state | {key: state[key][:, :3].contiguous()}, room / "lora-of-two-ranks")
    save_file({key: tensor for key, tensor in state.items() if key.endswith("alpha")}, room / "alphas")


# What is asked for, with files by name; the beginning of the sentence; a part of it.
CASES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "absent": (("@absent",), "checkpoint @absent", "was not found"),
    "empty": (("@empty",), "@empty", "is empty"),
    "truncated GGUF": (("@cut.gguf",), "@cut.gguf", "is no whole GGUF file: cut short or damaged"),
    "index that names a missing shard": (("@missing",), f"@missing/{INDEX}", "which is not there"),
    "index that leaves its folder": (("@outside",), f"@outside/{INDEX}", "'../model'; expected a plain file"),
    "mixed variants": (("@mixed",), f"@mixed/{INDEX}", "mixes the variants fp16, none"),
    "pickle with code": (("@code.pt",), "@code.pt", "loading it would run code, so it was not loaded"),
    "scale of a wrong shape": (("@scale",), "@scale: blocks.0.ffn.0.weight_scale is [3, 2]", "or one a row"),
    "variant that is not there": (
        ("@shards", "--variant", "fp16"),
        "--variant fp16: @shards",
        "variants: none",
    ),
    "VAE as a model": (
        ("@wan-2.1-tiny.safetensors",),
        "@wan-2.1-tiny.safetensors",
        "it is a VAE; give it with --vae",
    ),
    "LoRA as a model": (("@lora",), "@lora", "these are the keys of a LoRA"),
    "ranks of a LoRA": (
        ("@model", "--lora", "@lora-of-two-ranks"),
        "--lora @lora-of-two-ranks",
        "different ranks",
    ),
    "LoRA of another base": (
        ("@model", "--lora", "@lora-of-another"),
        "--lora @lora-of-another",
        "[384, 384], the model's has [256, 256]: it is of another base model",
    ),
    "alphas alone": (("@model", "--lora", "@alphas"), "--lora @alphas", "it has alphas without matrices"),
    "model as a LoRA": (("@model", "--lora", "@model"), "--lora @model", "is no LoRA"),
    "empty LoRA": (("@model", "--lora", "@empty"), "--lora @empty", "is empty"),
    "empty VAE": (("@model", "--vae", "@empty"), "--vae @empty", "is empty"),
    "VAE with code": (("@model", "--vae", "@code.pt"), "--vae @code.pt", "loading it would run code"),
    "model as a VAE": (("@model", "--vae", "@model"), "--vae @model", "holds no VAE that is known"),
    "VAE of Wan 2.2": (
        ("@model", "--vae", "@wan-2.2-tiny.safetensors"),
        "--vae @wan-2.2-tiny.safetensors",
        "has 48 latent channels, 'tiny' gives 16",
    ),
    "tiny decoder of Wan 2.2": (
        ("@model", "--vae", "@taew2_2.safetensors"),
        "--vae @taew2_2.safetensors",
        "has 48 latent channels, 'tiny' gives 16",
    ),
    "two VAEs of two models": (
        ("@model", "--vae", "@taew2_1.safetensors", "--vae-encoder", "@wan-2.2-tiny.safetensors"),
        "--vae-encoder @wan-2.2-tiny.safetensors",
        "has 48 latent channels, 'tiny' gives 16: they are not of one model",
    ),
    "encoder that only decodes": (
        ("@model", "--vae", "@taew2_1.safetensors", "--vae-encoder", "@taew2_1.safetensors"),
        "--vae-encoder @taew2_1.safetensors",
        "encodes no pictures",
    ),
    "speech model as a VAE": (
        ("@model", "--vae", "@speech"),
        "--vae",
        "the folder @speech holds no *.safetensors",
    ),
    "text encoder of another model": (
        ("@i2v", "--text-encoder", "@text"),
        "--text-encoder @text",
        "is 64 wide, 'i2v-tiny' takes 48: they are not of one model",
    ),
    "empty text encoder": (("@model", "--text-encoder", "@empty"), "--text-encoder @empty", "is empty"),
    "model as an image encoder": (
        ("@model", "--image-encoder", "@model"),
        "--image-encoder @model",
        "holds no CLIP image encoder",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_by_a_sentence(
    case: str, files: Path, tmp_path: Path, invoke: Callable[..., Result]
) -> None:
    words, beginning, part = CASES[case]
    asked = [word.replace("@", f"{files}/") for word in words]
    before = sorted(files.rglob("*"))
    done = invoke("build", *asked, "--target", "cpu", "-o", tmp_path / "out" / "artifact")
    assert done.exit_code == 3, done.stderr
    sentence = done.stderr[done.stderr.index("seko-export: ") :]
    assert sentence.startswith("seko-export: " + beginning.replace("@", f"{files}/"))
    assert part.replace("@", f"{files}/") in sentence
    assert "Traceback" not in done.output
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
    assert sorted(files.rglob("*")) == before
    assert not (files / "mark").exists()


def test_a_model_whose_name_stands_for_a_file_is_hinted_at(
    tmp_path: Path, invoke: Callable[..., Result]
) -> None:
    for command in (("build", "sample", "-o", tmp_path / "out"), ("try", "sample", "-o", tmp_path / "a.mp4")):
        done = invoke(*command)
        assert done.exit_code == 3
        assert "the model of that name is --preset sample" in done.stderr
    assert not list(tmp_path.iterdir())


def test_damaged_weights_are_found_before_the_probe_of_the_compiler_has_ended(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes long beside the compilers of engines."""
    state = load_file(files / "model")
    state["blocks.1.ffn.0.weight"][0, 0] = torch.nan
    save_file(state, tmp_path / "damaged")
    leave_uncompiled(monkeypatch)
    waited: list[str] = []
    monkeypatch.setattr(environment, "probing_compiler", lambda: nullcontext(lambda: waited.append("probe")))
    with pytest.raises(
        CheckpointError, match=r"/damaged: blocks\.1\.ffn\.0\.weight holds 1 NaN or infinite numbers"
    ):
        build(
            BuildOptions(tmp_path / "damaged", target="cpu"),
            tmp_path / "artifact",
            room_check=False,
            note=lambda _: None,
        )
    assert not waited
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]

"""What `inspect` says of a checkpoint beyond its sizes (what goes with it, bytes on a GPU), and of a LoRA."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from scripts.random_checkpoint import write_random_checkpoint
from scripts.random_lora import random_pairs, write_lora
from seko_export import inspect
from seko_export.cli import main
from seko_export.errors import UsageError
from seko_export.families.registry import presets
from seko_export.families.wan.presets import PRESETS
from seko_export.video import inspection as checkpoint_inspection

TINY = PRESETS["tiny"].model


def test_a_checkpoint_and_what_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "tiny.pt"
    write_random_checkpoint(path, TINY, format="self-forcing", seed=0)
    report = inspect(path, gpu="h200")
    assert report["presets"] == ["tiny"]
    vae, text = report["needs"]
    assert vae.startswith("--vae: a VAE of 16 channels")
    assert text.startswith("--text-encoder: UMT5-XXL")
    sizes = report["gpu"]
    assert sizes["fits"]
    assert 0 < sizes["weight_bytes"] < sizes["peak_bytes"] < sizes["memory_bytes"]
    assert "gpu" not in inspect(path)
    with pytest.raises(UsageError, match="h201"):
        inspect(path, gpu="h201")


@pytest.mark.parametrize("form", ["peft", "comfyui", "lightx2v"])
def test_a_lora_and_its_base(form: str, tmp_path: Path) -> None:
    path = tmp_path / "style"
    write_lora(path, random_pairs(TINY, rank=4, seed=0), form, 2.0)
    report = inspect(path)
    assert (report["ranks"], report["width"], report["presets"]) == ([4], TINY.dim, ["tiny"])
    assert report["alpha"] == {
        "peft": "adapter_config.json", "comfyui": "its keys", "lightx2v": "none: the scale is 1",
    }[form]  # fmt: skip
    peft = [path / name for name in ("adapter_model.safetensors", "adapter_config.json")]
    content = b"".join(file.read_bytes() for file in (peft if form == "peft" else [path]))
    assert report["sha256"] == hashlib.sha256(content).hexdigest()
    assert report["command"].startswith(f"seko-export build CHECKPOINT --lora {path}")
    with pytest.raises(UsageError, match="--gpu h200 is for checkpoints"):
        inspect(path, gpu="h200")


@pytest.mark.parametrize("preset", ["lingbot-tiny", "seko-talk-tiny"])
def test_a_lora_in_diffusers_names(preset: str, tmp_path: Path) -> None:
    write_lora(tmp_path / "style", random_pairs(presets()[preset].model, rank=4, seed=0), "diffusers", 2.0)
    assert preset in inspect(tmp_path / "style")["presets"]


@pytest.mark.parametrize(
    "module", ["transformer.single_transformer_blocks.0.attn.to_q", "diffusion_model.blocks.0.self_attn.qkv"]
)
def test_a_lora_of_another_model_belongs_to_no_preset(module: str, tmp_path: Path) -> None:
    """Its matrices are as wide as Wan's, as those of Flux are for the 5B model."""
    path = tmp_path / "foreign.safetensors"
    save_file(
        {
            f"{module}.lora_A.weight": torch.ones(4, TINY.dim),
            f"{module}.lora_B.weight": torch.ones(TINY.dim, 4),
        },
        path,
    )
    report = inspect(path)
    assert (report["width"], report["presets"]) == (TINY.dim, [])


def test_a_lora_whose_matrices_are_numbers_has_no_rank(tmp_path: Path) -> None:
    path = tmp_path / "numbers.safetensors"
    module = "diffusion_model.blocks.0.self_attn.q"
    save_file({f"{module}.lora_{side}.weight": torch.tensor(1.0) for side in "AB"}, path)
    report = inspect(path)
    assert (report["ranks"], report["width"], report["modules"]) == ([], None, 1)


def test_the_entry_that_a_build_takes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset's authors run an entry of their own; `inspect` shows that one, not the first of the file."""
    path = tmp_path / "tiny.pt"
    write_random_checkpoint(tmp_path / "random.pt", TINY, format="self-forcing", seed=0)
    weights = torch.load(tmp_path / "random.pt")["generator"]
    torch.save({"generator": weights, "generator_ema": dict(weights)}, path)
    opened = mock.Mock(wraps=checkpoint_inspection.open_files)
    monkeypatch.setattr(checkpoint_inspection, "open_files", opened)
    assert inspect(path)["part"] == "generator_ema"
    opened.assert_not_called()  # again, after the family was found
    monkeypatch.setitem(PRESETS, "tiny", replace(PRESETS["tiny"], entry="generator"))
    report = inspect(path)
    assert report["part"] == "generator"
    opened.assert_called_once()
    assert any("--entry generator_ema" in note for note in report["notes"])


@pytest.mark.parametrize("average", [{}, None])
def test_an_average_that_is_empty_is_not_the_model(tmp_path: Path, average: object) -> None:
    write_random_checkpoint(tmp_path / "random.pt", TINY, format="self-forcing", seed=0)
    weights = torch.load(tmp_path / "random.pt")["generator"]
    torch.save({"generator_ema": average, "generator": weights}, tmp_path / "tiny.pt")
    report = inspect(tmp_path / "tiny.pt")
    assert (report["family"], report["part"]) == ("wan", "generator")
    assert not any("--entry" in note for note in report["notes"])


def test_presets_are_listed() -> None:
    """Each says where its weights are from."""
    done = CliRunner().invoke(main, ["presets"], standalone_mode=False)
    assert done.exception is None
    assert "sample  (wan: " in done.output
    for name, preset in presets().items():
        assert f"{name}  (" in done.output
        assert preset.missing in done.output
        assert preset.source

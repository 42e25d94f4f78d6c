"""Whole files with the wrong weights in them: keys, shapes, types and numbers, all listed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from seko_export.checkpoints import errors
from seko_export.checkpoints.sources import LoadOptions
from seko_export.config.model import ModelConfig
from seko_export.errors import CheckpointError
from seko_export.families.model_files import load_checkpoint
from seko_export.families.wan.presets import PRESETS
from seko_export.families.wan_layout.keys import wan_shapes
from seko_export.families.wan_layout.namings import wan_to_diffusers

Weights = dict[str, torch.Tensor]


def refusal(path: Path, model: ModelConfig, kind: type[CheckpointError], **options: Any) -> Any:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, model, LoadOptions(**options))
    assert type(caught.value) is kind, caught.value
    assert caught.value.exit_code == 3
    return caught.value


def save_named(path: Path, weights: Weights, naming: str) -> Path:
    if naming == "self-forcing":
        torch.save({"generator_ema": {f"model.{name}": tensor for name, tensor in weights.items()}}, path)
    else:
        spell = wan_to_diffusers if naming == "diffusers" else str
        save_file({spell(name) if name in KNOWN else name: tensor for name, tensor in weights.items()}, path)
    return path


KNOWN = wan_shapes(ModelConfig(name="test", layers=3, dim=32, heads=2, ffn_dim=48))


@pytest.mark.parametrize("naming", ["self-forcing", "wan", "diffusers"])
def test_everything_wrong_with_the_keys_is_in_one_error(
    naming: str, tmp_path: Path, model: ModelConfig, weights: Weights
) -> None:
    lost = [f"blocks.1.cross_attn.{part}.{leaf}" for part in "qkvo" for leaf in ("weight", "bias")]
    for name in lost:
        del weights[name]
    for number in range(30):
        weights[f"stray.{number:02}"] = torch.ones(1)
    weights["blocks.3.norm3.weight"] = torch.ones(32)  # a layer too many
    weights["head.modulation"] = torch.ones(2, 32)  # the right numbers, another shape
    weights["blocks.0.ffn.0.weight"] = torch.ones(32, 48)  # transposed
    fault = refusal(save_named(tmp_path / "file", weights, naming), model, errors.WeightKeysError)
    assert list(fault.missing) == lost
    assert len(fault.unknown) == 31
    assert list(fault.misshapen) == ["head.modulation", "blocks.0.ffn.0.weight"]
    text = str(fault)
    assert "31 unknown" in text
    assert "and 11 more" in text
    assert "8 missing" in text
    assert "[32, 48], expected [48, 32]" in text
    assert ("blocks.1.attn2.to_q.weight" if naming == "diffusers" else "blocks.1.cross_attn.q.weight") in text


def test_one_weight_under_two_wrappers_is_refused(
    save_pt: Callable[[Any], Path], model: ModelConfig, weights: Weights
) -> None:
    state = {f"model.{name}": tensor for name, tensor in weights.items()}
    state["model._fsdp_wrapped_module.head.head.bias"] = torch.zeros(12)
    fault = refusal(save_pt({"generator_ema": state}), model, errors.WeightKeysError)
    assert len(fault.doubled) == 1
    assert "twice" in str(fault)


@pytest.mark.parametrize("format", ["self-forcing", "wan", "wan-sharded", "diffusers"])
def test_another_presets_set_is_named(format: str, tmp_path: Path) -> None:
    from scripts.random_checkpoint import write_random_checkpoint

    path = tmp_path / "tiny"
    write_random_checkpoint(path, PRESETS["tiny"].model, format=format, seed=0)
    text = str(refusal(path, PRESETS["self-forcing-1.3b"].model, errors.WeightKeysError))
    assert "dim 256 (expected 1536)" in text
    assert "--preset tiny" in text


@pytest.mark.parametrize(
    ("stray", "hint"),
    [
        ("blocks.0.cross_attn.k_img.weight", "image-to-video"),
        ("img_emb.proj.0.weight", "image-to-video"),
        ("blocks.0.attn2.add_k_proj.weight", "image-to-video"),
        ("blocks.0.ffn.0.weight_scale", "quantised"),
        ("blocks.0.self_attn.q.lora_A.weight", "LoRA"),
    ],
)
def test_other_kinds_of_checkpoint_are_named(
    stray: str, hint: str, tmp_path: Path, model: ModelConfig, weights: Weights
) -> None:
    weights[stray] = torch.ones(4)
    save_file(weights, tmp_path / "file")
    assert hint in str(refusal(tmp_path / "file", model, errors.WeightKeysError))


def test_prefixed_keys_get_a_hint(tmp_path: Path, model: ModelConfig, weights: Weights) -> None:
    save_file({f"net.{name}": tensor for name, tensor in weights.items()}, tmp_path / "file")
    fault = refusal(tmp_path / "file", model, errors.WeightKeysError)
    assert "prefix 'net.'" in str(fault)


def test_keys_cannot_write_to_the_terminal(tmp_path: Path, model: ModelConfig, weights: Weights) -> None:
    weights["\x1b[2Jhidden\n"] = torch.ones(1)
    weights["long" * 1000] = torch.ones(1)
    save_file(weights, tmp_path / "file")
    text = str(refusal(tmp_path / "file", model, errors.WeightKeysError))
    assert "\x1b" not in text
    assert len(text) < 2000


@pytest.mark.parametrize("naming", ["self-forcing", "wan", "diffusers"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_bad_numbers_name_their_key(
    naming: str, poison: float, tmp_path: Path, model: ModelConfig, weights: Weights
) -> None:
    weights["blocks.2.ffn.2.weight"][-1, -1] = poison
    path = save_named(tmp_path / "file", weights, naming)
    for dtype in (None, torch.float32):
        checkpoint = load_checkpoint(path, model, LoadOptions(dtype=dtype))
        assert torch.equal(
            checkpoint["head.modulation"], weights["head.modulation"].to(dtype or torch.bfloat16)
        )
        with pytest.raises(errors.CheckpointError, match=r"blocks\.2\.ffn.* holds 1 NaN or infinite"):
            checkpoint["blocks.2.ffn.2.weight"]


def test_numbers_too_large_for_the_dtype_asked_for(
    tmp_path: Path, model: ModelConfig, weights: Weights
) -> None:
    weights["head.head.bias"][0] = 1e5
    path = save_named(tmp_path / "file", weights, "wan")
    assert load_checkpoint(path, model)["head.head.bias"][0] > 9e4
    with pytest.raises(errors.CheckpointError, match=r"head\.head\.bias holds numbers up to .*float16"):
        load_checkpoint(path, model, LoadOptions(dtype=torch.float16))["head.head.bias"]


@pytest.mark.parametrize("naming", ["self-forcing", "wan", "diffusers"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float64, torch.bool])
def test_other_types_are_listed(
    naming: str, dtype: torch.dtype, tmp_path: Path, model: ModelConfig, weights: Weights
) -> None:
    for name in ("blocks.0.ffn.0.weight", "head.head.bias"):
        weights[name] = weights[name].to(dtype)
    fault = refusal(save_named(tmp_path / "file", weights, naming), model, errors.CheckpointError)
    assert "2 weights" in str(fault)


def test_sparse_and_meta_tensors_are_refused(
    save_pt: Callable[[Any], Path], model: ModelConfig, weights: Weights
) -> None:
    state = {f"model.{name}": tensor for name, tensor in weights.items()}
    state["model.blocks.0.ffn.0.weight"] = state["model.blocks.0.ffn.0.weight"].to("meta")
    state["model.blocks.0.ffn.2.weight"] = state["model.blocks.0.ffn.2.weight"].to_sparse()
    assert "2 weights" in str(refusal(save_pt({"generator_ema": state}), model, errors.CheckpointError))

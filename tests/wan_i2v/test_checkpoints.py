"""Files of image-to-video models: their keys are diffusers' own, and they are told by keys and shapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from scripts.checkpoint_configs import i2v_diffusers_config
from scripts.random_checkpoint import FORMS, write_random_checkpoint
from seko_export.checkpoints.sources import LoadOptions, LoraFile
from seko_export.errors import CheckpointError
from seko_export.families.model_files import load_checkpoint, recognise_checkpoint
from seko_export.families.wan_i2v.keys import i2v_shapes
from seko_export.families.wan_i2v.model import WanI2vModel
from seko_export.families.wan_i2v.presets import A14B, FLF2V, I2V, PRESETS
from seko_export.families.wan_layout.namings import diffusers_to_wan
from tests.wan_i2v.streams import BARE, KINDS, ONE, TWO, i2v_config

FULL = {name: replace(PRESETS[name].model, layers=1) for name in (I2V, FLF2V, A14B)}


@pytest.mark.parametrize("name", FULL)
def test_the_full_sizes_are_the_keys_of_diffusers_class(name: str) -> None:
    model = FULL[name]
    with torch.device("meta"):
        theirs = WanTransformer3DModel.from_config(i2v_diffusers_config(model)).state_dict()
    assert {diffusers_to_wan(key): tuple(their.shape) for key, their in theirs.items()} == i2v_shapes(model)


def test_the_branch_has_the_shapes_of_wans_code() -> None:
    shapes = i2v_shapes(FULL[FLF2V])
    assert shapes["patch_embedding.weight"] == (5120, 36, 1, 2, 2)
    assert (shapes["img_emb.proj.1.weight"], shapes["img_emb.proj.3.weight"]) == ((1280, 1280), (5120, 1280))
    assert shapes["img_emb.emb_pos"] == (1, 514, 1280)
    assert shapes["blocks.0.cross_attn.norm_k_img.weight"] == (5120,)
    assert not any("img" in name for name in i2v_shapes(FULL[A14B]))


@pytest.mark.parametrize("form", FORMS["wan_i2v"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_tells_what_it_is(kind: str, form: str, tmp_path: Path) -> None:
    model = i2v_config(kind).model
    write_random_checkpoint(tmp_path / "file", model, format=form, seed=0, dtype=torch.float32)
    recognised = recognise_checkpoint(tmp_path / "file").recognised
    assert (recognised.family, recognised.kind, recognised.foreign) == ("wan_i2v", WanI2vModel, ())
    facts = {name: fact.value for name, fact in recognised.model.items()}
    assert (facts["pictures"], facts["image_dim"]) == (model.seen_pictures, getattr(model, "image_dim", None))
    loaded = load_checkpoint(tmp_path / "file", model)
    assert {name: tuple(weight.shape) for name, weight in loaded.items()} == i2v_shapes(model)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"blocks.1.cross_attn.k_img.weight": None}, "1 missing: blocks.1.cross_attn.k_img.weight"),
        ({"img_emb.proj.4.bias": torch.zeros(3)}, r"1 mis-shaped: img_emb.proj.4.bias is \[3\]"),
        ({"img_emb.extra": torch.zeros(1)}, "1 unknown: img_emb.extra"),
    ],
)
def test_keys_are_strict(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = i2v_config(TWO).model
    write_random_checkpoint(tmp_path / "file", model, format="wan", seed=0, dtype=torch.float32)
    stored = {
        name: weight for name, weight in (load_file(tmp_path / "file") | change).items() if weight is not None
    }
    save_file(stored, tmp_path / "odd")
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(tmp_path / "odd", model)


def test_a_config_that_contradicts_the_keys_is_refused(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "model.safetensors", i2v_config(ONE).model, format="wan", seed=0)
    (tmp_path / "config.json").write_text('{"_class_name": "WanModel", "in_dim": 36, "image_dim": 40}')
    with pytest.raises(CheckpointError, match=r"image_dim is 32 by shapes, 40 by config\.json"):
        recognise_checkpoint(tmp_path / "model.safetensors")


def test_a_lora_of_the_branch_is_merged(tmp_path: Path) -> None:
    """W + up @ down, where the model has the branch; a model without it leaves the keys out with a note."""
    model = i2v_config(ONE).model
    write_random_checkpoint(tmp_path / "model", model, format="wan", seed=0, dtype=torch.float32)
    name = "blocks.1.cross_attn.k_img"
    down, up = torch.randn(2, model.dim), torch.randn(model.dim, 2)
    pair = {f"diffusion_model.{name}.lora_{half}.weight": matrix for half, matrix in (("A", down), ("B", up))}
    save_file(pair, tmp_path / "lora.safetensors")
    loras = [LoraFile(tmp_path / "lora.safetensors")]
    plain = load_checkpoint(tmp_path / "model", model)[f"{name}.weight"]
    merged = load_checkpoint(tmp_path / "model", model, LoadOptions(loras=loras))[f"{name}.weight"]
    assert torch.allclose(merged, plain + up @ down, atol=1e-6)
    bare = i2v_config(BARE).model
    write_random_checkpoint(tmp_path / "bare", bare, format="wan", seed=0, dtype=torch.float32)
    query = {key.replace("k_img", "q"): matrix for key, matrix in pair.items()}
    save_file(pair | {key: matrix.clone() for key, matrix in query.items()}, tmp_path / "both.safetensors")
    loaded = load_checkpoint(
        tmp_path / "bare", bare, LoadOptions(loras=[LoraFile(tmp_path / "both.safetensors")])
    )
    assert any("k_img" in note or "image branch" in note for note in loaded.notes), loaded.notes

"""Files of Matrix-Game 2.0: told apart by keys alone, strict, and the foundation model refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.random_checkpoint import FORMS, write_random_checkpoint
from seko_export import inspect
from seko_export.errors import CheckpointError, UsageError
from seko_export.families.matrix_game.keys import matrix_game_shapes
from seko_export.families.matrix_game.model import MatrixGameModel
from seko_export.families.matrix_game.presets import GTA, PRESETS, TEMPLE_RUN, THREE, UNIVERSAL
from seko_export.families.model_files import load_checkpoint, recognise_checkpoint
from seko_export.families.registry import presets
from tests.matrix_game.streams import GAMES, game_config


def test_the_full_sizes_are_those_of_the_facts() -> None:
    shapes = matrix_game_shapes(replace(PRESETS[UNIVERSAL].model, layers=15))
    action = "blocks.14.action_model."
    assert shapes["patch_embedding.weight"] == (1536, 36, 1, 2, 2)
    assert (shapes["img_emb.proj.1.weight"], shapes["img_emb.proj.3.weight"]) == ((1280, 1280), (1536, 1280))
    assert shapes[f"{action}keyboard_embed.0.weight"] == (128, 4)
    assert shapes[f"{action}mouse_mlp.0.weight"] == (1024, 1560)
    assert shapes[f"{action}t_qkv.weight"] == (3072, 1024)
    assert shapes[f"{action}keyboard_attn_kv.weight"] == (2048, 1536)
    assert shapes[f"{action}mouse_attn_q.weight"] == (1024, 1536)
    assert shapes[f"{action}img_attn_q_norm.weight"] == (64,)
    assert not any("text_embedding" in name for name in shapes)
    runner = matrix_game_shapes(PRESETS[TEMPLE_RUN].model)
    assert runner["blocks.0.action_model.keyboard_embed.0.weight"] == (128, 7)
    assert not any("mouse_mlp" in name or "t_qkv" in name for name in runner)
    assert not any(name.startswith("blocks.15.action_model") for name in shapes | runner)


def test_times_are_those_in_use() -> None:
    assert THREE.timesteps == pytest.approx((1000.0, 908.8427, 713.9794), abs=1e-4)
    four = PRESETS[TEMPLE_RUN].schedule
    assert four is not None
    assert four.timesteps == pytest.approx((1000.0, 937.5, 833.3333, 625.0), abs=1e-4)


@pytest.mark.parametrize("form", FORMS["matrix_game"])
@pytest.mark.parametrize("game", GAMES)
def test_a_file_tells_its_game(game: str, form: str, tmp_path: Path) -> None:
    config = game_config(game)
    write_random_checkpoint(tmp_path / "file", config.model, format=form, seed=0, dtype=torch.float32)
    recognised = recognise_checkpoint(tmp_path / "file").recognised
    assert (recognised.family, recognised.kind, recognised.foreign) == ("matrix_game", MatrixGameModel, ())
    facts = {name: fact.value for name, fact in recognised.model.items()}
    if form == "matrix-game":  # nothing beside the weights says so: the usual ones are assumed
        assert (facts["image_tokens"], facts["heads"]) == (257, 1)
        facts |= {"image_tokens": 5, "heads": 2}
    asked = {name: value for name, value in vars(config.model).items() if name not in ("name", "family")}
    assert {name: facts[name] for name in asked} == asked
    assert recognised.own_schedule == config.workload.schedule
    assert recognised.stream["ring_frames"].value == config.workload.stream.ring_frames
    loaded = load_checkpoint(tmp_path / "file", config.model)
    assert {name: tuple(weight.shape) for name, weight in loaded.items()} == matrix_game_shapes(config.model)


@pytest.mark.parametrize("name", [UNIVERSAL, GTA, TEMPLE_RUN])
def test_the_authors_files_are_known_by_name(name: str, tmp_path: Path) -> None:
    preset = presets()[name]
    (file,) = preset.files
    assert [known for known, other in presets().items() if other.is_named(tmp_path / file)] == [name]


def stored(tmp_path: Path, change: dict[str, Any]) -> Path:
    """A universal file with other tensors; None leaves one out."""
    write_random_checkpoint(tmp_path / "file", game_config().model, format="matrix-game", seed=0)
    tensors = load_file(tmp_path / "file") | {f"model.{name}": tensor for name, tensor in change.items()}
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "odd.safetensors"
    )
    return tmp_path / "odd.safetensors"


def test_the_foundation_model_is_refused_by_name(tmp_path: Path) -> None:
    odd = stored(tmp_path, {"blocks.15.action_model.keyboard_embed.0.weight": torch.zeros(8, 4)})
    with pytest.raises(CheckpointError, match=r"foundation model .*take one of the distilled models"):
        recognise_checkpoint(odd)


def test_a_keyboard_that_no_game_has_is_refused(tmp_path: Path) -> None:
    odd = stored(tmp_path, {"blocks.0.action_model.keyboard_embed.0.weight": torch.zeros(8, 6)})
    with pytest.raises(CheckpointError, match="a keyboard of 6 numbers with a mouse, expected one of 4"):
        recognise_checkpoint(odd)
    with pytest.raises(UsageError, match="a keyboard of 4 numbers without a mouse"):
        replace(MatrixGameModel.of(game_config().model), mouse=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"blocks.0.action_model.proj_mouse.weight": None},
            "1 missing: blocks.0.action_model.proj_mouse",
        ),
        ({"blocks.1.cross_attn.k_img.weight": torch.zeros(1)}, "1 unknown: model.blocks.1.cross_attn.k_img"),
        ({"blocks.0.action_model.t_qkv.weight": torch.zeros(3, 3)}, "1 mis-shaped"),
    ],
)
def test_keys_are_strict(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(stored(tmp_path, change), game_config().model)


def test_inspect_says_the_game(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "file", game_config("gta").model, format="matrix-game-sharded", seed=0)
    report = inspect(tmp_path / "file")
    assert (report["family"], report["preset"]) == ("matrix_game", "matrix-game-tiny-gta")
    assert (report["model"]["keyboard"]["value"], report["model"]["mouse"]["value"]) == (2, True)
    assert not any("text" in need for need in report["needs"])


def test_a_model_with_a_text_is_refused() -> None:
    with pytest.raises(UsageError, match="text_tokens is 4, expected 0"):
        replace(game_config().model, text_dim=8, text_tokens=4)

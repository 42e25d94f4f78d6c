"""The text encoder's keys against transformers' class, its loader's refusals, and configs read from files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from seko_export.checkpoints import errors
from seko_export.config.media import TextEncoderConfig
from seko_export.media.load import load_text_encoder
from seko_export.media.umt5.dimensions import text_config_of
from seko_export.media.umt5.encoder import UMT5_XXL
from seko_export.media.umt5.keys import text_shapes, text_transformers_names
from seko_export.media.vaes import vae_config_of
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.media.wan_vae.keys import vae_diffusers_names, vae_shapes
from tests.export.media_files import transformers_config

SMALL = TextEncoderConfig(vocab_size=11, dim=6, heads=2, head_dim=4, ffn_dim=10, layers=12, buckets=8)
Weights = dict[str, torch.Tensor]


@pytest.fixture
def weights() -> Weights:
    """What a checkpoint of `SMALL` holds under Wan's names; a fresh dict that a test may spoil."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in text_shapes(SMALL).items()}


def in_transformers(weights: Weights) -> Weights:
    names = text_transformers_names(SMALL)
    return {names.get(name, name): tensor for name, tensor in weights.items()}


def assert_holds(path: Path, weights: Weights) -> None:
    checkpoint = load_text_encoder(path, SMALL)
    assert checkpoint.names == tuple(text_shapes(SMALL))
    for name, tensor in checkpoint.items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("config", [SMALL, UMT5_XXL])
def test_table_is_transformers_state_dict(config: TextEncoderConfig) -> None:
    from transformers import UMT5EncoderModel

    with torch.device("meta"):
        model = UMT5EncoderModel(transformers_config(config))
    names, shapes = text_transformers_names(config), text_shapes(config)
    shapes_of_model = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes_of_model.pop("encoder.embed_tokens.weight") == shapes_of_model["shared.weight"]
    assert {names[name]: shape for name, shape in shapes.items()} == shapes_of_model


def test_wan_names_are_the_original_files() -> None:
    """As models_t5_umt5-xxl-enc-bf16.pth spells them: 10 a layer and 2 more."""
    names = list(text_shapes(UMT5_XXL))
    assert len(names) == 10 * 24 + 2
    assert {name for name in names if not name.startswith("blocks.") or name.startswith("blocks.23.")} == {
        *("token_embedding.weight", "norm.weight"),
        *(f"blocks.23.attn.{part}.weight" for part in "qkvo"),
        *("blocks.23.norm1.weight", "blocks.23.norm2.weight", "blocks.23.pos_embedding.embedding.weight"),
        *("blocks.23.ffn.gate.0.weight", "blocks.23.ffn.fc1.weight", "blocks.23.ffn.fc2.weight"),
    }


def test_every_form_gives_the_same_tensors(tmp_path: Path, weights: Weights) -> None:
    torch.save(weights, tmp_path / "enc.pth")
    save_file(weights, tmp_path / "wan.safetensors")
    (tmp_path / "pipeline/text_encoder").mkdir(parents=True)
    stored = tmp_path / "pipeline/text_encoder/model.safetensors"
    save_file(in_transformers(weights), stored)
    for path in (tmp_path / "enc.pth", tmp_path / "wan.safetensors"):
        assert_holds(path, weights)
        assert load_text_encoder(path, SMALL).format == "wan"
    for path in (stored, stored.parent, tmp_path / "pipeline"):
        assert_holds(path, weights)
        assert load_text_encoder(path, SMALL).format == "transformers"


def test_comfyuis_scaled_fp8_with_the_bytes_of_its_tokenizer(tmp_path: Path, weights: Weights) -> None:
    state = in_transformers(weights) | {"spiece_model": torch.zeros(9, dtype=torch.uint8)}
    name = "encoder.block.0.layer.0.SelfAttention.q"
    codes = state[f"{name}.weight"].to(torch.float8_e4m3fn)
    state |= {f"{name}.weight": codes, f"{name}.scale_weight": torch.tensor(0.5)}
    state["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    save_file(state, tmp_path / "umt5_xxl_fp8_e4m3fn_scaled.safetensors")
    expected = weights | {"blocks.0.attn.q.weight": codes.float() * 0.5}
    assert_holds(tmp_path / "umt5_xxl_fp8_e4m3fn_scaled.safetensors", expected)


def test_a_whole_umt5_holds_its_encoder(tmp_path: Path, weights: Weights) -> None:
    """The decoder is passed over; the embedding's second name too, if it is the same tensor."""
    whole = in_transformers(weights) | {
        "decoder.block.0.layer.0.SelfAttention.q.weight": torch.ones(3),
        "lm_head.weight": torch.ones(2, 2),
        "encoder.embed_tokens.weight": weights["token_embedding.weight"].clone(),
    }
    save_file(whole, tmp_path / "whole")
    assert_holds(tmp_path / "whole", weights)
    del whole["shared.weight"]
    save_file(whole, tmp_path / "other-name")
    assert_holds(tmp_path / "other-name", weights)
    whole["shared.weight"] = weights["token_embedding.weight"] + 1
    save_file(whole, tmp_path / "contradiction")
    with pytest.raises(errors.WeightKeysError) as caught:
        load_text_encoder(tmp_path / "contradiction", SMALL)
    assert set(caught.value.doubled) < {"shared.weight", "encoder.embed_tokens.weight"}
    assert len(caught.value.doubled) == 1


@pytest.mark.parametrize("naming", ["wan", "transformers"])
def test_everything_wrong_with_the_keys_is_in_one_error(
    naming: str, tmp_path: Path, weights: Weights
) -> None:
    del weights["blocks.3.norm2.weight"]
    weights["blocks.1.attn.o.weight"] = torch.ones(8, 6)
    weights["blocks.12.norm1.weight"] = torch.ones(6)
    weights["blocks.01.norm1.weight"] = torch.ones(6)
    save_file(in_transformers(weights) if naming == "transformers" else weights, tmp_path / "file")
    with pytest.raises(errors.WeightKeysError) as caught:
        load_text_encoder(tmp_path / "file", SMALL)
    fault = caught.value
    assert fault.missing == ("blocks.3.norm2.weight",)
    assert fault.misshapen == ("blocks.1.attn.o.weight",)
    assert set(fault.unknown) == {"blocks.12.norm1.weight", "blocks.01.norm1.weight"}
    spelled = "encoder.block.3.layer.1.layer_norm.weight" if naming == "transformers" else "blocks.3.norm2"
    assert spelled in str(fault)
    assert "12 layers and width 6" in str(fault)


# -- what lies at a path -----------------------------------------------------------------------------------------


def test_text_config_is_read_from_config_json_or_shapes(tmp_path: Path, weights: Weights) -> None:
    config = replace(SMALL, max_distance=77, norm_eps=1e-5)
    spelled = transformers_config(config)
    spelled.layer_norm_epsilon = 1e-5
    home = tmp_path / "pipeline/text_encoder"
    home.mkdir(parents=True)
    spelled.save_pretrained(home)
    save_file(in_transformers(weights), home / "model.safetensors")
    assert text_config_of(home) == text_config_of(tmp_path / "pipeline") == config
    # A bare file: the distance and the epsilon leave no trace, and are UMT5's.
    assert text_config_of(home / "model.safetensors") == SMALL
    torch.save(weights, tmp_path / "enc.pth")
    assert text_config_of(tmp_path / "enc.pth") == SMALL


def test_defaults_are_transformers_own(tmp_path: Path) -> None:
    from transformers import UMT5Config

    (tmp_path / "config.json").write_text("{}")
    defaults = UMT5Config()
    config = text_config_of(tmp_path)
    assert transformers_config(config).to_diff_dict() == defaults.to_diff_dict()
    assert (config.pad_id, config.norm_eps) == (defaults.pad_token_id, defaults.layer_norm_epsilon)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "a JSON list, expected an object"),
        ('{"model_type": "t5"}', "describes a t5"),
        ('{"feed_forward_proj": "relu"}', "relu"),
        ('{"d_model": "wide"}', "describes no UMT5 encoder"),
    ],
)
def test_text_configs_that_cannot_be(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(errors.NotACheckpointError, match=words):
        text_config_of(tmp_path)


def test_a_file_that_is_no_text_encoder(tmp_path: Path) -> None:
    save_file({"head.weight": torch.ones(3)}, tmp_path / "file")
    with pytest.raises(errors.NotACheckpointError, match="holds no UMT5 encoder"):
        text_config_of(tmp_path / "file")
    with pytest.raises(errors.NotACheckpointError, match="holds no VAE that is known: expected a Wan VAE"):
        vae_config_of(tmp_path / "file")


def test_vae_config_is_read_from_config_json_or_shapes(tmp_path: Path) -> None:
    from diffusers import AutoencoderKLWan

    config = WanVaeConfig(base_dim=4, num_res_blocks=1, latents_mean=(0.5,) * 16)
    with torch.device("meta"):
        spelled = AutoencoderKLWan(base_dim=4, num_res_blocks=1, latents_mean=[0.5] * 16)
    home = tmp_path / "pipeline/vae"
    home.mkdir(parents=True)
    (home / "config.json").write_text(json.dumps(dict(spelled.config)))
    assert vae_config_of(home) == vae_config_of(tmp_path / "pipeline") == config
    names = vae_diffusers_names(WanVaeConfig(base_dim=4))
    for half in ("decoder", "encoder"):
        shapes = vae_shapes(WanVaeConfig(base_dim=4), half)
        for spell in (names, {name: name for name in names}):
            weights = {spell[name]: torch.zeros(shape) for name, shape in shapes.items()}
            save_file(weights, tmp_path / "file")
            assert vae_config_of(tmp_path / "file") == WanVaeConfig(base_dim=4)

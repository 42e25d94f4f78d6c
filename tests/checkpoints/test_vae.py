"""The VAE's keys against diffusers' class and converter, and its loader: what is accepted, what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from seko_export.checkpoints import errors
from seko_export.errors import UsageError
from seko_export.media.load import load_vae
from seko_export.media.vae import HALVES
from seko_export.media.vaes import vae_config_of
from seko_export.media.wan_vae.config import VAE_PRESETS, WanVaeConfig
from seko_export.media.wan_vae.keys import vae_diffusers_names, vae_shapes
from seko_export.media.wan_vae.modules import VaeDecode, VaeEncode
from tests.export.vae_oracle import diffusers_vae

SMALL = WanVaeConfig(base_dim=2, num_res_blocks=1, dim_mult=(1, 1), temporal_downsample=(True,))
Weights = dict[str, torch.Tensor]


@pytest.fixture
def weights() -> Weights:
    """What a checkpoint of `SMALL` holds under Wan's names; a fresh dict that a test may spoil."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float32)
        for name, shape in vae_shapes(SMALL, "both").items()
    }


def in_diffusers(weights: Weights) -> Weights:
    names = vae_diffusers_names(SMALL)
    return {names.get(name, name): tensor for name, tensor in weights.items()}


def assert_holds(path: Path, weights: Weights, half: str = "both", **options: Any) -> None:
    checkpoint = load_vae(path, SMALL, half=half, **options)
    assert checkpoint.names == tuple(vae_shapes(SMALL, half))
    for name, tensor in checkpoint.items():
        assert torch.equal(tensor, weights[name]), name


def refusal(path: Path, half: str = "both", config: WanVaeConfig = SMALL) -> errors.WeightKeysError:
    with pytest.raises(errors.WeightKeysError) as caught:
        load_vae(path, config, half=half)
    return caught.value


@pytest.mark.parametrize("preset", sorted(VAE_PRESETS))
def test_table_is_diffusers_state_dict(preset: str) -> None:
    config = VAE_PRESETS[preset]
    with torch.device("meta"):
        theirs = diffusers_vae(config).state_dict()
    names, shapes = vae_diffusers_names(config), vae_shapes(config, "both")
    assert len(set(names.values())) == len(names) == (196 if config.is_residual else 194)
    assert {names[name]: shape for name, shape in shapes.items()} == {
        name: tuple(tensor.shape) for name, tensor in theirs.items()
    }


def test_wan_names_are_the_original_files() -> None:
    """diffusers' converter reads the original file: our names go through it to diffusers' own."""
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    names = vae_diffusers_names(WanVaeConfig())
    assert convert_wan_vae_to_diffusers({name: name for name in names}) == {b: a for a, b in names.items()}
    assert names["decoder.upsamples.7.time_conv.bias"] == "decoder.up_blocks.1.upsamplers.0.time_conv.bias"
    assert names["encoder.middle.1.to_qkv.weight"] == "encoder.mid_block.attentions.0.to_qkv.weight"


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        WanVaeConfig(base_dim=4, num_res_blocks=3),
        WanVaeConfig(base_dim=2, dim_mult=(1, 3, 2), temporal_downsample=(True, False)),
        WanVaeConfig(base_dim=2, decoder_base_dim=4),
        replace(VAE_PRESETS["wan-2.2"], base_dim=4, decoder_base_dim=2, num_res_blocks=3),
    ],
)
def test_other_dimensions_are_diffusers_too(config: WanVaeConfig) -> None:
    with torch.device("meta"):
        theirs = diffusers_vae(config).state_dict()
    names, shapes = vae_diffusers_names(config), vae_shapes(config, "both")
    assert {names[name]: shape for name, shape in shapes.items()} == {
        name: tuple(tensor.shape) for name, tensor in theirs.items()
    }


def test_sizes_of_the_published_models() -> None:
    count = {half: sum(map(math.prod, vae_shapes(WanVaeConfig(), half).values())) for half in HALVES}
    assert count == {"decoder": 73_295_603, "encoder": 53_596_928, "both": 126_892_531}


def test_sizes_of_wan_2_2() -> None:
    count = {half: sum(map(math.prod, vae_shapes(VAE_PRESETS["wan-2.2"], half).values())) for half in HALVES}
    assert count == {"decoder": 555_051_580, "encoder": 149_637_088, "both": 704_688_668}


def test_names_of_wan_2_2() -> None:
    """As the authors' file and diffusers' converter name them: lists of levels, each with its list of blocks."""
    names = vae_diffusers_names(VAE_PRESETS["wan-2.2"])
    for wan, theirs in (
        ("decoder.upsamples.1.upsamples.3.time_conv.bias", "decoder.up_blocks.1.upsampler.time_conv.bias"),
        (
            "decoder.upsamples.2.upsamples.0.shortcut.weight",
            "decoder.up_blocks.2.resnets.0.conv_shortcut.weight",
        ),
        ("decoder.upsamples.3.upsamples.2.residual.6.bias", "decoder.up_blocks.3.resnets.2.conv2.bias"),
        (
            "encoder.downsamples.0.downsamples.2.resample.1.bias",
            "encoder.down_blocks.0.downsampler.resample.1.bias",
        ),
        (
            "encoder.downsamples.3.downsamples.1.residual.0.gamma",
            "encoder.down_blocks.3.resnets.1.norm1.gamma",
        ),
        ("decoder.middle.1.to_qkv.weight", "decoder.mid_block.attentions.0.to_qkv.weight"),
        ("conv2.weight", "post_quant_conv.weight"),
    ):
        assert names[wan] == theirs


def test_a_file_of_wan_2_2_is_told_by_its_keys(tmp_path: Path) -> None:
    """In either naming, whole or one half of it; a config.json is believed first."""
    small = replace(VAE_PRESETS["wan-2.2"], base_dim=4, decoder_base_dim=8)
    names = vae_diffusers_names(small)
    for half, known in (("both", {}), ("decoder", {"base_dim": 160}), ("encoder", {"decoder_base_dim": 256})):
        for spelled in (names, {name: name for name in names}):
            save_file(
                {spelled[name]: torch.zeros(shape) for name, shape in vae_shapes(small, half).items()},
                tmp_path / "file",
            )
            assert vae_config_of(tmp_path / "file") == replace(small, **known)
    with torch.device("meta"):
        vae_config = dict(diffusers_vae(replace(small, latents_std=(0.5,) * 48)).config)
    home = tmp_path / "pipeline/vae"
    home.mkdir(parents=True)
    (home / "config.json").write_text(json.dumps(vae_config))
    assert vae_config_of(tmp_path / "pipeline") == replace(small, latents_std=(0.5,) * 48)


def test_layers_of_training_in_matrix_games_lightvae_are_left_out(tmp_path: Path) -> None:
    pruned = replace(VAE_PRESETS["wan-2.2"], base_dim=4, decoder_base_dim=8)
    names = vae_diffusers_names(pruned)
    state = {names[name]: torch.zeros(shape) for name, shape in vae_shapes(pruned, "both").items()}
    state["dynamic_feature_projection_heads.0.weight"] = torch.zeros(2, 2)
    save_file(state, tmp_path / "file")
    assert vae_config_of(tmp_path / "file") == pruned
    assert {*load_vae(tmp_path / "file", pruned).sources} == {*vae_shapes(pruned, "both")}


def test_another_width_of_wan_2_2_is_named(tmp_path: Path) -> None:
    small = replace(VAE_PRESETS["wan-2.2"], base_dim=4, decoder_base_dim=8)
    save_file({name: torch.zeros(shape) for name, shape in vae_shapes(small, "both").items()}, tmp_path / "f")
    text = str(refusal(tmp_path / "f", "both", replace(small, decoder_base_dim=4)))
    assert "the file's VAE has decoder_base_dim 8 (expected 4)" in text


def test_latent_statistics_are_diffusers() -> None:
    from diffusers import AutoencoderKLWan

    with torch.device("meta"):
        theirs = AutoencoderKLWan(base_dim=8).config
    assert WanVaeConfig().latents_mean == tuple(theirs["latents_mean"])
    assert WanVaeConfig().latents_std == tuple(theirs["latents_std"])


def test_every_form_gives_the_same_tensors(tmp_path: Path, weights: Weights) -> None:
    torch.save(weights, tmp_path / "Wan2.1_VAE.pth")
    save_file(weights, tmp_path / "wan.safetensors")
    (tmp_path / "pipeline" / "vae").mkdir(parents=True)
    stored = tmp_path / "pipeline" / "vae" / "diffusion_pytorch_model.safetensors"
    save_file(in_diffusers(weights), stored)
    paths = {"wan": [tmp_path / "Wan2.1_VAE.pth", tmp_path / "wan.safetensors"]}
    paths["diffusers"] = [stored, stored.parent, tmp_path / "pipeline"]
    for format_name, alike in paths.items():
        for path in alike:
            for half in HALVES:
                assert_holds(path, weights, half)
            assert load_vae(path, SMALL).format == format_name
    prints = {load_vae(path, SMALL).identity["fingerprint"] for alike in paths.values() for path in alike}
    assert len(prints) == 1
    assert load_vae(stored, SMALL, dtype=torch.bfloat16)["conv2.bias"].dtype == torch.bfloat16


def test_what_is_loaded_fits_the_modules(tmp_path: Path, weights: Weights) -> None:
    save_file(in_diffusers(weights), tmp_path / "file")
    for half, kind in (("decoder", VaeDecode), ("encoder", VaeEncode)):
        module = kind(SMALL, first=True, frames=1)
        left = module.load_state_dict(
            dict(load_vae(tmp_path / "file", SMALL, half=half).items()), strict=False
        )
        assert left.missing_keys == ["latents_mean", "latents_std"]
        assert not left.unexpected_keys


@pytest.mark.parametrize("naming", ["wan", "diffusers"])
@pytest.mark.parametrize("half", ["decoder", "encoder"])
def test_one_half_is_taken_with_or_without_the_other(
    naming: str, half: str, tmp_path: Path, weights: Weights
) -> None:
    spell = in_diffusers if naming == "diffusers" else dict
    mine = {name: weights[name] for name in vae_shapes(SMALL, half)}
    save_file(spell(mine), tmp_path / "alone")
    assert_holds(tmp_path / "alone", weights, half)
    fault = refusal(tmp_path / "alone")
    assert set(fault.missing) == set(weights) - set(mine)
    assert not fault.unknown
    # The other half of another width, as where a light decoder was trained beside a whole encoder.
    other = {name: torch.ones(5) for name in weights if name not in mine}
    save_file(spell(mine | other), tmp_path / "mixed")
    assert_holds(tmp_path / "mixed", weights, half)
    assert set(refusal(tmp_path / "mixed").misshapen) == set(other)


@pytest.mark.parametrize("naming", ["wan", "diffusers"])
@pytest.mark.parametrize("half", HALVES)
def test_everything_wrong_with_the_keys_is_in_one_error(
    naming: str, half: str, tmp_path: Path, weights: Weights
) -> None:
    for lost in ("decoder.middle.1.norm.gamma", "encoder.middle.1.norm.gamma"):
        del weights[lost]
    for name in ("conv1.bias", "conv2.bias"):
        weights[name] = torch.ones(1)
    weights["decoder.upsamples.9.residual.0.gamma"] = torch.ones(2, 1, 1, 1)
    weights["latents_mean"] = torch.ones(16)
    save_file(in_diffusers(weights) if naming == "diffusers" else weights, tmp_path / "file")
    fault = refusal(tmp_path / "file", half)
    halves = {"both": ("decoder", "encoder")}.get(half, (half,))
    assert set(fault.missing) == {f"{part}.middle.1.norm.gamma" for part in halves}
    assert set(fault.misshapen) == {
        {"decoder": "conv2.bias", "encoder": "conv1.bias"}[halve] for halve in halves
    }
    assert set(fault.unknown) == {"decoder.upsamples.9.residual.0.gamma", "latents_mean"}
    text = str(fault)
    assert "2 unknown" in text
    assert f"asked for: {half}" in text
    assert ("mid_block.attentions.0.norm.gamma" if naming == "diffusers" else "middle.1.norm.gamma") in text


def test_another_width_is_named(tmp_path: Path) -> None:
    light = WanVaeConfig(base_dim=24, num_res_blocks=1, dim_mult=(1, 1), temporal_downsample=(True,))
    wide = WanVaeConfig(base_dim=96, num_res_blocks=1, dim_mult=(1, 1), temporal_downsample=(True,))
    save_file(
        {name: torch.zeros(shape) for name, shape in vae_shapes(light, "both").items()}, tmp_path / "file"
    )
    for half in HALVES:
        text = str(refusal(tmp_path / "file", half, wide))
        assert "the file's VAE has base_dim 24 (expected 96): the VAE 'lightvae'" in text


def test_a_pth_is_never_run_and_must_be_bare_weights(tmp_path: Path, weights: Weights) -> None:
    torch.save({"state_dict": weights}, tmp_path / "wrapped.pth")
    with pytest.raises(errors.NotACheckpointError, match="are no tensors: state_dict; expected a Wan VAE"):
        load_vae(tmp_path / "wrapped.pth", SMALL)
    torch.save(list(weights.values()), tmp_path / "list.pth")
    with pytest.raises(
        errors.NotACheckpointError, match="no dict of named tensors: list; expected a Wan VAE"
    ):
        load_vae(tmp_path / "list.pth", SMALL)
    torch.save(weights | {"conv1.bias": Path("/")}, tmp_path / "code.pth")
    with pytest.raises(errors.CheckpointError, match="pathlib"):
        load_vae(tmp_path / "code.pth", SMALL)
    with pytest.raises(errors.CheckpointNotFoundError, match=r"a Wan VAE's \.pth"):
        load_vae(tmp_path / "nothing", SMALL)
    with pytest.raises(UsageError, match="unknown half 'middle'"):
        load_vae(tmp_path / "list.pth", SMALL, half="middle")

"""config.json of a VoxCPM2 model: what is read of it, and what is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.random_speech import config_json
from seko_export import inspect
from seko_export.checkpoints.errors import CheckpointNotFoundError, NotACheckpointError
from seko_export.errors import CheckpointError
from seko_export.families.voxcpm2.config import VoxCpm2Config
from seko_export.families.voxcpm2.keys import voxcpm2_shapes
from seko_export.families.voxcpm2.presets import FULL, PRESETS, TINY
from seko_export.families.voxcpm2.recognise import read_config, recognise
from seko_export.media.audio_vae.files import audio_vae_shapes
from seko_export.options.asked import workload_asked
from seko_export.options.declaration import BuildOptions
from seko_export.speech.resolve import resolve_speech
from tests.voxcpm2.models import scaled
from tests.voxcpm2.oracle import original, original_config


def public() -> dict[str, Any]:
    """The public checkpoint's config.json, but for the 64 factors, which are the preset's."""
    factors = list(PRESETS[FULL].rope.short_factors)
    return {
        "architecture": "voxcpm2",
        "lm_config": {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 32768,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000,
            "kv_channels": 128,
            "rope_scaling": {
                "type": "longrope",
                "long_factor": factors,
                "short_factor": factors,
                "original_max_position_embeddings": 32768,
            },
            "vocab_size": 73448,
            "use_mup": False,
            "scale_emb": 12,
            "dim_model_base": 256,
            "scale_depth": 1.4,
        },
        "patch_size": 4,
        "feat_dim": 64,
        "scalar_quantization_latent_dim": 512,
        "scalar_quantization_scale": 9,
        "residual_lm_num_layers": 8,
        "residual_lm_no_rope": True,
        "encoder_config": {
            "hidden_dim": 1024,
            "ffn_dim": 4096,
            "num_heads": 16,
            "num_layers": 12,
            "kv_channels": 128,
        },
        "dit_config": {
            "hidden_dim": 1024,
            "ffn_dim": 4096,
            "num_heads": 16,
            "num_layers": 12,
            "kv_channels": 128,
            "mean_mode": False,
            "cfm_config": {
                "sigma_min": 1e-06,
                "solver": "euler",
                "t_scheduler": "log-norm",
                "inference_cfg_rate": 2.0,
            },
        },
        "audio_vae_config": {
            "encoder_dim": 128,
            "encoder_rates": [2, 5, 8, 8],
            "latent_dim": 64,
            "decoder_dim": 2048,
            "decoder_rates": [8, 6, 5, 2, 2, 2],
            "sr_bin_boundaries": [20000, 30000, 40000],
            "sample_rate": 16000,
            "out_sample_rate": 48000,
        },
        "max_length": 8192,
        "device": "cuda",
        "dtype": "bfloat16",
    }


def test_the_public_file_is_the_preset() -> None:
    assert read_config(public(), "config.json") == PRESETS[FULL]
    assert len(voxcpm2_shapes(PRESETS[FULL])) == 577
    assert len(audio_vae_shapes(PRESETS[FULL].vae)) == 312


def test_the_presets_tensors_are_the_originals() -> None:
    """Names and shapes of all tensors of the public size, without their numbers."""
    config = PRESETS[FULL]
    package, theirs = original(), original_config(replace(config, max_length=2))
    with torch.device("meta"):
        base = package.lm.MiniCPMModel(theirs.lm_config)
    shapes = {f"base_lm.{name}": tuple(tensor.shape) for name, tensor in base.state_dict().items()}
    assert {name: shape for name, shape in voxcpm2_shapes(config).items() if name in shapes} == shapes
    total = sum(torch.Size(shape).numel() for shape in voxcpm2_shapes(config).values())
    assert 2.2e9 < total < 2.4e9


@pytest.mark.parametrize("config", [*PRESETS.values(), scaled(PRESETS[TINY])], ids=[*PRESETS, "scaled"])
def test_what_is_written_is_read_back(config: VoxCpm2Config, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json(config)))
    assert recognise(tmp_path) == replace(config, name="voxcpm2")


def test_missing_fields_are_the_originals_defaults() -> None:
    stored = public()
    for section in (stored, stored["lm_config"], stored["encoder_config"], stored["dit_config"]):
        for name in ("patch_size", "residual_lm_no_rope", "kv_channels", "use_mup", "num_layers", "device"):
            section.pop(name, None)
    stored["encoder_config"]["num_heads"] = stored["dit_config"]["num_heads"] = 8
    stored["audio_vae_config"] = None
    config = read_config(stored, "config.json")
    theirs = original().model.VoxCPMConfig.model_validate(stored)
    assert config.residual_rope is not theirs.residual_lm_no_rope
    assert (config.base.scale_depth, config.embed_scale) == (theirs.lm_config.scale_depth, 12.0)
    assert config.encoder.layers == theirs.encoder_config.num_layers == 4
    assert config.encoder.head_dim == 1024 // 8
    assert config.vae == PRESETS[FULL].vae


def test_another_models_config_is_not_ours(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no config\.json"):
        recognise(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "voxcpm", "hidden_size": 3}))
    assert recognise(tmp_path) is None


def at(config: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    *sections, name = path.split(".")
    for section in sections:
        config = config[section]
    return config, name


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("sliding_window", 3, "fields that are not known: sliding_window"),
        ("lm_config.attention_bias", False, r"not known: lm_config\.attention_bias"),
        ("dit_config.cfm_config.steps", 4, r"not known: dit_config\.cfm_config\.steps"),
        ("lm_config.rope_scaling.factor", 2.0, r"not known: lm_config\.rope_scaling\.factor"),
        ("audio_vae_config.stereo", True, r"not known: audio_vae_config\.stereo"),
        ("lm_config.hidden_size", "2048", r"lm_config\.hidden_size .* is '2048', expected a whole number"),
        ("lm_config.hidden_size", True, "is True, expected a whole number"),
        ("lm_config.num_hidden_layers", 0, "is 0, expected a whole number of at least 1"),
        ("lm_config.rms_norm_eps", float("nan"), "expected a finite number"),
        ("lm_config.use_mup", 1, "expected true or false"),
        ("lm_config.num_key_value_heads", 3, "16 heads of queries are no multiple of 3"),
        ("lm_config.kv_channels", 64, "expected 32 of each"),
        ("lm_config.rope_scaling.type", "yarn", "expected 'longrope', which alone is built"),
        ("lm_config.rope_scaling.long_factor", [1.0] * 3, "3 long factors, expected 64"),
        ("lm_config.rope_scaling.short_factor", [1.0, "a"], "expected an array of finite numbers"),
        ("dit_config.cfm_config.solver", "heun", "expected 'euler', which alone is built"),
        ("encoder_config", [], "expected an object"),
        ("dtype", "int8", "expected one of bfloat16"),
        ("audio_vae_config.depthwise", False, "expected True, which alone is built"),
        ("audio_vae_config.use_noise_block", True, "expected False"),
        ("audio_vae_config.cond_type", "add", "expected one of scale_bias"),
        ("audio_vae_config.decoder_dim", 100, "multiple of 64"),
        ("audio_vae_config.encoder_rates", [2, 0], "whole numbers of at least 1"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(path: str, value: object, said: str) -> None:
    config = public()
    section, name = at(config, path)
    section[name] = value
    with pytest.raises(NotACheckpointError, match=said):
        read_config(config, "config.json")


@pytest.mark.parametrize("path", ["lm_config.vocab_size", "lm_config.rope_scaling", "dit_config.cfm_config"])
def test_what_the_original_needs_is_needed(path: str) -> None:
    config = public()
    section, name = at(config, path)
    del section[name]
    with pytest.raises(NotACheckpointError, match=f"lacks {path}"):
        read_config(config, "config.json")


def test_fields_that_contradict_each_other_are_refused() -> None:
    """The original ignores ``mean_mode``, as the public file calls ``dit_mean_mode``."""
    config = public()
    config["dit_config"]["mean_mode"] = True
    with pytest.raises(CheckpointError, match="mean_mode is True, dit_mean_mode"):
        read_config(config, "config.json")
    config["dit_config"]["dit_mean_mode"] = True
    assert read_config(config, "config.json").mean_mode
    config["feat_dim"] = 32
    with pytest.raises(CheckpointError, match=r"feat_dim is 32, audio_vae_config\.latent_dim 64"):
        read_config(config, "config.json")


@pytest.mark.parametrize("value", [None, {}, [], "a", -1, 1e999])
def test_any_value_of_any_field_is_taken_or_refused(value: object) -> None:
    """Whatever it is, nothing but a refusal is raised."""
    whole = public()

    def put_into(section: dict[str, Any]) -> None:
        for name, before in list(section.items()):
            if isinstance(before, dict):
                put_into(before)
            section[name] = value
            with suppress(NotACheckpointError, CheckpointError):
                read_config(whole, "config.json")
            section[name] = before

    put_into(whole)


def earlier(architecture: str | None) -> dict[str, Any]:
    """config.json of VoxCPM-0.5B."""
    named = {} if architecture is None else {"architecture": architecture}
    new = ("residual_lm_no_rope", "architecture")
    return {**named, **{name: value for name, value in public().items() if name not in new}, "patch_size": 2}


@pytest.mark.parametrize("architecture", ["voxcpm", None])
def test_a_voxcpm_1_is_named_and_no_video(architecture: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(earlier(architecture)))
    torch.save(
        {"state_dict": {"base_lm.embed_tokens.weight": torch.ones(2, 2)}}, tmp_path / "pytorch_model.bin"
    )
    for preset in (None, FULL):
        with pytest.raises(NotACheckpointError, match=r"config\.json describes a VoxCPM 1, .* take VoxCPM2$"):
            resolve_speech(BuildOptions(tmp_path, preset=preset))
    with pytest.raises(NotACheckpointError, match="describes a VoxCPM 1,"):
        inspect(tmp_path)
    assert workload_asked(BuildOptions(tmp_path)).name == "speech"


def test_a_later_version_is_no_video_either(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**public(), "architecture": "voxcpm3"}))
    with pytest.raises(NotACheckpointError, match="no speech model of a known family"):
        inspect(tmp_path)


@pytest.mark.parametrize("value", ["1e400", "1" + "0" * 400])
def test_numbers_that_no_float_holds(value: str, tmp_path: Path) -> None:
    for field in ("scale_emb", "rope_theta", "rms_norm_eps"):
        changed = public()
        changed["lm_config"][field] = "VALUE"
        (tmp_path / "config.json").write_text(json.dumps(changed).replace('"VALUE"', value))
        with pytest.raises(NotACheckpointError, match=f"{field}.* inf.*a finite number"):
            recognise(tmp_path)


@pytest.mark.parametrize("layers", [10**7, 2**62])
def test_a_model_of_millions_of_layers_is_refused_before_its_keys_are_listed(
    layers: int, tmp_path: Path
) -> None:
    for section, field in (("lm_config", "num_hidden_layers"), ("dit_config", "num_layers")):
        changed = public()
        changed[section][field] = layers
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(NotACheckpointError, match="layers must be a whole number from 1 to 1024, got"):
            recognise(tmp_path)

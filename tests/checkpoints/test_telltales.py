"""Files of other models and parts are named by their keys; two experts and foreign quantisation are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scripts.random_vae import write_random_vae
from seko_export.checkpoints.errors import UnknownModelError
from seko_export.checkpoints.lora_files import open_lora
from seko_export.config.model import ModelConfig
from seko_export.errors import CheckpointError
from seko_export.families.model_files import load_checkpoint, recognise_checkpoint
from seko_export.media.clip.files import clip_config_of
from seko_export.media.umt5.dimensions import text_config_of
from seko_export.media.vaes import vae_config_of
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import resolve_build

Weights = dict[str, torch.Tensor]
VAE = WanVaeConfig(base_dim=4)


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("vace_blocks.0.proj.weight", "VACE, which is not built"),
        ("blocks.0.face_adapter.weight", "Animate"),
        ("img_emb.emb_pos", "image-to-video"),
        ("blocks.0.action_model.keyboard_embed.0.weight", "Matrix-Game"),
        ("blocks.0.self_attn.q.lora_A.weight", "--lora"),
        ("vae.decoder.middle.0.residual.0.gamma", "another part, of --vae, lie beside a transformer; save"),
        (
            "text_encoders.umt5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q.weight",
            "of --text-encoder, lie",
        ),
    ],
)
def test_wan_with_more_keys(
    key: str, sentence: str, tmp_path: Path, model: ModelConfig, weights: Weights
) -> None:
    save_file({**weights, key: torch.ones(2)}, tmp_path / "file")
    with pytest.raises(CheckpointError, match=sentence) as caught:
        load_checkpoint(tmp_path / "file", model)
    assert key in str(caught.value)
    assert "give it with" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("decoder.middle.0.residual.0.gamma", "--vae"),
        ("decoder.up_blocks.0.resnets.0.conv1.weight", "--vae"),
        ("decoder.3.conv.0.weight", "TAEHV"),
        ("visual.transformer.0.norm1.weight", "--image-encoder"),
        ("vision_model.pre_layrnorm.weight", "--image-encoder"),
        ("token_embedding.weight", "--text-encoder"),
        ("encoder.block.0.layer.0.SelfAttention.q.weight", "--text-encoder"),
        ("txt_in.individual_token_refiner.blocks.0.norm1.weight", "HunyuanVideo"),
        ("model.diffusion_model.input_blocks.0.0.weight", "Stable Diffusion"),
        ("transformer_blocks.0.attn.x", "known family"),
    ],
)
def test_another_model_or_part(key: str, sentence: str, tmp_path: Path) -> None:
    save_file({key: torch.ones(2)}, tmp_path / "file")
    with pytest.raises(UnknownModelError, match=sentence) as caught:
        recognise_checkpoint(tmp_path / "file")
    assert str(caught.value).count("hint:") <= 1


@pytest.mark.parametrize(
    ("keys", "option"),
    [
        (("patch_embedding.weight", "blocks.0.self_attn.q.weight"), "as the checkpoint"),
        (("condition_embedder.time_embedder.linear_1.weight",), "as the checkpoint"),
        (("decoder.middle.0.residual.0.gamma",), "--vae"),
        (("decoder.3.conv.0.weight", "decoder.conv1.weight"), "--vae"),
        (("visual.transformer.0.norm1.weight", "textual.token_embedding.weight"), "--image-encoder"),
        (("encoder.block.0.layer.0.SelfAttention.q.weight",), "--text-encoder"),
        (("diffusion_model.blocks.0.self_attn.q.lora_A.weight",), "--lora"),
    ],
)
@pytest.mark.parametrize("entry", [None, "generator"])
def test_a_part_in_the_place_of_another(
    keys: tuple[str, ...], option: str, entry: str | None, tmp_path: Path
) -> None:
    """Each option names the option that takes the file, whether its weights lie at the top or in an entry."""
    state = {key: torch.ones(2, 2) for key in keys}
    torch.save(state if entry is None else {entry: state}, tmp_path / "file.pt")
    for wrong in (vae_config_of, text_config_of, clip_config_of):
        if {vae_config_of: "--vae", text_config_of: "--text-encoder", clip_config_of: "--image-encoder"}[
            wrong
        ] == option:
            continue
        with pytest.raises(CheckpointError) as caught:
            wrong(tmp_path / "file.pt")
        assert str(caught.value).count("give it") + str(caught.value).count("with --lora") == 1
        assert option in str(caught.value)


def test_another_vae_is_not_sent_to_the_option_that_refused_it(tmp_path: Path) -> None:
    save_file({"decoder.mid_block.resnets.0.norm1.weight": torch.ones(2)}, tmp_path / "other")
    with pytest.raises(CheckpointError, match="holds no VAE that is known") as caught:
        vae_config_of(tmp_path / "other")
    assert "it is a VAE" not in str(caught.value)


def test_a_clip_has_the_keys_of_a_text_encoder_and_one_hint(tmp_path: Path) -> None:
    keys = (
        "visual.transformer.0.norm1.weight",
        "visual.patch_embedding.weight",
        "textual.token_embedding.weight",
    )
    torch.save({key: torch.ones(2) for key in keys}, tmp_path / "clip.pth")
    with pytest.raises(UnknownModelError) as caught:
        recognise_checkpoint(tmp_path / "clip.pth")
    hints = [line for line in str(caught.value).splitlines() if "hint:" in line]
    assert hints == ["  hint: it is a CLIP image encoder; give it with --image-encoder beside a model"]


def test_entries_of_a_lora_and_of_a_model_are_told_apart(tmp_path: Path) -> None:
    """A `.pt` of the other kind names no entry of the kind that was expected; it says what its keys are."""
    torch.save(
        {"generator_lora": {"blocks.0.self_attn.q.lora_A.weight": torch.ones(2, 2)}}, tmp_path / "lora.pt"
    )
    with pytest.raises(CheckpointError, match="the LoRA with --lora"):
        recognise_checkpoint(tmp_path / "lora.pt")
    torch.save({"generator": {"model.blocks.0.self_attn.q.weight": torch.ones(2, 2)}}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"--lora .*give it as the checkpoint") as caught:
        open_lora(tmp_path / "model.pt")
    assert "--entry" not in str(caught.value)
    torch.save({"weights": {"x": torch.ones(2)}}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="with --entry"):
        recognise_checkpoint(tmp_path / "other.pt")


def test_weights_in_a_dict_of_an_entry_are_told(tmp_path: Path, model: ModelConfig, weights: Weights) -> None:
    """It is the place of the checkpoint already, so the advice is not to give the file there."""
    torch.save({"generator": {"model": weights}}, tmp_path / "file.pt")
    with pytest.raises(
        CheckpointError, match="seem to lie deeper, in 'model': save that dict alone"
    ) as caught:
        load_checkpoint(tmp_path / "file.pt", model)
    assert "as the checkpoint" not in str(caught.value)


@pytest.mark.parametrize("names", [("transformer", "transformer_2"), ("high_noise_model", "low_noise_model")])
def test_two_experts(names: tuple[str, str], tmp_path: Path, weights: Weights) -> None:
    for name in names:
        (tmp_path / name).mkdir()
        save_file(weights, tmp_path / name / "diffusion_pytorch_model.safetensors")
    with pytest.raises(CheckpointError, match=f"two experts, {names[0]} and {names[1]}"):
        recognise_checkpoint(tmp_path)
    recognise_checkpoint(tmp_path / names[0])
    # as a pipeline with a VAE, and as a folder of all files; one expert is a checkpoint
    write_random_vae(tmp_path / "vae", VAE, "diffusers", seed=0, dtype=torch.float32, device="cpu")
    for options in (BuildOptions(tmp_path, target="cpu"), BuildOptions(model_folder=tmp_path, target="cpu")):
        with pytest.raises(CheckpointError, match=f"two experts, {names[0]} and {names[1]}"):
            resolve_build(options)


def test_quantisation_of_another_library(tmp_path: Path, weights: Weights) -> None:
    save_file(weights, tmp_path / "diffusion_pytorch_model.safetensors")
    config = {"_class_name": "WanTransformer3DModel", "quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantised by 'bitsandbytes'"):
        recognise_checkpoint(tmp_path)


def test_matrix_game_is_named_although_it_has_the_keys_of_a_picture_branch(
    tmp_path: Path, weights: Weights
) -> None:
    """It has no text, so no family knows it; keys that it shares with image-to-video models give no hint."""
    state = {name: tensor for name, tensor in weights.items() if not name.startswith("text_embedding")}
    state |= {
        "img_emb.proj.1.weight": torch.ones(32, 32),
        "blocks.0.cross_attn.k_img.weight": torch.ones(32, 32),
    }
    state["blocks.0.action_model.keyboard_embed.0.weight"] = torch.ones(4, 4)
    save_file(state, tmp_path / "file")
    with pytest.raises(UnknownModelError) as caught:
        recognise_checkpoint(tmp_path / "file")
    hints = [line for line in str(caught.value).splitlines() if "hint:" in line]
    assert hints == [
        "  hint: these are the keys of another Matrix-Game than the distilled models of 2.0, which is not built"
    ]


# A key that each of these models has beside Wan's, as their code names it.
@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("vace_patch_embedding.weight", "VACE"),
        ("control_adapter.conv.weight", "Wan Fun with a camera"),
        ("ref_conv.weight", "Wan Fun with control"),
        ("casual_audio_encoder.encoder.weight", "S2V"),
        ("audio_injector.injector.0.q.weight", "S2V"),
        ("audio_proj.audio_proj_glob_1.layer.weight", "HuMo"),
        ("motion_encoder.enc.fc.0.weight", "Animate"),
        ("pose_patch_embedding.weight", "Animate"),
        ("patch_embedding_pose.weight", "SCAIL"),
        ("patch_embedding_mask.weight", "SCAIL-2"),
        ("patch_embedding_global.weight", "WanDancer"),
        ("music_injector.q.weight", "WanDancer"),
        ("blocks.0.audio_cross_attn.kv_linear.weight", "MultiTalk"),
        ("audio_proj.proj1.weight", "MultiTalk"),
        ("fps_embedding.weight", "SkyReels-V2"),
        ("blocks.0.cam_self_attn.q.weight", "DreamX-World"),
        ("patch_short.weight", "Helios"),
        ("blocks.0.self_attn.to_gate_compress.weight", "FastWan with VSA"),
        ("patchify_proj.weight", "LTX"),
        ("net.x_embedder.proj.1.weight", "Cosmos"),
        ("blocks.0.attn.qkv_x.weight", "Mochi"),
        ("blocks.0.cross_attn.kv_linear.weight", "SANA"),
        ("double_blocks.0.img_attn.qkv.weight", "Flux"),
        ("txtfusion.projector.weight", "Krea-2"),
    ],
)
@pytest.mark.parametrize("beside_wan", [True, False], ids=["beside Wan's keys", "alone"])
def test_a_model_is_named_by_its_key(
    key: str, name: str, beside_wan: bool, tmp_path: Path, model: ModelConfig, weights: Weights
) -> None:
    save_file({**(weights if beside_wan else {}), key: torch.ones(2)}, tmp_path / "file")
    with pytest.raises(CheckpointError, match=f"these are the keys of .*{name}.*, which is not built"):
        load_checkpoint(tmp_path / "file", model)

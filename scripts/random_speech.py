"""Writer of a VoxCPM2 folder of seeded random weights, with a small tokenizer of the same form as the public model's
tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch

from scripts.random_checkpoint import RandomFile, write_random_folder
from seko_export.checkpoints.json_files import CONFIG_FILE
from seko_export.families.voxcpm2.config import NetConfig, VoxCpm2Config
from seko_export.families.voxcpm2.family import TOKENIZER_FILE
from seko_export.families.voxcpm2.keys import FILES, voxcpm2_shapes
from seko_export.families.voxcpm2.recognise import ARCHITECTURE
from seko_export.media.audio_vae.files import BOUNDARIES, audio_vae_shapes, spread
from seko_export.media.audio_vae.files import FILES as VAE_FILES

# What the random tokenizer knows beside ASCII and bytes: characters, words of two, and a few English pieces.
_CHINESE = "你好世界今天气很说话声音"
_WORDS = ("你好", "世界", "今天", "天气", "说话", "声音")
_ENGLISH = ("he", "ll", "hell", "hello", "wo", "rl", "th", "the", "in", "on")
_MARKS = ("<|audio_start|>", "<|audio_end|>", "<|ref_start|>", "<|ref_end|>")
_FIRST_MARK = 101
_WORD = "▁"


def write_random_voxcpm2(
    path: Path, config: VoxCpm2Config, *, seed: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> None:
    """Write the checkpoint folder of a model: config.json, both files of weights, tokenizer.json.

    The weights of the audio VAE are float32 as in the original. `write_random_folder` documents the
    parameters and errors.
    """
    boundaries = torch.tensor(config.vae.rate_boundaries, dtype=torch.int32)
    files = {
        FILES[0]: RandomFile(voxcpm2_shapes(config), dtype),
        VAE_FILES[0]: RandomFile(
            audio_vae_shapes(config.vae), torch.float32, spread, {BOUNDARIES: boundaries}
        ),
    }
    documents = {CONFIG_FILE: config_json(config), TOKENIZER_FILE: tokenizer_json()}
    write_random_folder(path, files, documents, seed=seed, device=device)


def config_json(config: VoxCpm2Config) -> dict[str, object]:
    """Return the content of the config.json that describes a model; the inverse of `recognise.read_config`."""
    base, vae = config.base, config.vae
    return {
        "architecture": ARCHITECTURE,
        "lm_config": {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": base.dim,
            "intermediate_size": base.ffn_dim,
            "max_position_embeddings": config.rope.max_positions,
            "num_attention_heads": base.heads,
            "num_hidden_layers": base.layers,
            "num_key_value_heads": base.kv_heads,
            "rms_norm_eps": base.norm_eps,
            "rope_theta": config.rope.theta,
            "kv_channels": base.head_dim,
            "rope_scaling": {
                "type": "longrope",
                "long_factor": list(config.rope.long_factors),
                "short_factor": list(config.rope.short_factors),
                "original_max_position_embeddings": config.rope.original_positions,
            },
            "vocab_size": config.vocab_size,
            "use_mup": base.scale_depth is not None,
            "scale_emb": config.embed_scale,
            "dim_model_base": 256,
            "scale_depth": 1.4 if base.scale_depth is None else base.scale_depth,
        },
        "patch_size": config.patch_size,
        "feat_dim": config.latent_dim,
        "scalar_quantization_latent_dim": config.fsq_dim,
        "scalar_quantization_scale": config.fsq_scale,
        "residual_lm_num_layers": config.residual.layers,
        "residual_lm_no_rope": not config.residual_rope,
        "encoder_config": _local_json(config.encoder),
        "dit_config": {
            **_local_json(config.decoder),
            "dit_mean_mode": config.mean_mode,
            "cfm_config": {
                "sigma_min": 1e-6,
                "solver": "euler",
                "t_scheduler": "log-norm",
                "inference_cfg_rate": 2.0,
            },
        },
        "audio_vae_config": {
            "encoder_dim": vae.encoder_dim,
            "encoder_rates": list(vae.encoder_rates),
            "latent_dim": vae.latent_dim,
            "decoder_dim": vae.decoder_dim,
            "decoder_rates": list(vae.decoder_rates),
            "sr_bin_boundaries": list(vae.rate_boundaries),
            "sample_rate": vae.sample_rate,
            "out_sample_rate": vae.out_sample_rate,
        },
        "max_length": config.max_length,
        "device": "cuda",
        "dtype": config.dtype,
    }


def _local_json(net: NetConfig) -> dict[str, object]:
    return {
        "hidden_dim": net.dim,
        "ffn_dim": net.ffn_dim,
        "num_heads": net.heads,
        "num_layers": net.layers,
        "kv_channels": net.head_dim,
    }


def tokenizer_json() -> dict[str, object]:
    """Return the content of tokenizer.json, which is Llama's byte-pair encoding over a small vocabulary of 400
    tokens."""
    tokens = ["<unk>", "<s>", "</s>", _WORD, *map(chr, range(33, 127))]
    tokens += [f"<unused{number}>" for number in range(_FIRST_MARK - len(tokens))]
    tokens += [*_MARKS, *(f"<0x{byte:02X}>" for byte in range(256)), *_CHINESE]
    words = (*_WORDS, *(_WORD + word for word in _WORDS[:3]), *_ENGLISH, _WORD + _ENGLISH[3])
    known, merges = set(tokens), []
    for word in words:
        cuts = ((word[:cut], word[cut:]) for cut in range(1, len(word)))
        left, right = next(pair for pair in cuts if known.issuperset(pair))
        merges.append([left, right])
        known.add(word)
    specials = [*range(3), *range(_FIRST_MARK, _FIRST_MARK + len(_MARKS))]
    begin = {"SpecialToken": {"id": tokens[1], "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": tokens[number],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number in specials
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": _WORD},
                {"type": "Replace", "pattern": {"String": " "}, "content": _WORD},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {tokens[1]: {"id": tokens[1], "ids": [1], "tokens": [tokens[1]]}},
        },
        "decoder": {"type": "ByteFallback"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[0],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate((*tokens, *words))},
            "merges": merges,
        },
    }


def stored_tensors(config: VoxCpm2Config) -> int:
    """Return the total number of tensors in the two weight files."""
    return len(voxcpm2_shapes(config)) + len(audio_vae_shapes(config.vae))

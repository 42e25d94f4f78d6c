"""Tiny random VAE, text encoder and tokenizer, as files that the exporter reads; and a sample's folder of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from scripts.checkpoint_configs import umt5_config
from scripts.random_checkpoint import write_random_checkpoint
from seko_export.config.media import TextEncoderConfig
from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig
from seko_export.media.umt5.keys import text_shapes, text_transformers_names
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.media.wan_vae.keys import vae_shapes

VAE = WanVaeConfig(base_dim=4, num_res_blocks=1, latents_mean=(0.1,) * 16, latents_std=(0.5,) * 16)
TEXT = TextEncoderConfig(
    vocab_size=32, dim=64, heads=2, head_dim=16, ffn_dim=48, layers=1, buckets=8, max_distance=16
)
WORDS = ("a", "red", "blue", "disc", "square", "bouncing", "spinning", "on", "dark", "background")
SAMPLE_MODEL = ModelConfig(
    name="sample", layers=1, dim=128, heads=1, ffn_dim=64, text_dim=TEXT.dim, text_tokens=12, freq_dim=32
)
SAMPLE_STREAM = StreamConfig(32, 32, chunk_frames=2, sink_frames=1, ring_frames=3)


def write_vae(folder: Path) -> Path:
    """Write the VAE under Wan's names with diffusers' config.json, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _save(folder / "diffusion_pytorch_model.safetensors", vae_shapes(VAE, "both"))
    config = asdict(VAE)
    config["temperal_downsample"] = config.pop("temporal_downsample")  # their spelling
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_text_encoder(folder: Path) -> Path:
    """Write the encoder under transformers' names with its config.json and tokenizer.json, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names = text_transformers_names(TEXT)
    _save(folder / "model.safetensors", {names[name]: shape for name, shape in text_shapes(TEXT).items()})
    (folder / "config.json").write_text(json.dumps(umt5_config(TEXT)))
    write_tokenizer(folder / "tokenizer.json")
    return folder


def write_tokenizer(path: Path) -> None:
    """Write a word-level tokenizer with `</s>` at the end."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from tokenizers.processors import TemplateProcessing

    words = {word: number for number, word in enumerate(("<pad>", "</s>", "<unk>", *WORDS))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.save(str(path))


def write_sample(folder: Path) -> Path:
    """Write a sample's folder as the training scripts do, of random weights, and return it."""
    folder.mkdir(parents=True)
    write_random_checkpoint(folder / "dit.safetensors", SAMPLE_MODEL, format="wan", seed=0)
    _save(folder / "vae.safetensors", vae_shapes(VAE, "both"))
    names = text_transformers_names(TEXT)
    _save(folder / "text.safetensors", {names[name]: shape for name, shape in text_shapes(TEXT).items()})
    write_tokenizer(folder / "tokenizer.json")
    config = {
        "format_version": 1,
        "model": asdict(SAMPLE_MODEL),
        "stream": asdict(SAMPLE_STREAM),
        "schedule": {"timesteps": [1000.0, 750.0], "shift": 3.0},
        "vae": asdict(VAE),
        "text": umt5_config(TEXT),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def transformers_config(config: TextEncoderConfig):
    """Return transformers' own configuration of this encoder."""
    from transformers import UMT5Config

    return UMT5Config.from_dict(umt5_config(config))


def _save(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write random weights that keep activations near 1."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        fan_in = noise[0].numel()
        weights[name] = 1 + 0.1 * noise if fan_in == 1 else noise * fan_in**-0.5
    save_file(weights, path)

"""The sample's text side: a word-level tokenizer over the grammar, and a small UMT5 encoder run as pipelines run it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import UMT5Config, UMT5EncoderModel

from scripts.train_sample.captions import vocabulary
from seko_export.config.media import TextEncoderConfig
from seko_export.media.umt5.encoder import TextEncoder
from seko_export.media.umt5.keys import text_transformers_names

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"  # UMT5's names and numbers: 0, 1, 2


def make_tokenizer() -> Tokenizer:
    """Return the tokenizer: lower case, words and commas, `</s>` at the end; a strange word is `<unk>`."""
    words = {word: number for number, word in enumerate([PAD, END, UNKNOWN, *vocabulary()])}
    tokenizer = Tokenizer(WordLevel(words, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = TemplateProcessing(single=f"$A {END}", special_tokens=[(END, words[END])])
    return tokenizer


def save_tokenizer(path: Path) -> None:
    """Write tokenizer.json."""
    make_tokenizer().save(str(path))


def token_ids(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> Tensor:
    """Return [B, length] int64, zeros (`<pad>`) behind each text's `</s>`.

    Raises
    ------
    ValueError
        If a text has more tokens than ``length``: cutting one would lose its background.
    """
    rows = torch.zeros(len(texts), length, dtype=torch.int64)
    for row, (text, encoded) in enumerate(zip(texts, tokenizer.encode_batch(list(texts)), strict=True)):
        if len(encoded.ids) > length:
            raise ValueError(f"{text!r} has {len(encoded.ids)} tokens, at most {length} fit; shorten it")
        rows[row, : len(encoded.ids)] = torch.tensor(encoded.ids)
    return rows


def text_config(d_model: int = 128, layers: int = 3) -> UMT5Config:
    """Return the encoder's configuration; the whole vocabulary has about 60 words."""
    return UMT5Config(
        vocab_size=-(-(len(vocabulary()) + 3) // 32) * 32,
        d_model=d_model,
        d_kv=32,
        num_heads=d_model // 32,
        d_ff=2 * d_model,
        num_layers=layers,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=64,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )


def make_encoder(config: UMT5Config) -> UMT5EncoderModel:
    """Return a freshly initialised encoder, drawn from torch's global generator."""
    return UMT5EncoderModel(config)


def encode(encoder: UMT5EncoderModel, ids: Tensor) -> Tensor:
    """Return [B, length, d_model]: run with the mask, zeros where ``ids`` [B, length] int64 is `<pad>`."""
    mask = (ids != 0).long()
    hidden: Tensor = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    return hidden * mask[..., None]


def encode_unwaited(encoder: UMT5EncoderModel, ids: Tensor) -> Tensor:
    """Return what `encode` returns, without waiting for the device: transformers asks there whether any mask is zero.

    The exported encoder's forward runs on the parameters of transformers' module, so that a CUDA graph can hold it.
    """
    c = encoder.config
    forward, names = _written_out(
        TextEncoderConfig(
            vocab_size=c.vocab_size,
            dim=c.d_model,
            heads=c.num_heads,
            head_dim=c.d_kv,
            ffn_dim=c.d_ff,
            layers=c.num_layers,
            buckets=c.relative_attention_num_buckets,
            max_distance=c.relative_attention_max_distance,
            norm_eps=c.layer_norm_epsilon,
        )
    )
    parameters: dict[str, Tensor] = {name: encoder.get_parameter(theirs) for name, theirs in names.items()}
    hidden: Tensor = torch.func.functional_call(forward, parameters, (ids,))
    return hidden


@functools.cache
def _written_out(config: TextEncoderConfig) -> tuple[TextEncoder, dict[str, str]]:
    """Return the encoder without weights, and transformers' name of each of its parameters."""
    with torch.device("meta"):
        return TextEncoder(config), text_transformers_names(config)

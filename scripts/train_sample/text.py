"""The sample's text side: a word-level tokenizer over the grammar, and a small UMT5 encoder run as pipelines run it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import UMT5Config, UMT5EncoderModel

from scripts.train_sample.captions import vocabulary
from scripts.train_sample.progress import fill

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"  # UMT5's names and numbers: 0, 1, 2


def make_tokenizer() -> Tokenizer:
    """Return the tokenizer: lower case, words and commas, `</s>` at the end; a strange word is `<unk>`."""
    words = {word: number for number, word in enumerate([PAD, END, UNKNOWN, *vocabulary()])}
    tokenizer = Tokenizer(WordLevel(words, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = TemplateProcessing(single=f"$A {END}", special_tokens=[(END, words[END])])
    return tokenizer


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


def encode(encoder: UMT5EncoderModel, ids: Tensor) -> Tensor:
    """Return [B, length, d_model]: run with the mask, zeros where ``ids`` [B, length] int64 is `<pad>`."""
    mask = (ids != 0).long()
    hidden: Tensor = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    return hidden * mask[..., None]


class PromptTexts:
    """A sample's frozen text encoder.

    Parameters
    ----------
    sample : Path
        The sample's folder.
    device : str
        Where it works.
    """

    def __init__(self, sample: Path, device: str) -> None:
        config = json.loads((sample / "config.json").read_text(encoding="utf-8"))
        encoder = UMT5EncoderModel(UMT5Config.from_dict(config["text"])).requires_grad_(False).eval()
        weights = load_file(sample / "text.safetensors")
        fill(dict(encoder.named_parameters()), {name: t.float() for name, t in weights.items()})
        self.encoder, self.device = encoder.to(device), device
        self.tokenizer = Tokenizer.from_file(str(sample / "tokenizer.json"))
        self.tokens: int = config["model"]["text_tokens"]

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> Tensor:
        """Return [B, tokens, dim] float32."""
        return encode(self.encoder, token_ids(self.tokenizer, texts, self.tokens).to(self.device)).float()

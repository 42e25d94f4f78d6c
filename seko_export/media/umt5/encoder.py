"""The UMT5 text encoder: from the token ids of a prompt to embeddings for the transformer.

The encoder is written in this module instead of imported from transformers, because an engine must not change with a
library's internals, and so that a build needs no second model library. A test checks that this encoder and that of
transformers give equal results. Attribute names of the modules are those of Wan's checkpoint; the module `keys` knows
transformers' names. The tokenizer of the text encoder is shipped as a file of the artifact.

In shapes T is the number of tokens, d the width, H the number of heads. The maths of the text encoder is from
UMT5 (arXiv 2304.09151), T5 v1.1 with a relative bias in every layer.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.config.media import TextEncoderConfig

UMT5_XXL = TextEncoderConfig()  # what Wan 2.1 and its descendants read prompts with


class TextEncoder(nn.Module):
    """The text encoder as diffusers' pipelines run it: padding is masked, and the embeddings of padding are zeros."""

    def __init__(self, config: TextEncoderConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.dim, dtype=dtype)
        self.blocks = nn.ModuleList(TextLayer(config, dtype) for _ in range(config.layers))
        self.norm = TextNorm(config, dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Encode prompts to embeddings.

        Parameters
        ----------
        ids : Tensor
            Token ids, [B, T] int64, with ``pad_id`` after the end of each prompt.

        Returns
        -------
        Tensor
            Embeddings, [B, T, d] in the weights' dtype; zeros where ``ids`` is ``pad_id``.
        """
        x: Tensor = self.token_embedding(ids)
        bucket, mask = places(ids, self.config, x.dtype)
        for block in self.blocks:
            x = block(x, bucket, mask)
        return shown(self.norm(x), ids, self.config)


class TextStart(nn.Module):
    """What the layers of an encoder take, as an engine: its tokens, their distances and the mask of padding.

    Parameters
    ----------
    embeds : bool
        Whether this module embeds the tokens; otherwise each `EmbeddingPart` adds those that it knows to zeros.
    """

    def __init__(self, config: TextEncoderConfig, dtype: torch.dtype, *, embeds: bool) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.token_embedding = nn.Embedding(config.vocab_size, config.dim, dtype=dtype) if embeds else None

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Return hidden state [B, T, d], bucket [T, T] int64 and mask [B, 1, 1, T] float32 of ``ids`` [B, T], and
        without an embedding a copy of ``ids`` for the first part."""
        bucket, mask = places(ids, self.config, self.dtype)
        if self.token_embedding is not None:
            return self.token_embedding(ids), bucket, mask
        zeros = torch.zeros((*ids.shape, self.config.dim), dtype=self.dtype, device=ids.device)
        return zeros, bucket, mask, ids.clone()


class EmbeddingPart(nn.Module):
    """Some rows of the token embedding, as an engine, for an embedding that stays on the host."""

    def __init__(self, config: TextEncoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows = config.vocab_size // config.embedding_parts
        self.weight = nn.Parameter(torch.empty(self.rows, config.dim, dtype=dtype))

    def forward(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden state with the tokens of this part, and ``ids`` counted from the next part's first row."""
        here = (ids >= 0) & (ids < self.rows)
        found = F.embedding(ids.clamp(0, self.rows - 1), self.weight)
        return torch.where(here[..., None], found, hidden), ids - self.rows


class TextEnd(nn.Module):
    """The last norm of an encoder, as an engine."""

    def __init__(self, config: TextEncoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.norm = TextNorm(config, dtype)

    def forward(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return the embeddings [B, T, d] of ``ids`` [B, T] from the last layer's output; zeros at padding."""
        return shown(self.norm(hidden), ids, self.config)


class TextLayer(nn.Module):
    """Self-attention with a relative bias, then a gated feed-forward, each after a norm."""

    def __init__(self, config: TextEncoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = TextNorm(config, dtype)
        self.attn = TextAttention(config, dtype)
        self.norm2 = TextNorm(config, dtype)
        self.ffn = GatedFeedForward(config, dtype)
        self.pos_embedding = PositionBias(config, dtype)

    def forward(self, x: Tensor, bucket: Tensor, mask: Tensor) -> Tensor:
        """Return the layer's output [B, T, d] for ``x`` [B, T, d], ``bucket`` [T, T] and ``mask`` [B, 1, 1, T]
        float32."""
        x = x + self.attn(self.norm1(x), self.pos_embedding(bucket) + mask)
        y: Tensor = self.ffn(self.norm2(x))
        return x + y


class TextAttention(nn.Module):
    """Attention without scaling of the scores, written in plain ops because the bias differs between layers."""

    def __init__(self, config: TextEncoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = config.heads
        width = config.heads * config.head_dim
        self.q, self.k, self.v = (nn.Linear(config.dim, width, bias=False, dtype=dtype) for _ in range(3))
        self.o = nn.Linear(width, config.dim, bias=False, dtype=dtype)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return the attention's output [B, T, d] for ``x`` [B, T, d] and ``bias`` [B, H, T, T] float32."""
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        share = torch.softmax((q @ k.mT).float() + bias, dim=-1).to(x.dtype)  # [B, H, T, T]
        y: Tensor = self.o((share @ v).transpose(1, 2).flatten(2))
        return y


class GatedFeedForward(nn.Module):
    """A gated feed-forward: the GELU (tanh form) of one projection is multiplied by another projection, and the product
    is projected back."""

    def __init__(self, config: TextEncoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        d, ffn = config.dim, config.ffn_dim
        self.gate = nn.Sequential(nn.Linear(d, ffn, bias=False, dtype=dtype), nn.GELU(approximate="tanh"))
        self.fc1 = nn.Linear(d, ffn, bias=False, dtype=dtype)
        self.fc2 = nn.Linear(ffn, d, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward's output [B, T, d] for ``x`` [B, T, d]."""
        y: Tensor = self.fc2(self.gate(x) * self.fc1(x))
        return y


class PositionBias(nn.Module):
    """The relative position bias: a learned number for each head and distance bucket."""

    def __init__(self, config: TextEncoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.buckets, config.heads, dtype=dtype)

    def forward(self, bucket: Tensor) -> Tensor:
        """Return the position bias [1, H, T, T] float32 for ``bucket`` [T, T] int64."""
        bias: Tensor = self.embedding(bucket)
        return bias.float().permute(2, 0, 1).unsqueeze(0)


class TextNorm(nn.Module):
    """RMSNorm that is computed in float32."""

    def __init__(self, config: TextEncoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.empty(config.dim, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised ``x``, with the shape [..., d] and dtype of ``x``."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


def places(ids: Tensor, config: TextEncoderConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the buckets of the distances of tokens [T, T] int64, and the mask of padding [B, 1, 1, T] float32."""
    there = ids != config.pad_id
    # The lowest number rather than -inf: a prompt without any token would be NaN.
    mask = torch.zeros_like(ids, dtype=torch.float32).masked_fill(~there, torch.finfo(dtype).min)
    return position_buckets(ids.shape[1], config, ids.device), mask[:, None, None, :]


def shown(x: Tensor, ids: Tensor, config: TextEncoderConfig) -> Tensor:
    """Return embeddings [B, T, d] with zeros at padding."""
    return torch.where((ids != config.pad_id)[..., None], x, 0)


def position_buckets(tokens: int, config: TextEncoderConfig, device: torch.device) -> Tensor:
    """Return the bucket of each (query, key) pair, [T, T] int64; keys after the query use the upper half of the
    buckets.

    Short distances have a bucket each; longer distances share buckets that grow by a constant factor up to
    ``max_distance``.
    """
    half = config.buckets // 2
    near = half // 2
    place = torch.arange(tokens, device=device)
    offset = place[None, :] - place[:, None]
    distance = offset.abs()
    # The logarithm of 0 is not used, but must not become an integer either.
    steps = torch.log(distance.clamp(min=1).float() / near) / math.log(config.max_distance / near)
    far = (near + (steps * (half - near)).to(torch.int64)).clamp(max=half - 1)
    return torch.where(distance < near, distance, far) + half * (offset > 0)

"""The causal video DiT of the Wan family, as the modules that become engines. Every shape is fixed, and every position
is a tensor.

`Embed` and `Head` run once for each pass, `block.Block` for each layer and pass; `Prompt` and `PromptKv` run
once for each prompt. Every size comes from a frozen config and every position is a tensor, so one traced graph serves
a whole stream, and rows of a batch may be at different chunks. The sampler is in `sampler.py`; `seko_kernels` defines
the formats of quantised caches.

In shapes B is the number of rows, F the number of latent frames of the chunk, n the number of tokens of a latent frame,
N the number of tokens of the cache, H the number of heads, and D the number of channels of a head. T is F*n, and d is
the width. The maths of the transformer is from Wan 2.1 (arXiv 2503.20314) and Self-Forcing (arXiv 2506.08009). Matmuls
of the transformer run in the weights' dtype; norms, modulation, RoPE, time embedding and head run in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.config.model import ModelConfig
from seko_export.config.stream import PATCH, StreamConfig
from seko_export.families.layers.block import RmsNormWeight, modulate, rms_norm
from seko_export.families.layers.rank_split import Ranked
from seko_export.families.layers.ring_positions import (
    chunk_positions,
    of_rank,
)


class Embed(Ranked):
    """Patch, time and position embeddings of a chunk, shared by all blocks of one pass.

    Parameters
    ----------
    key_rotary : bool
        Whether to return the rotary tables of all cached keys, which attention needs if keys are stored before RoPE.
    update : bool
        Whether blocks also take the previous layer's FFN output as ``update``, which the embedding returns as zeros
        for the first block.

    Attributes
    ----------
    split : RankSplit or None
        How ranks share a chunk. Each rank embeds the whole chunk and keeps its own tokens.
    """

    groups: tuple[str, ...] = ("conditioning",)

    def __init__(
        self,
        model: ModelConfig,
        stream: StreamConfig,
        dtype: torch.dtype,
        *,
        key_rotary: bool,
        update: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.stream, self.key_rotary, self.update = model, stream, key_rotary, update
        d = model.dim
        self.patch_embedding = nn.Linear(model.in_channels * PATCH * PATCH, d, dtype=dtype)
        self.time_embedding = nn.Sequential(nn.Linear(model.freq_dim, d), nn.SiLU(), nn.Linear(d, d))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(d, 6 * d))

    def forward(
        self,
        latents: Tensor,
        timestep: Tensor,
        frames: Tensor,
        write_slots: Tensor,
        conditioning_frames: Tensor,
        context_timestep: Tensor,
        slot_frames: Tensor | None = None,
        valid_tokens: Tensor | None = None,
        rows: Tensor | None = None,
        conditioning: Mapping[str, Tensor] | None = None,
        rank: Tensor | None = None,
        scaled: Tensor | None = None,
        time_scale: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Embed one chunk of latent frames.

        Parameters
        ----------
        latents : Tensor
            Latents of the chunk, float32 [B, C, F, h, w]: noisy, or clean in the context pass.
        timestep : Tensor
            Timestep of each latent frame, float32 [B, F] in 0..1000.
        frames : Tensor
            Absolute latent-frame numbers, int64 [B, F], of any size: angles are computed, not looked up.
        write_slots : Tensor
            Cache slot to which each latent frame is written, int64 [B, F].
        conditioning_frames : Tensor
            Number of leading frames of the chunk that are conditioning frames, int64 [B]: clean latents, with the
            context timestep in every pass.
        context_timestep : Tensor
            Timestep of the context pass, float32 [1].
        slot_frames : Tensor, optional
            Number of the frame in each cache slot, int64 [B*cache_frames]; only with `key_rotary`. `Embed` writes the
            chunk's frame numbers into ``slot_frames`` in place, before any block writes the frames' keys.
            ``slot_frames`` is state and cannot be computed, because the frames of a rebuilt cache are not consecutive.
        valid_tokens : Tensor, optional
            Number of filled tokens in each row's cache, int64 [B]; only if RoPE positions count from the oldest cached
            frame.
        rows : Tensor, optional
            The row of the pool for each batch index, int64 [B], only in a pool; ``slot_frames`` then covers all rows of
            the pool.
        conditioning : mapping of str to Tensor, optional
            The family's tensors that the methods `beside` and `tokens` take, by name, [B, ...] each.
        rank : Tensor, optional
            Number of this rank, int64 [1]; only if several ranks (GPUs) share a chunk.
        scaled, time_scale : Tensor, optional
            Whether the pass's timestep is scaled, float32 [2] (the second number is the next pass's), and the factors
            of each row's times and levels, float32 [B, 2]; only with an input video.

        Returns
        -------
        hidden : Tensor
            The hidden state, [B, T, d] in the compute dtype; [B, T/R, d] if R ranks share the chunk.
        update : Tensor
            Zeros of the shape of ``hidden``, as the FFN output of a layer before the first; only with `update`.
        modulation : Tensor
            Shift, scale and gate for both halves of a block, for each latent frame: float32 [B, F, 6, d].
        time : Tensor
            Time embedding for the head, float32 [B, F, d].
        cos, sin : Tensor
            Rotary tables of the chunk's tokens, float32 [B, T, D/2]; of this rank's tokens if several ranks share the
            chunk.
        token_index : Tensor
            Index into the flat cache [B*N, ...] to which each token is written, int64 [B*T]; if several ranks share the
            chunk, in the token order of `RankSplit.to_heads`.
        slot_rotary, patch_rotary : Tensor
            The two rotary tables of the cached keys that `rotary.key_rotary_tables` returns; only with `key_rotary`.
        """
        latents = self.with_extra_channels(latents, conditioning or {})
        patches = patchify(latents).to(self.patch_embedding.weight.dtype)  # [B, T, C*4]
        hidden = self.tokens(patches, frames, conditioning or {})
        if self.split is not None and rank is not None:
            hidden = self.split.own_tokens(hidden, rank)
        if scaled is not None and time_scale is not None:
            timestep = scaled_by(timestep, scaled[0], time_scale[:, :1])
        timestep = self.times(timestep, frames, conditioning_frames, context_timestep)
        time = self.time_embedding(sinusoid(timestep, self.model.freq_dim))  # [B, F, d]
        modulation = self.time_projection(time).unflatten(-1, (6, self.model.dim))
        positions = chunk_positions(
            self.model, self.stream, frames, write_slots, slot_frames, valid_tokens, rows
        )
        state = (hidden, torch.zeros_like(hidden)) if self.update else (hidden,)
        return (*state, modulation, time, *of_rank(positions, self.split, rank))

    def with_extra_channels(self, latents: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        """Return the input of the patch embedding, [B, in_channels, F, h, w]: the latents, and further channels that
        the family adds.
        """
        del conditioning
        return latents

    def tokens(self, patches: Tensor, frames: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        """Return the embedded patches [B, T, d], from patches [B, T, C*4]; frame numbers ``frames`` [B, F] are negative
        for reference frames. ``conditioning`` has the tensors that `LayerChoice.embed_inputs` names.
        """
        del frames, conditioning
        embedded: Tensor = self.patch_embedding(patches)
        return embedded

    def times(
        self, timestep: Tensor, frames: Tensor, conditioning_frames: Tensor, context_timestep: Tensor
    ) -> Tensor:
        """Return the timestep [B, F] of each frame: the context timestep for conditioning frames, otherwise the
        timestep of the pass."""
        return torch.where(is_conditioning(conditioning_frames, frames.shape[1]), context_timestep, timestep)


class Head(Ranked):
    """The end of the transformer: last norm, projection to latent patches, and unpatchifying.

    Attributes
    ----------
    split : RankSplit or None
        How ranks share a chunk. Each rank projects its own tokens; then all ranks gather the whole velocity.
    """

    def __init__(self, model: ModelConfig, stream: StreamConfig) -> None:
        super().__init__()
        self.model, self.stream = model, stream
        self.modulation = nn.Parameter(torch.empty(1, 2, model.dim))
        self.head = nn.Linear(model.dim, PATCH * PATCH * model.out_channels)

    def forward(self, hidden: Tensor, time: Tensor) -> Tensor:
        """Return the velocity [B, C, F, h, w] float32 from hidden [B, T, d] and time [B, F, d]."""
        shift, scale = (self.modulation.unsqueeze(0) + time.unsqueeze(2)).unsqueeze(3).unbind(2)
        x = F.layer_norm(hidden.float(), (self.model.dim,), eps=self.model.norm_eps)
        x = self.head(modulate(x, shift, scale))
        if self.split is not None:
            x = self.split.every_token(x)
        return unpatchify(x, self.stream, self.model.out_channels)


class Prompt(nn.Module):
    """The module that projects the text encoder's output to the context to which the layers attend."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.text_embedding = nn.Sequential(
            nn.Linear(model.text_dim, model.dim, dtype=dtype),
            nn.GELU(approximate="tanh"),
            nn.Linear(model.dim, model.dim, dtype=dtype),
        )

    def forward(self, text: Tensor) -> Tensor:
        """Return the text context [B, text tokens, d] from the encoder's output [B, text tokens, text_dim],
        zero-padded, in the compute dtype."""
        context: Tensor = self.text_embedding(text)
        return context


class PromptKv(nn.Module):
    """The projections of the text to one layer's cross-attention keys and values, which run once for each prompt."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.k = nn.Linear(model.dim, model.dim, dtype=dtype)
        self.v = nn.Linear(model.dim, model.dim, dtype=dtype)
        self.norm_k = RmsNormWeight(model)

    def forward(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V, each [B, text tokens, H, D], from context [B, text tokens, d]."""
        heads = (self.model.heads, self.model.head_dim)
        k = rms_norm(self.k(context), self.norm_k).to(context.dtype)
        return k.unflatten(-1, heads), self.v(context).unflatten(-1, heads)


def sinusoid(timestep: Tensor, width: int) -> Tensor:
    """Return the sinusoidal embedding [..., width] float32: cosines, then sines, of timestep * 10000 ** (-i /
    (width/2))."""
    half = width // 2
    exponent = torch.arange(half, dtype=torch.float64, device=timestep.device) / half
    angle = timestep.to(torch.float64)[..., None] * torch.exp(-math.log(10_000.0) * exponent)
    return torch.cat((angle.cos(), angle.sin()), dim=-1).float()


def scaled_by(number: Tensor, scaled: Tensor, time_scale: Tensor) -> Tensor:
    """Return a time or level [...] of a pass for each row: times its factor, float32 [B, 1], where ``scaled`` is 1, and
    as it is where ``scaled`` is 0. A factor of 1 changes no bit."""
    return number * (1 + scaled * (time_scale - 1))


def is_conditioning(conditioning_frames: Tensor, chunk_frames: int) -> Tensor:
    """Return [B, F] bool: whether each frame of the chunk is a conditioning frame, from the number of conditioning
    frames [B].
    """
    return torch.arange(chunk_frames, device=conditioning_frames.device) < conditioning_frames[:, None]


def patchify(latents: Tensor) -> Tensor:
    """Return [B, T, C*4]: the channels of one 2x2 patch for each token, ordered (C, row, column)."""
    batch, channels, frames, height, width = latents.shape
    x = latents.reshape(batch, channels, frames, height // PATCH, PATCH, width // PATCH, PATCH)
    return x.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)


def unpatchify(x: Tensor, stream: StreamConfig, channels: int) -> Tensor:
    """Return latents [B, C, F, h, w] from patches [B, T, 4*C], whose channels are ordered (row, column, C)."""
    grid = (stream.chunk_frames, stream.latent_height // PATCH, stream.latent_width // PATCH)
    x = x.reshape(x.shape[0], *grid, PATCH, PATCH, channels)  # [B, F, rows, columns, 2, 2, C]
    return x.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)

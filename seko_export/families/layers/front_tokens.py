"""Tokens before a stream that take part in the passes of its first chunk, and to which all chunks attend.

A reference frame of a stream is written before the stream begins. Front tokens are not: in each pass of the first chunk
they are queries, too, and attend to the chunk as the chunk attends to them. Their keys and values after the chunk's
last pass stay in caches of their own for the whole stream, after RoPE, because their positions never change. The head
ignores them.

A first chunk runs the engines of this module in addition to the engines of any chunk: for every layer one that computes
the front tokens' next hidden state and writes their keys and values, before the layer's own engine reads them.

Shapes use the letters that `causal_dit` defines; P is the number of front tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from seko_export.config.model import ModelConfig
from seko_export.families.layers.block import (
    FRONT_K,
    FRONT_V,
    Block,
    LayerInputs,
    modulate,
    window_attention,
)
from seko_export.families.layers.causal_dit import sinusoid
from seko_export.families.layers.fused_block import FusedLayer
from seko_export.families.layers.rotary import axis_angles, side_channels
from seko_kernels.rows import Modulation

HIDDEN, UPDATE, MODULATION, COS, SIN = "hidden", "update", "modulation", "cos", "sin"


class FrontEmbed(nn.Module):
    """The beginning of a pass for the front tokens: hidden state, modulation, and rotary tables. A subclass defines
    their positions.

    Parameters
    ----------
    rows : int
        Number of rows B of a call.
    update : bool
        Whether layers also take the previous layer's FFN output, as in `causal_dit.Embed`.
    """

    def __init__(self, model: ModelConfig, rows: int, dtype: torch.dtype, *, update: bool) -> None:
        super().__init__()
        self.model, self.rows, self.dtype, self.update, d = model, rows, dtype, update, model.dim
        self.time_embedding = nn.Sequential(nn.Linear(model.freq_dim, d), nn.SiLU(), nn.Linear(d, d))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(d, 6 * d))

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions of the front tokens along time, height and width, [3, P] int64."""
        raise NotImplementedError

    def forward(self, context_timestep: Tensor) -> tuple[Tensor, ...]:
        """Return the hidden state [B, P, d], the update [B, P, d] if layers take one, the modulation [B, 1, 6, d] at
        the context timestep [1], and cosines and sines [B, P, D/2]. The hidden state is zeros."""
        time, height, width = self.positions(context_timestep.device)
        side, theta = side_channels(self.model), self.model.rope_theta
        sizes = (self.model.head_dim - 2 * side, side, side)
        axes = zip((time, height, width), sizes, strict=True)
        angles = torch.cat([axis_angles(at, size, theta) for at, size in axes], -1)  # [P, D/2]
        rows = (self.rows, *angles.shape)
        hidden = angles.new_zeros((self.rows, len(angles), self.model.dim), dtype=self.dtype)
        state = (hidden, torch.zeros_like(hidden)) if self.update else (hidden,)
        embedded = self.time_embedding(sinusoid(context_timestep, self.model.freq_dim))
        modulation = self.time_projection(embedded).unflatten(-1, (6, self.model.dim))  # [1, 6, d]
        return (
            *state,
            modulation.expand(self.rows, 1, -1, -1).contiguous(),
            angles.cos().float().expand(rows).contiguous(),
            angles.sin().float().expand(rows).contiguous(),
        )


class FrontBlock(Block):
    """One transformer layer for the front tokens, in plain torch, with the weights of the layer's `Block`."""

    groups = ("caches", "front")

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        modulation: Tensor,
        cos: Tensor,
        sin: Tensor,
        front: Mapping[str, Tensor],
        text_k: Tensor,
        text_v: Tensor,
        caches: Mapping[str, Tensor],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the next hidden state [B, P, d] of the front tokens, and write their keys and values.

        Parameters
        ----------
        hidden, modulation, cos, sin, text_k, text_v, rows : Tensor
            The parameters of `Block.forward` with the same names: the chunk, before this layer.
        front : mapping of str to Tensor
            The results of `FrontEmbed` by name, with the hidden state before this layer.
        caches : mapping of str to Tensor
            ``front_k`` and ``front_v`` of this layer, [S*P, H, D] for S rows; written in place.
        """
        shift, scale = (self.modulation.unsqueeze(0) + modulation).unsqueeze(3).unbind(2)[:2]
        chunk = modulate(self._plain_norm(hidden), shift, scale).to(hidden.dtype)
        _, k, v, _ = self._norm_rope(self.self_attn.qkv(chunk), cos, sin)

        def attend(qkv: Tensor) -> Tensor:
            q, *own, _ = self._norm_rope(qkv, front[COS], front[SIN])
            return _attend_to_both(q, own, (k, v), caches, rows)

        return self._layer(front[HIDDEN], front[MODULATION], _inputs(text_k, text_v, caches, rows), attend)


class FusedFrontBlock(FusedLayer):
    """One transformer layer for the front tokens with Seko's kernels, with the weights of the layer's fused block. Its
    attention is torch's, in 16 bits."""

    groups = ("caches", "front")

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        update: Tensor,
        modulation: Tensor,
        cos: Tensor,
        sin: Tensor,
        front: Mapping[str, Tensor],
        text_k: Tensor,
        text_v: Tensor,
        caches: Mapping[str, Tensor],
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the arguments ``hidden`` and ``update`` [B, P, d] of the front tokens' next layer, and write their
        keys and values; `FrontBlock.forward` and `FusedLayer.forward` document the parameters."""
        _, qkv = self._project(hidden, update, Modulation(modulation, self.modulation.squeeze(0)))
        _, k, v, _ = self._norm_rope(qkv, cos, sin, "none")

        def attend(qkv: Tensor) -> Tensor:
            q, *own, _ = self._norm_rope(qkv, front[COS], front[SIN], "none", frames=1)
            return _attend_to_both(q, own, (k, v), caches, rows)

        inputs = _inputs(text_k, text_v, caches, rows)
        return self._layer(front[HIDDEN], front[UPDATE], front[MODULATION], inputs, attend)


def _inputs(text_k: Tensor, text_v: Tensor, caches: Mapping[str, Tensor], rows: Tensor | None) -> LayerInputs:
    """Return what a layer takes for the front tokens, which have caches of their own, always full."""
    return LayerInputs(text_k, text_v, caches, rows, None, {}, {}, {}, None, None, {}, {})


def _attend_to_both(
    q: Tensor,
    own: list[Tensor],
    chunk: tuple[Tensor, Tensor],
    caches: Mapping[str, Tensor],
    rows: Tensor | None,
) -> Tensor:
    """Write the front tokens' keys and values ``own`` [B, P, H, D], and return the attention of their queries to
    themselves and to the chunk's keys and values [B, T, H, D]."""
    for name, x in zip((FRONT_K, FRONT_V), own, strict=True):
        if rows is None:
            caches[name].copy_(x.flatten(0, 1))
            continue
        tokens = torch.arange(x.shape[1], device=x.device)
        caches[name].index_copy_(0, (rows[:, None] * x.shape[1] + tokens).flatten(), x.flatten(0, 1))
    k, v = (torch.cat(both, 1) for both in zip(own, chunk, strict=True))
    return window_attention(q, k, v, None)

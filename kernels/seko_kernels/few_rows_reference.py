"""Definitions of the ops on few rows and few tokens, in plain torch. The kernels compute the same results as these
definitions, which run on a CPU.

Norms and matmuls round to the dtype of `x` at the places where torch's ops round.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm that rounds to x's dtype before it multiplies by the weight."""
    mean = x.float().square().mean(-1, keepdim=True)
    return (x * torch.rsqrt(mean + eps)).to(x.dtype) * weight


def linear(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return ``x @ weight.T``; if there are scales ``[out, 1]``, the rows of the weight are multiplied by these scales
    first."""
    return F.linear(x, weight if scale is None else (weight.float() * scale).to(x.dtype))


def gated(x: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, where gate and up are the halves of the last dimension."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def added(hidden: Tensor, branch: Tensor, scale: float) -> Tensor:
    """Return ``hidden + branch * scale``."""
    return hidden + (branch if scale == 1 else branch * scale)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate both halves of the channels of ``x`` [..., heads, D] in float32, by tables [..., D]."""
    wide = x.float()
    low, high = wide.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return (wide * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)).to(x.dtype)


def split_heads(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q ``[..., heads, D]`` and k, v ``[..., kv_heads, D]`` of ``qkv`` ``[..., (heads + 2 * kv_heads) * D]``."""
    every = qkv.unflatten(-1, (heads + 2 * kv_heads, -1))
    q, k, v = every.split((heads, kv_heads, kv_heads), dim=-2)
    return q, k, v


def local_attention(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Return ``[B, T, heads * D]``: attention of each row's T tokens to all T tokens of that row."""
    q, k, v = split_heads(qkv, heads, kv_heads)
    k, v = (x.repeat_interleave(heads // kv_heads, -2) for x in (rotate(k, cos, sin), v))
    q, k, v = (x.transpose(1, 2) for x in (rotate(q, cos, sin), k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def decode_attention(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    positions: Tensor,
    write_index: Tensor,
) -> Tensor:
    """Return ``[B, heads * D]``: attention of each row's new token to the row's cached positions and itself.

    For each row the function reads as many places as the cache has. Indices beyond the row's last position are clamped
    to the last position, and the numbers that are read through clamped indices are masked.
    """
    _, kv_heads, head_dim = k_cache.shape
    heads = qkv.shape[-1] // head_dim - 2 * kv_heads
    _, k, v = split_heads(qkv, heads, kv_heads)
    k_cache.index_copy_(0, write_index, k if cos is None or sin is None else rotate(k, cos, sin))
    v_cache.index_copy_(0, write_index, v)
    return attended(qkv, cos, sin, k_cache, v_cache, starts, positions)


def attended(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    positions: Tensor,
) -> Tensor:
    """Return the attention that `decode_attention` returns, for a cache to which the new token's keys and values were
    already written."""
    places, kv_heads, head_dim = k_cache.shape
    heads = qkv.shape[-1] // head_dim - 2 * kv_heads
    q, _, _ = split_heads(qkv, heads, kv_heads)
    if cos is not None and sin is not None:
        q = rotate(q, cos, sin)
    read = torch.arange(places, device=qkv.device)
    index = (starts[:, None] + torch.minimum(read, positions[:, None])).flatten()
    shape = (len(qkv), places)
    keys, values = (cache.index_select(0, index).unflatten(0, shape) for cache in (k_cache, v_cache))
    mask = (read <= positions[:, None])[:, None, None]  # [B, 1, 1, places]
    grouped = q.unflatten(1, (kv_heads, -1))  # [B, kv_heads, group, D]
    out = F.scaled_dot_product_attention(grouped, keys.transpose(1, 2), values.transpose(1, 2), mask)
    return out.flatten(1)

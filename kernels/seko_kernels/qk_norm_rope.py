"""The ops that normalise and rotate q and k. One writes k into the chunk's cache slots, the other writes q, k and v as
ranks send them. An op checks its arguments, then runs the kernel or the reference."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from seko_kernels import fused_reference
from seko_kernels.checks import expect, expect_dims
from seko_kernels.errors import KernelsError
from seko_kernels.ops import FLOAT_DTYPES, kernel_op, takes_kernels
from seko_kernels.triton.qk_norm_rope import (
    NORM_ROPE_WARPS,
    PLAIN_BEFORE,
    PLAIN_NONE,
    PLAIN_ROTATED,
    qk_norm_rope_kernel,
)

PLAIN_KEYS = {"none": PLAIN_NONE, "rotated": PLAIN_ROTATED, "before_rope": PLAIN_BEFORE}


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    write_slots: Tensor,
    frame_tokens: int,
    eps: float,
    k_out: Tensor,
    plain_keys: str = "none",
) -> tuple[Tensor, Tensor]:
    """Apply RMSNorm and RoPE to q and k in float32, write k into the slots `write_slots` of `k_out`, and return q.

    Parameters
    ----------
    qkv : Tensor
        The output of the fused projection, ``[B, T, 3 * H * D]`` float32 or bfloat16, contiguous.
    q_weight, k_weight : Tensor
        Weights of the two norms, over the full width, ``[H * D]`` float32.
    cos, sin : Tensor
        Rotary tables, ``[B, T, D // 2]`` float32.
    write_slots : Tensor
        Cache slot of each latent frame, ``[B, F]`` int64, with ``T = F * frame_tokens``. The CUDA kernel skips tokens
        outside the cache.
    frame_tokens : int
        Number of tokens in a cache slot.
    eps : float
        Epsilon of the norms.
    k_out : Tensor
        The cache of keys, ``[B, N, H, D]`` of qkv's dtype, contiguous; written in place.
    plain_keys : str
        Kind of unquantised keys to return: ``"none"``, ``"rotated"`` or ``"before_rope"``, depending on the KV cache
        format.

    Returns
    -------
    q : Tensor
        Normalised and rotated queries, ``[B, T, H, D]`` of qkv's dtype.
    keys : Tensor
        Unquantised keys, ``[B, T, H, D]`` of qkv's dtype, or empty if `plain_keys` is ``"none"``.

    Raises
    ------
    KernelsError
        If a tensor has another shape, dtype or layout than documented here, or `plain_keys` is another word; if the
        tensors lie on different devices, or on a device that is neither CPU nor CUDA.
    """
    expect_dims("k_out", k_out, 4, "[batch, tokens, heads, head_dim]")
    expect_dims("qkv", qkv, 3, "[batch, tokens, 3 * width]")
    expect_dims("write_slots", write_slots, 2, "[batch, chunk frames]")
    batch, cache_tokens, heads, head_dim = k_out.shape
    width, tokens = heads * head_dim, write_slots.shape[1] * frame_tokens
    if head_dim % 2:
        raise KernelsError(f"head_dim must be even to be rotated in pairs, got {head_dim}")
    expect("qkv", qkv, (batch, tokens, 3 * width), *FLOAT_DTYPES)
    expect("k_out", k_out, tuple(k_out.shape), qkv.dtype)
    expect("write_slots", write_slots, (batch, write_slots.shape[1]), torch.int64)
    _expect_normed(qkv, q_weight, k_weight, cos, sin, head_dim, plain_keys)
    if takes_kernels(qkv, q_weight, k_weight, cos, sin, write_slots, k_out):
        q, keys = _qk_norm_rope_cuda(
            *(qkv, q_weight, k_weight, cos, sin, write_slots, frame_tokens, eps, k_out),
            PLAIN_KEYS[plain_keys],
        )
        return q, keys
    _, q = fused_reference.qk_norm_rope(qkv, q_weight, cos, sin, 0, heads, eps)
    before, k = fused_reference.qk_norm_rope(qkv, k_weight, cos, sin, 1, heads, eps)
    keys = {"none": qkv.new_empty(0), "rotated": k, "before_rope": before}[plain_keys].to(qkv.dtype)
    row = torch.arange(batch, device=qkv.device)[:, None, None] * cache_tokens
    place = row + write_slots[..., None] * frame_tokens + torch.arange(frame_tokens, device=qkv.device)
    flat = k_out.view(batch * cache_tokens, heads, head_dim)
    flat.index_copy_(0, place.flatten(), k.to(k_out.dtype).flatten(0, 1))
    return q.to(k_out.dtype), keys


def qk_norm_rope_shares(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    shares: int,
    eps: float,
    plain_keys: str = "none",
) -> Tensor:
    """Apply RMSNorm and RoPE to q and k as `qk_norm_rope` does, and return q, k and v by shares of the heads.

    Parameters
    ----------
    qkv, q_weight, k_weight, cos, sin, eps, plain_keys
        The parameters of `qk_norm_rope`.
    heads : int
        Number H of heads.
    shares : int
        Number R of equal shares of the heads.

    Returns
    -------
    Tensor
        ``[R, B, T, P, H / R, D]`` of qkv's dtype: of each share of the heads q, k, v and, unless `plain_keys` is
        ``"none"``, the unquantised keys.

    Raises
    ------
    KernelsError
        If a tensor has another shape, dtype or layout than documented at `qk_norm_rope`, if there are no such shares,
        or if the tensors lie on different devices, or on a device that is neither CPU nor CUDA.
    """
    expect_dims("qkv", qkv, 3, "[batch, tokens, 3 * width]")
    width = qkv.shape[2] // 3
    if shares < 1 or heads % shares or width % heads or (width // heads) % 2:
        raise KernelsError(
            f"{width} channels of {heads} heads, each rotated in pairs, have no {shares} shares"
        )
    head_dim = width // heads
    _expect_normed(qkv, q_weight, k_weight, cos, sin, head_dim, plain_keys)
    if takes_kernels(qkv, q_weight, k_weight, cos, sin):
        sent: Tensor = _qk_norm_rope_shares_cuda(
            qkv, q_weight, k_weight, cos, sin, heads, shares, eps, PLAIN_KEYS[plain_keys]
        )
        return sent
    _, q = fused_reference.qk_norm_rope(qkv, q_weight, cos, sin, 0, heads, eps)
    before, k = fused_reference.qk_norm_rope(qkv, k_weight, cos, sin, 1, heads, eps)
    v = qkv[..., 2 * width :].unflatten(-1, (heads, head_dim))
    keys = {"none": [], "rotated": [k], "before_rope": [before]}[plain_keys]
    stacked = torch.stack([part.to(qkv.dtype) for part in (q, k, v, *keys)], dim=2)  # [B, T, P, H, D]
    by_share: Tensor = stacked.unflatten(3, (shares, -1)).permute(3, 0, 1, 2, 4, 5).contiguous()
    return by_share


def _expect_normed(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, head_dim: int, plain_keys: str
) -> None:
    """Raise an error unless the tensors fit ``qkv`` [B, T, 3 * width], and ``plain_keys`` is one of the words."""
    if plain_keys not in PLAIN_KEYS:
        raise KernelsError(f"plain_keys must be one of {', '.join(PLAIN_KEYS)}, got {plain_keys!r}")
    batch, tokens, three = qkv.shape
    expect("qkv", qkv, (batch, tokens, 3 * (three // 3)), *FLOAT_DTYPES)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        expect(name, weight, (three // 3,), torch.float32)
    for name, table in (("cos", cos), ("sin", sin)):
        expect(name, table, (batch, tokens, head_dim // 2), torch.float32)


@kernel_op("seko::qk_norm_rope", mutates_args={"k_out"})
def _qk_norm_rope_cuda(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    write_slots: Tensor,
    frame_tokens: int,
    eps: float,
    k_out: Tensor,
    plain: int,
) -> tuple[Tensor, Tensor]:
    batch, tokens, _ = qkv.shape
    _, cache_tokens, heads, head_dim = k_out.shape
    q = torch.empty((batch, tokens, heads, head_dim), dtype=k_out.dtype, device=qkv.device)
    keys_shape = (batch, tokens, heads, head_dim) if plain else (0,)
    keys = torch.empty(keys_shape, dtype=qkv.dtype, device=qkv.device)
    wrap_triton(qk_norm_rope_kernel)[(batch * tokens, 2)](
        qkv,
        q_weight,
        k_weight,
        cos,
        sin,
        write_slots,
        q,
        k_out,
        keys if plain else qkv,  # an argument that the kernel does not write, but that needs a tensor
        tokens,
        cache_tokens,
        EPS=eps,
        HEADS=heads,
        HEAD_DIM=head_dim,
        FRAME_TOKENS=frame_tokens,
        BLOCK=triton.next_power_of_2(heads * head_dim),
        PLAIN=plain,
        SHARES=0,
        PLANE=0,
        num_warps=NORM_ROPE_WARPS,
    )
    return q, keys


@kernel_op("seko::qk_norm_rope_shares", mutates_args=())
def _qk_norm_rope_shares_cuda(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    shares: int,
    eps: float,
    plain: int,
) -> Tensor:
    batch, tokens, three = qkv.shape
    head_dim, parts = three // 3 // heads, 4 if plain else 3
    shape = (shares, batch, tokens, parts, heads // shares, head_dim)
    sent = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
    wrap_triton(qk_norm_rope_kernel)[(batch * tokens, 3)](
        qkv,
        q_weight,
        k_weight,
        cos,
        sin,
        qkv,  # this variant has no slots, and one output: one tensor twice would be copied
        sent,
        qkv,
        qkv,
        tokens,
        tokens,
        EPS=eps,
        HEADS=heads,
        HEAD_DIM=head_dim,
        FRAME_TOKENS=tokens,
        BLOCK=triton.next_power_of_2(heads * head_dim),
        PLAIN=plain,
        SHARES=shares,
        PLANE=sent.stride(0),
        num_warps=NORM_ROPE_WARPS,
    )
    return sent

"""Attention of few tokens: among themselves, or of one token to what its row holds of a cache. Heads share keys."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import triton_op, wrap_triton

from seko_kernels import few_rows_reference as reference
from seko_kernels.checks import expect, expect_dims
from seko_kernels.errors import KernelsError
from seko_kernels.few_rows import DTYPES, TICKETS
from seko_kernels.ops import takes_kernels
from seko_kernels.parts import softmax_scale
from seko_kernels.triton.few_tokens import decode_attention_kernel, local_attention_kernel

LOCAL_TOKENS = 64  # that one program holds
LOCAL_WARPS = 4
DECODE_WARPS = 4
DECODE_TURN = 64  # positions
_LEAST = 16  # side of a tensor core's operand
_PROGRAMS = 264
_MOST_PARTS = 16


def local_attention(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Rotate q and k, and return the attention of each row's tokens to all of that row.

    Parameters
    ----------
    qkv : Tensor
        ``[B, T, (heads + 2 * kv_heads) * D]`` bfloat16, float16 or float32, contiguous; at most 64 tokens on CUDA.
    cos, sin : Tensor
        ``[T, D]`` float32, whose halves are the same numbers.
    heads, kv_heads : int
        Heads of queries, and of keys and values.

    Returns
    -------
    Tensor
        ``[B, T, heads * D]`` of qkv's dtype.

    Raises
    ------
    KernelsError
        If a tensor is not as above, or there are more tokens.
    """
    expect_dims("qkv", qkv, 3, "[batch, tokens, heads of q, k and v]")
    _, tokens, _ = qkv.shape
    head_dim = _head_dim(qkv, heads, kv_heads)
    expect("qkv", qkv, tuple(qkv.shape), *DTYPES)
    for name, table in (("cos", cos), ("sin", sin)):
        expect(name, table, (tokens, head_dim), torch.float32)
    if not takes_kernels(qkv, cos, sin):
        return reference.local_attention(qkv, cos, sin, heads, kv_heads)
    if tokens > LOCAL_TOKENS:
        raise KernelsError(f"{tokens} tokens attend to each other, expected {LOCAL_TOKENS} at most")
    attended: Tensor = _local_attention_cuda(qkv, cos, sin, heads, kv_heads)
    return attended


def decode_attention(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    positions: Tensor,
    write_index: Tensor,
    tickets: Tensor,
) -> Tensor:
    """Rotate q and k of one token a row, write its k and v, and return its attention to its row and itself.

    Parameters
    ----------
    qkv : Tensor
        ``[B, (H + 2 * K) * D]`` bfloat16, float16 or float32, contiguous.
    cos, sin : Tensor or None
        ``[B, D]`` float32, whose halves are the same numbers; None: no rotation.
    k_cache, v_cache : Tensor
        ``[S, K, D]`` of qkv's dtype, contiguous; mutated.
    starts, positions, write_index : Tensor
        ``[B]`` int64: the first place of a row, how many positions it holds before this token, the token's place.
        Several rows may write the same place, which no row reads.
    tickets : Tensor
        From `few_rows.norm_linear`; zeros again behind the launch.

    Returns
    -------
    Tensor
        ``[B, H * D]`` of qkv's dtype.

    Raises
    ------
    KernelsError
        If a tensor is not as above.
    """
    expect_dims("qkv", qkv, 2, "[batch, heads of q, k and v]")
    expect_dims("k_cache", k_cache, 3, "[places, heads, head_dim]")
    batch, width = qkv.shape
    _, kv_heads, head_dim = k_cache.shape
    heads = width // head_dim - 2 * kv_heads
    if _head_dim(qkv, heads, kv_heads) != head_dim:
        raise KernelsError(f"qkv has {width} channels, no whole heads of {head_dim} beside {kv_heads} twice")
    expect("qkv", qkv, (batch, width), *DTYPES)
    expect("k_cache", k_cache, tuple(k_cache.shape), qkv.dtype)
    expect("v_cache", v_cache, tuple(k_cache.shape), qkv.dtype)
    expect("tickets", tickets, (TICKETS,), torch.int32)
    for name, index in (("starts", starts), ("positions", positions), ("write_index", write_index)):
        expect(name, index, (batch,), torch.int64)
    if (cos is None) != (sin is None):
        raise KernelsError("cos and sin must both be tables or both be None")
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None:
            expect(name, table, (batch, head_dim), torch.float32)
    if not takes_kernels(qkv, k_cache, v_cache, starts, positions, write_index, tickets):
        return reference.decode_attention(qkv, cos, sin, k_cache, v_cache, starts, positions, write_index)
    if batch * kv_heads > TICKETS:
        raise KernelsError(
            f"{batch} rows of {kv_heads} heads need as many tickets, expected {TICKETS} at most"
        )
    arguments = (qkv, cos, sin, k_cache, v_cache, starts, positions, write_index, tickets)
    attended: Tensor = _decode_attention_cuda(*arguments)
    return attended


def decode_parts(batch: int, kv_heads: int) -> int:
    """Into how many parts the positions of each row are cut, which depends on the size of the call alone."""
    wanted = _PROGRAMS // (batch * kv_heads)
    return max(1, min(_MOST_PARTS, 1 << max(0, wanted.bit_length() - 1)))


def _head_dim(qkv: Tensor, heads: int, kv_heads: int) -> int:
    every = heads + 2 * kv_heads
    if min(heads, kv_heads) < 1 or heads % kv_heads or qkv.shape[-1] % (2 * every):
        raise KernelsError(
            f"{qkv.shape[-1]} channels are not {heads} heads of queries and twice {kv_heads} of keys and values: the "
            "first must be a multiple of the second, and a head of even width"
        )
    return qkv.shape[-1] // every


def _block(size: int) -> int:
    return max(_LEAST, int(triton.next_power_of_2(size)))


@triton_op("seko::local_attention", mutates_args=())
def _local_attention_cuda(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> Tensor:
    return launch_local_attention(wrap_triton(local_attention_kernel), qkv, cos, sin, heads, kv_heads)


@triton_op("seko::decode_attention", mutates_args={"k_cache", "v_cache", "tickets"})
def _decode_attention_cuda(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    positions: Tensor,
    write_index: Tensor,
    tickets: Tensor,
) -> Tensor:
    parts = decode_parts(len(qkv), k_cache.shape[1])
    arguments = (qkv, cos, sin, k_cache, v_cache, starts, positions, write_index, tickets)
    return launch_decode_attention(wrap_triton(decode_attention_kernel), *arguments, parts)


def launch_local_attention(
    kernel: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, warps: int = LOCAL_WARPS
) -> Tensor:
    """Launch `local_attention_kernel`, wrapped for an op or as it is."""
    batch, tokens, width = qkv.shape
    head_dim = width // (heads + 2 * kv_heads)
    out = torch.empty((batch, tokens, heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    kernel[(batch, heads)](
        qkv,
        cos,
        sin,
        out,
        SCALE=softmax_scale(head_dim),
        TOKENS=tokens,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BT=_block(tokens),
        BH=_block(head_dim // 2),
        BD=_block(head_dim),
        num_warps=warps,
    )
    return out


def launch_decode_attention(
    kernel: Any,
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    positions: Tensor,
    write_index: Tensor,
    tickets: Tensor,
    parts: int,
    turn: int = DECODE_TURN,
    warps: int = DECODE_WARPS,
) -> Tensor:
    """Launch `decode_attention_kernel`, wrapped for an op or as it is, in some parts of a row's positions."""
    batch, width = qkv.shape
    _, kv_heads, head_dim = k_cache.shape
    heads = width // head_dim - 2 * kv_heads
    group, block = _block(heads // kv_heads), _block(head_dim)
    out = torch.empty((batch, heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    sums = torch.empty((batch, kv_heads, parts, group, block), dtype=torch.float32, device=qkv.device)
    tops = torch.empty((batch, kv_heads, parts, 2, group), dtype=torch.float32, device=qkv.device)
    kernel[(batch, kv_heads, parts)](
        qkv,
        sums if cos is None else cos,  # not read then; a tensor must stand there
        sums if sin is None else sin,
        k_cache,
        v_cache,
        starts,
        positions,
        write_index,
        out,
        sums,
        tops,
        tickets,
        SCALE=softmax_scale(head_dim),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        ROPE=cos is not None,
        SPLITS=parts,
        BG=group,
        BN=turn,
        BH=_block(head_dim // 2),
        BD=block,
        num_warps=warps,
    )
    return out

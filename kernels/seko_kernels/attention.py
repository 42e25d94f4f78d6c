"""The fp8 attention as an op: checks, tiles, then Triton on CUDA or the reference on a CPU. No arithmetic."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.library import triton_op, wrap_triton

from seko_kernels import fused_reference
from seko_kernels.checks import expect, expect_dims, expect_dtype, expect_fp8
from seko_kernels.errors import OpShapeError
from seko_kernels.fused_reference import FP8
from seko_kernels.ops import FLOAT_DTYPES, takes_kernels
from seko_kernels.triton.attention_fp8 import (
    COMBINE_WARPS,
    attention_combine_kernel,
    attention_fp8_kernel,
)
from seko_kernels.tuned import AttentionTiles, shape_class, tiles_for

# Columns of a transposed V scratch are a multiple of this: a descriptor's rows must begin on 16 bytes, and on a
# whole cache line they cost no second one.
COLUMN_UNIT = 128
DESCRIPTOR_UNIT = 8  # bfloat16 numbers between two rows of a descriptor: 16 bytes
SMALLEST_HEAD_DIM = 32  # of an fp8 matrix instruction


class OwnTokens(NamedTuple):
    """Keys and values of the queries' own tokens, as they are.

    Parameters
    ----------
    k : Tensor
        ``[B, T, H, D]`` of q's dtype, contiguous, after RoPE.
    v : Tensor
        ``[B, T, H * D]`` of q's dtype; rows may lie at any one stride, as in the output of a fused projection.
    """

    k: Tensor
    v: Tensor


def v_columns(tokens: int) -> int:
    """Return the columns that a transposed V scratch of `tokens` tokens has."""
    return -(-tokens // COLUMN_UNIT) * COLUMN_UNIT


def attention_fp8(
    q: Tensor,
    k: Tensor,
    v_t: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor,
    valid_tokens: Tensor,
    tiles: AttentionTiles | None = None,
    own: OwnTokens | None = None,
) -> Tensor:
    """Attend to the first ``valid_tokens[b]`` keys of each row; what lies behind may be any bytes.

    With `own` the queries' own keys and values, as many as there are queries, stand apart from the past and are taken
    as they are (docs/adr/0006): a row's past are the first ``valid_tokens[b] - T`` of `k` and `v_t`. Then q and all
    keys are bfloat16, since three bits of mantissa in them cost pictures, and only the past's values are e4m3.

    K is token-major because the cache is: what expands it, and what writes a chunk's own keys, copy whole rows of
    all heads, and a tile of one head is as good for a tensor descriptor (rows of D bytes, D a multiple of 32) as a
    head-major one. V is transposed because the fp8 matrix instruction takes its second factor in no other order.

    Parameters
    ----------
    q : Tensor
        ``[B, T, H, D]`` e4m3, contiguous; D a power of two, at least 32. With `own` the real numbers, bfloat16 (on a
        CPU float32, too).
    k : Tensor
        ``[B, N, H, D]`` of q's dtype, contiguous.
    v_t : Tensor
        ``[B, H, D, v_columns(N)]`` e4m3, contiguous.
    q_scale, k_scale, v_scale : Tensor
        ``[H]`` float32, powers of two: what a head's numbers are multiplied by to be the real ones. With `own` those of
        q and k are None.
    valid_tokens : Tensor
        ``[B]`` int64 on the device, at most N; a row with 0 gives zeros. With `own` its T tokens count, too.
    tiles : AttentionTiles, optional
        Chosen from `tuned` if absent. Only `admission` and benchmarks name them.
    own : OwnTokens, optional
        Without it all keys and values are e4m3, the queries' own among them; no build asks for that, since a chunk
        does not bear it. Benchmarks compare the two.

    Returns
    -------
    Tensor
        ``[B, T, H * D]`` bfloat16, with `own` of q's dtype.

    Raises
    ------
    OpShapeError, OpDtypeError
        If a tensor is not as above.
    KvDeviceError
        If the tensors lie on different devices, or on one that is neither CPU nor CUDA.
    ArchError
        If the GPU has no fp8 numbers.
    """
    expect_dims("q", q, 4, "[batch, tokens, heads, head_dim]")
    expect_dims("k", k, 4, "[batch, tokens, heads, head_dim]")
    batch, query_tokens, heads, head_dim = q.shape
    cache_tokens = k.shape[1]
    if head_dim < SMALLEST_HEAD_DIM or head_dim & (head_dim - 1):
        raise OpShapeError(f"head_dim must be a power of two of at least {SMALLEST_HEAD_DIM}, got {head_dim}")
    expect("q", q, (batch, query_tokens, heads, head_dim), *([FP8] if own is None else FLOAT_DTYPES))
    if own is not None:
        _expect_own(own, q)
    expect("k", k, (batch, cache_tokens, heads, head_dim), q.dtype)
    expect("v_t", v_t, (batch, heads, head_dim, v_columns(cache_tokens)), FP8)
    scales = [("v_scale", v_scale)]
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale)):
        if (scale is None) != (own is not None):
            raise OpShapeError(f"{name} belongs to q and k in fp8: with own tokens it is None, else a tensor")
        scales += [] if scale is None else [(name, scale)]
    for name, scale in scales:
        expect(name, scale, (heads,), torch.float32)
    expect("valid_tokens", valid_tokens, (batch,), torch.int64)
    arguments = (q, k, v_t, q_scale, k_scale, v_scale, valid_tokens)
    if not takes_kernels(*(x for x in arguments if x is not None), *(own or ())):
        if own is not None:
            return fused_reference.attention_fp8_own(q, k, v_t, v_scale, valid_tokens, *own)
        if q_scale is not None and k_scale is not None:
            return fused_reference.attention_fp8(q, k, v_t, q_scale, k_scale, v_scale, valid_tokens)
    if own is not None:
        expect_dtype("q", q, torch.bfloat16)
    major, minor = expect_fp8(q.device)
    if tiles is None:
        tiles = tiles_for(f"sm_{major}{minor}", head_dim, shape_class(batch, heads, query_tokens))
    out: Tensor = _attention_fp8_cuda(
        *arguments,
        *(own or (None, None)),
        tiles.block_m,
        tiles.block_n,
        tiles.stages,
        tiles.warps,
        tiles.warp_specialize,
        tiles.splits,
        tiles.tail_n,
        tiles.whole,
        tiles.peel,
        tiles.fma_exps,
    )
    return out


@triton_op("seko::attention_fp8", mutates_args=())
def _attention_fp8_cuda(
    q: Tensor,
    k: Tensor,
    v_t: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor,
    valid_tokens: Tensor,
    k_own: Tensor | None,
    v_own: Tensor | None,
    block_m: int,
    block_n: int,
    stages: int,
    warps: int,
    warp_specialize: bool,
    splits: int,
    tail_n: int,
    whole: bool,
    peel: bool,
    fma_exps: int,
) -> Tensor:
    batch, query_tokens, heads, head_dim = q.shape
    cache_tokens = k.shape[1]
    # Tensor descriptors live in global memory that Triton asks its host for; a compiled engine brings its own.
    triton.set_allocator(_descriptor_memory)
    parts = torch.empty(
        (batch * splits, query_tokens, heads, head_dim), dtype=torch.bfloat16, device=q.device
    )
    lse_size = (batch * splits, heads, query_tokens) if splits > 1 else (1, 1, 1)
    lse = torch.empty(lse_size, dtype=torch.float32, device=q.device)
    grid = ((query_tokens + block_m - 1) // block_m, heads, batch * splits)
    wrap_triton(attention_fp8_kernel)[grid](
        q,
        k,
        v_t,
        q if k_own is None else k_own,  # what is not read needs a tensor all the same
        q if v_own is None else v_own,
        v_scale if q_scale is None else q_scale,
        v_scale if k_scale is None else k_scale,
        v_scale,
        valid_tokens,
        parts,
        lse,
        query_tokens,
        cache_tokens,
        v_t.shape[3],
        0 if v_own is None else v_own.stride(1),
        HEADS=heads,
        HEAD_DIM=head_dim,
        SOFTMAX_SCALE=head_dim**-0.5 * math.log2(math.e),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=stages,
        WARP_SPECIALIZE=warp_specialize,
        SPLITS=splits,
        TAIL_N=tail_n,
        WHOLE=whole,
        PEEL=peel,
        FMA_EXPS=fma_exps,
        OWN_N=0 if k_own is None else own_block(block_n),
        INTEGER=False,
        num_warps=warps,
    )
    if splits == 1:
        return parts.view(batch, query_tokens, heads * head_dim)
    out = torch.empty((batch, query_tokens, heads * head_dim), dtype=torch.bfloat16, device=q.device)
    wrap_triton(attention_combine_kernel)[(query_tokens, batch)](
        parts,
        lse,
        out,
        query_tokens,
        HEADS=heads,
        HEAD_DIM=head_dim,
        SPLITS=splits,
        BLOCK_H=triton.next_power_of_2(heads),
        num_warps=COMBINE_WARPS,
    )
    return out


def own_block(block_n: int) -> int:
    """Return how many own keys a tile has beside `block_n` of the past: no more shared memory, and values are wider."""
    return block_n // 2


def _expect_own(own: OwnTokens, q: Tensor) -> None:
    batch, tokens, heads, head_dim = q.shape
    expect("own keys", own.k, tuple(q.shape), q.dtype)
    expect_dtype("own values", own.v, q.dtype)
    expected = (batch, tokens, heads * head_dim)
    if tuple(own.v.shape) != expected:
        raise OpShapeError(f"own values have shape {tuple(own.v.shape)}, expected {expected}")
    apart, token = own.v.stride(0), own.v.stride(1)
    if own.v.stride(2) != 1 or token % DESCRIPTOR_UNIT or (batch > 1 and apart != tokens * token):
        raise OpShapeError(
            f"own values are strided {own.v.stride()}, expected rows of contiguous numbers at one stride, a multiple "
            f"of {DESCRIPTOR_UNIT}"
        )


def _descriptor_memory(size: int, alignment: int, stream: int | None) -> Tensor:  # noqa: ARG001 - Triton's protocol
    return torch.empty(size, dtype=torch.int8, device="cuda")

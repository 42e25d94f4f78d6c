"""The kernel that casts a chunk's own values to fp8 and puts them, transposed, at their ring places."""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_cast import power_of_two_inverse, to_e4m3

TRANSPOSE_TILE = 64  # tokens per program
TRANSPOSE_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def v_transpose_kernel(  # type: ignore[no-untyped-def]
    V,
    WRITE_SLOTS,
    V_SCALE,
    V_OUT,
    v_token_stride,
    cache_tokens,
    v_columns,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FRAME_TOKENS: tl.constexpr,
    CHUNK_FRAMES: tl.constexpr,
    TILE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Write ``e4m3(v / V_SCALE)`` of token ``t`` to column ``slot * FRAME_TOKENS + t % FRAME_TOKENS`` of V_OUT.

    `seko_kernels.fused_reference.v_transpose` is the definition. A program stays inside one latent frame, so its
    columns are neighbours whatever the ring does.

    Parameters
    ----------
    V : pointer to bf16 or fp32
        ``[B * T, ...]``, rows of H * D contiguous numbers at a stride: a part of the fused projection's output.
    WRITE_SLOTS : pointer to int64
        ``[B, CHUNK_FRAMES]``. A slot outside the cache is not written.
    V_SCALE : pointer to fp32
        ``[H]``, powers of two.
    V_OUT : pointer to fp8
        ``[B, H, D, v_columns]``, contiguous.
    v_token_stride, cache_tokens, v_columns : int
        Elements between tokens of V; N; columns of V_OUT. The grid is (tiles of a frame, H, B * CHUNK_FRAMES).
    HEADS, HEAD_DIM, FRAME_TOKENS, CHUNK_FRAMES, TILE : constexpr int
        H, D (a power of two), tokens of a slot, slots, tokens per program.
    INTEGER : constexpr bool
        See `to_e4m3`.
    """
    first = tl.program_id(0) * TILE
    head = tl.program_id(1)
    frame = tl.program_id(2)
    token = first + tl.arange(0, TILE)
    channel = tl.arange(0, HEAD_DIM)
    live = token < FRAME_TOKENS
    source = (frame.to(tl.int64) * FRAME_TOKENS + token) * v_token_stride + head * HEAD_DIM
    v = tl.load(V + (source[:, None] + channel[None, :]), mask=live[:, None], other=0.0).to(tl.float32)
    v = to_e4m3(v * power_of_two_inverse(tl.load(V_SCALE + head)), INTEGER)
    slot = tl.load(WRITE_SLOTS + frame)
    inside = (slot >= 0) & ((slot + 1) * FRAME_TOKENS <= cache_tokens)
    row = (frame // CHUNK_FRAMES).to(tl.int64)
    target = ((row * HEADS + head) * HEAD_DIM + channel) * v_columns + slot * FRAME_TOKENS
    tl.store(V_OUT + (target[:, None] + token[None, :]), tl.trans(v), mask=(live & inside)[None, :])

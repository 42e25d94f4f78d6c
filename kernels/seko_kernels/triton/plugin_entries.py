"""Entry points of the kernels for TensorRT. An entry point runs a kernel's device code, with arguments in the order in
which TensorRT passes arguments.

TensorRT passes arguments in a fixed order: the inputs' pointers, then the scalars, then the outputs' pointers. An
aliased output has the address of its input, and the kernel writes through the output's pointer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.attention_fp8 import attention_fp8_kernel
from seko_kernels.triton.cache_write import cache_write_kernel
from seko_kernels.triton.fp8_expand import fp8_expand_kernel
from seko_kernels.triton.gaussian import gaussian_kernel
from seko_kernels.triton.kv_expand import kv_expand_kernel
from seko_kernels.triton.kv_write import kv_write_kernel
from seko_kernels.triton.nvfp4_expand import nvfp4_expand_kernel


@triton.jit  # type: ignore[untyped-decorator]
def nvfp4_write_entry(  # type: ignore[no-untyped-def]
    X,
    TOKEN_INDEX,
    CODES,  # noqa: ARG001 - the address of NEW_CODES
    SCALES,  # noqa: ARG001 - the address of NEW_SCALES
    GLOBAL_SCALE,
    blocks,
    cache_tokens,
    x_token_stride,
    x_head_stride,
    NEW_CODES,
    NEW_SCALES,
    HEADS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Run `kv_write_kernel` for NVFP4 without a mean, with arguments in TensorRT's order."""
    kv_write_kernel(
        X,
        TOKEN_INDEX,
        NEW_CODES,
        NEW_SCALES,
        GLOBAL_SCALE,
        GLOBAL_SCALE,
        blocks,
        cache_tokens,
        x_token_stride,
        x_head_stride,
        HEADS,
        HEAD_BLOCKS,
        16,
        4,
        True,
        False,
        False,
        True,
        TILE,
    )


@triton.jit  # type: ignore[untyped-decorator]
def nvfp4_write_keys_entry(  # type: ignore[no-untyped-def]
    X,
    TOKEN_INDEX,
    CODES,  # noqa: ARG001 - the address of NEW_CODES
    SCALES,  # noqa: ARG001 - the address of NEW_SCALES
    GLOBAL_SCALE,
    MEAN,
    blocks,
    cache_tokens,
    x_token_stride,
    x_head_stride,
    NEW_CODES,
    NEW_SCALES,
    HEADS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Run `kv_write_kernel` for NVFP4 with a mean, with arguments in TensorRT's order."""
    kv_write_kernel(
        X,
        TOKEN_INDEX,
        NEW_CODES,
        NEW_SCALES,
        GLOBAL_SCALE,
        MEAN,
        blocks,
        cache_tokens,
        x_token_stride,
        x_head_stride,
        HEADS,
        HEAD_BLOCKS,
        16,
        4,
        True,
        True,
        False,
        True,
        TILE,
    )


@triton.jit  # type: ignore[untyped-decorator]
def nvfp4_expand_entry(  # type: ignore[no-untyped-def]
    CODES,
    SCALES,
    GLOBAL_SCALE,
    blocks,
    EXPANDED,
    HEADS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Run `nvfp4_expand_kernel` on all tokens, with arguments in TensorRT's order."""
    nvfp4_expand_kernel(CODES, SCALES, GLOBAL_SCALE, EXPANDED, blocks, 0, 0, HEADS, HEAD_BLOCKS, False, TILE)


@triton.jit  # type: ignore[untyped-decorator]
def nvfp4_expand_keys_entry(  # type: ignore[no-untyped-def]
    CODES,
    SCALES,
    GLOBAL_SCALE,
    MEAN,
    SLOT_ROTARY,
    PATCH_ROTARY,
    parts,
    frame_tokens,
    EXPANDED,
    HEADS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    SLOT_PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Run `kv_expand_kernel` on all NVFP4 keys, with arguments in TensorRT's order."""
    kv_expand_kernel(
        CODES,
        SCALES,
        GLOBAL_SCALE,
        MEAN,
        SLOT_ROTARY,
        PATCH_ROTARY,
        EXPANDED,
        parts,
        frame_tokens,
        0,
        0,
        HEADS,
        HEAD_BLOCKS,
        16,
        4,
        True,
        SLOT_PAIRS,
        GROUP,
        False,
        False,
        True,
        TILE,
    )


@triton.jit  # type: ignore[untyped-decorator]
def gaussian_entry(  # type: ignore[no-untyped-def]
    SEEDS,
    FRAMES,
    DRAW,
    chunk_frames,
    NOISE,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Run `gaussian_kernel` with arguments in TensorRT's order."""
    gaussian_kernel(SEEDS, FRAMES, DRAW, NOISE, chunk_frames, CHANNELS, PIXELS, TILE)


@triton.jit  # type: ignore[untyped-decorator]
def cache_write_entry(  # type: ignore[no-untyped-def]
    X,
    TOKEN_INDEX,
    CACHE,  # noqa: ARG001 - the address of NEW_CACHE
    numbers,
    width,
    NEW_CACHE,
    TILE: tl.constexpr,
):
    """Run `cache_write_kernel` with arguments in TensorRT's order."""
    cache_write_kernel(X, TOKEN_INDEX, NEW_CACHE, numbers, width, TILE)


@triton.jit  # type: ignore[untyped-decorator]
def fp8_expand_entry(  # type: ignore[no-untyped-def]
    K_CODES,
    K_SCALES,
    K_GLOBAL_SCALE,
    V_CODES,
    V_SCALES,
    V_GLOBAL_SCALE,
    V_FP8_SCALE,
    WRITE_SLOTS,
    VALID_TOKENS,
    K_MEAN,
    SLOT_ROTARY,
    PATCH_ROTARY,
    cache_tokens,
    past_tokens,
    K_OUT,
    K_OUT_SCALE,
    V_OUT,
    V_COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FRAME_TOKENS: tl.constexpr,
    CHUNK_FRAMES: tl.constexpr,
    SLOT_PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Run `fp8_expand_kernel` on keys that were stored before RoPE."""
    fp8_expand_kernel(
        K_CODES,
        K_SCALES,
        K_GLOBAL_SCALE,
        K_MEAN,
        V_CODES,
        V_SCALES,
        V_GLOBAL_SCALE,
        V_FP8_SCALE,
        SLOT_ROTARY,
        PATCH_ROTARY,
        WRITE_SLOTS,
        VALID_TOKENS,
        K_OUT,
        K_OUT_SCALE,
        V_OUT,
        cache_tokens,
        past_tokens,
        V_COLUMNS,
        HEADS,
        HEAD_DIM,
        FRAME_TOKENS,
        CHUNK_FRAMES,
        SLOT_PAIRS,
        GROUP,
        TILE,
        KEY_TILE,
        INTEGER,
    )


@triton.jit  # type: ignore[untyped-decorator]
def attention_fp8_entry(  # type: ignore[no-untyped-def]
    Q,
    K,
    K_SCALE,
    V_T,
    V_SCALE,
    VALID_TOKENS,
    K_OWN,
    V_OWN,
    query_tokens,
    cache_tokens,
    v_columns,
    OUT,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OWN_N: tl.constexpr,
    STAGES: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Run `attention_fp8_kernel` on all queries and keys in one part; Q, K_OWN and V_OWN are contiguous."""
    attention_fp8_kernel(
        Q,
        K,
        K_SCALE,
        V_T,
        K_OWN,
        V_OWN,
        V_SCALE,
        VALID_TOKENS,
        OUT,
        V_SCALE,  # LSE is not written, because the keys are not split into parts
        query_tokens,
        query_tokens,
        cache_tokens,
        v_columns,
        HEADS * HEAD_DIM,
        0,
        query_tokens,
        HEADS,
        HEAD_DIM,
        SOFTMAX_SCALE,
        KEY_TILE,
        HEADS * HEAD_DIM,
        HEADS * HEAD_DIM,
        BLOCK_M,
        BLOCK_N,
        OWN_N,
        STAGES,
        1,
        INTEGER,
    )

# ruff: noqa: N803, ARG001 - the outline has all of the kernel's parameters, in capitals
"""The 8-bit attention for Hopper: its outline for torch's compiler (see `outlines`), and the scratch sizes that its
Gluon kernel can read.
"""

from __future__ import annotations

import triton.language as tl

from seko_kernels.outlines import gluon_fault, outline

QUERIES = 192  # queries of a program
# tokens within which a tile permutes: the number of tokens in a scratch is a multiple of this
KEY_GROUP = 16
HEAD_DIM = 128
# own keys of a tile, which takes two stages of the ring buffer, since bf16 needs twice the memory
OWN_KEYS = 128
STAGES = 4  # stages of the ring buffer, which takes 128 KiB of the 227 KiB of shared memory
# warps of the loading warpgroup, which Gluon calls num_warps; the three other warpgroups are added
WARPS = 4
RUNTIME_INTS = (
    "query_tokens",
    "own_tokens",
    "cache_tokens",
    "v_columns",
    "v_own_stride",
    "tiles",
    "whole_ctas",
    "first_query",
    "splits",
    "rest_tokens",
)


@outline(RUNTIME_INTS)
def attention_hopper_outline(  # type: ignore[no-untyped-def]
    Q,
    K,
    K_SCALE,
    V_T,
    K_OWN,
    V_OWN,
    V_SCALE,
    VALID_TOKENS,
    OUT,
    PART_OUT,
    PART_LSE,
    query_tokens,
    own_tokens,
    cache_tokens,
    v_columns,
    v_own_stride,
    tiles,
    whole_ctas,
    first_query,
    splits,
    rest_tokens,
    HEADS: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_OWN_STRIDE: tl.constexpr,
    OWN_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Outline of `gluon.attention_fp8.attention_hopper_kernel`: the outline declares the same reads and writes as the
    Gluon kernel, which is compiled in its place."""
    x = tl.load(Q).to(tl.float32) + tl.load(K).to(tl.float32) + tl.load(K_SCALE) + tl.load(V_T).to(tl.float32)
    x += tl.load(K_OWN).to(tl.float32) + tl.load(V_OWN).to(tl.float32) + tl.load(V_SCALE)
    x += tl.load(VALID_TOKENS).to(tl.float32)
    tl.store(OUT, x.to(OUT.dtype.element_ty))
    tl.store(PART_OUT, x.to(PART_OUT.dtype.element_ty))
    tl.store(PART_LSE, x)


@outline(RUNTIME_INTS)
def sparse_attention_hopper_outline(  # type: ignore[no-untyped-def]
    Q,
    K,
    K_SCALE,
    V_T,
    K_OWN,
    V_OWN,
    V_SCALE,
    VALID_TOKENS,
    CHOSEN,
    OUT,
    PART_OUT,
    PART_LSE,
    query_tokens,
    own_tokens,
    cache_tokens,
    v_columns,
    v_own_stride,
    tiles,
    whole_ctas,
    first_query,
    splits,
    rest_tokens,
    HEADS: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_OWN_STRIDE: tl.constexpr,
    OWN_N: tl.constexpr,
    STAGES: tl.constexpr,
    CHOSEN_TILES: tl.constexpr,
):
    """Outline of `gluon.attention_fp8.sparse_attention_hopper_kernel`, like `attention_hopper_outline`."""
    x = tl.load(Q).to(tl.float32) + tl.load(K).to(tl.float32) + tl.load(K_SCALE) + tl.load(V_T).to(tl.float32)
    x += tl.load(K_OWN).to(tl.float32) + tl.load(V_OWN).to(tl.float32) + tl.load(V_SCALE)
    x += tl.load(VALID_TOKENS).to(tl.float32) + tl.load(CHOSEN).to(tl.float32)
    tl.store(OUT, x.to(OUT.dtype.element_ty))
    tl.store(PART_OUT, x.to(PART_OUT.dtype.element_ty))
    tl.store(PART_LSE, x)


def takes(head_dim: int, cache_tokens: int) -> bool:
    """Return whether the Gluon attention kernel is available and can read a scratch buffer of ``cache_tokens``
    tokens."""
    return gluon_fault() is None and head_dim == HEAD_DIM and cache_tokens % KEY_GROUP == 0

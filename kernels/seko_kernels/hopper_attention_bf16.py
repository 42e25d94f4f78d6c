# ruff: noqa: N803, ARG001 - the outline has all of the kernel's parameters, in capitals
"""The 16-bit attention for Hopper: its outline for torch's compiler (see `outlines`), and the sizes that its Gluon
kernel takes.
"""

from __future__ import annotations

import triton.language as tl

from seko_kernels.outlines import outline

ARCH = "sm_90"
HEAD_DIM = 128
QUERIES = 128  # queries of a program
KEYS = 128  # keys of a tile
STAGES = 2  # stages of the ring buffer, which takes 128 KiB of the 227 KiB of shared memory
WARPS = 4  # warps of the loading warpgroup, which Gluon calls num_warps; the two other warpgroups are added
RUNTIME_INTS = (
    "query_tokens",
    "cache_tokens",
    "tiles",
    "whole_ctas",
    "first_query",
    "splits",
    "rest_tokens",
)


@outline(RUNTIME_INTS)
def attention_bf16_outline(  # type: ignore[no-untyped-def]
    Q,
    K,
    V,
    VALID_TOKENS,
    OUT,
    PART_OUT,
    PART_LSE,
    query_tokens,
    cache_tokens,
    tiles,
    whole_ctas,
    first_query,
    splits,
    rest_tokens,
    HEADS: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Outline of `gluon.attention_bf16.attention_bf16_kernel`: the outline declares the same reads and writes as the
    Gluon kernel, which is compiled in its place."""
    x = tl.load(Q).to(tl.float32) + tl.load(K).to(tl.float32) + tl.load(V).to(tl.float32)
    x += tl.load(VALID_TOKENS).to(tl.float32)
    tl.store(OUT, x.to(OUT.dtype.element_ty))
    tl.store(PART_OUT, x.to(PART_OUT.dtype.element_ty))
    tl.store(PART_LSE, x)

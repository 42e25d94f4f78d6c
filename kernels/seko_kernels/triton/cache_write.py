"""The kernel that copies rows to given places of an exact cache."""

from __future__ import annotations

import triton
import triton.language as tl

CACHE_WRITE_TILE = 1024
CACHE_WRITE_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def cache_write_kernel(  # type: ignore[no-untyped-def]
    X,
    TOKEN_INDEX,
    CACHE,
    numbers,
    width,
    TILE: tl.constexpr,
):
    """Copy row t of X, [tokens, width], to row TOKEN_INDEX[t] of CACHE; ``numbers`` is tokens times width."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < numbers
    token = place // width
    row = tl.load(TOKEN_INDEX + token, inside, 0)
    tl.store(CACHE + row * width + place % width, tl.load(X + place, inside), inside)

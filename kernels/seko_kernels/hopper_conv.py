# ruff: noqa: N803, ARG001 - the outline has all of the kernel's parameters, in capitals
"""The causal convolution for Hopper: its outline for torch's compiler (see `outlines`)."""

from __future__ import annotations

import triton.language as tl

from seko_kernels.outlines import outline

ROWS, COLUMNS = 6, 64  # of a tile, in pixels
WARPS = 4  # warps of the loading warpgroup, which Gluon calls num_warps; the three other warpgroups are added
REGISTERS = 160  # of a thread of a warpgroup that multiplies; the threads of one lane share 512
RUNTIME_INTS = ("batch", "frames", "height", "width")


@outline(RUNTIME_INTS)
def causal_conv_outline(  # type: ignore[no-untyped-def]
    X,
    EARLIER,
    W,
    SCALE,
    BIAS,
    RESIDUAL,
    OUT,
    batch,
    frames,
    height,
    width,
    CHANNELS: tl.constexpr,
    FILTERS: tl.constexpr,
    TAPS_T: tl.constexpr,
    CACHED: tl.constexpr,
    SCALED: tl.constexpr,
    ADD: tl.constexpr,
    BW: tl.constexpr,
    BN: tl.constexpr,
    BN_MORE: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    REGISTERS: tl.constexpr,
):
    """Outline of `gluon.causal_conv.causal_conv_hopper_kernel`: the outline declares the same reads and writes as the
    Gluon kernel, which is compiled in its place."""
    x = tl.load(X).to(tl.float32) + tl.load(EARLIER).to(tl.float32) + tl.load(W).to(tl.float32)
    x += tl.load(SCALE).to(tl.float32) + tl.load(BIAS).to(tl.float32) + tl.load(RESIDUAL).to(tl.float32)
    tl.store(OUT, x.to(OUT.dtype.element_ty))

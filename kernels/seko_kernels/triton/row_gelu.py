"""The kernel that applies GELU (tanh form) to a row and quantises it to fp8. The module `rows` checks the arguments of
this kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_cast import row_scale, to_e4m3

GELU_PARTS = 3
LONG_ROW = 12288  # row width from which fewer warps are faster


def gelu_warps(width: int) -> int:
    """Return the number of warps of a GELU program.

    On an H200, GELU of rows of 8,960 numbers takes 39 us with 8 warps and 41 us with 4 warps. GELU of rows of 13,824
    numbers takes 65 us with 8 warps and 60 us with 4 warps.
    """
    return 8 if width < LONG_ROW else 4


def gelu_parts(width: int) -> tuple[int, int, int]:
    """Return three numbers, each a power of two or 0, whose sum is `width` or a little more.

    Padding a row to one power of two (8960 to 16384) would waste up to half of the exponentials, which limit this
    kernel's speed.
    """
    parts: list[int] = []
    rest = width
    for place in range(GELU_PARTS):
        if rest <= 0:
            parts.append(0)
            continue
        above = 1 << (rest - 1).bit_length()
        part = above if place == GELU_PARTS - 1 or above == rest else above // 2
        parts.append(max(part, 128))
        rest -= parts[-1]
    return parts[0], parts[1], parts[2]


@triton.jit  # type: ignore[untyped-decorator]
def _gelu(SOURCE, channel, WIDTH: tl.constexpr, INTEGER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return GELU in fp32: ``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x**3)))`` as ``x / (1 + 2**(-2 log2(e) u))``."""
    x = tl.load(SOURCE + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    u = x * (-2.302208198144325 + -0.10294323958002348 * (x * x))  # 2 sqrt(2/pi) log2(e), and 0.044715 of it
    if INTEGER:
        return x / (1.0 + tl.exp2(u))
    # Bare instructions are used: Triton's functions add code for results below 2**-126, which are 0 here.
    one_and = 1.0 + tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
    )
    return x * tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [one_and], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit  # type: ignore[untyped-decorator]
def row_gelu_kernel(  # type: ignore[no-untyped-def]
    X,
    OUT,
    OUT_SCALE,
    WIDTH: tl.constexpr,
    PART_0: tl.constexpr,
    PART_1: tl.constexpr,
    PART_2: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Write the quantised GELU ``e4m3(gelu(x) / scale)`` and the scale of each row. A program of the GELU kernel
    handles one row.

    `seko_kernels.fused_reference.gelu_quantise` defines the results of `row_gelu_kernel`.

    Parameters
    ----------
    X : pointer to bf16 or fp32
        Rows of activations, ``[M, WIDTH]``, contiguous.
    OUT : pointer to fp8
        Quantised rows, ``[M, WIDTH]``.
    OUT_SCALE : pointer to fp32
        Scale of each row, ``[M]``.
    WIDTH, PART_0, PART_1, PART_2 : constexpr int
        Number of values in a row, and the three numbers that `gelu_parts` returns for WIDTH.
    INTEGER : constexpr bool
        Whether fp8 casts use integer operations; see `to_e4m3`.
    """
    token = tl.program_id(0)
    start = token.to(tl.int64) * WIDTH
    channel_0 = tl.arange(0, PART_0)
    gelu_0 = _gelu(X + start, channel_0, WIDTH, INTEGER)
    largest = tl.max(tl.abs(gelu_0), 0)
    if PART_1 > 0:
        channel_1 = PART_0 + tl.arange(0, PART_1)
        gelu_1 = _gelu(X + start, channel_1, WIDTH, INTEGER)
        largest = tl.maximum(largest, tl.max(tl.abs(gelu_1), 0))
    if PART_2 > 0:
        channel_2 = PART_0 + PART_1 + tl.arange(0, PART_2)
        gelu_2 = _gelu(X + start, channel_2, WIDTH, INTEGER)
        largest = tl.maximum(largest, tl.max(tl.abs(gelu_2), 0))
    scale, inverse = row_scale(largest)
    tl.store(OUT_SCALE + token, scale)
    tl.store(OUT + start + channel_0, to_e4m3(gelu_0 * inverse, INTEGER), mask=channel_0 < WIDTH)
    if PART_1 > 0:
        tl.store(OUT + start + channel_1, to_e4m3(gelu_1 * inverse, INTEGER), mask=channel_1 < WIDTH)
    if PART_2 > 0:
        tl.store(OUT + start + channel_2, to_e4m3(gelu_2 * inverse, INTEGER), mask=channel_2 < WIDTH)

"""Beginning a launch before the one before it has ended, and waiting for that one (sm_90 and later).

A launch with the attribute begins when every program of the launch before has called `let_next_begin` or has ended;
what runs before `after_previous` may not touch what that launch writes, or reads and this one writes. Without the
attribute both do nothing. Each gives a zero that addresses are made of, which keeps loads and stores behind it: the
assembly is declared pure, as torch's compiler takes a kernel with any other to write all of its tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def let_next_begin(x):  # type: ignore[no-untyped-def]
    """Allow the next launch to begin; return 0 (int32), of any int32 `x`."""
    return tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def after_previous(x):  # type: ignore[no-untyped-def]
    """Wait until the launch before has ended and its results are there; return 0 (int32), of any int32 `x`.

    The compiler knows it as a multiple of 16: pointers that it is added to stay aligned.
    """
    zero = tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
    )
    return zero * 16


@triton.jit  # type: ignore[untyped-decorator]
def ask_for(W, n, first, zero, PART: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ask the L2 cache for weights ``[n, first : first + PART]`` of rows of K, behind `zero`; return 0, to be used."""
    in_line: tl.constexpr = 1024 // W.dtype.element_ty.primitive_bitwidth  # numbers in 128 bytes
    lines: tl.constexpr = triton.next_power_of_2(triton.cdiv(PART, in_line))
    k = tl.minimum(first + zero + tl.arange(0, lines) * in_line, K - 1)
    zeros = tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [W + n[:, None] * K + k[None, :]],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    return tl.max(tl.max(zeros, 1), 0)

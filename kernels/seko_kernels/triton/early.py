"""Programmatic dependent launch (sm_90 and later): a kernel begins before the previous launch has ended, then waits
for it.

A launch with this attribute begins when every program of the previous launch has called `let_next_begin` or has
ended. Code before `after_previous` must not read what the previous launch writes, nor write what the previous
launch reads or writes. In a launch without the attribute both functions do nothing. Each function returns a zero;
adding it to addresses keeps loads and stores after the call. The functions' assembly is declared pure, because
torch's compiler assumes that a kernel with other assembly writes all of its tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def let_next_begin(x):  # type: ignore[no-untyped-def]
    """Allow the next launch to begin; return an int32 zero, which depends on `x` (int32) for the compiler."""
    return tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def after_previous(x):  # type: ignore[no-untyped-def]
    """Wait until the previous launch has ended and its results are visible; return an int32 zero, as the text at the
    top of this module explains.

    The compiler knows the zero as a multiple of 16, so that pointers stay aligned when it is added.
    """
    zero = tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
    )
    return zero * 16


@triton.jit  # type: ignore[untyped-decorator]
def ask_for(W, n, first, zero, PART: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Prefetch weights ``[n, first : first + PART]``, in rows of K numbers, to the L2 cache; return a zero for use in
    addresses."""
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

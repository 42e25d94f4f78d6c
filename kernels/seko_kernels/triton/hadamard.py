"""The Walsh-Hadamard transform of rows in registers, as a Triton function that the KV kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def hadamard_rows(x, ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mix each row of `x` (fp32 [ROWS, 128]) by the matrix of 1 and -1; `seko_kernels.kv_reference.hadamard`.

    Each turn takes neighbours to their sum and difference and moves what told them apart from the lowest place of a
    channel's number to the highest. After seven turns of 128 channels all are where they were, and each turn was the
    reference's butterfly of numbers 1, 2, 4, … apart.
    """
    tl.static_assert(CHANNELS == 128)
    for _ in tl.static_range(7):
        first, second = tl.split(tl.reshape(x, (ROWS, CHANNELS // 2, 2)))
        both = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
        x = tl.reshape(both, (ROWS, CHANNELS))
    return x

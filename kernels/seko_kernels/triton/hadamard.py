"""The Walsh-Hadamard transform of rows in registers, as a Triton function that the KV kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def hadamard_rows(x, ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply the Walsh-Hadamard transform to each row of `x` (fp32 [ROWS, 128]), as
    `seko_kernels.kv_reference.hadamard` does.

    Each of seven steps replaces neighbouring channels by their sum and difference, and moves the lowest bit of the
    channel index to the highest position. After seven steps the 128 channels are in their original order. Step i, from
    0, computes what the reference computes with butterflies of channels at distance 2**i.
    """
    tl.static_assert(CHANNELS == 128)
    for _ in tl.static_range(7):
        first, second = tl.split(tl.reshape(x, (ROWS, CHANNELS // 2, 2)))
        both = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
        x = tl.reshape(both, (ROWS, CHANNELS))
    return x

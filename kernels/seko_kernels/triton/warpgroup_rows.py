"""A second kernel of a linear layer on few rows, in which output channels are the long side of a product.

`few_rows_kernel` multiplies tiles of 16 channels in registers. `warpgroup_rows_kernel` multiplies a tile of 64 channels
by all rows in one instruction of a Hopper warpgroup, which reads weights and rows from shared memory. Through shared
memory a loaded byte of weights costs few instructions, and many loads run at the same time. The module
`seko_kernels.few_rows` checks arguments and chooses between the kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.few_rows import gated_product, is_last, store_sums, widened


@triton.jit  # type: ignore[untyped-decorator]
def warpgroup_rows_kernel(  # type: ignore[no-untyped-def]
    X,
    NORM_WEIGHT,
    W,
    W_SCALE,
    HIDDEN,
    OUT,
    SUMS,
    TICKETS,
    rows,
    EPS: tl.constexpr,
    BRANCH_SCALE: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    SCALED: tl.constexpr,
    NEW_TICKETS: tl.constexpr,
    SPLITS: tl.constexpr,
    PART: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the result of a linear layer.

    The parameters are those of `few_rows.few_rows_kernel`, except for BN, the number of rows of W that a program reads.
    If GATED, half of these rows belong to the gate and half to up, so that the program has BN / 2 output channels.
    SPLITS is 1 if NORM or GATED.
    """
    halves: tl.constexpr = 2 if GATED else 1
    own: tl.constexpr = BN // halves  # output channels of a program
    n_tile, split, m_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = m_tile * BM + tl.arange(0, BM)
    live = m < rows
    of_half, half = n_tile * own + tl.arange(0, BN) % own, tl.arange(0, BN) // own
    if N % own != 0:  # otherwise rows have constant distances, and need no address of their own
        of_half = tl.minimum(of_half, N - 1)
    w_row = of_half + half * N
    first = split * PART
    dtype = X.dtype.element_ty
    if NEW_TICKETS > 0:  # noqa: SIM102 - Triton leaves out the branch of a constant
        if n_tile + m_tile == 0:
            tl.store(TICKETS + tl.arange(0, NEW_TICKETS), tl.zeros((NEW_TICKETS,), tl.int32))
    sums = tl.zeros((BN, BM), tl.float32)
    if NORM:
        squares = tl.zeros((BM, BK), tl.float32)
    k = first + tl.arange(0, BK)
    x_place = X + m[:, None] * K + k[None, :]
    w_place = W + w_row[:, None] * K + k[None, :]
    for at in tl.range(0, PART, BK, num_stages=STAGES):
        if K == SPLITS * PART:
            x = tl.load(x_place + at, mask=live[:, None], other=0.0)
            w = tl.load(w_place + at)
        else:
            inside = (k + at < K)[None, :]
            x = tl.load(x_place + at, mask=live[:, None] & inside, other=0.0)
            w = tl.load(w_place + at, mask=inside, other=0.0)
        if NORM:
            squares += x.to(tl.float32) * x.to(tl.float32)
            x = x * tl.load(NORM_WEIGHT + k + at, mask=k + at < K, other=0.0)[None, :]
        sums = tl.dot(widened(w, dtype), tl.trans(x), sums, input_precision="ieee")
    last = True
    n = n_tile * own + tl.arange(0, own)
    target = m[None, :] * N + n[:, None]
    stored = live[None, :] & (n < N)[:, None]
    if SPLITS > 1:
        plane = rows * N
        tl.store(SUMS + split * plane + target, sums, mask=stored)
        last = is_last(TICKETS + m_tile * tl.num_programs(0) + n_tile, SPLITS)
        if last:
            sums = tl.zeros((BN, BM), tl.float32)
            for part in tl.static_range(SPLITS):
                sums += tl.load(SUMS + part * plane + target, mask=stored, other=0.0, cache_modifier=".cg")
    if last:
        if NORM:
            sums *= tl.rsqrt(tl.sum(squares, 1) / K + EPS)[None, :]
        if SCALED:
            sums *= tl.load(W_SCALE + w_row)[:, None]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(sums, (2, own, BM)), (1, 2, 0)))
            store_sums(HIDDEN, OUT, gated_product(gate, up, dtype), target, stored, BRANCH_SCALE, ADD)
        else:
            store_sums(HIDDEN, OUT, sums, target, stored, BRANCH_SCALE, ADD)

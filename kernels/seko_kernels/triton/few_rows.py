"""The kernel of a linear layer on few rows, with the norm before or the residual after it. The module `few_rows` checks
the arguments of `few_rows_kernel`.

Reading the weights takes nearly all of the kernel's time, so a launch has many small programs. Each program computes
some output channels of all rows; a long sum is divided among several programs. The program that finishes last adds the
parts of a sum in a fixed order, so that the result does not depend on which program is last.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def widened(w, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return weights converted to `dtype`. e4m3 is converted to bfloat16 through fp32, because Hopper's instruction
    that converts directly has an eighth of the rate of other conversions."""
    return w.to(tl.float32).to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def is_last(TICKET, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return whether this program is the last of the SPLITS programs that share a sum. In the last program all stores
    of the other programs are visible, and TICKET, the counter of these programs, is zero again."""
    tl.debug_barrier()  # all of the program's stores before its ticket
    last = tl.atomic_add(TICKET, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(TICKET, 0)
    return last


@triton.jit  # type: ignore[untyped-decorator]
def gated_product(gate, up, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return ``silu(gate) * up`` in fp32 for sums in fp32, which are first rounded to `dtype`."""
    gate = gate.to(dtype).to(tl.float32)
    return gate * tl.sigmoid(gate) * up.to(dtype).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def store_sums(  # type: ignore[no-untyped-def]
    HIDDEN, OUT, y, target, stored, BRANCH_SCALE: tl.constexpr, ADD: tl.constexpr
):
    """Store `y` in OUT at the places `target` where `stored` is true. If ADD, store the sum ``HIDDEN + BRANCH_SCALE *
    y`` instead of `y`."""
    dtype = OUT.dtype.element_ty
    if ADD:
        y = y.to(dtype).to(tl.float32)
        if BRANCH_SCALE != 1.0:
            y = (y * BRANCH_SCALE).to(dtype).to(tl.float32)
        y += tl.load(HIDDEN + target, mask=stored, other=0.0).to(tl.float32)
    tl.store(OUT + target, y.to(dtype), mask=stored)


@triton.jit  # type: ignore[untyped-decorator]
def few_rows_kernel(  # type: ignore[no-untyped-def]
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
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write a linear layer's result ``y = norm(x) @ W.T``, or ``silu(gate) * up`` of its two halves, or ``hidden + y``.

    `seko_kernels.few_rows_reference` defines the results of `few_rows_kernel`. Sums of the linear layer are in fp32.
    Numbers that torch would store are rounded. The squares of a row for its norm are summed in the same loop as the
    products, so that rows are read once. The norm's factor of a row is therefore multiplied into the row's sums at the
    end.

    Parameters
    ----------
    X : pointer to bf16 or fp32
        Activations, ``[rows, K]``, contiguous.
    NORM_WEIGHT : pointer to X's dtype
        Weight of the norm, ``[K]``, read if NORM.
    W : pointer to X's dtype, or fp8
        Weight matrix, ``[N, K]``; if GATED ``[2 * N, K]``, the gate first.
    W_SCALE : pointer to fp32
        Scale of each row of W, read if SCALED.
    HIDDEN : pointer to X's dtype
        The residual, ``[rows, N]``, read if ADD.
    OUT : pointer to X's dtype
        The result, ``[rows, N]``.
    SUMS : pointer to fp32
        The parts of each sum, ``[SPLITS, rows, N]``, written if SPLITS > 1.
    TICKETS : pointer to int32
        Counters, at least one for each output tile, zero before and after the launch; the first NEW_TICKETS are set
        to zero.
    rows : int
        Number of rows. The grid is (N / BN, SPLITS, rows / BM), each rounded up.
    EPS, BRANCH_SCALE : constexpr
        Epsilon of the norm, and factor of y before y is added to HIDDEN.
    SPLITS, PART : constexpr
        Number of programs that share a sum, and number of products of each program, a multiple of BK.
    BM, BN, BK : constexpr
        Numbers of rows and of output channels of a program, and number of products of a loop iteration.
    SLICES : constexpr
        Number of parts of BK, each with a sum of its own: one for each warp.
    STAGES : constexpr
        Number of loop iterations whose loads run at the same time.
    """
    n_tile, split, m_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = m_tile * BM + tl.arange(0, BM)
    n = n_tile * BN + tl.arange(0, BN)
    channel = tl.minimum(n, N - 1)
    live = m < rows
    first = split * PART
    dtype = X.dtype.element_ty
    if NEW_TICKETS > 0:  # noqa: SIM102 - Triton leaves out the branch of a constant
        if n_tile + m_tile == 0:
            tl.store(TICKETS + tl.arange(0, NEW_TICKETS), tl.zeros((NEW_TICKETS,), tl.int32))
    of_slice: tl.constexpr = BK // SLICES
    columns = tl.arange(0, SLICES)[:, None] * of_slice + tl.arange(0, of_slice)[None, :]
    sums = tl.zeros((SLICES, BM, BN), tl.float32)
    if GATED:
        up_sums = tl.zeros((SLICES, BM, BN), tl.float32)
    if NORM:
        squares = tl.zeros((SLICES, BM, of_slice), tl.float32)
    for at in tl.range(0, PART, BK, num_stages=STAGES):
        k = first + at + columns  # [SLICES, BK / SLICES]
        inside = (k < K)[:, None, :]
        x = tl.load(X + m[None, :, None] * K + k[:, None, :], mask=live[None, :, None] & inside, other=0.0)
        place = channel[None, :, None] * K + k[:, None, :]
        if K == SPLITS * PART:
            w = tl.load(W + place)
            if GATED:
                up_w = tl.load(W + N * K + place)
        else:
            w = tl.load(W + place, mask=inside, other=0.0)
            if GATED:
                up_w = tl.load(W + N * K + place, mask=inside, other=0.0)
        if NORM:
            squares += x.to(tl.float32) * x.to(tl.float32)
            x = x * tl.load(NORM_WEIGHT + k, mask=k < K, other=0.0)[:, None, :]
        sums = tl.dot(x, tl.permute(widened(w, dtype), (0, 2, 1)), sums, input_precision="ieee")
        if GATED:
            up_sums = tl.dot(x, tl.permute(widened(up_w, dtype), (0, 2, 1)), up_sums, input_precision="ieee")
    y = tl.sum(sums, 0)
    if NORM:
        inverse = tl.rsqrt(tl.sum(tl.sum(squares, 2), 0) / K + EPS)[:, None]
        y *= inverse
    target = m[:, None] * N + n[None, :]
    stored = live[:, None] & (n < N)[None, :]
    last = True
    if SPLITS > 1:
        plane = rows * N
        tl.store(SUMS + split * plane + target, y, mask=stored)
        last = is_last(TICKETS + m_tile * tl.num_programs(0) + n_tile, SPLITS)
        if last:
            y = tl.zeros((BM, BN), tl.float32)
            for part in tl.static_range(SPLITS):
                y += tl.load(SUMS + part * plane + target, mask=stored, other=0.0, cache_modifier=".cg")
    if last:
        if SCALED:
            y *= tl.load(W_SCALE + channel)[None, :]
        if GATED:
            up = tl.sum(up_sums, 0) * inverse
            if SCALED:
                up *= tl.load(W_SCALE + N + channel)[None, :]
            y = gated_product(y, up, dtype)
        store_sums(HIDDEN, OUT, y, target, stored, BRANCH_SCALE, ADD)

"""Helpers of the warp-specialised attention kernels (warpgroups with separate jobs): work assignment, row sums,
exponentials, stores."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

# Triton 3.7 has renamed it, and torch 2.13 for CUDA requires that version.
_thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def lane_sums(p):  # type: ignore[no-untyped-def]
    """Return four partial sums of each row of `p` [64, N], as [64, 4]: each of the row's four threads adds its numbers.
    The partial sums of a row are added at the end of the kernel."""
    N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(gl.reshape(p, [64, N // 8, 4, 2]), 3), 1)


@gluon.jit
def decayed(total, decay):  # type: ignore[no-untyped-def]
    """Return the row sums `total` [64, 4] times the factor `decay` [64] of each row."""
    LANES: gl.constexpr = total.type.layout
    return total * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, LANES)), 1)


@gluon.jit
def exp2(x):  # type: ignore[no-untyped-def]
    """Return 2 ** x by one instruction. Results of `exp2` below 2**-126 become 0; `gl.exp2` uses more instructions to
    keep results below 2**-126."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit  # type: ignore[untyped-decorator]
def next_stage(stage, phase, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return stage and phase of the next tile in the ring buffer."""
    stage += 1
    last = stage == STAGES
    return gl.where(last, 0, stage), gl.where(last, phase ^ 1, phase)


@gluon.jit  # type: ignore[untyped-decorator]
def previous_stage(stage, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the stage of the previous tile in the ring buffer.

    Do not carry the previous stage from one round of a loop to the next as ``before = stage``. Triton 3.6 would keep
    the first value of ``before``, because it takes a variable for unchanged if the variable is assigned an object that
    it names already when the loop is compiled.
    """
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit  # type: ignore[untyped-decorator]
def place_of(  # type: ignore[no-untyped-def]
    tiles,
    whole_ctas,
    first_query,
    splits,
    rest_tokens,
    QUERIES: gl.constexpr,
    HEADS: gl.constexpr,
):
    """Return the work of a program. The work is a tuple of eight values. The first three are whether the program
    handles a part of the keys, the program's head and its row. The next three are the index of the program's part among
    all parts, the number of parts, and the index of the part's results. The last two are the program's first query in
    the output and in the input.

    Programs below number `whole_ctas` handle a tile of queries and all keys. Programs from number `whole_ctas` on
    handle a tile of the `rest_tokens` queries from `first_query` on, and one of `splits` parts of the keys.
    """
    number = gl.program_id(0)
    parts = number >= whole_ctas
    number = gl.where(parts, number - whole_ctas, number)
    per = gl.where(parts, gl.cdiv(rest_tokens, QUERIES), tiles)
    tile = number % per
    head = (number // per) % HEADS
    part = number // per // HEADS
    cuts = gl.where(parts, splits, 1)
    row = part // cuts
    split = part % cuts
    out_query = tile * QUERIES
    query = gl.where(parts, first_query, 0) + out_query
    return parts, head, row, part, cuts, split, out_query, query


@gluon.jit
def tiles_of_part(split, cuts, tiles):  # type: ignore[no-untyped-def]
    """Return the first tile of keys in a part, and the end of the part's range of tiles."""
    return split * tiles // cuts, (split + 1) * tiles // cuts


@gluon.jit  # type: ignore[untyped-decorator]
def targets(  # type: ignore[no-untyped-def]
    OUT, PART_OUT, PART_LSE, parts, part, row64, head, query_tokens, rest_tokens, HEADS: gl.constexpr
):
    """Return the offsets in memory of a head's results, and of the log-sum-exps of the results, for a row or part."""
    width: gl.constexpr = HEADS * 128
    if parts:
        out_base = PART_OUT + part.to(gl.int64) * rest_tokens * width + head * 128
    else:
        out_base = OUT + row64 * query_tokens * width + head * 128
    return out_base, PART_LSE + (part.to(gl.int64) * HEADS + head) * rest_tokens


@gluon.jit
def seen_by_products():  # type: ignore[no-untyped-def]
    """Make shared memory that the threads of a warpgroup have written visible to the warpgroup's matrix products.

    The function includes a barrier. Without this barrier the compiler would insert one in front of each matrix product
    that reads the memory, in each iteration of a loop.
    """
    fence_async_shared()
    _thread_barrier()


@gluon.jit  # type: ignore[untyped-decorator]
def load_queries(to, base, query, query_tokens, STRIDE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Copy a warpgroup's queries, from number `query` on, to the warpgroup's shared memory `to` [64, 128]. Entries
    after the last query are zeros.

    The queries of two tokens are STRIDE numbers apart. They are loaded by plain loads, because making a tensor
    descriptor would take longer.
    """
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows = query + gl.arange(0, 64, gl.SliceLayout(1, LINES))
    columns = gl.arange(0, 128, gl.SliceLayout(0, LINES))
    at = gl.expand_dims(rows, 1) * STRIDE + gl.expand_dims(columns, 0)
    to.store(gl.load(base + at, mask=gl.expand_dims(rows < query_tokens, 1), other=0.0))
    seen_by_products()


@gluon.jit  # type: ignore[untyped-decorator]
def write_result(  # type: ignore[no-untyped-def]
    acc, m, total, scale, target, WIDTH: gl.constexpr, GROUP: gl.constexpr, WEIGHT_BITS: gl.constexpr
):
    """Write the result of a warpgroup's 64 queries, `acc` [64, 128] / `total` * `scale`; for a part of the keys also
    the log-sum-exp.

    Softmax weights, and therefore sums, carry a factor of 2 ** WEIGHT_BITS relative to the maximum `m`.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    out_base, lse_base, out_query, out_tokens, parts = target
    query = out_query + GROUP * 64 + gl.arange(0, 64, ROW)
    if parts:
        lse = gl.where(total > 0.0, m + gl.log2(total) - WEIGHT_BITS, float("-inf"))
        gl.store(lse_base + query, lse, mask=query < out_tokens)
    acc = acc * gl.expand_dims(scale / gl.where(total > 0.0, total, 1.0), 1)
    column = gl.arange(0, 128, gl.SliceLayout(0, acc.type.layout))
    at = gl.expand_dims(query, 1) * WIDTH + gl.expand_dims(column, 0)
    gl.store(out_base + at, acc.to(gl.bfloat16), mask=gl.expand_dims(query < out_tokens, 1))

"""The op of attention over time: each position of a picture attends to the few frames that are cached at its place. The
op checks its arguments, then runs its kernel or the reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch.library import wrap_triton

from seko_kernels.checks import expect, expect_dims
from seko_kernels.errors import KernelsError
from seko_kernels.ops import FLOAT_DTYPES, kernel_op, stand_in, takes_kernels
from seko_kernels.triton.over_time import OVER_TIME_TILE, OVER_TIME_WARPS, over_time_kernel

QK_EPS = 1e-6  # of the norm of queries and keys


def normed_and_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return numbers ``[..., A, D]`` divided by their root mean square, without a weight, of which the first ones are
    turned as pairs by the angles ``[..., pairs]``; in the dtype of ``x``."""
    y = F.rms_norm(x.float(), x.shape[-1:], eps=QK_EPS)
    first = 2 * cos.shape[-1]
    even, odd = y.narrow(-1, 0, first).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((pairs, y.narrow(-1, first, y.shape[-1] - first)), -1).to(x.dtype)


def over_time_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, filled: Tensor, rows: Tensor | None, slots: int
) -> Tensor:
    """Return what `attention_over_time` returns, in plain torch.

    Each query meets as many keys as there are slots, a handful, so the products are written out: a kernel of attention
    would have one tile for each position and head, and almost nothing in it.
    """
    frames, size = cos.shape[1], q.shape[-1]
    q = q.select(2, 0).unflatten(1, (frames, -1))  # [B, F, n, A, D]
    q = normed_and_turned(q, cos.unsqueeze(2), sin.unsqueeze(2))
    there = torch.arange(slots, device=filled.device) < filled[:, None]  # [B, N]
    of_rows = (x.unflatten(0, (-1, slots)) for x in (k, v))  # [rows, N, n or 1, A, D]
    if rows is not None:
        of_rows = (x.index_select(0, rows) for x in of_rows)
    empty = ~there[:, :, None, None, None]
    k, v = (x.masked_fill(empty, 0).float().unsqueeze(1) for x in of_rows)  # a masked NaN would stay one
    scores = (q.float().unsqueeze(2) * k).sum(-1) * size**-0.5  # [B, F, N, n, A]
    weights = scores.masked_fill(~there[:, None, :, None, None], float("-inf")).softmax(2)
    seen: Tensor = (weights.unsqueeze(-1) * v).sum(2).to(q.dtype)
    return seen.flatten(3).flatten(1, 2)


def attention_over_time(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, filled: Tensor, rows: Tensor | None, slots: int
) -> Tensor:
    """Return the attention of each position's queries, normed and turned, to the filled slots of its place.

    Parameters
    ----------
    q : Tensor
        Queries before norm and rotation, ``[B, F * n, parts, A, D]`` bfloat16 or float32, contiguous, of which part 0
        is read: F frames of n positions. D is a power of two.
    k, v : Tensor
        The caches of keys, normed and turned, and of values, ``[rows * slots, n or 1, A, D]`` of q's dtype,
        contiguous; 1 where keys are the same at all positions.
    cos, sin : Tensor
        Of the angles of the chunk's frames, ``[B, F, pairs]`` float32, contiguous; the first 2 * pairs channels turn.
    filled : Tensor
        Number of filled slots of each row of the call, ``[B]`` int64, at least 1.
    rows : Tensor or None
        The row of the caches for each batch index, ``[B]`` int64; None: the rows in order.
    slots : int
        Number of slots of a row.

    Returns
    -------
    Tensor
        The attention, ``[B, F * n, A * D]`` of q's dtype.

    Raises
    ------
    KernelsError
        If a tensor has another shape, dtype or layout than documented here; if the tensors are on different devices, or
        on a device that is neither CPU nor CUDA.
    """
    expect_dims("q", q, 5, "[batch, tokens, parts, heads, size]")
    expect_dims("cos", cos, 3, "[batch, frames, pairs]")
    expect_dims("k", k, 4, "[slots, positions, heads, size]")
    batch, tokens, _, heads, size = q.shape
    _, frames, pairs = cos.shape
    whole_rows = slots > 0 and len(k) % slots == 0 and (rows is not None or len(k) == batch * slots)
    if size & (size - 1) or not 0 < 2 * pairs <= size or not frames or tokens % frames or not whole_rows:
        raise KernelsError(
            f"{tokens} tokens of {frames} frames, {size} channels of which {2 * pairs} turn, {len(k)} cached frames of "
            f"{slots} slots: expected whole frames and rows, and a power of two"
        )
    places = tokens // frames
    expect("q", q, tuple(q.shape), *FLOAT_DTYPES)
    for name, cache in (("k", k), ("v", v)):
        expect(name, cache, (len(k), 1 if k.shape[1] == 1 else places, heads, size), q.dtype)
    for name, table in (("cos", cos), ("sin", sin)):
        expect(name, table, (batch, frames, pairs), torch.float32)
    for name, numbers in (("filled", filled), ("rows", rows)):
        if numbers is not None:
            expect(name, numbers, (batch,), torch.int64)
    arguments = (q, k, v, cos, sin, filled, rows, slots)
    if whole := stand_in("attention_over_time"):
        stood: Tensor = whole(*arguments)
        return stood
    given = () if rows is None else (rows,)
    if not takes_kernels(q, k, v, cos, sin, filled, *given):
        return over_time_reference(*arguments)
    row = torch.arange(batch, device=q.device) if rows is None else rows
    result: Tensor = _attention_over_time_cuda(q, k, v, cos, sin, filled, row, slots)
    return result


@kernel_op("seko::attention_over_time", mutates_args=())
def _attention_over_time_cuda(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, filled: Tensor, rows: Tensor, slots: int
) -> Tensor:
    batch, tokens, parts, heads, size = q.shape
    _, frames, pairs = cos.shape
    out = torch.empty((batch, tokens, heads * size), dtype=q.dtype, device=q.device)
    places = tokens // frames
    grid = ((places * heads + OVER_TIME_TILE - 1) // OVER_TIME_TILE, batch)
    wrap_triton(over_time_kernel)[grid](
        *(q, k, v, cos, sin, rows, filled, out, places),
        SCALE=size**-0.5,
        EPS=QK_EPS,
        HEADS=heads,
        SIZE=size,
        PAIRS=pairs,
        FRAMES=frames,
        SLOTS=slots,
        PARTS=parts,
        SHARED=k.shape[1] == 1,
        TILE=OVER_TIME_TILE,
        num_warps=OVER_TIME_WARPS,
    )
    return out

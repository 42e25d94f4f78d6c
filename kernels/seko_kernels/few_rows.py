"""Linear layers on few rows. One launch computes a linear layer together with the norm before the layer, or with the
residual sum behind the layer.

For up to `FEW_ROWS` rows, reading the weights takes nearly all of the time of a linear layer. A step of speech
synthesis has one or a few rows for each session. Calls with more rows use torch's matmuls, and torch's compiler fuses
the ops between these matmuls. A linear layer of few rows has two kernels: `few_rows_kernel` is the usual one, and
`warpgroup_rows_kernel` runs where the table of `tuned_rows` has it, for up to `MOST_ROWS` rows.

*Tickets* are int32 counters that tell the programs of a launch which of them finishes a shared sum last. Tickets are
zero between launches. The first op of a layer allocates the layer's tickets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from seko_kernels import few_rows_reference as reference
from seko_kernels.checks import expect, expect_dims, expect_fp8
from seko_kernels.errors import KernelsError
from seko_kernels.fused_reference import FP8
from seko_kernels.ops import FLOAT_DTYPES, kernel_op, takes_kernels
from seko_kernels.triton.few_rows import few_rows_kernel
from seko_kernels.triton.warpgroup_rows import warpgroup_rows_kernel
from seko_kernels.tuned_rows import ADDED, GATED, MOST_ROWS, NORM, Product, RowTiles, measured_tiles

FEW_ROWS = 32
TICKETS = 512


class Weight(NamedTuple):
    """A weight matrix, in the activations' dtype or in e4m3 with scales.

    Parameters
    ----------
    values : Tensor
        The matrix, ``[out, in]``, of the activations' dtype or e4m3.
    scale : Tensor or None
        Scale of each row of the matrix, ``[out, 1]`` float32 from `matmul.quantise_weight`, if the matrix is e4m3;
        otherwise None.
    """

    values: Tensor
    scale: Tensor | None = None


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: Weight) -> tuple[Tensor, Tensor]:
    """Return ``rms_norm(x) @ weight.T``, and the tickets (zeroed counters) that the layer's later ops need.

    Parameters
    ----------
    x : Tensor
        Activations, ``[..., in]`` bfloat16 or float32, contiguous.
    norm_weight : Tensor
        Weight of the norm, ``[in]`` of x's dtype.
    eps : float
        Epsilon of the norm. The kernel rounds once, after multiplying by `norm_weight`; torch's ops also round before
        multiplying by `norm_weight`.
    weight : Weight
        Weight matrix of the linear layer, ``[out, in]``.

    Returns
    -------
    y : Tensor
        Result of the linear layer, ``[..., out]`` of x's dtype.
    tickets : Tensor
        Counters for the layer's later ops, ``[512]`` int32 zeros.

    Raises
    ------
    KernelsError
        If a tensor has another shape, dtype or layout than documented here, or lies on another device; if the
        weight is e4m3 and the GPU has no fp8 numbers.
    """
    tickets = torch.zeros if _tiles(x, weight, NORM) is None else torch.empty
    counters = tickets(TICKETS, dtype=torch.int32, device=x.device)
    return _linear(x, weight, counters, norm=(norm_weight, eps), makes_tickets=True), counters


def norm_gated_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, tickets: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, ``[..., out]``. Gate and up are the two halves of ``rms_norm(x) @ weight.T``, where
    the weight is ``[2 * out, in]``.

    Parameters and errors are those of `norm_linear` and `linear_added`.
    """
    return _linear(x, weight, tickets, norm=(norm_weight, eps), gated=True)


def linear_added(x: Tensor, weight: Weight, hidden: Tensor, scale: float, tickets: Tensor) -> Tensor:
    """Return the residual sum ``hidden + scale * (x @ weight.T)``.

    Parameters
    ----------
    x : Tensor
        Activations, ``[..., in]`` bfloat16 or float32, contiguous.
    weight : Weight
        Weight matrix of the linear layer, ``[out, in]``.
    hidden : Tensor
        The residual, ``[..., out]`` of x's dtype, contiguous.
    scale : float
        Factor of the product ``x @ weight.T`` before the product is added to `hidden`.
    tickets : Tensor
        Counters that the layer's `norm_linear` returned. All counters are zero again after the launch.

    Raises
    ------
    KernelsError
        If a tensor has another shape, dtype or layout than documented here, or lies on another device; if the
        weight is e4m3 and the GPU has no fp8 numbers.
    """
    expect("hidden", hidden, (*x.shape[:-1], weight.values.shape[0]), x.dtype)
    return _linear(x, weight, tickets, hidden=hidden, branch_scale=scale)


def _tiles(x: Tensor, weight: Weight, form: str) -> RowTiles | None:
    """Return the tile sizes with which a linear layer runs in a kernel of Seko's, or None if it runs in torch's
    ops."""
    if not takes_kernels(x, weight.values):
        return None
    outer, inner = weight.values.shape
    outer, rows = outer // 2 if form == GATED else outer, x.numel() // x.shape[-1]
    if rows <= MOST_ROWS and x.dtype == torch.bfloat16:
        major, minor = torch.cuda.get_device_capability(x.device)
        product = Product.of(rows, outer, inner, form, fp8=weight.scale is not None)
        measured = measured_tiles(f"sm_{major}{minor}", product)
        if measured is not None:
            return measured
    if rows > FEW_ROWS:
        return None
    return RowTiles.of(rows, outer, inner, gated=form == GATED, shared=form == ADDED)


def _form(normed: bool, gated: bool) -> str:
    return ADDED if not normed else GATED if gated else NORM


def _linear(
    x: Tensor,
    weight: Weight,
    tickets: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    hidden: Tensor | None = None,
    branch_scale: float = 1.0,
    gated: bool = False,
    makes_tickets: bool = False,
) -> Tensor:
    values, scale = weight
    expect_dims("weight", values, 2, "[out, in]")
    outer, inner = values.shape
    expect("x", x, (*x.shape[:-1], inner), *FLOAT_DTYPES)
    expect("weight", values, (outer, inner), x.dtype if scale is None else FP8)
    expect("tickets", tickets, (TICKETS,), torch.int32)
    if scale is not None:
        expect("weight's scale", scale, (outer, 1), torch.float32)
    if gated and outer % 2:
        raise KernelsError(f"the weight of gate and up has {outer} rows, expected an even number")
    if norm is not None:
        expect("norm_weight", norm[0], (inner,), x.dtype)
    eps = 0.0 if norm is None else norm[1]
    if _tiles(x, weight, _form(norm is not None, gated)) is not None:
        if scale is not None:
            expect_fp8(x.device)
        norm_weight = None if norm is None else norm[0]
        switches = (eps, branch_scale, gated, makes_tickets)
        fused: Tensor = _few_rows_cuda(x, norm_weight, values, scale, hidden, tickets, *switches)
        return fused
    normed = x if norm is None else reference.rms_norm(x, norm[0], eps)
    y = reference.linear(normed, values, scale)
    y = reference.gated(y) if gated else y
    return y if hidden is None else reference.added(hidden, y, branch_scale)


@kernel_op("seko::few_rows_linear", mutates_args={"tickets"})
def _few_rows_cuda(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    hidden: Tensor | None,
    tickets: Tensor,
    eps: float,
    branch_scale: float,
    gated: bool,
    makes_tickets: bool,
) -> Tensor:
    outer = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((*x.shape[:-1], outer), dtype=x.dtype, device=x.device)
    tiles = _tiles(x, Weight(weight, scale), _form(norm_weight is not None, gated))
    assert tiles is not None
    # By their names: torch reads an op's kernels off the source of its function.
    kernel = wrap_triton(warpgroup_rows_kernel) if tiles.warpgroup else wrap_triton(few_rows_kernel)
    launch_few_rows(
        kernel,
        *(x, norm_weight, weight, scale, hidden, out, tickets),
        *(eps, branch_scale, gated, makes_tickets),
        tiles,
    )
    return out


def kernel_of(tiles: RowTiles) -> Any:
    """Return the kernel for which tile sizes are made."""
    return warpgroup_rows_kernel if tiles.warpgroup else few_rows_kernel


def launch_few_rows(
    kernel: Any,
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    hidden: Tensor | None,
    out: Tensor,
    tickets: Tensor,
    eps: float,
    branch_scale: float,
    gated: bool,
    makes_tickets: bool,
    tiles: RowTiles,
) -> None:
    """Launch the kernel of the given tile sizes. `kernel` is the result of `kernel_of`, or a torch op's wrapper of this
    kernel."""
    outer, inner = out.shape[-1], x.shape[-1]
    rows = x.numel() // inner
    part = triton.cdiv(triton.cdiv(inner, tiles.splits), tiles.products) * tiles.products
    sums = out
    if tiles.splits > 1:
        sums = torch.empty((tiles.splits, rows, outer), dtype=torch.float32, device=x.device)
    channels = tiles.channels // 2 if gated and tiles.warpgroup else tiles.channels
    grid = (triton.cdiv(outer, channels), tiles.splits, triton.cdiv(rows, tiles.rows))
    if grid[0] * grid[2] > TICKETS and tiles.splits > 1:
        raise KernelsError(f"{grid[0] * grid[2]} tiles of outputs share sums, expected {TICKETS} at most")
    kernel[grid](
        x,
        x
        if norm_weight is None
        else norm_weight,  # a tensor must stand there; the switches say that it is not read
        weight,
        x if scale is None else scale,
        x if hidden is None else hidden,
        out,
        sums,
        tickets,
        rows,
        EPS=eps,
        BRANCH_SCALE=branch_scale,
        K=inner,
        N=outer,
        NORM=norm_weight is not None,
        GATED=gated,
        ADD=hidden is not None,
        SCALED=scale is not None,
        NEW_TICKETS=TICKETS if makes_tickets else 0,
        SPLITS=tiles.splits,
        PART=part,
        BM=tiles.rows,
        BN=tiles.channels,
        BK=tiles.products,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        **({} if tiles.warpgroup else {"SLICES": tiles.warps}),
    )

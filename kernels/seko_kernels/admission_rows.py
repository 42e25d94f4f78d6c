"""Admission of the kernels of linear layers on few rows: a check that tile sizes give right results on this GPU, before
they enter the table of `tuned_rows`."""

from __future__ import annotations

import torch
from torch import Tensor

from seko_kernels import few_rows_reference as reference
from seko_kernels.admission import RUNS, SAME_DTYPE_FACTOR, Admission
from seko_kernels.admission_cases import distance
from seko_kernels.few_rows import TICKETS, kernel_of, launch_few_rows
from seko_kernels.matmul import quantise_weight
from seko_kernels.tuned_rows import ADDED, GATED, NORM, Product, RowTiles

EPS, BRANCH_SCALE = 1e-5, 0.25


def admit_rows(tiles: RowTiles, product: Product, rows: int, device: str = "cuda") -> Admission:
    """Run a kernel with the given tile sizes; compare its error with the error of the same layer in torch's bfloat16
    ops.

    Parameters
    ----------
    tiles : RowTiles
        Tile sizes to check.
    product : Product
        The linear layer.
    rows : int
        Number of rows of activations; its class must be ``product.rows``.
    device : str
        Torch device of the tensors.

    Returns
    -------
    Admission
        Error and bound over all rows, with a refusal if the kernel does not compile or run, gives different results in
        two runs, leaves a counter that is not zero, returns NaN, or exceeds its error bound.
    """
    x, norm, weight, scale, hidden = _inputs(product, rows, device)
    normed, gated = product.form != ADDED, product.form == GATED
    nan = float("nan")
    outs = []
    try:
        for _ in range(RUNS):
            tickets = torch.zeros(TICKETS, dtype=torch.int32, device=device)
            outs.append(torch.full_like(hidden, nan))
            launch_few_rows(
                kernel_of(tiles),
                *(x, norm if normed else None, weight, scale, None if normed else hidden, outs[-1], tickets),
                *(EPS, BRANCH_SCALE, gated, product.form == NORM, tiles),
            )
            if bool(tickets.any()):
                return Admission(nan, nan, "a counter is not zero after the launch")
    except Exception as fault:  # any exception of a compiler is the result of the check
        lines = str(fault).strip().splitlines() or [""]
        return Admission(nan, nan, f"{type(fault).__name__}: {lines[0][:200]}")
    if any(not torch.equal(outs[0], out) for out in outs[1:]):  # also true if a result is NaN
        return Admission(nan, nan, "two runs differ, or a result is NaN")
    exact = (weight.double() if scale is None else weight.float().double() * scale.double()), hidden.double()
    truth = _by_torch(product, x.double(), norm.double(), *exact)
    own = (weight if scale is None else (weight.float() * scale).to(x.dtype)), hidden
    error = distance(outs[0], truth)
    bound = SAME_DTYPE_FACTOR * distance(_by_torch(product, x, norm, *own), truth)
    refusal = "" if error <= bound else f"error {error:.4g} is above {bound:.4g}"
    return Admission(error, bound, refusal)


def _inputs(product: Product, rows: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Return x, the norm's weight, the weight and its scales, and the residual."""
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    channels, products = product.channels, product.products
    x = normal(rows, products) * torch.exp(normal(rows, 1))  # rows of different norms
    norm = 1 + 0.3 * normal(products)
    weight = normal(channels * (1 + (product.form == GATED)), products) / products**0.5
    values, scale = (weight.bfloat16(), None) if product.weights == "bf16" else quantise_weight(weight)
    there = scale if scale is None else scale.to(device)
    x, norm, hidden = (tensor.to(device, torch.bfloat16) for tensor in (x, norm, normal(rows, channels)))
    return x, norm, values.to(device), there, hidden


def _by_torch(product: Product, x: Tensor, norm: Tensor, weight: Tensor, hidden: Tensor) -> Tensor:
    """Return the layer's result, computed in the dtype of the arguments."""
    if product.form == ADDED:
        return hidden + BRANCH_SCALE * (x @ weight.T)
    normed = reference.rms_norm(x, norm, EPS) if x.dtype == torch.bfloat16 else _rms_norm(x, norm)
    y = normed @ weight.T
    return reference.gated(y) if product.form == GATED else y


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight

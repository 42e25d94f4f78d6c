"""Admission of tile sizes of linear layers on few rows to the table of `tuned_rows`."""

from __future__ import annotations

import torch
from torch import Tensor

from scripts.kernel_admission.judge import Admission, Prepared, judge
from seko_kernels import few_rows_reference as reference
from seko_kernels.few_rows import TICKETS, kernel_of, launch_few_rows
from seko_kernels.matmul import quantise_weight
from seko_kernels.tuned_rows import ADDED, GATED, NORM, Product, RowTiles

EPS, BRANCH_SCALE = 1e-5, 0.25


def admit_rows(tiles: RowTiles, product: Product, rows: int, device: str = "cuda") -> Admission:
    """Run a kernel with the given tile sizes, and `judge` it; the same layer in torch's bfloat16 ops sets the bound.

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
    """
    x, norm, weight, scale, hidden = _inputs(product, rows, device)
    normed, gated = product.form != ADDED, product.form == GATED

    def run() -> Tensor:
        tickets = torch.zeros(TICKETS, dtype=torch.int32, device=device)
        out = torch.full_like(hidden, float("nan"))
        launch_few_rows(
            kernel_of(tiles),
            *(x, norm if normed else None, weight, scale, None if normed else hidden, out, tickets),
            *(EPS, BRANCH_SCALE, gated, product.form == NORM, tiles),
        )
        if bool(tickets.any()):
            raise RuntimeError("a counter is not zero after the launch")
        return out

    exact = (weight.double() if scale is None else weight.float().double() * scale.double()), hidden.double()
    truth = _by_torch(product, x.double(), norm.double(), *exact)
    own = (weight if scale is None else (weight.float() * scale).to(x.dtype)), hidden
    return judge([Prepared(f"{rows} rows", run, truth, _by_torch(product, x, norm, *own))])


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

"""Every variant of the row kernel that a block uses, its inputs, and the public op that names it. No assertions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seko_kernels.rows import (
    Modulation,
    gated_residual,
    gated_residual_norm,
    gated_residual_norm_modulate,
    quantise_rows,
    residual_norm_modulate,
)
from seko_kernels.triton.row_norm import (
    ADD_GATED,
    ADD_NONE,
    ADD_PLAIN,
    NORM_AFFINE,
    NORM_MODULATED,
    NORM_NONE,
)

EPS = 1e-6


@dataclass(frozen=True)
class Variant:
    """One setting of the kernel's switches, by the op that asks for it."""

    op: str
    fp8: bool
    add: int = ADD_NONE
    norm: int = NORM_NONE
    gate_at: int = -1
    shift_at: int = -1
    scale_at: int = -1
    exact: bool = False  # nothing but a quantisation: bytes are equal

    @property
    def spans_layers(self) -> bool:
        """Whether its gate is of the layer before."""
        return self.gate_at >= 0 and self.scale_at >= 0

    def __str__(self) -> str:
        return f"{self.op}{'-fp8' if self.fp8 else ''}"


VARIANTS = [
    variant
    for fp8 in (False, True)
    for variant in (
        Variant(
            "gated_residual_norm_modulate", fp8, ADD_GATED, NORM_MODULATED, gate_at=5, shift_at=0, scale_at=1
        ),
        Variant("gated_residual_norm", fp8, ADD_GATED, NORM_AFFINE, gate_at=2),
        Variant("residual_norm_modulate", fp8, ADD_PLAIN, NORM_MODULATED, shift_at=3, scale_at=4),
        Variant("quantise_rows", True, exact=True)
        if fp8
        else Variant("gated_residual", False, ADD_GATED, gate_at=5),
    )
]


@dataclass(frozen=True)
class RowInputs:
    """What the row ops take."""

    x: Tensor
    y: Tensor
    before: Tensor  # the gate's layer's, where that is another one
    modulation: Modulation
    weight: Tensor
    bias: Tensor

    def cuda(self) -> RowInputs:
        return RowInputs(
            self.x.cuda(),
            self.y.cuda(),
            self.before.cuda(),
            Modulation(self.modulation.frames.cuda(), self.modulation.layer.cuda()),
            self.weight.cuda(),
            self.bias.cuda(),
        )


def row_inputs(batch: int, frames: int, frame_tokens: int, width: int, dtype: torch.dtype) -> RowInputs:
    """Rows of different size and mean, an outlier channel, a row of zeros."""
    torch.manual_seed(width)
    shape = (batch, frames * frame_tokens, width)
    x = torch.randn(shape) * torch.exp(torch.randn(shape[:2])[..., None]) + torch.randn(shape[:2])[..., None]
    x[..., 3] *= 50
    x[0, 1] = 0
    y = torch.randn(shape)
    y[0, 1] = 0
    modulation = Modulation(torch.randn(batch, frames, 6, width) * 0.3, torch.randn(6, width) * 0.3)
    weight, bias, before = 1 + 0.2 * torch.randn(width), torch.randn(width), torch.randn(6, width) * 0.3
    return RowInputs(x.to(dtype), y.to(dtype), before, modulation, weight, bias)


def run(variant: Variant, inputs: RowInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Call the variant's op; returns hidden (or x, or empty), values and scales (or empty)."""
    i, none = inputs, inputs.x.new_empty(0)
    if variant.op == "gated_residual_norm_modulate":
        at = (variant.shift_at, variant.scale_at, EPS)
        hidden, rows = gated_residual_norm_modulate(
            i.x, i.y, i.before, variant.gate_at, i.modulation, *at, fp8=variant.fp8
        )
        return hidden, *rows
    if variant.op == "gated_residual_norm":
        hidden, rows = gated_residual_norm(
            i.x, i.y, i.modulation, variant.gate_at, i.weight, i.bias, EPS, fp8=variant.fp8
        )
        return hidden, *rows
    if variant.op == "residual_norm_modulate":
        hidden, rows = residual_norm_modulate(
            i.x, i.y, i.modulation, variant.shift_at, variant.scale_at, EPS, fp8=variant.fp8
        )
        return hidden, *rows
    if variant.op == "gated_residual":
        return gated_residual(i.x, i.y, i.modulation, variant.gate_at), none, none
    return none, *quantise_rows(i.x)


def reference_of(variant: Variant, inputs: RowInputs) -> tuple[Tensor, Tensor, Tensor]:
    """What the op gives on a CPU."""
    return run(variant, inputs)

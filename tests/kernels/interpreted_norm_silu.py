"""RMS norm with SiLU in Triton's interpreter; run by test_interpreted.py in a process of its own."""

from __future__ import annotations

import math

import pytest
import torch

from seko_kernels.norm_silu import part_of
from seko_kernels.triton.norm_silu import norm_silu_kernel
from tests.support.tolerances import FUSED, relative_error


@pytest.mark.parametrize("channels", [8, 24, 64, 96, 192, 384])
@pytest.mark.parametrize("pixels", [1, 7, 70])
def test_the_kernel_is_norm_and_silu(channels: int, pixels: int) -> None:
    """In float64 by its definition; pixels of zeros, of large and of small numbers."""
    generator = torch.Generator().manual_seed(channels + pixels)
    x = torch.randn(pixels, channels, generator=generator)
    x[1:2] = 0.0
    x[2:3] *= 1e4
    x[3:4] *= 1e-4
    gamma = torch.randn(channels, generator=generator)
    part = part_of(channels)
    out = torch.full_like(x, torch.nan)
    rows = 16
    norm_silu_kernel[(-(-pixels // rows),)](
        x, gamma, out, pixels, ROOT=math.sqrt(channels), WIDTH=channels, PART=part, ROWS=rows
    )
    wide = x.double()
    normed = wide / wide.norm(dim=1, keepdim=True).clamp(min=1e-12) * math.sqrt(channels) * gamma.double()
    assert relative_error(out, normed / (1 + torch.exp(-normed))) <= FUSED[torch.float32]
    assert torch.equal(out[1:2], x[1:2])

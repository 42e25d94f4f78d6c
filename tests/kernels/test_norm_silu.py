"""norm_silu: the reference, refusals, what compiles, one launch; on a GPU the kernel beside the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from seko_kernels import conv_reference
from seko_kernels.errors import KernelsError
from seko_kernels.norm_silu import NUMBERS, WARPS, norm_silu, part_of
from seko_kernels.triton.norm_silu import norm_silu_kernel
from tests.kernels.captured import run_and_replay
from tests.support.tolerances import FUSED, relative_error


def frames(channels: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Frames, a pixel of which is zeros, and gains."""
    generator = torch.Generator().manual_seed(channels)
    x = torch.randn(2, 3, 5, 7, channels, generator=generator)
    x[0, 0, 0, 0] = 0.0
    return x.to(device, dtype), torch.randn(channels, generator=generator).to(device, dtype)


def test_the_reference_is_norm_and_silu() -> None:
    x, gamma = frames(40)
    wide = x.double()
    normed = wide / wide.norm(dim=-1, keepdim=True).clamp(min=1e-12) * math.sqrt(40) * gamma.double()
    assert (
        relative_error(conv_reference.norm_silu(x, gamma), normed * normed.sigmoid()) <= FUSED[torch.float32]
    )


@pytest.mark.parametrize(
    ("channels", "part"),
    [(8, 8), (24, 8), (96, 32), (192, 64), (1024, 1024), (40, None), (6, None), (2048, None)],
)
def test_channels_that_the_kernel_takes(channels: int, part: int | None) -> None:
    assert part_of(channels) == part


def test_refusals() -> None:
    x, gamma = frames(24)
    for wrong, message in (
        ((x.half(), gamma), "x is torch.float16"),
        ((x.transpose(1, 2), gamma), "strided"),
        ((x, gamma[:8]), "gamma has shape"),
        ((x, gamma.bfloat16()), "gamma is torch.bfloat16"),
        (frames(40), "x has 40 channels"),
        (frames(2048), "x has 2048 channels, expected a power of two from 8 to 1024"),
        ((x[0], gamma), "expected \\[batch, frames"),
        ((x.to("meta"), gamma.to("meta")), "meta"),
    ):
        with pytest.raises(KernelsError, match=message):
            norm_silu(*wrong)


@pytest.mark.parametrize("channels", [96, pytest.param(384, marks=pytest.mark.slow)])
def test_the_kernel_moves_sixteen_bytes_at_a_time(
    channels: int, cross_compile: Callable[..., Any], disassembled: Callable[[Any], str]
) -> None:
    types = {**dict.fromkeys(("X", "GAMMA", "OUT"), "*bf16"), "pixels": "i32"}
    part = part_of(channels)
    assert part is not None
    constants = {"ROOT": math.sqrt(channels), "WIDTH": channels, "PART": part, "ROWS": NUMBERS // part}
    for arch in (90, 80):
        code = disassembled(cross_compile(norm_silu_kernel, types, constants, arch, WARPS))
        assert code.count("STG.E.128") == 3
        assert "LDL" not in code
        assert "STL" not in code


def test_the_op_on_a_gpu_is_one_launch(launches: list[tuple[str, list[str]]]) -> None:
    x, gamma = (
        torch.empty(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((1, 4, 6, 8, 96), (96,))
    )
    assert norm_silu(x, gamma).shape == x.shape
    assert launches == [("norm_silu_kernel", ["OUT"])]


class NormModule(torch.nn.Module):
    """The op as an engine's graph sees it."""

    def forward(self, x: Tensor, gamma: Tensor) -> Tensor:
        return norm_silu(x * 1.0, gamma) + 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [8, 24, 96, 192, 384, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_kernel_is_as_near_as_the_reference(channels: int, dtype: torch.dtype) -> None:
    """To the reference in float64; at most twice as far as one rounding."""
    x, gamma = frames(channels, "cuda", dtype)
    exact = conv_reference.norm_silu(x.double(), gamma.double())
    ours = norm_silu(x, gamma)
    rounding = relative_error(exact.to(dtype), exact) if dtype is torch.bfloat16 else FUSED[torch.float32]
    assert relative_error(ours, exact) <= 2 * rounding
    assert torch.equal(ours, norm_silu(x, gamma))


@pytest.mark.gpu
def test_gpu_package_is_the_op(package_runner: Callable[..., Any]) -> None:
    arguments = frames(96, "cuda", torch.bfloat16)
    engine = package_runner(NormModule(), arguments)
    (direct,), (captured,) = run_and_replay(engine, arguments)
    assert torch.equal(direct, norm_silu(*arguments))
    assert torch.equal(direct, captured)

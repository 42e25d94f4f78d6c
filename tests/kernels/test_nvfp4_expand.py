"""Expanding NVFP4 values: the reference is exact for every code and scale; a GPU gives its bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from seko_kernels import kv_expand
from seko_kernels.formats import E2M1_VALUES, FP4, NVFP4_GLOBAL_EXPONENTS
from seko_kernels.triton.nvfp4_expand import EXPAND_TILE, EXPAND_WARPS, nvfp4_expand_kernel
from tests.kernels.captured import run_and_replay

DTYPES = (torch.bfloat16, torch.float32)
SIGNATURE = {
    "CODES": "*u8",
    "SCALES": "*u8",
    "GLOBAL_SCALE": "*fp32",
    "OUT": "*bf16",
    "blocks": "i32",
    "row_tokens": "i32",
    "left_out": "i32",
}


def bits(x: Tensor) -> Tensor:
    """The bits of a float tensor, so that minus zero differs from zero and NaN equals itself."""
    return x.cpu().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def random_cache(tokens: int, heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of every value, scale bytes 0..0x7E, global scales of different size."""
    torch.manual_seed(tokens)
    codes = torch.randint(0, 256, (tokens, heads, head_dim // 2), dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (tokens, heads, head_dim // 16), dtype=torch.uint8)
    return codes, scales, 2.0 ** torch.randint(-20, 20, (heads,)).float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exponent", [0, -7, *NVFP4_GLOBAL_EXPONENTS])
def test_every_code_and_scale_expands_exactly(dtype: torch.dtype, exponent: int) -> None:
    """All 16 codes times all 127 scale bytes, against a product in float64."""
    scales = torch.arange(127, dtype=torch.uint8).view(127, 1, 1)
    codes = (torch.arange(8) * 0x22 + 0x10).to(torch.uint8).expand(127, 1, 8).contiguous()  # 0, 1, … 15
    g = torch.tensor([2.0**exponent])
    grid = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float64)
    expected = scales.view(torch.float8_e4m3fn).double() * g.double() * grid
    expanded = kv_expand(FP4, codes, scales, g, dtype)
    assert expanded.dtype == dtype
    assert torch.equal(expanded.double(), expected)
    assert torch.equal(bits(expanded), bits(expected.to(dtype)))


def test_kernel_compiles_everywhere_without_spills(
    cross_compile: Callable[..., Any], sass_of: Callable[[Any], list[str]], compile_archs: tuple[int, ...]
) -> None:
    constants = {"HEADS": 12, "HEAD_BLOCKS": 8, "TILE": EXPAND_TILE}
    for arch in compile_archs:
        for apart in (True, False) if arch == 90 else (True,):
            more = {"APART": apart}
            compiled = cross_compile(
                nvfp4_expand_kernel, SIGNATURE, constants | more, arch, EXPAND_WARPS, ("blocks",)
            )
            if arch == 90:
                opcodes = sass_of(compiled)
                assert "LDG" in opcodes
                assert not {"LDL", "STL"} & set(opcodes), "the kernel spills to local memory"


class ExpandModule(torch.nn.Module):
    """Both dtypes of a window, as an engine's graph sees them."""

    def forward(self, codes: Tensor, scales: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return kv_expand(FP4, codes, scales, g, DTYPES[0]), kv_expand(FP4, codes, scales, g, DTYPES[1])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(32760, 12, 128), (130, 3, 48), (1, 1, 16)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpu_gives_the_bits_of_the_reference(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    args = random_cache(*shape)
    expanded = kv_expand(FP4, *(t.cuda() for t in args), dtype)
    assert torch.equal(bits(expanded), bits(kv_expand(FP4, *args, dtype)))


@pytest.mark.gpu
def test_gpu_package_and_its_capture_give_the_bits_of_the_reference(
    package_runner: Callable[..., Any],
) -> None:
    args = random_cache(2730, 12, 128)
    expected = ExpandModule()(*args)
    on_device = [t.cuda() for t in args]
    engine = package_runner(ExpandModule(), tuple(on_device))
    direct, captured = run_and_replay(engine, on_device)
    for ours, replayed, truth in zip(direct, captured, expected, strict=True):
        assert torch.equal(bits(ours), bits(truth))
        assert torch.equal(bits(replayed), bits(truth))

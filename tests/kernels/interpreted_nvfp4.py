"""Tests of `nvfp4_expand_kernel` in Triton's interpreter; run by test_interpreted.py, a process apart."""

from __future__ import annotations

import pytest
import torch

from seko_kernels.reference import nvfp4_decode
from seko_kernels.triton.nvfp4_expand import EXPAND_TILE, nvfp4_expand_kernel

SHAPES = [
    (1, 1, 16),
    (7, 2, 48),
    (7, 3, 128),
    (130, 3, 64),
]  # no count of scale blocks is a multiple of a tile
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("left_out", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_expand_kernel_gives_the_bits_of_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, left_out: int
) -> None:
    tokens, heads, head_dim = shape
    row_tokens = 1 if left_out else tokens
    window = tokens + tokens // row_tokens * left_out
    torch.manual_seed(tokens)
    codes = torch.randint(0, 256, (tokens, heads, head_dim // 2), dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (tokens, heads, head_dim // 16), dtype=torch.uint8)
    g = 2.0 ** torch.randint(-20, 20, (heads,)).float()
    out = torch.full((window + 1, heads, head_dim), float("nan"), dtype=dtype)
    blocks = tokens * heads * head_dim // 16
    nvfp4_expand_kernel[(-(-blocks // EXPAND_TILE),)](
        codes,
        scales,
        g,
        out,
        blocks,
        row_tokens,
        left_out,
        HEADS=heads,
        HEAD_BLOCKS=head_dim // 16,
        APART=left_out > 0,
        TILE=EXPAND_TILE,
    )
    integer = torch.int16 if dtype == torch.bfloat16 else torch.int32
    rows = nvfp4_decode(codes, scales, g, dtype).unflatten(0, (-1, row_tokens))
    expanded = out[:window].unflatten(0, (-1, left_out + row_tokens))
    assert torch.equal(expanded[:, left_out:].contiguous().view(integer), rows.view(integer))
    assert bool(expanded[:, :left_out].isnan().all())  # what is stored apart is left free
    assert bool(out[window:].isnan().all())  # nothing is written past the end

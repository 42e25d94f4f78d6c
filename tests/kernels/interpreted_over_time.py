"""Attention over time in Triton's interpreter; run by test_interpreted.py in a process of its own."""

from __future__ import annotations

import pytest
import torch

from seko_kernels.over_time import QK_EPS, over_time_reference
from seko_kernels.triton.over_time import OVER_TIME_TILE, over_time_kernel
from tests.support.tolerances import FUSED, relative_error


@pytest.mark.parametrize(
    ("places", "heads", "parts", "shared"), [(5, 2, 3, False), (7, 3, 1, True), (1, 1, 1, False)]
)
@pytest.mark.parametrize("filled", [(3, 6), (6, 4)])
def test_the_kernel_is_the_reference(
    places: int, heads: int, parts: int, shared: bool, filled: tuple[int, int]
) -> None:
    """Two rows of a call on other rows of the caches, whose slots that are not filled hold NaN."""
    frames, slots, size, pairs, rows = 3, 6, 16, 2, torch.tensor([2, 0])
    generator = torch.Generator().manual_seed(places)
    q = torch.randn(2, frames * places, parts, heads, size, generator=generator)
    shape = (3 * slots, 1 if shared else places, heads, size)
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    angles = torch.rand(2, frames, pairs, generator=generator)
    tables = angles.cos(), angles.sin()
    for batch, count in enumerate(filled):
        for cache in (k, v):
            cache[rows[batch] * slots + count : (rows[batch] + 1) * slots] = torch.nan
    counts = torch.tensor(filled)
    out = torch.full((2, frames * places, heads * size), torch.nan)
    grid = (-(-places * heads // OVER_TIME_TILE), 2)
    over_time_kernel[grid](
        *(q, k, v, *tables, rows, counts, out, places),
        SCALE=size**-0.5,
        EPS=QK_EPS,
        HEADS=heads,
        SIZE=size,
        PAIRS=pairs,
        FRAMES=frames,
        SLOTS=slots,
        PARTS=parts,
        SHARED=shared,
        TILE=OVER_TIME_TILE,
    )
    wanted = over_time_reference(q, k, v, *tables, counts, rows, slots)
    assert relative_error(out, wanted) <= FUSED[torch.float32]

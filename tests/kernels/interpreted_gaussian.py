"""The noise kernel in Triton's interpreter; run by test_interpreted.py in a process of its own."""

from __future__ import annotations

import pytest
import torch

from seko_export.families.layers.sampler import gaussian
from seko_kernels.triton.gaussian import GAUSSIAN_TILE, gaussian_kernel
from tests.support.tolerances import BOX_MULLER

SEEDS = torch.tensor([0, -7, 2**61 + 12345])
FRAMES = torch.tensor([[0, 1], [5, 2**33 + 6], [300, 301]])


@pytest.mark.parametrize("latent_shape", [(16, 8, 12), (3, 5, 7), (1, 1, 1)], ids=str)
def test_the_kernel_draws_the_samplers_noise(latent_shape: tuple[int, int, int]) -> None:
    draw = torch.tensor([3])
    expected = gaussian(SEEDS, FRAMES, draw, latent_shape)
    noise = torch.full_like(expected, torch.nan)
    channels, rows, columns = latent_shape
    tiles = -(-channels * rows * columns // (4 * GAUSSIAN_TILE))
    gaussian_kernel[(tiles, FRAMES.numel())](
        SEEDS,
        FRAMES,
        draw,
        noise,
        FRAMES.shape[1],
        CHANNELS=channels,
        PIXELS=rows * columns,
        TILE=GAUSSIAN_TILE,
    )
    # The words behind them are exact; logarithm, cosine and sine are numpy's here and torch's there.
    assert (noise - expected).abs().max() <= BOX_MULLER[torch.float32]

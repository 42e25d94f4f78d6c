"""The convolution in Triton's interpreter; run by test_interpreted.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seko_kernels.causal_conv import doubled_filters, launch_causal_conv, packed_filters
from seko_kernels.triton.causal_conv import causal_conv_kernel
from seko_kernels.tuned_conv import ConvTiles
from tests.support.tolerances import FUSED, relative_error
from tests.truth.naive_conv import doubled_frames, naive_causal_conv, some_convolution

ONE_PART = ConvTiles(4, 16, 32, 0, 16, stages=2, warps=4)
TWO_PARTS = ConvTiles(8, 8, 32, 16, 32, stages=2, warps=4)
FILTERS_FIRST = ConvTiles(4, 16, 64, 64, 16, stages=2, warps=4, filters_first=True)
ROW = ConvTiles(1, 64, 16, 0, 16, stages=2, warps=4)
ALL = (3, 3, 3)
# Rows, frames, height, width, channels, filters.
CASES = [
    (1, 3, 5, 18, 20, 40, ALL, TWO_PARTS),  # no side a multiple of a tile
    (2, 1, 4, 16, 16, 3, ALL, ONE_PART),  # fewer frames than a tap reaches back, few filters
    (2, 2, 9, 7, 24, 48, ALL, TWO_PARTS),  # whole filters in two parts, rows of the batch
    (1, 3, 1, 70, 36, 17, (3, 1, 1), ROW),
    (1, 2, 6, 5, 12, 20, (1, 3, 3), ONE_PART),
    (1, 2, 6, 5, 48, 96, (1, 1, 1), TWO_PARTS),
    (1, 2, 3, 18, 20, 140, ALL, FILTERS_FIRST),
    (2, 1, 4, 16, 16, 96, ALL, FILTERS_FIRST),
]
SMALL = (1, 2, 5, 10, 20, 40)


def run(
    inputs: dict[str, Tensor], tiles: ConvTiles, *, cached: bool, added: bool, programs: int = 3
) -> Tensor:
    """What the kernel writes over memory of NaN."""
    x, residual = inputs["x"], inputs["residual"]
    out = torch.full_like(residual, torch.nan)
    launch_causal_conv(
        *(
            causal_conv_kernel,
            x,
            inputs["earlier"] if cached else None,
            packed_filters(inputs["weight"]),
            None,
        ),
        *(inputs["bias"], residual if added else None, out, tiles, programs),
    )
    return out


# A first call, without frames before it and with nothing to add: with pixels first, and with filters first.
@pytest.mark.parametrize(
    ("case", "later"), [*((case, True) for case in CASES), (CASES[0], False), (CASES[-1], False)], ids=str
)
def test_the_kernel_is_the_convolution(case: tuple, later: bool) -> None:
    *sides, taps, tiles = case
    inputs = some_convolution(*sides, taps)
    cached = later and taps[0] > 1
    out = run(inputs, tiles, cached=cached, added=later)
    truth = naive_causal_conv(
        inputs["x"],
        inputs["earlier"] if cached else None,
        inputs["weight"],
        inputs["bias"],
        inputs["residual"] if later else None,
    )
    assert relative_error(out, truth) <= FUSED[torch.float32]


@pytest.mark.parametrize(
    ("tiles", "sides"),
    [
        (ONE_PART, (2, 1, 8, 16, 16, 40)),
        (TWO_PARTS, (1, 2, 5, 9, 20, 40)),
        (FILTERS_FIRST, (2, 1, 4, 16, 16, 130)),
        (ROW, (1, 1, 3, 9, 20, 20)),
    ],
    ids=str,
)
def test_the_kernel_doubles_pixels_first(tiles: ConvTiles, sides: tuple[int, ...]) -> None:
    inputs = some_convolution(*sides, (1, 3, 3))
    truth = naive_causal_conv(doubled_frames(inputs["x"]), None, inputs["weight"], inputs["bias"])
    out = torch.full(truth.shape, torch.nan)
    filters = doubled_filters(inputs["weight"].squeeze(2))
    launch_causal_conv(
        *(causal_conv_kernel, inputs["x"], None, filters, None, inputs["bias"], None),
        *(out, tiles, 7, True),
    )
    assert relative_error(out, truth) <= FUSED[torch.float32]


def test_results_do_not_depend_on_the_number_of_programs() -> None:
    inputs = some_convolution(*SMALL, ALL)
    every = [run(inputs, TWO_PARTS, cached=True, added=True, programs=n) for n in (1, 3, 1000)]
    assert all(torch.equal(every[0], out) for out in every[1:])


def test_frames_before_the_first_are_not_read() -> None:
    inputs = some_convolution(*SMALL, ALL)
    zeros = {**inputs, "earlier": torch.zeros_like(inputs["earlier"])}
    started = run(inputs, TWO_PARTS, cached=False, added=False)
    assert torch.equal(started, run(zeros, TWO_PARTS, cached=True, added=False))


@pytest.mark.parametrize("tiles", [TWO_PARTS, FILTERS_FIRST], ids=["pixels first", "filters first"])
def test_sums_of_scaled_filters(tiles: ConvTiles) -> None:
    """As of e4m3 numbers, which the interpreter does not multiply."""
    inputs = some_convolution(*SMALL, ALL)
    scale = torch.linspace(0.5, 2.0, 40)
    weight = packed_filters(inputs["weight"] / scale.view(-1, 1, 1, 1, 1))
    out = torch.full_like(inputs["residual"], torch.nan)
    launch_causal_conv(
        *(causal_conv_kernel, inputs["x"], inputs["earlier"], weight, scale, inputs["bias"], None),
        *(out, tiles, 2),
    )
    truth = naive_causal_conv(inputs["x"], inputs["earlier"], inputs["weight"], inputs["bias"])
    assert relative_error(out, truth) <= FUSED[torch.float32]

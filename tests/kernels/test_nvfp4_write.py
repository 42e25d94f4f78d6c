"""Writing NVFP4: the reference is the nearest code by brute force. test_kv_ops.py has what holds for every format."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seko_kernels import kv_write
from seko_kernels.formats import E2M1_VALUES, FP4
from seko_kernels.reference import e4m3_decode, nvfp4_decode, nvfp4_encode, nvfp4_global_scale

# A block with 6 * 2**k in it gets the scale 2**k exactly: then these lie on midpoints.
TIES = st.sampled_from([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.0])
SIGNS = st.sampled_from([-1.0, 1.0])
NUMBERS = st.floats(-(2.0**40), 2.0**40, width=32, allow_subnormal=False)
BLOCKS = st.one_of(
    st.lists(NUMBERS, min_size=16, max_size=16),
    st.tuples(st.lists(st.tuples(TIES, SIGNS), min_size=15, max_size=15), st.integers(-20, 20)).map(
        lambda drawn: [6.0 * 2.0 ** drawn[1]] + [tie * sign * 2.0 ** drawn[1] for tie, sign in drawn[0]]
    ),
)


def written(
    x: Tensor, index: Tensor, cache_tokens: int, global_scale: Tensor, mean: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and scales of a cache filled with 0xEE after one write of `x`."""
    _, heads, head_dim = x.shape
    codes = torch.full((cache_tokens, heads, head_dim // 2), 0xEE, dtype=torch.uint8, device=x.device)
    scales = torch.full((cache_tokens, heads, head_dim // 16), 0xEE, dtype=torch.uint8, device=x.device)
    kv_write(FP4, x, index, codes, scales, global_scale, mean)
    return codes, scales


def keys_with_outliers(tokens: int, heads: int, head_dim: int) -> Tensor:
    """Float32 ``[tokens, heads, head_dim]``: heads of different size, outlier channels, a block of zeros."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, heads, head_dim) * torch.exp(torch.randn(heads, 1) * 2)
    x[:, :, 5] *= 30
    x[tokens // 2, :, :16] = 0
    return x


@pytest.mark.shows("fp4-kv")
@given(block=BLOCKS, exponent=st.integers(-30, 30))
def test_every_code_is_the_nearest_on_the_better_scale(block: list[float], exponent: int) -> None:
    """Both scales worked out in fractions: codes nearest, ties to even; the smaller error wins, ties to the top 6."""
    x = torch.tensor(block, dtype=torch.float32)
    g = torch.tensor([2.0**exponent])
    codes, scales = nvfp4_encode(x.view(1, 1, 16), g)
    tried = {top: on_scale(x, g, top) for top in (6, 4)}
    chosen = 4 if tried[4][2] < tried[6][2] else 6
    byte, nibbles, *_ = tried[chosen]
    assert scales.item() == byte
    assert [codes.flatten()[i // 2].item() >> (4 * (i % 2)) & 15 for i in range(16)] == nibbles
    # What was compared in whole parts is the better one in truth too, but for half a part of each number.
    power = block_power(x)
    loss = {
        top: sum((abs(Fraction(n)) / power - abs(v)) ** 2 for n, v in zip(x.tolist(), trial[3], strict=True))
        for top, trial in tried.items()
    }
    most = max(2, *(abs(v) for result in tried.values() for v in result[3]))
    half = Fraction(1, 2048)
    assert loss[chosen] <= min(loss.values()) + 2 * 16 * (2 * most * half + half * half)


def on_scale(x: Tensor, g: Tensor, top: int) -> tuple[int, list[int], int, list[Fraction]]:
    """Scale byte, nibbles, error in whole parts, and values over the block's power of two, of 16 numbers."""
    # The scale byte, by torch's own fp8 cast.
    wanted = x.abs().amax() * torch.tensor(1 / top, dtype=torch.float32) / g
    scale = wanted.clamp(max=448.0).to(torch.float8_e4m3fn)
    step, power = Fraction(scale.float().item()) * Fraction(g.item()), block_power(x)
    nibbles, values, error = [], [], 0
    for number in x.tolist():
        distance = [abs(abs(Fraction(number)) - Fraction(value) * step) for value in E2M1_VALUES]
        nearest = [code for code, far in enumerate(distance) if far == min(distance)]
        code = nearest[0] if len(nearest) == 1 else next(code for code in nearest if code % 2 == 0)
        nibbles.append((code | (8 if number < 0 else 0)) if step else 0)
        values.append(Fraction(E2M1_VALUES[code]) * step / power)
        error += (round(abs(Fraction(number)) / power * 1024) - round(values[-1] * 1024)) ** 2
    return scale.view(torch.uint8).item(), nibbles, error, values


def block_power(x: Tensor) -> Fraction:
    """The power of two at or below the largest magnitude; 1 for a block of zeros."""
    amax = x.abs().amax().item()
    return Fraction(2) ** (math.frexp(amax)[1] - 1) if amax else Fraction(1)


def test_four_wins_where_the_gap_below_six_would_hurt() -> None:
    """Numbers at 5/6 of the largest fall into e2m1's gap between 4 and 6; on top 4 they lie by the code of 3."""
    near_top = torch.tensor([6.0, *[5.0] * 15]).view(1, 1, 16)
    codes, scales = nvfp4_encode(near_top, torch.ones(1))
    assert e4m3_decode(scales).item() == 1.5  # 6 / 4
    assert codes.flatten()[0].item() == 6 | 5 << 4  # 4 * 1.5 and 3 * 1.5
    on_grid = torch.tensor([6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.0] * 2).view(1, 1, 16)
    assert e4m3_decode(nvfp4_encode(on_grid, torch.ones(1))[1]).item() == 1.0  # no error on top 6


def test_zeros_get_scale_zero_and_code_zero() -> None:
    x = torch.zeros(1, 2, 32)
    x[0, 1, 16:] = -1e-30  # far below the smallest scale: dropped with its sign
    codes, scales = nvfp4_encode(x, torch.ones(2))
    assert not codes.any()
    assert not scales.any()
    assert not nvfp4_decode(codes, scales, torch.ones(2), torch.float32).any()


@pytest.mark.parametrize("constant", [6.0, -6.0, 6 * 1.125, 0.75, -3 * 2.0**-7])
def test_a_constant_block_comes_back_exactly(constant: float) -> None:
    """Where constant/6 is an e4m3 number, the block's top is exact."""
    x = torch.full((1, 1, 16), constant)
    codes, scales = nvfp4_encode(x, torch.ones(1))
    assert torch.equal(nvfp4_decode(codes, scales, torch.ones(1), torch.float32), x)


def test_an_outlier_saturates_and_leaves_other_blocks_alone() -> None:
    x = torch.ones(1, 1, 32)
    x[0, 0, 3] = -1e30
    codes, scales = nvfp4_encode(x, torch.ones(1))
    assert scales[0, 0, 0].item() == 0x7E
    assert codes[0, 0, 1].item() >> 4 == 15  # channel 3: -6
    assert e4m3_decode(scales[0, 0, 1:]).item() == e4m3_decode(
        nvfp4_encode(torch.ones(1, 1, 16), torch.ones(1))[1]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4680, 12, 128), (130, 3, 48), (1, 1, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("centred", [False, True])
def test_gpu_gives_the_bytes_of_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, centred: bool
) -> None:
    x = keys_with_outliers(*shape).to(dtype)
    g = nvfp4_global_scale(x.float().abs().amax((0, 2)) / 9)  # some blocks saturate
    mean = x.float().mean(0) if centred else None
    cache_tokens = shape[0] * 7
    index = torch.randperm(cache_tokens)[: shape[0]]
    expected_codes, expected_scales = written(x, index, cache_tokens, g, mean)
    codes, scales = written(
        x.cuda(), index.cuda(), cache_tokens, g.cuda(), None if mean is None else mean.cuda()
    )
    assert torch.equal(scales.cpu(), expected_scales)
    assert torch.equal(codes.cpu(), expected_codes)

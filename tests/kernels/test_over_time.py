"""Attention over time: torch's attention at each position; the kernel compiles; on a GPU within rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from seko_kernels.errors import KernelsError
from seko_kernels.over_time import attention_over_time, normed_and_turned
from seko_kernels.triton.over_time import OVER_TIME_TILE, OVER_TIME_WARPS, over_time_kernel
from tests.support.tolerances import STEP, relative_error

FRAMES, SLOTS, HEADS, SIZE, PAIRS, ROWS = 3, 6, 2, 64, 4, 3


def inputs(places: int, shared: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q, k, v, cos, sin, filled and rows of two batch indices."""
    generator = torch.Generator().manual_seed(places)
    q = torch.randn(2, FRAMES * places, 3, HEADS, SIZE, generator=generator).to(dtype)
    shape = (ROWS * SLOTS, 1 if shared else places, HEADS, SIZE)
    k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    angles = torch.rand(2, FRAMES, PAIRS, generator=generator)
    return q, k, v, angles.cos(), angles.sin(), torch.tensor([3, 6]), torch.tensor([2, 0])


@pytest.mark.parametrize("shared", [False, True])
def test_it_is_torchs_attention_at_each_position(shared: bool) -> None:
    places = 5
    q, k, v, cos, sin, filled, rows = inputs(places, shared)
    got = attention_over_time(q, k, v, cos, sin, filled, rows, SLOTS).unflatten(1, (FRAMES, places))
    turned = normed_and_turned(q[:, :, 0].unflatten(1, (FRAMES, places)), cos[:, :, None], sin[:, :, None])
    length = turned.double().square().mean(-1)
    assert torch.allclose(length, torch.ones_like(length), atol=1e-5)
    assert not torch.equal(turned[..., : 2 * PAIRS], turned[..., :1].expand(*turned.shape[:-1], 2 * PAIRS))
    for batch, row in enumerate(rows.tolist()):
        own = slice(row * SLOTS, row * SLOTS + int(filled[batch]))
        for place in range(places):
            there = 0 if shared else place
            keys, values = (x[own, there].transpose(0, 1) for x in (k, v))  # [A, N, D]
            of_place = turned[batch, :, place].transpose(0, 1)  # [A, F, D]
            wanted = F.scaled_dot_product_attention(of_place, keys, values).transpose(0, 1).flatten(1)
            assert relative_error(got[batch, :, place], wanted) <= STEP[torch.float32]


def test_only_the_first_channels_turn_and_by_their_angles() -> None:
    x = torch.ones(1, 1, 1, HEADS, SIZE)
    angle = torch.tensor([0.5, 0.25, 0.0, 1.0])
    turned = normed_and_turned(x, angle.cos().view(1, 1, 1, -1), angle.sin().view(1, 1, 1, -1))[0, 0, 0, 0]
    pairs = torch.stack((angle.cos() - angle.sin(), angle.sin() + angle.cos()), -1).flatten()
    assert torch.allclose(turned[: 2 * PAIRS], pairs, atol=1e-5)
    assert torch.allclose(turned[2 * PAIRS :], torch.ones(SIZE - 2 * PAIRS), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({1: lambda x: x[:, :4]}, "k has shape"),
        ({2: lambda x: x.double()}, "v is"),
        ({3: lambda x: x[..., :2].contiguous()}, "sin has shape"),
        ({5: lambda x: x.int()}, "filled is"),
        ({0: lambda x: x[:, :-1]}, "whole frames"),
    ],
)
def test_wrong_tensors_are_refused(change: dict[int, Callable[[Tensor], Tensor]], words: str) -> None:
    given = list(inputs(5, shared=False))
    for at, wrong in change.items():
        given[at] = wrong(given[at])
    with pytest.raises(KernelsError, match=words):
        attention_over_time(*given, SLOTS)  # type: ignore[arg-type]


@pytest.mark.parametrize(("cached_rows", "slots"), [(1, SLOTS), (ROWS, SLOTS), (ROWS, 0)])
def test_rows_in_order_are_those_of_the_call(cached_rows: int, slots: int) -> None:
    q, k, v, *tables, _ = inputs(5, shared=False)
    cached = cached_rows * SLOTS
    with pytest.raises(KernelsError, match="whole frames and rows"):
        attention_over_time(q, k[:cached], v[:cached], *tables, None, slots)


def test_kernel_compiles_without_spills(
    cross_compile: Callable[..., Any], sass_of: Callable[[Any], list[str]], compile_archs: tuple[int, ...]
) -> None:
    """At Matrix-Game's size."""
    signature = {
        **dict.fromkeys(("Q", "K", "V"), "*bf16"),
        **dict.fromkeys(("COS", "SIN"), "*fp32"),
        **dict.fromkeys(("ROWS", "FILLED"), "*i64"),
        "OUT": "*bf16",
        "places": "i32",
    }
    constants = {"SCALE": 0.125, "EPS": 1e-6, "HEADS": 16, "SIZE": 64, "PAIRS": 4, "FRAMES": 3, "SLOTS": 6}
    constants |= {"PARTS": 3, "TILE": OVER_TIME_TILE}
    for arch in compile_archs:
        constants["SHARED"] = arch != 90
        compiled = cross_compile(over_time_kernel, signature, constants, arch, OVER_TIME_WARPS)
        if arch == 90:
            assert not {"LDL", "STL"} & set(sass_of(compiled))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shared", [False, True])
def test_gpu_is_as_near_as_the_same_dtype_torch_computation(shared: bool) -> None:
    given = inputs(880, shared, torch.bfloat16)
    truth = attention_over_time(*(x.float() for x in given[:3]), *given[3:], SLOTS)
    same_dtype = attention_over_time(*given, SLOTS)
    got = attention_over_time(*(x.cuda() for x in given), SLOTS).cpu()  # type: ignore[arg-type]
    assert relative_error(got, truth) <= 2 * relative_error(same_dtype, truth)

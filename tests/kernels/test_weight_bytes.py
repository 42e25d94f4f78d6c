"""The bytes of e4m3 that Hopper's 8-bit attention makes of logarithms of weights, by the constants in its assembly."""

from __future__ import annotations

import inspect
import re

import numpy as np
import torch
from numpy.typing import NDArray

from seko_kernels.gluon import attention_fp8

LARGEST = 8.0  # logarithm of a row's largest weight


def lines_of_the_kernel() -> tuple[np.float32, np.float32, np.float32]:
    """The slope and the place of the second line, and the least number."""
    source = inspect.getsource(attention_fp8._weights.fn)  # Gluon is not interpreted, so its numbers are read
    words = {name: int(bits, 16) for name, bits in re.findall(r"mov\.b32 (\w+), 0x(\w+);", source)}
    assert set(words) == {"quarter", "above", "least"}
    assert all(word >> 16 == word & 0xFFFF for word in words.values())
    halves = {
        name: np.uint16(word & 0xFFFF).view(np.float16).astype(np.float32) for name, word in words.items()
    }
    return halves["quarter"], halves["above"], halves["least"]


def weights_of(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
    """What the kernel multiplies values by, in place of 2 ** logarithms."""
    quarter, above, least = lines_of_the_kernel()
    with np.errstate(over="ignore"):  # minus infinity, as on the GPU
        x = (8 * logarithms + 56 - attention_fp8.MIDDLE.value + 1024).astype(np.float32).astype(np.float16)
    low = (x.astype(np.float32) * quarter + above).astype(np.float16)
    numbers = np.stack(
        [x.view(np.int16), low.view(np.int16), np.full(x.shape, least, np.float16).view(np.int16)]
    )
    read = torch.from_numpy((numbers.max(0) & 0xFF).astype(np.uint8)).view(torch.float8_e4m3fn)
    return read.double().numpy()


def octaves(low: float, high: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Logarithms from low to high, and the weights that are made of them relative to what they stand for."""
    logarithms = np.linspace(low, high, 100_000, endpoint=False)
    return logarithms, weights_of(logarithms) / 2**logarithms


def test_weights_with_an_exponent_are_a_little_coarser_than_rounded_ones() -> None:
    logarithms, ratio = octaves(-6, LARGEST)
    rounded = torch.from_numpy(2**logarithms).float().to(torch.float8_e4m3fn).double().numpy() / 2**logarithms
    assert abs(ratio.mean() - 1) < 1e-3
    assert np.sqrt(np.square(ratio - 1).mean()) < 1.25 * np.sqrt(np.square(rounded - 1).mean())


def test_weights_without_one_keep_their_size() -> None:
    for octave in (-7, -8, -9):
        assert abs(octaves(octave, octave + 1)[1].mean() - 1) < 0.2


def test_a_larger_score_has_no_smaller_weight() -> None:
    weights = weights_of(np.linspace(-40, LARGEST, 100_000))
    assert (np.diff(weights) >= 0).all()
    assert weights[0] == 0
    assert weights[-1] == 2**LARGEST


def test_a_masked_score_has_no_weight_and_an_inexact_largest_one_is_a_number() -> None:
    assert weights_of(np.array([-np.inf, -70_000.0, LARGEST + 0.7])).tolist()[:2] == [0, 0]
    assert np.isfinite(weights_of(np.array([LARGEST + 0.7]))).all()

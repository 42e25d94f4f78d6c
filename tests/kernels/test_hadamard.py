"""The Walsh-Hadamard transform and rotated int4: the matrix, by fractions; what it is for. Bytes: test_kv_ops.py."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seko_kernels.formats import HADAMARD_READ_FACTOR, HADAMARD_WRITE_FACTOR, INT4, INT4_HADAMARD
from seko_kernels.kv_reference import decode, encode, hadamard
from seko_kernels.reference import e4m3_decode
from tests.kernels.test_kv_ops import rounded


@st.composite
def rows_of_128(draw: st.DrawFn) -> Tensor:
    """A row of whole numbers below 2**16 times a power of two: sums of 128 of them are exact in float32."""
    numbers = draw(st.lists(st.integers(-(2**16), 2**16), min_size=128, max_size=128))
    return torch.tensor(numbers).float() * 2.0 ** draw(st.integers(-30, 30))


@given(rows_of_128())
@settings(max_examples=50)
def test_the_transform_is_sylvesters_matrix_and_its_own_inverse(row: Tensor) -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < 128:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    mixed = hadamard(row)
    assert torch.equal(mixed.double(), matrix @ row.double())
    # Twice is 128 times the row: what the two factors of a write and a read undo.
    assert torch.equal((matrix @ mixed.double()) * HADAMARD_WRITE_FACTOR * HADAMARD_READ_FACTOR, row.double())


@given(data=st.data(), exponent=st.integers(-20, 20))
@settings(max_examples=60)
def test_rotated_codes_are_those_of_int4_in_one_group_of_what_is_mixed(
    data: st.DataObject, exponent: int
) -> None:
    """Codes, step and zero point by fractions on the mixed numbers, which are exact here."""
    row, g = data.draw(rows_of_128()), torch.tensor([2.0**exponent])
    codes, scales = encode(INT4_HADAMARD, row.view(1, 1, 128), g)
    assert scales is not None
    assert scales.shape == (1, 1, 2)
    step = Fraction(e4m3_decode(scales[0, 0, :1]).item()) * Fraction(g.item())
    mixed = [Fraction(number) / 16 for number in hadamard(row).tolist()]
    zero = rounded(-min(Fraction(0), *mixed), step, 15)
    assert int(scales[0, 0, 1]) == zero
    unpacked = [int(byte) >> shift & 15 for byte in codes.flatten() for shift in (0, 4)]
    assert unpacked == [min(max(rounded(n, step, 15) + zero, 0), 15) for n in mixed]


def test_one_step_for_all_channels_stands_an_outlier_that_unmixed_channels_do_not() -> None:
    """What the rotation is for: of a head with one large channel the others are not rounded away."""
    torch.manual_seed(0)
    x = torch.randn(50, 2, 128)
    x[:, :, 7] *= 30
    g = torch.full((2,), 2.0**-2)
    plain = replace(INT4, group=128)
    errors = []
    for form in (INT4_HADAMARD, plain):
        read = decode(form, *encode(form, x, g), g, torch.float32)
        rest = torch.arange(128) != 7
        errors.append(float((read - x)[..., rest].norm() / x[..., rest].norm()))
    assert errors[0] < 0.5 * errors[1]

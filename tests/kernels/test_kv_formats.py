"""The KV formats as a model and a manifest see them: tensors, bytes, lookup, calibration, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seko_kernels import ExactKv, KvFormat, Nvfp4Kv, kv_format
from seko_kernels.errors import KvCalibrationError, KvSchemeError, KvShapeError
from seko_kernels.formats import NVFP4_CALIBRATED_SCALE, NVFP4_GLOBAL_EXPONENTS

FORMATS = (ExactKv(3, 48, torch.float32), ExactKv(3, 48, torch.bfloat16), Nvfp4Kv(3, 48))
TOKENS = 11
INDEX = torch.tensor([7, 0, 10, 3])


def caches_of(form: KvFormat, byte: int) -> dict[str, torch.Tensor]:
    """Caches of one layer, every byte `byte`."""
    caches = {}
    for tensor in form.cache_tensors:
        raw = torch.full(
            (TOKENS, math.prod(tensor.token_shape) * tensor.dtype.itemsize), byte, dtype=torch.uint8
        )
        caches[tensor.name] = raw.view(tensor.dtype).reshape(TOKENS, *tensor.token_shape)
    return caches


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_pool_bytes_are_what_the_tensors_take(form: KvFormat) -> None:
    layer = sum(cache.numel() * cache.element_size() for cache in caches_of(form, 0).values())
    assert form.pool_bytes(5, TOKENS) == 5 * layer
    assert form.pool_bytes(1, TOKENS) * 8 == form.bits_per_number * TOKENS * 2 * 3 * 48


def test_fp4_takes_a_3_56th_of_bf16() -> None:
    exact, fp4 = ExactKv(12, 128, torch.bfloat16), Nvfp4Kv(12, 128)
    assert exact.pool_bytes(30, 32760) / fp4.pool_bytes(30, 32760) == 16 / 4.5


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_write_touches_its_places_only_and_window_reads_them(form: KvFormat) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if form.name == "bf16" else torch.float32
    k, v = torch.randn(2, 4, 3, 48).to(dtype)
    scales = form.calibrate(k.float().abs().amax((0, 2)), v.float().abs().amax((0, 2)))
    assert {name: (tuple(t.shape), t.dtype) for name, t in scales.items()} == {
        tensor.name: (tensor.shape, tensor.dtype) for tensor in form.scale_tensors
    }
    caches = caches_of(form, 0x31)
    form.write(caches, scales, INDEX, k, v)
    others = [place for place in range(TOKENS) if place not in INDEX.tolist()]
    for name, untouched in caches_of(form, 0x31).items():
        assert torch.equal(caches[name][others], untouched[others])
    k_window, v_window = form.window(caches, scales, dtype)
    assert k_window.shape == v_window.shape == (TOKENS, 3, 48)
    if isinstance(form, ExactKv):
        assert torch.equal(k_window[INDEX], k)
        assert torch.equal(v_window[INDEX], v)
        assert k_window.data_ptr() == caches["k"].data_ptr()  # no copy


def test_a_pool_of_zero_bytes_is_a_window_of_zeros() -> None:
    form = Nvfp4Kv(3, 48)
    k, v = form.window(caches_of(form, 0), form.calibrate(torch.ones(3), torch.ones(3)), torch.bfloat16)
    assert not k.any()
    assert not v.any()


@given(st.floats(min_value=0, max_value=2.0**120, width=32, allow_subnormal=False))
def test_global_scale_is_the_smallest_power_of_two_with_headroom(amax: float) -> None:
    scales = Nvfp4Kv(1, 16).calibrate(torch.tensor([amax]), torch.tensor([0.0]))
    g = scales["k_global_scale"].item()
    mantissa, exponent = math.frexp(g)
    assert mantissa == 0.5
    assert scales["v_global_scale"].item() == 1.0
    if amax == 0:
        assert g == 1.0
        return
    lowest, highest = NVFP4_GLOBAL_EXPONENTS
    if exponent - 1 < highest:
        assert amax <= 6 * g * NVFP4_CALIBRATED_SCALE
    if exponent - 1 > lowest:
        assert amax > 6 * (g / 2) * NVFP4_CALIBRATED_SCALE


@pytest.mark.parametrize("steps", [-1, 0, 1])
def test_global_scale_at_its_boundary(steps: int) -> None:
    amax = torch.tensor([336.0])
    amax = amax.nextafter(torch.tensor([math.copysign(1e9, steps)])) if steps else amax
    expected = 2.0 if steps > 0 else 1.0
    assert Nvfp4Kv(1, 16).calibrate(amax, amax)["k_global_scale"].item() == expected


@pytest.mark.parametrize("amax", [float("nan"), float("inf"), -1.0])
def test_calibration_refuses_what_is_no_magnitude(amax: float) -> None:
    with pytest.raises(KvCalibrationError, match="finite"):
        Nvfp4Kv(1, 16).calibrate(torch.tensor([amax]), torch.tensor([1.0]))


def test_calibration_refuses_another_number_of_heads_and_another_dtype() -> None:
    with pytest.raises(KvShapeError, match="one a head"):
        Nvfp4Kv(2, 16).calibrate(torch.ones(3), torch.ones(2))
    with pytest.raises(KvCalibrationError, match="float32"):
        Nvfp4Kv(2, 16).calibrate(torch.ones(2, dtype=torch.bfloat16), torch.ones(2))


def test_lookup_gives_the_format_of_that_name() -> None:
    assert kv_format("bf16", 2, 32, torch.bfloat16) == ExactKv(2, 32, torch.bfloat16)
    assert kv_format("fp32", 2, 32, torch.float32) == ExactKv(2, 32, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        assert kv_format("fp4", 2, 32, dtype) == Nvfp4Kv(2, 32)
    for form in FORMATS:
        dtype = torch.bfloat16 if form.name == "bf16" else torch.float32
        assert kv_format(form.name, 3, 48, dtype) == form


def test_lookup_refuses_and_says_what_there_is() -> None:
    with pytest.raises(KvSchemeError, match="'int3'; there are bf16, fp32, fp4"):
        kv_format("int3", 2, 32, torch.float32)
    with pytest.raises(KvSchemeError, match="computes in"):
        kv_format("bf16", 2, 32, torch.float32)
    with pytest.raises(KvShapeError, match="multiple of 16"):
        kv_format("fp4", 2, 40, torch.float32)
    with pytest.raises(KvShapeError, match="at least 1"):
        ExactKv(0, 32, torch.float32)
    with pytest.raises(KvSchemeError, match="without a copy"):
        ExactKv(2, 32, torch.float32).window({}, {}, torch.bfloat16)

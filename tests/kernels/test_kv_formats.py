"""The KV formats as a model and a manifest see them: tensors, bytes, lookup, calibration, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seko_kernels import ChannelStatistics, ExactKv, KvFormat, Nvfp4Kv, kv_format
from seko_kernels.errors import KvCalibrationError, KvSchemeError, KvShapeError
from seko_kernels.formats import NVFP4_CALIBRATED_SCALE, NVFP4_GLOBAL_EXPONENTS

FORMATS = (ExactKv(3, 48, torch.float32), ExactKv(3, 48, torch.bfloat16), Nvfp4Kv(3, 48))
TOKENS = 11
INDEX = torch.tensor([7, 0, 10, 3])
# One slot of 11 tokens, nothing turned.
STILL = {
    "slot_rotary": torch.tensor([1.0, 0.0]).expand(1, 8, 2).contiguous(),
    "patch_rotary": torch.tensor([1.0, 0.0]).expand(TOKENS, 16, 2).contiguous(),
}


def seen(x: torch.Tensor) -> ChannelStatistics:
    """Statistics of tokens [T, H, D]."""
    x = x.float()
    return ChannelStatistics(x.amin(0), x.amax(0), x.mean(0))


def reaching(amax: torch.Tensor, head_dim: int = 16) -> ChannelStatistics:
    """Statistics of heads whose channels reach as far up as down: amax [H]."""
    highest = amax[:, None].expand(-1, head_dim).contiguous()
    return ChannelStatistics(-highest, highest, torch.zeros_like(highest))


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
    scales = form.calibrate(seen(k), seen(v))
    assert {name: (tuple(t.shape), t.dtype) for name, t in scales.items()} == {
        tensor.name: (tensor.shape, tensor.dtype) for tensor in form.scale_tensors
    }
    caches = caches_of(form, 0x31)
    form.write(caches, scales, INDEX, k, v)
    others = [place for place in range(TOKENS) if place not in INDEX.tolist()]
    for name, untouched in caches_of(form, 0x31).items():
        assert torch.equal(caches[name][others], untouched[others])
    k_window, v_window = form.window(caches, scales, STILL if form.keys_before_rope else {}, dtype)
    assert k_window.shape == v_window.shape == (TOKENS, 3, 48)
    if isinstance(form, ExactKv):
        assert torch.equal(k_window[INDEX], k)
        assert torch.equal(v_window[INDEX], v)
        assert k_window.data_ptr() == caches["k"].data_ptr()  # no copy


def test_a_pool_of_zero_bytes_is_a_window_of_means_and_zeros() -> None:
    form = Nvfp4Kv(3, 48)
    known = ChannelStatistics(*(torch.full((3, 48), number) for number in (0.0, 1.0, 0.25)))
    k, v = form.window(caches_of(form, 0), form.calibrate(known, known), STILL, torch.bfloat16)
    assert bool((k == 0.25).all())
    assert not v.any()


def test_keys_of_one_large_mean_are_kept_more_finely_than_without() -> None:
    """What all tokens share costs no bits: the error is that of what is left."""
    torch.manual_seed(0)
    form = Nvfp4Kv(3, 48)
    rest = torch.randn(TOKENS, 3, 48) * 0.1
    k = rest + torch.randn(3, 48) * 10
    errors = []
    for stored in (k, rest):
        caches = caches_of(form, 0)
        scales = form.calibrate(seen(stored), seen(stored))
        form.write(caches, scales, torch.arange(TOKENS), stored, stored)
        read, _ = form.window(caches, scales, STILL, torch.float32)
        errors.append(float((read - stored).norm() / rest.norm()))
    # A twentieth of what is left, or less, is FP4's error; a sum near 10 keeps 12 bits of it in a read.
    assert errors[1] < 0.1
    assert errors[0] < errors[1] + 10 * 2.0**-12 / 0.1


@given(st.floats(min_value=0, max_value=2.0**120, width=32, allow_subnormal=False))
def test_global_scale_is_the_smallest_power_of_two_with_headroom(amax: float) -> None:
    scales = Nvfp4Kv(1, 16).calibrate(reaching(torch.tensor([amax])), reaching(torch.tensor([0.0])))
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
    known = reaching(amax)
    assert Nvfp4Kv(1, 16).calibrate(known, known)["k_global_scale"].item() == expected


def test_the_global_scale_of_keys_is_that_of_what_is_left_without_the_mean() -> None:
    ones = torch.ones(1, 16)
    known = ChannelStatistics(1000 * ones, 1001 * ones, 1000.5 * ones)
    scales = Nvfp4Kv(1, 16).calibrate(known, known)
    assert scales["k_global_scale"].item() == 2.0**-9  # of 0.5: 0.5 / 336 <= 2**-9
    assert scales["v_global_scale"].item() == 4.0  # of 1001
    assert torch.equal(scales["k_mean"], 1000.5 * ones)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_statistics_must_be_finite(number: float) -> None:
    with pytest.raises(KvCalibrationError, match="finite"):
        reaching(torch.tensor([number]))


def test_statistics_of_another_form_are_refused() -> None:
    ones = torch.ones(2, 16)
    with pytest.raises(KvCalibrationError, match="above its highest"):
        ChannelStatistics(ones, -ones, ones)
    with pytest.raises(KvCalibrationError, match="float32"):
        ChannelStatistics(ones, ones, ones.bfloat16())
    with pytest.raises(KvShapeError, match="expected one"):
        ChannelStatistics(ones, ones, ones[:1])
    other = reaching(torch.ones(3))
    for form in (Nvfp4Kv(2, 16), ExactKv(2, 16, torch.float32)):
        with pytest.raises(KvShapeError, match=r"expected \(2, 16\)"):
            form.calibrate(other, other)


def test_lookup_gives_the_format_of_that_name() -> None:
    assert kv_format("bf16", 2, 32, torch.bfloat16) == ExactKv(2, 32, torch.bfloat16)
    assert kv_format("fp32", 2, 32, torch.float32) == ExactKv(2, 32, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        assert kv_format("fp4", 2, 32, dtype) == Nvfp4Kv(2, 32)
    assert Nvfp4Kv(2, 32).name == "fp4-before-rope"  # of these bytes; a manifest's "fp4" has other ones
    for form in FORMATS:
        if isinstance(form, ExactKv):
            assert kv_format(form.name, 3, 48, form.dtype) == form


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
        ExactKv(2, 32, torch.float32).window({}, {}, {}, torch.bfloat16)

"""The KV formats as a model and a manifest see them: tensors, bytes, lookup, calibration, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seko_kernels import (
    ChannelStatistics,
    ExactKv,
    KvFormat,
    KvScheme,
    LossyKv,
    RowLayout,
    kv_format,
)
from seko_kernels.errors import KernelsError, KvSchemeError
from seko_kernels.formats import FP4, NUMBER_FORMATS, NVFP4_CALIBRATED_SCALE, NVFP4_GLOBAL_EXPONENTS
from seko_kernels.lossy_kv import _ring_index

HEADS, HEAD_DIM = 3, 384  # what every format can cut, and no power of two
NAMES = (
    "fp32",
    *NUMBER_FORMATS,
    "int8-fp4",
    "fp32-int4",
    "fp8-fp32",
    "int4-sink",
    "fp4-fp32-sink",
    "int4-hadamard-int4",
    "fp8-int4-hadamard-sink",
)
LAYOUT = RowLayout(sink_tokens=2, ring_tokens=9, chunk_tokens=4)
FORMATS = (
    ExactKv(HEADS, HEAD_DIM, torch.bfloat16),
    *(kv_format(name, HEADS, HEAD_DIM, torch.float32, LAYOUT) for name in NAMES),
)
TOKENS = LAYOUT.cache_tokens
INDEX = torch.tensor([7, 10, 2, 3])
# Slots of one token, nothing turned.
STILL = {
    "slot_rotary": torch.tensor([1.0, 0.0]).expand(TOKENS, 8, 2).contiguous(),
    "patch_rotary": torch.tensor([1.0, 0.0]).expand(1, HEAD_DIM // 2 - 8, 2).contiguous(),
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
        tokens = {"cache": TOKENS, "sink": LAYOUT.sink_tokens, "ring": LAYOUT.ring_tokens}[tensor.part]
        raw = torch.full((tokens, tensor.token_bytes), byte, dtype=torch.uint8)
        caches[tensor.name] = raw.view(tensor.dtype).reshape(tokens, *tensor.token_shape)
    return caches


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_bits_a_number_are_what_the_tensors_take(form: KvFormat) -> None:
    layer = sum(cache.nbytes for cache in caches_of(form, 0).values())
    assert layer * 8 == pytest.approx(form.bits_per_number * TOKENS * 2 * HEADS * HEAD_DIM)


def test_fp4_takes_a_3_56th_of_bf16() -> None:
    formats = (ExactKv(12, 128, torch.bfloat16), LossyKv(12, 128))
    exact, fp4 = (sum(tensor.token_bytes for tensor in form.cache_tensors) for form in formats)
    assert exact / fp4 == 16 / 4.5


@pytest.mark.shows("kv-formats")
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_write_touches_its_places_only_and_window_reads_them(form: KvFormat) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if form.name == "bf16" else torch.float32
    k, v = torch.randn(2, 4, HEADS, HEAD_DIM).to(dtype)
    scales = form.calibrate(seen(k), seen(v))
    assert {name: (tuple(t.shape), t.dtype) for name, t in scales.items()} == {
        tensor.name: (tensor.shape, tensor.dtype) for tensor in form.scale_tensors
    }
    caches = caches_of(form, 0x31)
    form.write(caches, scales, INDEX, k, v)
    first = {tensor.name: LAYOUT.sink_tokens * (tensor.part == "ring") for tensor in form.cache_tensors}
    for name, untouched in caches_of(form, 0x31).items():
        written = {place - first[name] for place in INDEX.tolist()}
        others = [place for place in range(len(untouched)) if place not in written]
        assert torch.equal(caches[name][others].view(torch.uint8), untouched[others].view(torch.uint8))
    k_window, v_window = form.expand(caches, scales, STILL if form.keys_before_rope else {}, dtype)
    assert k_window.shape == v_window.shape == (TOKENS, HEADS, HEAD_DIM)
    for side, window, x, exact in zip("kv", (k_window, v_window), (k, v), form.exact, strict=True):
        if exact:
            assert torch.equal(window[INDEX], x)
            assert window.data_ptr() == caches[side].data_ptr()  # no copy
        else:
            assert 0.001 < float((window[INDEX] - x).norm() / x.norm()) < 0.12


@pytest.mark.parametrize("scheme", NUMBER_FORMATS)
def test_a_pool_of_zero_bytes_is_a_window_of_means_and_zeros(scheme: str) -> None:
    form = kv_format(scheme, HEADS, HEAD_DIM, torch.bfloat16)
    known = ChannelStatistics(*(torch.full((HEADS, HEAD_DIM), number) for number in (0.0, 1.0, 0.25)))
    k, v = form.expand(caches_of(form, 0), form.calibrate(known, known), STILL, torch.bfloat16)
    assert bool((k == 0.25).all())
    assert not v.any()


@pytest.mark.parametrize("scheme", ["fp4", "int4", "int4-hadamard"])
def test_keys_of_one_large_mean_are_kept_more_finely_than_without(scheme: str) -> None:
    """What all tokens share costs no bits: the error is that of what is left."""
    torch.manual_seed(0)
    form = kv_format(scheme, HEADS, HEAD_DIM, torch.float32)
    rest = torch.randn(TOKENS, HEADS, HEAD_DIM) * 0.1
    k = rest + torch.randn(HEADS, HEAD_DIM) * 10
    errors = []
    for stored in (k, rest):
        caches = caches_of(form, 0)
        scales = form.calibrate(seen(stored), seen(stored))
        form.write(caches, scales, torch.arange(TOKENS), stored, stored)
        read, _ = form.expand(caches, scales, STILL, torch.float32)
        errors.append(float((read - stored).norm() / rest.norm()))
    # A twentieth of what is left, or less, is FP4's error; a sum near 10 keeps 12 bits of it in a read.
    assert errors[1] < 0.1
    assert errors[0] < errors[1] + 10 * 2.0**-12 / 0.1


@given(st.floats(min_value=0, max_value=2.0**120, width=32, allow_subnormal=False))
def test_global_scale_is_the_smallest_power_of_two_with_headroom(amax: float) -> None:
    scales = LossyKv(1, 16).calibrate(reaching(torch.tensor([amax])), reaching(torch.tensor([0.0])))
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
    assert LossyKv(1, 16).calibrate(known, known)["k_global_scale"].item() == expected


def test_the_global_scale_of_keys_is_that_of_what_is_left_without_the_mean() -> None:
    ones = torch.ones(1, 16)
    known = ChannelStatistics(1000 * ones, 1001 * ones, 1000.5 * ones)
    scales = LossyKv(1, 16).calibrate(known, known)
    assert scales["k_global_scale"].item() == 2.0**-9  # of 0.5: 0.5 / 336 <= 2**-9
    assert scales["v_global_scale"].item() == 4.0  # of 1001
    assert torch.equal(scales["k_mean"], 1000.5 * ones)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_statistics_must_be_finite(number: float) -> None:
    with pytest.raises(KernelsError, match="finite"):
        reaching(torch.tensor([number]))


def test_statistics_of_another_form_are_refused() -> None:
    ones = torch.ones(2, 16)
    with pytest.raises(KernelsError, match="above its highest"):
        ChannelStatistics(ones, -ones, ones)
    with pytest.raises(KernelsError, match="float32"):
        ChannelStatistics(ones, ones, ones.bfloat16())
    with pytest.raises(KernelsError, match="expected one"):
        ChannelStatistics(ones, ones, ones[:1])
    other = reaching(torch.ones(3))
    for form in (LossyKv(2, 16), ExactKv(2, 16, torch.float32)):
        with pytest.raises(KernelsError, match=r"expected \(2, 16\)"):
            form.calibrate(other, other)


def test_lookup_gives_the_format_of_that_name() -> None:
    assert kv_format("bf16", 2, 32, torch.bfloat16) == ExactKv(2, 32, torch.bfloat16)
    assert kv_format("fp32", 2, 32, torch.float32) == ExactKv(2, 32, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        assert kv_format("fp4", 2, 32, dtype) == LossyKv(2, 32)
    assert LossyKv(2, 32).name == "fp4-before-rope"  # of these bytes; a manifest's "fp4" has other ones
    names = [form.name for form in FORMATS[1:]]
    assert names == [
        *("fp32", *(f"{name}-before-rope" for name in NUMBER_FORMATS)),
        *("int8-before-rope.fp4", "exact.int4", "fp8-before-rope.exact"),
        *("int4-before-rope.exact-sink", "fp4-before-rope.exact.exact-sink"),
        "int4-hadamard-before-rope.int4",
        "fp8-before-rope.int4-hadamard.exact-sink",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_scheme_is_spelled_as_it_is_read(name: str) -> None:
    assert str(KvScheme.parse(name)) == name
    assert str(KvScheme.parse("int8-int8")) == "int8"


def test_a_sink_that_is_stored_as_it_is_comes_back_as_it_was() -> None:
    """Two rows; written by a chunk of sink and ring, and kept when later chunks write none of it."""
    layout = RowLayout(sink_tokens=3, ring_tokens=6, chunk_tokens=4)
    form = kv_format("fp4-sink", 2, 32, torch.float32, layout)
    sizes = {"sink": 6, "ring": 12}
    caches = {t.name: torch.zeros((sizes[t.part], *t.token_shape), dtype=t.dtype) for t in form.cache_tensors}
    torch.manual_seed(0)
    x = torch.randn(2, 9, 2, 32)  # of each row, by place
    scales = form.calibrate(seen(x.flatten(0, 1)), seen(x.flatten(0, 1)))
    still = {
        "slot_rotary": torch.tensor([1.0, 0.0]).expand(18, 8, 2).contiguous(),
        "patch_rotary": torch.tensor([1.0, 0.0]).expand(1, 8, 2).contiguous(),
    }
    for chunks in (([0, 1, 2, 3], [2, 3, 4, 5]), ([4, 5, 6, 7], [0, 1, 2, 3]), ([8, 3, 4, 5], [6, 7, 8, 3])):
        index = torch.tensor([[place + 9 * row for place in chunk] for row, chunk in enumerate(chunks)])
        numbers = torch.stack([x[row][chunk] for row, chunk in enumerate(chunks)]).flatten(0, 1)
        form.write(caches, scales, index.flatten(), numbers, numbers)
    k, v = (window.unflatten(0, (2, 9)) for window in form.expand(caches, scales, still, torch.float32))
    assert torch.equal(v[:, :3], x[:, :3])
    assert torch.equal(k[:, :3], x[:, :3])
    assert 0.01 < float((v - x)[:, 3:].norm() / x[:, 3:].norm()) < 0.2


@given(st.integers(0, 4), st.integers(1, 4), st.integers(0, 4), st.integers(0, 40))
def test_codes_beside_an_exact_sink_have_places_of_their_own(
    sink: int, chunk: int, spare: int, first: int
) -> None:
    """No two tokens of a chunk share a place, and a frame of the sink takes none that holds a frame of the ring."""
    layout, ring = RowLayout(2 * sink, 2 * (chunk + spare), 2 * chunk), chunk + spare
    frames = range(first, first + chunk)
    slots = [frame if frame < sink else sink + (frame - sink) % ring for frame in frames]
    index = torch.tensor([2 * slot + token for slot in slots for token in (0, 1)])
    places = _ring_index(layout, index).tolist()
    assert len(set(places)) == 2 * chunk
    ring_places = {2 * ((frame - sink) % ring) + token for frame in range(sink, first) for token in (0, 1)}
    of_sink = [
        place for place, slot in zip(places, (s for s in slots for _ in (0, 1)), strict=True) if slot < sink
    ]
    assert not ring_places & set(of_sink)


def test_lookup_refuses_and_says_what_there_is() -> None:
    with pytest.raises(KvSchemeError, match=f"'int3'; there are bf16, fp32, {', '.join(NUMBER_FORMATS)}$"):
        kv_format("int3", 2, 32, torch.float32)
    with pytest.raises(KvSchemeError, match="computes in"):
        kv_format("bf16", 2, 32, torch.float32)
    with pytest.raises(KernelsError, match="multiple of 16"):
        kv_format("fp4", 2, 40, torch.float32)
    with pytest.raises(KernelsError, match="multiple of 32"):
        kv_format("fp4-int8", 2, 48, torch.float32)
    with pytest.raises(KernelsError, match="head_dim 64 is no multiple of 128"):
        kv_format("int4-hadamard", 2, 64, torch.float32)
    for text in ("hadamard", "fp4-hadamard", "int4-hadamard-hadamard", "int4-hadamard-int4-int4"):
        with pytest.raises(KvSchemeError, match="no KV scheme"):
            KvScheme.parse(text)
    with pytest.raises(KvSchemeError, match="its sink with it"):
        kv_format("fp32-sink", 2, 32, torch.float32)
    with pytest.raises(KvSchemeError, match="layout"):
        kv_format("fp4-sink", 2, 32, torch.float32)
    with pytest.raises(KvSchemeError, match="has none"):
        kv_format("fp4-sink", 2, 32, torch.float32, RowLayout(0, 4, 2))
    with pytest.raises(KvSchemeError, match="neither"):
        LossyKv(2, 32, None, None)
    with pytest.raises(KvSchemeError, match="name the model's dtype"):
        LossyKv(2, 32, FP4, None)
    with pytest.raises(KernelsError, match="at least 1"):
        ExactKv(0, 32, torch.float32)
    with pytest.raises(KvSchemeError, match="without a copy"):
        ExactKv(2, 32, torch.float32).expand({}, {}, {}, torch.bfloat16)

"""kv_write and kv_expand: the reference is the nearest number by fractions; the package and the GPU give its bytes."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seko_kernels.errors import KernelsError
from seko_kernels.formats import (
    FP4,
    FP8,
    INT4,
    INT4_HADAMARD,
    INT8,
    NUMBER_FORMATS,
    NumberFormat,
)
from seko_kernels.kv_ops import kv_expand, kv_write
from seko_kernels.kv_reference import decode, encode
from seko_kernels.kv_tables import KeyTables, SinkApart
from seko_kernels.reference import e4m3_decode, global_scale
from seko_kernels.triton.kv_expand import (
    KV_EXPAND_HEADS,
    KV_EXPAND_NUMBERS,
    KV_EXPAND_WARPS,
    kv_expand_kernel,
)
from seko_kernels.triton.kv_write import KV_WRITE_NUMBERS, KV_WRITE_WARPS, kv_write_kernel
from tests.kernels.conftest import OTHERS
from tests.kernels.interpreted_kv import keys, shape_of
from tests.support.tiers import first_is_fast

FORMS = tuple(NUMBER_FORMATS.values())
EACH = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
POINTERS = {torch.int8: "*i8", torch.uint8: "*u8"}
NUMBERS = st.floats(-(2.0**40), 2.0**40, width=32, allow_subnormal=False)
# Halves of a step, where 127 or 15 steps are the group's reach: ties.
TIES = st.tuples(
    st.lists(st.integers(-30, 30), min_size=31, max_size=31), st.integers(-20, 20), st.sampled_from([15, 127])
).map(lambda drawn: [drawn[2] * 2.0 ** drawn[1]] + [half * 0.5 * 2.0 ** drawn[1] for half in drawn[0]])
GROUPS = st.one_of(st.lists(NUMBERS, min_size=32, max_size=32), TIES)


def written(
    form: NumberFormat, x: Tensor, index: Tensor, tokens: int, g: Tensor, mean: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of a cache of bytes 0x31 after one write of `x`."""
    _, heads, head_dim = x.shape
    shapes = [form.codes_shape(heads, head_dim)] + (
        [form.scales_shape(heads, head_dim)] if form.group else []
    )
    codes, *scales = (torch.full((tokens, *s), 0x31, dtype=torch.uint8, device=x.device) for s in shapes)
    codes = codes.view(form.code_dtype)
    kv_write(form, x, index, codes, scales[0] if scales else None, g, mean)
    return codes, scales[0] if scales else None


@given(group=GROUPS, exponent=st.integers(-30, 30))
@settings(max_examples=300)
@pytest.mark.parametrize("form", [INT8, INT4], ids=lambda form: form.name)
def test_every_integer_is_the_nearest(form: NumberFormat, group: list[float], exponent: int) -> None:
    """Worked out in fractions on the step that is stored: nearest, ties to even, at most what the codes hold."""
    x, g = torch.tensor(group).view(1, 1, 32), torch.tensor([2.0**exponent])
    codes, scales = encode(form, x, g)
    assert scales is not None
    step = Fraction(e4m3_decode(scales[0, 0, :1]).item()) * Fraction(g.item())
    numbers = [Fraction(number) for number in x.flatten().tolist()]
    if form is INT8:
        most, zero, reach = 127, 0, max(abs(n) for n in numbers)
        found = codes.flatten().tolist()
        wanted = [rounded(n, step, most) for n in numbers]
    else:
        most, reach = 15, max(0, *numbers) - min(0, *numbers)
        zero = int(scales[0, 0, 1])
        assert zero == rounded(-min(Fraction(0), *numbers), step, most)
        found = [int(byte) >> shift & 15 for byte in codes.flatten() for shift in (0, 4)]
        wanted = [min(max(rounded(n, step, most) + zero, 0), most) for n in numbers]
    assert found == wanted
    # The step is the first e4m3 number from the wanted one on, unless that saturates or rounds to nothing.
    bits = int(scales[0, 0, 0])
    target = torch.tensor([float(reach)], dtype=torch.float32) * (1.0 / most) * g.reciprocal()
    if 0 < bits < 0x7E:
        assert e4m3_decode(torch.tensor([bits], dtype=torch.uint8)) >= target
        assert e4m3_decode(torch.tensor([bits - 1], dtype=torch.uint8)) < target
    read = decode(form, codes, scales, g, torch.float32).flatten().tolist()
    assert [Fraction(n) for n in read] == [(code - zero) * step for code in wanted]


def rounded(number: Fraction, step: Fraction, most: int) -> int:
    """The whole number nearest to number / step, ties to even, within -most..most; 0 where the step is 0."""
    return max(-most, min(most, round(number / step))) if step else 0


@given(number=NUMBERS, exponent=st.integers(-30, 30))
def test_fp8_is_torchs_own_cast(number: float, exponent: int) -> None:
    x, g = torch.full((1, 1, 16), number), torch.tensor([2.0**exponent])
    codes, scales = encode(FP8, x, g)
    assert scales is None
    wanted = (x / g).clamp(-448, 448).to(torch.float8_e4m3fn)
    read = decode(FP8, codes, None, g, torch.float32)
    assert torch.equal(read, wanted.float() * g)
    assert torch.equal(codes.abs().to(torch.uint8), wanted.view(torch.uint8) & 0x7F)


@EACH
def test_groups_of_zeros_and_of_one_number_come_back(form: NumberFormat) -> None:
    """KIVI's constant group divides 0 by 0; here it is one step times its most, or nothing."""
    x = torch.zeros(3, 1, form.unit)
    x[1], x[2] = 7.5, -7.5 * 2.0**-5
    codes, scales = encode(form, x, torch.ones(1))
    read = decode(form, codes, scales, torch.ones(1), torch.float32)
    assert not read[0].any()
    assert ((read - x).abs() <= x.abs() / 15).all()


@EACH
@given(data=st.data())
@settings(max_examples=30)
def test_a_write_touches_its_own_tokens_only(form: NumberFormat, data: st.DataObject) -> None:
    """Token by token in any order is the same as at once: no code or step hangs on another token."""
    tokens = data.draw(st.integers(1, 5))
    torch.manual_seed(data.draw(st.integers(0, 9)))
    head_dim = shape_of(form, 64)
    x, g = torch.randn(tokens, 3, head_dim) * 4, torch.full((3,), 2.0**-4)
    index = torch.randperm(9)[:tokens]
    once = written(form, x, index, 9, g)
    shapes = [(9, *form.codes_shape(3, head_dim))]
    shapes += [(9, *form.scales_shape(3, head_dim))] if form.group else []
    parts = [torch.full(shape, 0x31, dtype=torch.uint8) for shape in shapes]
    parts[0] = parts[0].view(form.code_dtype)
    for token in data.draw(st.permutations(range(tokens))):
        before = [part.clone() for part in parts]
        here = slice(token, token + 1)
        scales = parts[1] if form.group else None
        kv_write(form, x[here], index[here], parts[0], scales, g)
        others = [place for place in range(9) if place != index[token]]
        assert all(torch.equal(old[others], new[others]) for old, new in zip(before, parts, strict=True))
    for found, wanted in zip(parts, once, strict=False):
        assert torch.equal(found, wanted)


@EACH
def test_the_mean_is_taken_off_first(form: NumberFormat) -> None:
    head_dim = shape_of(form, 64)
    x, mean, g = torch.randn(5, 3, head_dim), torch.randn(3, head_dim), torch.full((3,), 2.0**-4)
    for ours, expected in zip(encode(form, x, g, mean), encode(form, x - mean, g), strict=True):
        assert ours is expected or torch.equal(ours, expected)
    assert not torch.equal(encode(form, x, g, mean)[0], encode(form, x, g)[0])


@EACH
def test_each_head_is_written_and_read_by_its_own_scale(form: NumberFormat) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, shape_of(form, 64)) * torch.tensor([1.0, 2.0**7, 2.0**-9])[:, None]
    g = global_scale(x.abs().amax((0, 2)), form.top)
    assert len(g.unique()) == 3
    codes, scales = encode(form, x, g)
    read = decode(form, codes, scales, g, torch.float32)
    for head in range(3):
        alone = slice(head, head + 1)
        own_codes, own_scales = encode(form, x[:, alone], g[alone])
        assert torch.equal(codes[:, alone], own_codes)
        assert own_scales is None or (scales is not None and torch.equal(scales[:, alone], own_scales))
        assert torch.equal(read[:, alone], decode(form, own_codes, own_scales, g[alone], torch.float32))


@EACH
def test_a_window_with_the_sink_apart_has_room_for_it(form: NumberFormat) -> None:
    x, g = torch.randn(6, 2, shape_of(form, 32)), torch.full((2,), 2.0**-5)
    codes, scales = written(form, x, torch.arange(6), 6, g)
    rows = kv_expand(form, codes, scales, g, torch.float32).unflatten(0, (2, 3))
    apart = kv_expand(form, codes, scales, g, torch.float32, apart=SinkApart(3, 2)).unflatten(0, (2, 5))
    assert torch.equal(apart[:, 2:], rows)
    with pytest.raises(KernelsError, match="whole number of rows of 4"):
        kv_expand(form, codes, scales, g, torch.float32, apart=SinkApart(4, 2))


def test_wrong_tensors_are_refused() -> None:
    x, index, g = torch.zeros(2, 3, 64), torch.arange(2), torch.ones(3)
    codes, scales = torch.zeros(4, 3, 64, dtype=torch.int8), torch.zeros(4, 3, 2, dtype=torch.uint8)
    kv_write(INT8, x, index, codes, scales, g)
    for error, match, arguments in (
        (KernelsError, "heads, head_dim", (x[0], index, codes, scales, g)),
        (KernelsError, "codes of int8 have shape", (x, index, codes[:, :2], scales, g)),
        (KernelsError, "scales of int8 have shape", (x, index, codes, scales[:, :, :1], g)),
        (KernelsError, "scales of groups", (x, index, codes, None, g)),
        (KernelsError, "contiguous", (x, index, codes.mT.contiguous().mT, scales, g)),
        (KernelsError, "token_index", (x, torch.arange(3), codes, scales, g)),
        (KernelsError, "global_scale", (x, index, codes, scales, torch.ones(2))),
        (KernelsError, "multiple of 32", (torch.zeros(2, 3, 48), index, codes, scales, g)),
        (KernelsError, "mean has shape", (x, index, codes, scales, g, torch.zeros(3))),
        (KernelsError, "float16", (x.half(), index, codes, scales, g)),
        (KernelsError, "int64", (x, index.int(), codes, scales, g)),
        (KernelsError, "expected torch.int8", (x, index, codes.view(torch.uint8), scales, g)),
        (KernelsError, "one device", (x.to("meta"), index, codes, scales, g)),
    ):
        with pytest.raises(error, match=match):
            kv_write(INT8, *arguments)
    with pytest.raises(KernelsError, match="cannot expand to"):
        kv_expand(INT8, codes, scales, g, torch.float16)
    with pytest.raises(KernelsError, match="codes have shape"):
        kv_expand(INT8, codes[0], scales, g, torch.float32)


def test_bits_are_those_of_the_tensors() -> None:
    known = {"fp8": 8.0, "int8": 8.25, "int4": 4.5, "int4-hadamard": 4.125, "fp4": 4.5}
    for form in NUMBER_FORMATS.values():
        bits = known.get(form.name, form.bits)
        assert form.bits == bits
        (heads, codes), groups = form.codes_shape(3, 128), form.scales_shape(3, 128)[1] if form.group else 0
        assert (heads, (codes * form.code_dtype.itemsize + groups) * 8) == (3, bits * 128)


# On Hopper, whose instructions are looked at, each format's largest kernel, and one format's smallest; for the others
# the largest of another format each.
WRITES = [
    *((form, True, 90) for form in FORMS[::-1]),
    (FORMS[0], False, 90),
    *((form, True, arch) for form, arch in zip(FORMS, OTHERS, strict=False)),
]
EXPANDS = [
    *((form, 22, True, 90) for form in FORMS[::-1]),
    (FORMS[0], 0, False, 90),
    *((form, 22, True, arch) for form, arch in zip(FORMS, OTHERS, strict=False)),
]


@pytest.mark.parametrize(("form", "centred", "arch"), first_is_fast(WRITES), ids=str)
def test_write_kernel_compiles_everywhere_without_spills(
    form: NumberFormat,
    centred: bool,
    cross_compile: Callable[..., Any],
    sass_of: Callable[[Any], list[str]],
    arch: int,
) -> None:
    types = {"X": "*bf16", "TOKEN_INDEX": "*i64", "CODES": POINTERS[form.code_dtype], "SCALES": "*u8"}
    types |= {"GLOBAL_SCALE": "*fp32", "MEAN": "*fp32"}
    types |= dict.fromkeys(("units", "cache_tokens", "x_token_stride", "x_head_stride"), "i32")
    constants = {"HEADS": 12, "HEAD_UNITS": 128 // form.unit, "UNIT": form.unit, "BITS": form.code_bits}
    constants |= {"GROUPED": form.group > 0, "CENTRED": centred, "ROTATED": form.rotated, "E2M1": form.e2m1}
    constants |= {"TILE": KV_WRITE_NUMBERS // form.unit}
    aligned = ("units", "x_token_stride", "x_head_stride")
    compiled = cross_compile(kv_write_kernel, types, constants, arch, KV_WRITE_WARPS, aligned)
    if arch == 90:
        assert not {"LDL", "STL"} & set(sass_of(compiled)), "the kernel spills to local memory"


@pytest.mark.parametrize(("form", "slot_pairs", "apart", "arch"), first_is_fast(EXPANDS), ids=str)
def test_expand_kernel_compiles_everywhere_without_spills(
    form: NumberFormat,
    slot_pairs: int,
    apart: bool,
    cross_compile: Callable[..., Any],
    sass_of: Callable[[Any], list[str]],
    arch: int,
) -> None:
    types = {"CODES": POINTERS[form.code_dtype], "SCALES": "*u8", "GLOBAL_SCALE": "*fp32", "MEAN": "*fp32"}
    types |= {"SLOT_ROTARY": "*fp32", "PATCH_ROTARY": "*fp32", "OUT": "*bf16"}
    types |= dict.fromkeys(("parts", "frame_tokens", "row_tokens", "left_out"), "i32")
    constants = {"HEADS": 12, "HEAD_UNITS": 128 // form.unit, "UNIT": form.unit, "BITS": form.code_bits}
    constants |= {"GROUPED": form.group > 0, "SLOT_PAIRS": slot_pairs, "GROUP": KV_EXPAND_HEADS}
    constants |= {"ROTATED": form.rotated, "E2M1": form.e2m1}
    constants |= {"APART": apart, "TILE": KV_EXPAND_NUMBERS // form.unit}
    compiled = cross_compile(kv_expand_kernel, types, constants, arch, KV_EXPAND_WARPS, ("parts",))
    if arch == 90:
        assert not {"LDL", "STL"} & set(sass_of(compiled)), "the kernel spills to local memory"


class WriteAndExpand(torch.nn.Module):
    """Each format's write of a strided input with a mean, and both reads, as an engine's graph sees them."""

    def __init__(self, forms: tuple[NumberFormat, ...]) -> None:
        super().__init__()
        self.forms = forms

    def forward(self, qkv: Tensor, index: Tensor, g: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        tables, caches, read = KeyTables(*rest[:3]), rest[3:], []
        for form, codes, scales in zip(self.forms, caches[::2], caches[1::2], strict=True):
            groups = scales if form.group else None
            kv_write(form, qkv[:, 1], index, codes, groups, g, tables.mean)
            read.append(kv_expand(form, codes, groups, g, torch.float32, apart=SinkApart(11, 2)))
            read.append(kv_expand(form, codes, groups, g, qkv.dtype, tables))
        return tuple(read)


# Formats that one module can have, and a head_dim that they all cut: one that is no power of two where there is one.
BY_96 = tuple(form for form in FORMS if 96 % form.unit == 0)
WIDER = tuple(form for form in FORMS if form not in BY_96)
TOGETHER = pytest.mark.parametrize(("forms", "head_dim"), [(BY_96, 96), (WIDER, 128)], ids=str)


def module_arguments(dtype: torch.dtype, forms: tuple[NumberFormat, ...], head_dim: int) -> list[Tensor]:
    """A call's tensors: caches of bytes 0x31, three slots of 11 tokens."""
    qkv = keys(21, 6, head_dim, torch.float32).reshape(21, 3, 2, head_dim).to(dtype)
    g = global_scale(qkv[:, 1].float().abs().amax((0, 2)), 7.5)
    tables = [
        torch.stack((angle.cos(), angle.sin()), dim=-1)
        for angle in (torch.rand(3, 16) * 7, torch.rand(11, head_dim // 2 - 16) * 7)
    ]
    caches = [
        torch.full((33, *shape), 0x31, dtype=torch.uint8).view(kind)
        for form in forms
        for shape, kind in (
            (form.codes_shape(2, head_dim), form.code_dtype),
            (form.scales_shape(2, head_dim) if form.group else (1,), torch.uint8),
        )
    ]
    return [qkv, torch.randperm(33)[:21], g, qkv[:, 1].float().mean(0).contiguous(), *tables, *caches]


def same(a: Tensor, b: Tensor) -> bool:
    """Whether the bytes are equal."""
    a_bytes, b_bytes = (x.cpu().contiguous().view(torch.uint8) for x in (a, b))
    return torch.equal(a_bytes, b_bytes)


@pytest.mark.slow
@pytest.mark.usefixtures("vector_code")
def test_cpu_package_gives_the_bytes_of_eager(package_runner: Callable[..., Any]) -> None:
    """Numbers without groups, of e2m1, and of whole steps with a zero point, which are rotated: all that the others
    are made of."""
    forms, head_dim = (FP8, FP4, INT4_HADAMARD), 384  # which all cut, and which is no power of two
    arguments, eager = (module_arguments(torch.float32, forms, head_dim) for _ in range(2))
    eager[1] = arguments[1]
    module = WriteAndExpand(forms)
    engine = package_runner(module, tuple(module_arguments(torch.float32, forms, head_dim)))
    wanted, found = module(*eager), engine(list(arguments))
    assert all(same(*pair) for pair in zip(found, wanted, strict=True))
    assert all(same(*pair) for pair in zip(arguments, eager, strict=True))


@pytest.mark.gpu
@EACH
@pytest.mark.parametrize("shape", [(4680, 12, 128), (130, 3, 96), (1, 1, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gpu_gives_the_bytes_of_the_reference(
    form: NumberFormat, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    tokens, heads, head_dim = shape
    head_dim = shape_of(form, head_dim)
    x = keys(tokens, heads, head_dim, dtype)
    g = global_scale(x.float().abs().amax((0, 2)) / 2000, form.top)  # some groups saturate
    mean = x.float().mean(0)
    index = torch.randperm(tokens * 7)[:tokens]
    expected = written(form, x, index, tokens * 7, g, mean)
    found = written(form, x.cuda(), index.cuda(), tokens * 7, g.cuda(), mean.cuda())
    assert same(found[0], expected[0])
    assert expected[1] is None or (found[1] is not None and same(found[1], expected[1]))
    codes, scales = expected
    tables = KeyTables(
        mean,
        torch.randn(7, head_dim // 4, 2).clamp(-1, 1),
        torch.randn(tokens, head_dim // 2 - head_dim // 4, 2).clamp(-1, 1),
    )
    for turning, apart in ((None, None), (tables, None), (tables, SinkApart(tokens, 0))):
        wanted = kv_expand(form, codes, scales, g, dtype, turning, apart)
        on_gpu = None if turning is None else KeyTables(*(t.cuda() for t in turning))
        there = None if scales is None else scales.cuda()
        assert same(kv_expand(form, codes.cuda(), there, g.cuda(), dtype, on_gpu, apart), wanted)


@pytest.mark.gpu
@TOGETHER
def test_gpu_package_and_its_capture_write_in_place_without_a_copy(
    forms: tuple[NumberFormat, ...], head_dim: int, package_runner: Callable[..., Any]
) -> None:
    eager = module_arguments(torch.bfloat16, forms, head_dim)
    arguments = [argument.cuda() for argument in eager]
    engine = package_runner(WriteAndExpand(forms), tuple(argument.clone() for argument in arguments))
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        engine([argument.clone() for argument in arguments])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        found = engine(list(arguments))
    graph.replay()
    torch.cuda.synchronize()
    wanted = WriteAndExpand(forms)(*eager)
    for place, pair in enumerate(zip(found, wanted, strict=True)):
        left, right = pair
        if place % 2 == 0:  # the sink's room holds anything
            left, right = (x.unflatten(0, (3, 13))[:, 2:] for x in pair)
        assert same(left, right)
    assert all(same(*pair) for pair in zip(arguments, eager, strict=True))


@pytest.mark.gpu
@EACH
def test_gpu_peak_of_a_write_and_a_read_is_the_window(
    form: NumberFormat, package_runner: Callable[..., Any]
) -> None:
    """No copy of the cache, and none of the window beside the one that is read."""

    class Step(torch.nn.Module):
        def forward(self, x: Tensor, index: Tensor, g: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
            groups = scales if form.group else None
            kv_write(form, x, index, codes, groups, g)
            return kv_expand(form, codes, groups, g, torch.bfloat16)

    tokens, heads, head_dim = 32760, 12, 128
    codes, scales = (
        torch.zeros(tokens, *shape, dtype=torch.uint8, device="cuda").view(kind)
        for shape, kind in (
            (form.codes_shape(heads, head_dim), form.code_dtype),
            (form.scales_shape(heads, head_dim) if form.group else (1,), torch.uint8),
        )
    )
    x = torch.randn(4680, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    arguments = [x, torch.arange(4680, device="cuda"), torch.ones(heads, device="cuda"), codes, scales]
    engine = package_runner(Step(), tuple(arguments))
    engine(list(arguments))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    window = engine(list(arguments))
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= window[0].nbytes + codes.nbytes // 4

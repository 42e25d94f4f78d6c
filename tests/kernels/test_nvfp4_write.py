"""nvfp4_write: the reference is the nearest code by brute force; the package and the GPU give its bytes."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seko_kernels import nvfp4_write
from seko_kernels.errors import KvDeviceError, KvDtypeError, KvShapeError
from seko_kernels.formats import E2M1_VALUES
from seko_kernels.reference import e4m3_decode, nvfp4_decode, nvfp4_encode, nvfp4_global_scale
from seko_kernels.triton.nvfp4_write import WRITE_TILE, WRITE_WARPS, nvfp4_write_kernel

SIGNATURE = {
    "X": "*bf16",
    "TOKEN_INDEX": "*i64",
    "CODES": "*u8",
    "SCALES": "*u8",
    "GLOBAL_SCALE": "*fp32",
    "blocks": "i32",
    "cache_tokens": "i32",
    "x_token_stride": "i32",
    "x_head_stride": "i32",
}
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


def written(x: Tensor, index: Tensor, cache_tokens: int, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of a cache filled with 0xEE after one write of `x`."""
    _, heads, head_dim = x.shape
    codes = torch.full((cache_tokens, heads, head_dim // 2), 0xEE, dtype=torch.uint8, device=x.device)
    scales = torch.full((cache_tokens, heads, head_dim // 16), 0xEE, dtype=torch.uint8, device=x.device)
    nvfp4_write(x, index, codes, scales, global_scale)
    return codes, scales


def keys_with_outliers(tokens: int, heads: int, head_dim: int) -> Tensor:
    """Float32 ``[tokens, heads, head_dim]``: heads of different size, outlier channels, a block of zeros."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, heads, head_dim) * torch.exp(torch.randn(heads, 1) * 2)
    x[:, :, 5] *= 30
    x[tokens // 2, :, :16] = 0
    return x


@given(block=BLOCKS, exponent=st.integers(-30, 30))
@settings(deadline=None)
def test_every_code_is_the_nearest_ties_to_even(block: list[float], exponent: int) -> None:
    x = torch.tensor(block, dtype=torch.float32)
    g = torch.tensor([2.0**exponent])
    codes, scales = nvfp4_encode(x.view(1, 1, 16), g)
    # The scale byte, by torch's own fp8 cast.
    sixth = torch.tensor(1 / 6, dtype=torch.float32)
    expected_scale = (x.abs().amax() * sixth / g).clamp(max=448.0).to(torch.float8_e4m3fn)
    assert scales.flatten().tolist() == expected_scale.view(torch.uint8).tolist()
    step = Fraction(expected_scale.float().item()) * Fraction(g.item())
    for place, number in enumerate(x.tolist()):
        nibble = codes.flatten()[place // 2].item() >> (4 * (place % 2)) & 15
        if step == 0:
            assert nibble == 0
            continue
        distance = [abs(abs(Fraction(number)) - Fraction(value) * step) for value in E2M1_VALUES]
        nearest = [code for code, far in enumerate(distance) if far == min(distance)]
        code = nearest[0] if len(nearest) == 1 else next(code for code in nearest if code % 2 == 0)
        assert nibble == code | (8 if number < 0 else 0)


def test_only_the_named_places_change() -> None:
    x = keys_with_outliers(5, 3, 48)
    g = nvfp4_global_scale(x.abs().amax((0, 2)))
    index = torch.tensor([6, 1, 8, 0, 3])
    codes, scales = written(x, index, 9, g)
    expected_codes, expected_scales = nvfp4_encode(x, g)
    assert torch.equal(codes[index], expected_codes)
    assert torch.equal(scales[index], expected_scales)
    for cache in (codes, scales):
        assert bool((cache[[2, 4, 5, 7]] == 0xEE).all())


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


def test_strides_do_not_matter() -> None:
    qkv = keys_with_outliers(7, 9, 32)
    x = qkv[:, 3:6]
    g = nvfp4_global_scale(x.abs().amax((0, 2)))
    for ours, expected in zip(nvfp4_encode(x, g), nvfp4_encode(x.contiguous(), g), strict=True):
        assert torch.equal(ours, expected)


def test_wrong_tensors_are_refused() -> None:
    x, index, g = torch.zeros(2, 3, 32), torch.arange(2), torch.ones(3)
    codes, scales = torch.zeros(4, 3, 16, dtype=torch.uint8), torch.zeros(4, 3, 2, dtype=torch.uint8)
    nvfp4_write(x, index, codes, scales, g)
    with pytest.raises(KvShapeError, match="heads, head_dim"):
        nvfp4_write(x[0], index, codes, scales, g)
    with pytest.raises(KvShapeError, match="codes have shape"):
        nvfp4_write(x, index, codes[:, :2], scales, g)
    with pytest.raises(KvShapeError, match="contiguous"):
        nvfp4_write(x, index, torch.zeros(4, 3, 32, dtype=torch.uint8)[:, :, ::2], scales, g)
    with pytest.raises(KvShapeError, match="one a token"):
        nvfp4_write(x, torch.arange(3), codes, scales, g)
    with pytest.raises(KvShapeError, match="global_scale"):
        nvfp4_write(x, index, codes, scales, torch.ones(2))
    with pytest.raises(KvShapeError, match="multiple of 16"):
        nvfp4_write(torch.zeros(2, 3, 24), index, codes, scales, g)
    with pytest.raises(KvDtypeError, match="float16"):
        nvfp4_write(x.half(), index, codes, scales, g)
    with pytest.raises(KvDtypeError, match="int64"):
        nvfp4_write(x, index.int(), codes, scales, g)
    with pytest.raises(KvDtypeError, match="uint8"):
        nvfp4_write(x, index, codes.char(), scales, g)
    with pytest.raises(KvDeviceError, match="one device"):
        nvfp4_write(x.to("meta"), index, codes, scales, g)


def test_kernel_compiles_everywhere_without_spills(
    cross_compile: Callable[..., Any], sass_of: Callable[[Any], list[str]], compile_archs: tuple[int, ...]
) -> None:
    constants = {"HEADS": 12, "HEAD_BLOCKS": 8, "TILE": WRITE_TILE}
    aligned = ("blocks", "x_token_stride", "x_head_stride")
    for arch in compile_archs:
        compiled = cross_compile(nvfp4_write_kernel, SIGNATURE, constants, arch, WRITE_WARPS, aligned)
        if arch == 90:
            opcodes = sass_of(compiled)
            assert "LDG" in opcodes
            assert not {"LDL", "STL"} & set(opcodes), "the kernel spills to local memory"


class WriteModule(torch.nn.Module):
    """One write, as an engine's graph sees it: a strided input, mutated caches."""

    def forward(self, qkv: Tensor, index: Tensor, codes: Tensor, scales: Tensor, g: Tensor) -> Tensor:
        nvfp4_write(qkv[:, 1], index, codes, scales, g)
        return qkv[:, 0] + 1.0


def test_cpu_package_gives_the_bytes_of_eager(package_runner: Callable[..., Any]) -> None:
    qkv = keys_with_outliers(21, 6, 48).view(21, 3, 2, 48)
    g = nvfp4_global_scale(qkv[:, 1].abs().amax((0, 2)))
    index = torch.randperm(33)[:21]
    codes, scales = (torch.full((33, 2, last), 0xEE, dtype=torch.uint8) for last in (24, 3))
    engine = package_runner(WriteModule(), (qkv, index, codes, scales, g))
    engine([qkv, index, codes, scales, g])
    expected_codes, expected_scales = written(qkv[:, 1], index, 33, g)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scales, expected_scales)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4680, 12, 128), (130, 3, 48), (1, 1, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gpu_gives_the_bytes_of_the_reference(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x = keys_with_outliers(*shape).to(dtype)
    g = nvfp4_global_scale(x.float().abs().amax((0, 2)) / 9)  # some blocks saturate
    cache_tokens = shape[0] * 7
    index = torch.randperm(cache_tokens)[: shape[0]]
    expected_codes, expected_scales = written(x, index, cache_tokens, g)
    codes, scales = written(x.cuda(), index.cuda(), cache_tokens, g.cuda())
    assert torch.equal(scales.cpu(), expected_scales)
    assert torch.equal(codes.cpu(), expected_codes)


@pytest.mark.gpu
def test_gpu_package_and_its_capture_write_in_place(package_runner: Callable[..., Any]) -> None:
    tokens, heads, head_dim, cache_tokens = 390, 12, 128, 8190
    qkv = keys_with_outliers(tokens, 3 * heads, head_dim).view(tokens, 3, heads, head_dim).bfloat16()
    g = nvfp4_global_scale(qkv[:, 1].float().abs().amax((0, 2)))
    index = torch.randperm(cache_tokens)
    first, second = index[:tokens], index[tokens : 2 * tokens]
    args = [
        qkv.cuda(),
        first.cuda(),
        *(c.cuda() for c in written(qkv[:, 1], first, cache_tokens, g)),
        g.cuda(),
    ]
    codes, scales = args[2], args[3]
    codes.fill_(0xEE)
    scales.fill_(0xEE)
    engine = package_runner(WriteModule(), tuple(args))
    codes.fill_(0xEE)
    scales.fill_(0xEE)
    stream = torch.cuda.Stream()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.cuda.stream(stream):
        engine(list(args))
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < codes.nbytes, "the engine copies the cache"
    expected_codes, expected_scales = written(qkv[:, 1], first, cache_tokens, g)
    assert torch.equal(codes.cpu(), expected_codes)
    assert torch.equal(scales.cpu(), expected_scales)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        engine(list(args))
    args[1].copy_(second)  # the replay reads where to write from the device
    codes.fill_(0xEE)
    scales.fill_(0xEE)
    graph.replay()
    torch.cuda.synchronize()
    expected_codes, expected_scales = written(qkv[:, 1], second, cache_tokens, g)
    assert torch.equal(codes.cpu(), expected_codes)
    assert torch.equal(scales.cpu(), expected_scales)


@pytest.mark.gpu
def test_gpu_skips_places_outside_the_cache() -> None:
    x = keys_with_outliers(3, 2, 32)
    g = nvfp4_global_scale(x.abs().amax((0, 2)))
    index = torch.tensor([-1, 2, 4])
    codes, scales = written(x.cuda(), index.cuda(), 4, g.cuda())
    expected_codes, expected_scales = written(x[1:2], index[1:2], 4, g)
    assert torch.equal(codes.cpu(), expected_codes)
    assert torch.equal(scales.cpu(), expected_scales)

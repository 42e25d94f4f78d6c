"""fp8_expand: what it writes and what it leaves alone; bytes on CPU and GPU; what compiles."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import seko_kernels.triton
from seko_kernels import fused_reference
from seko_kernels.errors import KernelsError
from seko_kernels.formats import KEY_TILE
from seko_kernels.fused_reference import (
    FP8,
    by_tiles,
    fp8_scale,
    int8_scale,
    int8_tiles,
    key_bounds,
    key_codes,
    scale_per_token,
)
from seko_kernels.reference import e4m3_decode, nvfp4_decode, nvfp4_decode_keys, rotate_centred_keys
from seko_kernels.scratch import KeyRotation, fp8_expand
from seko_kernels.triton.fp8_expand import (
    EXPAND_GROUP,
    EXPAND_TILE,
    EXPAND_WARPS,
    fp8_expand_kernel,
)
from tests.kernels.fused_inputs import NAN_BYTE, RINGS, Ring, fp4_cache, key_rotation, poisoned

FULL = Ring(12, 128, 1560, 21, ((18, 19, 20),), (21,))  # S1
FULL_ROWS = Ring(
    12, 128, 720, 12, ((9, 10, 11), (0, 1, 2), (3, 4, 5)), (12, 3, 6)
)  # S3, rows at different chunks


def expanded(ring: Ring, device: str = "cpu", *, rotated: bool = False, clean: bool = True) -> list[Tensor]:
    """The scratch after an expansion over NaN; not `clean`: with poison in every place that is not of the past."""
    scratch = [x.to(device) for x in ring.scratch()]
    rotation = KeyRotation(*(x.to(device) for x in key_rotation(ring))) if rotated else None
    cache = fp4_cache(ring) if clean else poisoned(ring, fp4_cache(ring))
    cache = {name: x.to(device) for name, x in cache.items()}
    where = (ring.slots().to(device), ring.valid().to(device), ring.frame_tokens)
    fp8_expand(*cache.values(), *where, *scratch, rotation)
    return [x.cpu() for x in scratch]


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_expand_writes_the_past_without_gaps_and_nothing_else(ring: Ring, rotated: bool) -> None:
    """Values to the byte; a key's code is within half of its real one and what fp16 in int8's units loses."""
    k, k_scale, v = expanded(ring, rotated=rotated)
    cache = fp4_cache(ring)
    windows = []
    for name in ("k", "v"):
        g = cache[f"{name}_global_scale"]
        codes, scales = cache[f"{name}_codes"], cache[f"{name}_scales"]
        window = nvfp4_decode(codes, scales, g, torch.float32)
        if rotated and name == "k":
            window = nvfp4_decode_keys(codes, scales, g, *key_rotation(ring), torch.float32)
        if name == "v":
            window = (window / (8 * g)[:, None]).clamp(-448, 448).to(FP8)
        windows.append(window.view(ring.batch, ring.cache_tokens, ring.heads, ring.head_dim))
    for row in range(ring.batch):
        slots = [s for s in range(ring.valid_frames[row]) if s not in ring.write_slots[row]]
        past = [s * ring.frame_tokens + token for s in slots for token in range(ring.frame_tokens)]
        assert len(past) == (ring.valid_frames[row] - len(ring.write_slots[row])) * ring.frame_tokens
        tiles = -(-len(past) // KEY_TILE)
        bytes_ = cache["k_scales"].view(ring.batch, ring.cache_tokens, ring.heads, -1)[row, past]
        mean = key_rotation(ring).mean if rotated else None
        for tile in range(tiles):
            place = slice(tile * KEY_TILE, min((tile + 1) * KEY_TILE, len(past)))
            keys, scale = windows[0][row, past][place], k_scale[row, :, tile]
            assert bool(((k[row, place] - keys / scale[:, None]).abs() < 0.8).all())
            assert float((k[row, place] - keys / scale[:, None]).square().mean()) < 1.05 / 12
            bound = exact_bound(bytes_[place], cache["k_global_scale"], mean)
            assert bool((scale * 127 >= bound * (1 - 2.0**-10)).all())
            assert bool((scale * 127 <= bound * (1.032 if rotated else 1 + 2.0**-20)).all())
        seen = v[row, :, :, : len(past)].permute(2, 0, 1).contiguous()
        assert torch.equal(seen.view(torch.uint8), windows[1][row, past].view(torch.uint8))
        assert bool((k[row, len(past) :] == NAN_BYTE).all())
        assert bool(k_scale[row, :, tiles:].isnan().all())
        words = -(-len(past) // 4) * 4
        assert bool((v[row, :, :, words:].contiguous().view(torch.uint8) == NAN_BYTE).all())


def exact_bound(scales: Tensor, global_scale: Tensor, mean: Tensor | None) -> Tensor:
    """What no key [H] of these places' blocks can exceed, in float64."""
    r = 6.0 * e4m3_decode(scales).double().amax(0) * global_scale[:, None]  # [H, D/16]
    if mean is None:
        return r.amax(-1)
    even, odd = (mean.double().abs() + r.repeat_interleave(16, -1)).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.hypot(even, odd).amax(-1)


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_scales_of_places_that_are_not_of_the_past_never_enter(ring: Ring, rotated: bool) -> None:
    for ours, truth in zip(
        expanded(ring, rotated=rotated, clean=False), expanded(ring, rotated=rotated), strict=True
    ):
        assert torch.equal(ours.view(torch.uint8), truth.view(torch.uint8))


@settings(max_examples=200)
@given(st.integers(0, 2**31), st.integers(-100, 100), st.sampled_from([0.0, 0.1, 1.0, 30.0]))
def test_the_bound_of_a_tile_keeps_every_code_within_127(seed: int, exponent: int, mean_size: float) -> None:
    """Keys as large as their bytes let them be, turned by any angle: what is rounded is never above 127."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.tensor([2.0**exponent, 2.0 ** (exponent // 2)])
    scales = torch.randint(0, 0x7F, (KEY_TILE, 2, 4), generator=generator).to(torch.uint8)
    scales[:, 1] = scales[:, 1] // 16  # a head of small numbers beside one of large ones
    mean = torch.randn(2, 64, generator=generator) * g[:, None] * mean_size * 300
    sign = torch.randint(0, 2, (KEY_TILE, 2, 64), generator=generator) * 2.0 - 1
    sign[::2] = torch.where(mean < 0, -1.0, 1.0)  # as far from zero as can be
    keys = sign * 6 * (e4m3_decode(scales) * g[:, None]).repeat_interleave(16, -1)
    angle = torch.rand(1, 5, generator=generator) * 6.3, torch.rand(KEY_TILE, 27, generator=generator) * 6.3
    angle[1][::4] = torch.atan2(*(keys[::4] + mean).unflatten(-1, (-1, 2)).unbind(-1))[:, 0, 5:]
    tables = [torch.stack((a.cos(), a.sin()), -1) for a in angle]
    live = torch.ones(1, KEY_TILE, dtype=torch.bool)
    cos, sin = torch.cat([x.expand(KEY_TILE, -1, 2) for x in tables], 1).unbind(-1)
    codes = torch.where(sign < 0, 15, 7).view(KEY_TILE, 2, 32, 2)  # of 6, with their signs
    codes = (codes[..., 0] | codes[..., 1] << 4).to(torch.uint8)
    for turned, added in ((rotate_centred_keys(keys, mean, *tables, torch.float32), mean), (keys, None)):
        bound = key_bounds(scales[None], live, g, added)
        scale = int8_scale(bound)
        inverse = scale_per_token(scale.reciprocal(), KEY_TILE).transpose(1, 2)
        turn = None if added is None else (mean, cos[None], sin[None])
        rotated_codes = key_codes(codes[None], scales[None], g, scale, turn)
        real = turned[None] * inverse.unsqueeze(-1)
        assert float(real.abs().max()) < 127.05
        # Of 127: half an int8 step, and the roundings of fp16 numbers, each at most 2**-11 of a pair's length.
        assert float((rotated_codes - real).abs().max()) < 0.5 + 6 * 127 * 2.0**-11
        assert bool((scale >= bound * (1 / 127)).all())


def test_numbers_are_rounded_to_those_of_fp16_once() -> None:
    """As NumPy does: every number of fp16, what lies in the middle, and beside it by less than fp32 can tell."""
    grid = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).double()
    middle = (grid[1:] + grid[:-1]) / 2
    x = torch.cat([grid, middle, middle * (1 + 2.0**-40), middle * (1 - 2.0**-40)])
    x = torch.cat([x, -x])
    expected = x.numpy().astype(np.float16).astype(np.float64)
    assert np.array_equal(fused_reference._fp16(x).numpy(), expected)


def test_a_tile_of_zeros_has_a_scale_whose_inverse_is_finite() -> None:
    codes, scale = int8_tiles(torch.zeros(1, 130, 1, 16), torch.zeros(1, 1, 2))
    assert not codes.any()
    assert bool((scale == 2.0**-100).all())
    assert by_tiles(codes).shape == (1, 2, KEY_TILE, 1, 16)


def test_no_number_that_nvfp4_holds_saturates() -> None:
    g = torch.tensor([2.0**-9])
    largest = nvfp4_decode(
        torch.full((1, 1, 8), 0x77, dtype=torch.uint8),
        torch.full((1, 1, 1), 0x7E, dtype=torch.uint8),
        g,
        torch.float32,
    )
    assert float((largest / fp8_scale(g)).max()) == 336.0


def test_wrong_tensors_are_refused() -> None:
    ring = RINGS[0]
    cache, (k, k_scale, v) = fp4_cache(ring), ring.scratch()
    where = {"write_slots": ring.slots(), "valid_tokens": ring.valid(), "frame_tokens": ring.frame_tokens}
    right = {**cache, **where, "k_out": k, "k_out_scale": k_scale, "v_out": v}
    fp8_expand(**right)
    turn = key_rotation(ring)
    no_patch = turn._replace(patch_rotary=turn.patch_rotary[1:])
    no_slot = turn._replace(slot_rotary=turn.slot_rotary[:, :0])
    odd_slot = turn._replace(slot_rotary=turn.slot_rotary[:, :5])
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (KernelsError, "v_out has shape", {"v_out": v[..., :100]}),
        (KernelsError, "k_out is", {"k_out": k.to(FP8)}),
        (KernelsError, "k_out_scale has shape", {"k_out_scale": k_scale[..., 1:]}),
        (KernelsError, "k_out has 78 places, expected 80", {"k_out": k[:, :-2]}),
        (KernelsError, "divide that, the cache's tokens", {"k_codes": cache["k_codes"][1:]}),
        (KernelsError, "v_codes has shape", {"v_codes": cache["v_codes"][1:]}),
        (KernelsError, "patch_rotary has shape", {"rotation": no_patch}),
        (KernelsError, "pairs, expected", {"rotation": no_slot}),
        (KernelsError, "has 5 pairs, expected an even number", {"rotation": odd_slot}),
        (KernelsError, "frame_tokens", {"frame_tokens": 10_000}),
    ]
    for error, match, change in wrong:
        with pytest.raises(error, match=match):
            fp8_expand(**right | change)


def test_assembly_of_the_package_has_nothing_that_a_copy_of_it_would_lose() -> None:
    """Torch's compiler writes the globals of a kernel into a string in a file: an escape becomes what it stands for."""
    count = 0
    for module in pkgutil.iter_modules(seko_kernels.triton.__path__, "seko_kernels.triton."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, tl.constexpr) and isinstance(value.value, str):
                count += 1
                assert repr(value.value) == f"'{value.value}'"
    assert count >= 3


@pytest.mark.slow
def test_kernels_compile_without_spills_where_there_is_fp8(
    cross_compile: Callable[..., Any], sass_of: Callable[[Any], list[str]], compile_archs: tuple[int, ...]
) -> None:
    shared = {"HEADS": 12, "HEAD_DIM": 128, "FRAME_TOKENS": 1560, "CHUNK_FRAMES": 3, "KEY_TILE": KEY_TILE}
    expand = {
        **dict.fromkeys(("K_CODES", "K_SCALES"), "*u8"),
        **dict.fromkeys(("K_GLOBAL_SCALE", "K_MEAN"), "*fp32"),
        **dict.fromkeys(("V_CODES", "V_SCALES"), "*u8"),
        **dict.fromkeys(("V_GLOBAL_SCALE", "V_FP8_SCALE", "SLOT_ROTARY", "PATCH_ROTARY"), "*fp32"),
        **dict.fromkeys(("WRITE_SLOTS", "VALID_TOKENS"), "*i64"),
        "K_OUT": "*i8",
        "K_OUT_SCALE": "*fp32",
        "V_OUT": "*fp8e4nv",
        **dict.fromkeys(("cache_tokens", "past_tokens"), "i32"),
    }
    shared |= {"V_COLUMNS": 28160, "INTEGER": False}
    shared |= {"GROUP": EXPAND_GROUP, "TILE": EXPAND_TILE}
    turned, plain = ({"SLOT_PAIRS": pairs} for pairs in (22, 0))
    for arch in compile_archs:
        if arch == 80:
            continue
        for constants in (turned, plain) if arch == 90 else (turned,):
            compiled = cross_compile(fp8_expand_kernel, expand, shared | constants, arch, EXPAND_WARPS)
            if arch == 90:
                opcodes = sass_of(compiled)
                assert "F2FP" in opcodes  # the hardware's cast
                assert not {"LDL", "STL"} & set(opcodes), "the kernel spills to local memory"
                assert "st.global.v2.b64" in compiled.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("ring", [*RINGS, FULL, FULL_ROWS], ids=str)
def test_gpu_expands_to_the_bytes_of_the_reference(ring: Ring, rotated: bool) -> None:
    on_gpu, on_cpu = (expanded(ring, device, rotated=rotated) for device in ("cuda", "cpu"))
    for ours, expected in zip(on_gpu, on_cpu, strict=True):
        assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))

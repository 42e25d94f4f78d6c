"""Entries of plugins in Triton's interpreter: the past, attention to it, an exact cache; run by test_interpreted.py."""

from __future__ import annotations

import pytest
import torch
import triton

from scripts.kernel_admission.attention_cases import Case, expected, make_case
from scripts.kernel_admission.judge import distance
from seko_kernels import plugins
from seko_kernels.scratch import fp8_expand
from seko_kernels.triton.plugin_entries import attention_fp8_entry, cache_write_entry, fp8_expand_entry
from tests.kernels.fused_inputs import Ring, fp4_cache, key_rotation, poisoned

HEAD_DIM = 32


def test_the_past_is_expanded_as_the_op_expands_it() -> None:
    ring = Ring(2, 32, 13, 4, ((1, 2),), (4,))
    clean, rotation = fp4_cache(ring), key_rotation(ring)
    truth, outputs = ring.scratch(), ring.scratch()
    fp8_expand(*clean.values(), ring.slots(), ring.valid(), ring.frame_tokens, *truth, rotation)
    plugin = plugins.fp8_expand()
    places = {"write_slots": ring.slots(), "valid_tokens": ring.valid()}
    tensors = {**poisoned(ring, clean), **places, **rotation._asdict()}
    inputs = {name: tensors[name] for name in plugin.inputs}
    sizes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    assert [output.shape(sizes) for output in plugin.outputs] == [tuple(tensor.shape) for tensor in outputs]
    launch = plugin.launch(sizes, triton.cdiv)
    constants = plugin.constants(sizes) | {"INTEGER": True}
    fp8_expand_entry[launch.grid](*inputs.values(), *launch.scalars, *outputs, **constants)
    for ours, theirs in zip(outputs, truth, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_attention_is_as_near_as_the_same_roundings_in_torch() -> None:
    *past, own = make_case(Case("rows of different fill", 40, 2, 100, (3, 100)), HEAD_DIM, "cpu")
    plugin = plugins.attention_fp8()
    inputs = dict(zip(plugin.inputs, (*past, own.contiguous()), strict=True))
    sizes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    launch = plugin.launch(sizes, triton.cdiv)
    y = torch.full(plugin.outputs[0].shape(sizes), torch.nan)
    constants = plugin.constants(sizes) | {"INTEGER": True}
    attention_fp8_entry[launch.grid](*inputs.values(), *launch.scalars, y, **constants)
    truth, rounded = expected(*inputs.values())
    assert distance(y, truth) <= 2 * distance(rounded, truth)


@pytest.mark.parametrize("sizes", [(37, 3, 64, 55), (1, 1, 1, 2), (5, 2, 512, 9)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_land_where_they_belong_and_others_stay(
    sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    tokens, heads, dim, places = sizes
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(places, heads, dim, generator=generator).to(dtype)
    x = torch.randn(tokens, heads, dim, generator=generator).to(dtype)
    index = torch.randperm(places, generator=generator)[:tokens]
    plugin = plugins.cache_write()
    shapes = {"x": x.shape, "token_index": index.shape, "cache": cache.shape}
    launch = plugin.launch(shapes, triton.cdiv)
    expected = cache.index_copy(0, index, x)
    cache_write_entry[launch.grid](x, index, cache, *launch.scalars, cache, **plugin.constants(shapes))
    assert torch.equal(cache, expected)

"""The plugins that expand the past and attend to it, in Triton's interpreter; run by test_interpreted.py."""

from __future__ import annotations

import torch

from scripts.kernel_admission.attention_cases import Case, expected, make_case
from scripts.kernel_admission.judge import distance
from seko_kernels import plugins
from seko_kernels.scratch import fp8_expand
from seko_kernels.triton.plugin_entries import attention_fp8_entry, fp8_expand_entry
from tests.kernels.fused_inputs import RINGS, fp4_cache, key_rotation, poisoned

HEAD_DIM = 32


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def test_the_past_is_expanded_as_the_op_expands_it() -> None:
    ring = RINGS[0]
    clean, rotation = fp4_cache(ring), key_rotation(ring)
    truth, outputs = ring.scratch(), ring.scratch()
    fp8_expand(*clean.values(), ring.slots(), ring.valid(), ring.frame_tokens, *truth, rotation)
    plugin = plugins.fp8_expand()
    places = {"write_slots": ring.slots(), "valid_tokens": ring.valid()}
    tensors = {**poisoned(ring, clean), **places, **rotation._asdict()}
    inputs = {name: tensors[name] for name in plugin.inputs}
    sizes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    assert [output.shape(sizes) for output in plugin.outputs] == [tuple(tensor.shape) for tensor in outputs]
    launch = plugin.launch(sizes, ceil_div)
    constants = plugin.constants(sizes) | {"INTEGER": True}
    fp8_expand_entry[launch.grid](*inputs.values(), *launch.scalars, *outputs, **constants)
    for ours, theirs in zip(outputs, truth, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_attention_is_as_near_as_the_same_roundings_in_torch() -> None:
    *past, own = make_case(Case("rows of different fill", 40, 2, 100, (3, 100)), HEAD_DIM, "cpu")
    plugin = plugins.attention_fp8()
    inputs = dict(zip(plugin.inputs, (*past, own.contiguous()), strict=True))
    sizes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    launch = plugin.launch(sizes, ceil_div)
    y = torch.full(plugin.outputs[0].shape(sizes), torch.nan)
    constants = plugin.constants(sizes) | {"INTEGER": True}
    attention_fp8_entry[launch.grid](*inputs.values(), *launch.scalars, y, **constants)
    truth, rounded = expected(*inputs.values())
    assert distance(y, truth) <= 2 * distance(rounded, truth)

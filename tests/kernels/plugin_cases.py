"""Inputs of every plugin, and what it must give: the torch reference's bytes. No tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.kernel_admission.attention_cases import Case, make_case
from seko_export.backends.onnx_form import kept_ops
from seko_export.families.layers import sampler
from seko_kernels import fused_reference, plugins, reference
from seko_kernels.plugins import Plugin

LATENT_SHAPE = (16, 8, 12)


@dataclass(frozen=True)
class PluginCase:
    """A plugin, its inputs in order, and the reference of its outputs.

    Parameters
    ----------
    plugin : Plugin
        Which.
    inputs : dict of str to Tensor
        On the CPU.
    expected : callable
        From inputs (on any device) to outputs, in order.
    """

    plugin: Plugin
    inputs: dict[str, Tensor]
    expected: Callable[[dict[str, Tensor]], list[Tensor]]

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.inputs.items()}


def cases(
    compute: torch.dtype, tokens: int = 37, heads: int = 3, dim: int = 64, slots: int = 5
) -> list[PluginCase]:
    """One case a plugin, of sizes that are no multiple of a tile; caches hold what the reference wrote."""
    torch.manual_seed(0)
    name = str(compute).removeprefix("torch.")
    x = (torch.randn(tokens, heads, dim) * torch.exp(torch.randn(heads, 1) * 2)).to(compute)
    x[0, 0, :16] = 0
    x[:, :, 3] *= 40
    mean = x.float().mean(0)
    g = reference.nvfp4_global_scale(x.float().abs().amax((0, 2)) / 3)
    patches = 11
    places = slots * patches
    codes, scales = reference.nvfp4_encode(torch.randn(places, heads, dim), g)
    angles = torch.rand(slots, dim // 2 - 10) * 6, torch.rand(patches, 10) * 6
    slot_rotary, patch_rotary = (torch.stack([a.cos(), a.sin()], -1) for a in angles)
    cache = {"codes": codes, "scales": scales, "global_scale": g}
    index = torch.randperm(places)[:tokens]
    write = {"x": x, "token_index": index, **cache}
    keys = {**cache, "mean": mean, "slot_rotary": slot_rotary, "patch_rotary": patch_rotary}
    noise = {
        "seeds": torch.tensor([5, -(2**40)]),
        "frames": torch.tensor([[0, 1, 2], [7, 2**32 + 1, 9]]),
        "draw": torch.tensor([2]),
    }
    return [
        PluginCase(plugins.nvfp4_write(), write, _written),
        PluginCase(plugins.nvfp4_write_keys(), {**write, "mean": mean}, _written),
        PluginCase(
            plugins.nvfp4_expand(name),
            cache,
            lambda inputs: [reference.nvfp4_decode(**inputs, dtype=compute)],
        ),
        PluginCase(
            plugins.nvfp4_expand_keys(name),
            keys,
            lambda inputs: [reference.nvfp4_decode_keys(**inputs, dtype=compute)],
        ),
        PluginCase(
            plugins.cache_write(),
            {"x": x, "token_index": index, "cache": torch.randn(places, heads, dim).to(compute)},
            lambda inputs: [inputs["cache"].index_copy(0, inputs["token_index"], inputs["x"])],
        ),
        PluginCase(
            plugins.gaussian(LATENT_SHAPE),
            noise,
            lambda inputs: [sampler.gaussian(**inputs, latent_shape=LATENT_SHAPE)],
        ),
        PluginCase(plugins.fp8_expand(), _past(), _expanded_past),
        PluginCase(
            plugins.attention_fp8(),
            attended(),
            lambda inputs: [fused_reference.attention_fp8(*inputs.values())],
        ),
    ]


def attended() -> dict[str, Tensor]:
    """Inputs of attention to the past: rows of different fill, no size a multiple of a tile."""
    *past, own = make_case(Case("rows of different fill", 70, 3, 300, (3, 300)), 64, "cpu")
    q, k, k_scale, v, v_scale, valid, k_own = past
    tensors = (q.bfloat16(), k, k_scale, v, v_scale, valid, k_own.bfloat16(), own.bfloat16().contiguous())
    return dict(zip(plugins.attention_fp8().inputs, tensors, strict=True))


def _past() -> dict[str, Tensor]:
    """Two rows of a full ring of 7 slots of 25 tokens, two of which the chunk writes."""
    heads, dim, slots, patches = 4, 64, 7, 25
    tensors = dict[str, Tensor]()
    for part in ("k", "v"):
        x = torch.randn(2 * slots * patches, heads, dim)
        scale = reference.nvfp4_global_scale(x.abs().amax((0, 2)))
        codes, scales = reference.nvfp4_encode(x, scale)
        tensors |= {f"{part}_codes": codes, f"{part}_scales": scales, f"{part}_global_scale": scale}
    tensors["v_fp8_scale"] = fused_reference.fp8_scale(tensors["v_global_scale"])
    tensors["write_slots"] = torch.tensor([[1, 4], [6, 0]])
    tensors["valid_tokens"] = torch.full((2,), slots * patches)
    angles = torch.rand(2 * slots, dim // 2 - 10) * 6, torch.rand(patches, 10) * 6
    slot_rotary, patch_rotary = (torch.stack([a.cos(), a.sin()], -1) for a in angles)
    return tensors | {
        "mean": torch.randn(heads, dim),
        "slot_rotary": slot_rotary,
        "patch_rotary": patch_rotary,
    }


def _expanded_past(inputs: dict[str, Tensor]) -> list[Tensor]:
    """What is left as it was, behind the past's tokens, is zero."""
    device = inputs["mean"].device
    return [
        tensor.to(device) for tensor in kept_ops.fp8_expand(*(tensor.cpu() for tensor in inputs.values()))
    ]


def _written(inputs: dict[str, Tensor]) -> list[Tensor]:
    new_codes, new_scales = reference.nvfp4_encode(inputs["x"], inputs["global_scale"], inputs.get("mean"))
    return [
        inputs["codes"].index_copy(0, inputs["token_index"], new_codes),
        inputs["scales"].index_copy(0, inputs["token_index"], new_scales),
    ]

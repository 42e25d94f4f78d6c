"""All fused ops of a layer in one package, as an engine holds them: equal to eager, writes in place, captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from seko_kernels.attention import OwnTokens, attention_fp8
from seko_kernels.matmul import fp8_linear, quantise_weight
from seko_kernels.qk_norm_rope import qk_norm_rope
from seko_kernels.rows import (
    Modulation,
    gated_residual,
    gated_residual_norm,
    gated_residual_norm_modulate,
    gelu_quantise,
    quantise_rows,
    residual_norm_modulate,
)
from seko_kernels.scratch import KeyRotation, fp8_expand
from tests.kernels.fused_inputs import Ring, chunk_of, fp4_cache, key_rotation
from tests.support.tolerances import FP8_CHAIN, relative_error

EPS = 1e-6
SMALL = Ring(2, 32, 13, 9, ((7, 8, 3),), (9,))
LAYER = Ring(12, 128, 390, 7, ((4, 5, 6), (0, 1, 2)), (7, 3))


class FusedLayer(torch.nn.Module):
    """The self-attention and the feed-forward of a block, with every fused op once; no cross-attention."""

    def __init__(self, ring: Ring) -> None:
        super().__init__()
        self.ring = ring

    def forward(
        self, x: Tensor, tensors: dict[str, Tensor], k_out: Tensor, k_out_scale: Tensor, v_out: Tensor
    ) -> tuple[Tensor, Tensor]:
        t, ring = tensors, self.ring
        modulation = Modulation(t["frames_modulation"], t["layer_modulation"])
        x, rows = gated_residual_norm_modulate(
            x, t["update"], t["before"], 5, modulation, 0, 1, EPS, fp8=True
        )
        qkv = fp8_linear(rows, t["qkv"], t["qkv_scale"], t["qkv_bias"], x.dtype)
        k = qkv.new_empty((ring.batch, ring.tokens, ring.heads, ring.head_dim))
        frames = torch.arange(t["slots"].shape[1], device=x.device).expand(ring.batch, -1).contiguous()
        q, keys = qk_norm_rope(
            *(qkv, t["q_weight"], t["k_weight"], t["cos"], t["sin"], frames),
            *(ring.frame_tokens, EPS, k, "before_rope"),
        )
        fp8_expand(
            *(
                t["k_codes"],
                t["k_scales"],
                t["k_global_scale"],
                t["v_codes"],
                t["v_scales"],
                t["v_global_scale"],
            ),
            *(t["v_fp8_scale"], t["slots"], t["valid"], ring.frame_tokens, k_out, k_out_scale, v_out),
            KeyRotation(t["mean"], t["slot_rotary"], t["patch_rotary"]),
        )
        own = OwnTokens(k, qkv.chunk(3, dim=-1)[2])
        y = attention_fp8(q, k_out, k_out_scale, v_out, t["v_fp8_scale"], t["valid"], own)
        y = fp8_linear(quantise_rows(y), t["o"], t["o_scale"], t["o_bias"], x.dtype)
        hidden, rows = gated_residual_norm(
            x, y, modulation, 2, t["norm_weight"], t["norm_bias"], EPS, fp8=True
        )
        y = fp8_linear(rows, t["o"], t["o_scale"], t["o_bias"], x.dtype)
        hidden, rows = residual_norm_modulate(hidden, y, modulation, 3, 4, EPS, fp8=True)
        inner = gelu_quantise(fp8_linear(rows, t["up"], t["up_scale"], t["up_bias"], x.dtype))
        y = fp8_linear(inner, t["down"], t["down_scale"], t["o_bias"], x.dtype)
        return gated_residual(hidden, y, modulation, 5), keys


def layer_inputs(ring: Ring, device: str) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
    """Arguments of `FusedLayer`, bf16 on a GPU and float32 on a CPU."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    chunk, cache, rotation = chunk_of(ring, dtype), fp4_cache(ring), key_rotation(ring)
    width, frames = ring.heads * ring.head_dim, len(ring.write_slots[0])
    tensors = {
        **cache,
        **rotation._asdict(),
        **{name: getattr(chunk, name) for name in ("q_weight", "k_weight", "cos", "sin")},
        "slots": ring.slots(),
        "valid": ring.valid(),
        "frames_modulation": torch.randn(ring.batch, frames, 6, width) * 0.3,
        "layer_modulation": torch.randn(6, width) * 0.3,
        "before": torch.randn(6, width) * 0.3,
        "update": torch.randn(ring.batch, ring.tokens, width).to(dtype),
        "norm_weight": torch.rand(width) + 0.5,
        "norm_bias": torch.randn(width),
    }
    for name, inner, outer in (
        ("qkv", width, 3 * width),
        ("o", width, width),
        ("up", width, 2 * width),
        ("down", 2 * width, width),
    ):
        tensors[name], tensors[f"{name}_scale"] = quantise_weight(torch.randn(outer, inner) * inner**-0.5)
        tensors[f"{name}_bias"] = (torch.randn(outer) * 0.1).to(dtype)
    x = torch.randn(ring.batch, ring.tokens, width).to(dtype)
    scratch = [part.to(device) for part in ring.scratch()]
    return x.to(device), {name: tensor.to(device) for name, tensor in tensors.items()}, scratch


def near(ours: Sequence[Tensor], expected: Sequence[Tensor], *scratches: Sequence[Tensor]) -> None:
    """Results within what fp8 rounds; the scratch written in place, where it belongs."""
    for mine, truth in zip(ours, expected, strict=True):
        assert relative_error(mine, truth) < FP8_CHAIN
    for mine, truth in zip(*(bytes_of(*scratch) for scratch in scratches), strict=True):
        assert float((mine != truth).float().mean()) < FP8_CHAIN


def bytes_of(*tensors: Tensor) -> list[Tensor]:
    return [x.contiguous().view(torch.uint8).clone() for x in tensors]


@pytest.mark.slow
@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11 writes fp8 types into C++ for CPUs that its headers do not declare",
)
def test_cpu_package_agrees_with_eager(package_runner: Callable[..., Any]) -> None:
    x, tensors, scratch = layer_inputs(SMALL, "cpu")
    layer = FusedLayer(SMALL)
    expected = layer(x, tensors, *(eager := SMALL.scratch()))
    engine = package_runner(layer, (x, tensors, *SMALL.scratch()))
    ours = engine([x, *tensors.values(), *scratch])
    near(ours, expected, scratch, eager)


@pytest.mark.gpu
def test_gpu_package_agrees_with_eager_and_its_capture_repeats_it(
    package_runner: Callable[..., Any],
) -> None:
    x, tensors, scratch = layer_inputs(LAYER, "cuda")
    layer = FusedLayer(LAYER)
    expected = layer(x, tensors, *scratch)
    eager = [part.clone() for part in scratch]
    engine = package_runner(layer, (x, tensors, *(part.cuda() for part in LAYER.scratch())))
    arguments = [x, *tensors.values(), *scratch]

    def forget() -> None:
        """Give the engine the bytes that the eager run began with: behind the valid tokens nobody writes."""
        for part, fresh in zip(scratch, LAYER.scratch(), strict=True):
            part.copy_(fresh)

    stream = torch.cuda.Stream()
    forget()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        direct = engine(list(arguments))
    torch.cuda.synchronize()
    near(direct, expected, scratch, eager)
    first = bytes_of(*direct, *scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = engine(list(arguments))
    forget()
    captured[0].fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for replayed, once in zip(bytes_of(*captured, *scratch), first, strict=True):
        assert torch.equal(replayed, once)

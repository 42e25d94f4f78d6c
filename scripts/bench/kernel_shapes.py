"""Shapes and inputs of the kernel benchmark: a chunk, its cache and its weights, seeded, on the GPU. No timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from seko_export.families.layers.block import window_attention
from seko_kernels import ChannelStatistics, KvFormat, kv_format, kv_write
from seko_kernels.attention import key_tiles, scratch_tokens, v_columns
from seko_kernels.formats import FP4, NUMBER_FORMATS
from seko_kernels.fused_reference import FP8, fp8_scale
from seko_kernels.matmul import fp8_linear, quantise_weight
from seko_kernels.qk_norm_rope import qk_norm_rope
from seko_kernels.reference import nvfp4_global_scale
from seko_kernels.rows import (
    Modulation,
    Rows,
    gated_residual,
    gated_residual_norm,
    gated_residual_norm_modulate,
    gelu_quantise,
    quantise_rows,
    residual_norm_modulate,
)
from seko_kernels.scratch import KeyRotation, fp8_expand

EPS = 1e-6


Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """A preset's sizes, as far as a layer knows them."""

    name: str
    heads: int
    ffn: int
    frame_tokens: int
    cache_frames: int
    chunk_frames: int = 3
    head_dim: int = 128

    @property
    def width(self) -> int:
        """d."""
        return self.heads * self.head_dim

    @property
    def tokens(self) -> int:
        """Of the chunk."""
        return self.chunk_frames * self.frame_tokens

    @property
    def cache_tokens(self) -> int:
        """N."""
        return self.cache_frames * self.frame_tokens

    @property
    def attention_flops(self) -> float:
        """Of a full cache."""
        return 4.0 * self.heads * self.head_dim * self.tokens * self.cache_tokens


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("S1", heads=12, ffn=8960, frame_tokens=1560, cache_frames=21),
        Shape("S3", heads=12, ffn=8960, frame_tokens=720, cache_frames=12),
        Shape("S4", heads=40, ffn=13824, frame_tokens=1560, cache_frames=6),
        Shape("S5", heads=40, ffn=13824, frame_tokens=1560, cache_frames=21),
    )
}


@dataclass(frozen=True)
class Timed:
    """One call to time.

    Parameters
    ----------
    name : str
        Of the kernel and its variant.
    run : callable
        The call; what it returns is compared with the same call in plain torch.
    amount : float
        Bytes it must move, or operations it must do.
    unit : str
        ``"GB/s"`` or ``"TFLOP/s"``.
    """

    name: str
    run: Callable[[], object]
    amount: float
    unit: str


def cudnn_attention(shape: Shape, device: str) -> Timed:
    """SDPA pinned to cuDNN, bf16, a full cache, without a bias."""
    q, k, v = (x.transpose(1, 2) for x in exact_window(shape, device)[:3])
    attend = F.scaled_dot_product_attention
    return _by_cudnn("sdpa_cudnn_bf16", shape, device, lambda: attend(q, k, v))


def torchs_attention(shape: Shape, device: str) -> Timed:
    """The same as an exact engine takes it: cut to whole waves where that gains, compiled."""
    q, k, v, _ = exact_window(shape, device)
    attend = torch.compile(window_attention) if device == "cuda" else window_attention
    return _by_cudnn("sdpa_bf16, whole waves", shape, device, lambda: attend(q, k, v, None))


def _by_cudnn(name: str, shape: Shape, device: str, attend: Callable[[], Tensor]) -> Timed:
    backend = SDPBackend.CUDNN_ATTENTION if device == "cuda" else SDPBackend.MATH

    def run() -> Tensor:
        with sdpa_kernel([backend]):
            return attend()

    return Timed(name, run, shape.attention_flops, "TFLOP/s")


def exact_window(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments of `attention_bf16` over a full cache."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, tokens, shape.heads, shape.head_dim, device=device, dtype=torch.bfloat16)
        for tokens in (shape.tokens, shape.cache_tokens, shape.cache_tokens)
    )
    return q, k, v, torch.tensor([shape.cache_tokens], device=device)


def cache_calls(shape: Shape, device: str) -> list[Timed]:
    """What stands between the fused projection and attention, and what stores the chunk."""
    torch.manual_seed(1)
    s = shape
    qkv = torch.randn(1, s.tokens, 3 * s.width, device=device, dtype=torch.bfloat16)
    weights = [torch.rand(s.width, device=device) + 0.5 for _ in range(2)]
    angle = torch.rand(1, s.tokens, s.head_dim // 2, device=device) * 6.28
    slots = torch.arange(s.cache_frames - s.chunk_frames, s.cache_frames, device=device)[None]
    valid = torch.tensor([s.cache_tokens], device=device)
    places = (slots[..., None] * s.frame_tokens + torch.arange(s.frame_tokens, device=device)).flatten()
    cache = {}
    for name in ("k", "v"):
        g = nvfp4_global_scale(torch.full((s.heads,), 6.0)).to(device)
        cache[f"{name}_codes"] = torch.randint(
            0, 256, (s.cache_tokens, s.heads, s.head_dim // 2), device=device, dtype=torch.uint8
        )
        cache[f"{name}_scales"] = torch.randint(
            0x20, 0x60, (s.cache_tokens, s.heads, s.head_dim // 16), device=device, dtype=torch.uint8
        )
        cache[f"{name}_global_scale"] = g
    cache["v_fp8_scale"] = fp8_scale(cache["v_global_scale"])
    past_tokens = s.cache_tokens - s.tokens
    k_past = torch.zeros(1, scratch_tokens(past_tokens), s.heads, s.head_dim, device=device, dtype=torch.int8)
    k_scale = torch.zeros(1, s.heads, key_tiles(past_tokens), device=device)
    v_fp8 = torch.zeros(
        1, s.heads, s.head_dim, v_columns(past_tokens), device=device, dtype=torch.uint8
    ).view(FP8)
    k_exact = torch.zeros(1, s.cache_tokens, s.heads, s.head_dim, device=device, dtype=torch.bfloat16)
    _, k, v = qkv.chunk(3, dim=-1)
    own = s.tokens * s.width

    def norm_rope(out: Tensor, plain: str) -> Callable[[], object]:
        arguments = (
            qkv,
            *weights,
            angle.cos(),
            angle.sin(),
            slots,
            s.frame_tokens,
            EPS,
            out,
            plain,
        )
        return lambda: (*qk_norm_rope(*arguments), out)

    pairs = s.head_dim // 2 - 2 * (s.head_dim // 6)
    tables = (
        torch.rand(count, width, 2, device=device)
        for count, width in ((s.cache_frames, pairs), (s.frame_tokens, s.head_dim // 2 - pairs))
    )
    turned = KeyRotation(torch.randn(s.heads, s.head_dim, device=device), *tables)

    def expand(rotation: KeyRotation | None) -> Callable[[], object]:
        where = {"write_slots": slots, "valid_tokens": valid, "frame_tokens": s.frame_tokens}
        out = {"k_out": k_past, "k_out_scale": k_scale, "v_out": v_fp8}
        return lambda: (fp8_expand(**cache, **where, **out, rotation=rotation), *out.values())

    def write() -> None:
        for name, x in (("k", k), ("v", v)):
            heads = x.reshape(s.tokens, s.heads, s.head_dim)
            scale = cache[f"{name}_global_scale"]
            kv_write(FP4, heads, places, cache[f"{name}_codes"], cache[f"{name}_scales"], scale)

    past = past_tokens * s.width
    return [
        Timed("fp8_expand", expand(turned), (2 * 0.5625 + 2) * past, "GB/s"),
        Timed("fp8_expand, keys stored after RoPE", expand(None), (2 * 0.5625 + 2) * past, "GB/s"),
        Timed("qk_norm_rope", norm_rope(k_exact, "none"), own * 8.0, "GB/s"),
        Timed("qk_norm_rope, keys kept", norm_rope(k_exact, "before_rope"), own * 10.0, "GB/s"),
        Timed("nvfp4_write k and v", write, own * 2 * 2.5625, "GB/s"),
    ]


def scheme_calls(shape: Shape, device: str) -> list[Timed]:
    """What a layer writes and reads of its cache in each scheme: a chunk in, the whole window as bf16 out."""
    torch.manual_seed(3)
    s, calls = shape, list[Timed]()
    pairs = s.head_dim // 2 - 2 * (s.head_dim // 6)
    places = {
        "slot_rotary": torch.rand(s.cache_frames, pairs, 2, device=device),
        "patch_rotary": torch.rand(s.frame_tokens, s.head_dim // 2 - pairs, 2, device=device),
    }
    k, v = torch.randn(2, s.tokens, s.heads, s.head_dim, device=device, dtype=torch.bfloat16)
    index = torch.arange(s.tokens, device=device)
    reach = torch.full((s.heads, s.head_dim), 6.0)
    known = ChannelStatistics(-reach, reach, torch.zeros_like(reach))
    for scheme, numbers in NUMBER_FORMATS.items():
        form = kv_format(scheme, s.heads, s.head_dim, torch.bfloat16)
        caches = {
            c.name: torch.zeros(s.cache_tokens, *c.token_shape, device=device, dtype=c.dtype)
            for c in form.cache_tensors
        }
        scales = {name: scale.to(device) for name, scale in form.calibrate(known, known).items()}

        def write(form: KvFormat = form, caches: Tensors = caches, scales: Tensors = scales) -> Tensors:
            form.write(caches, scales, index, k, v)
            return caches

        def read(form: KvFormat = form, caches: Tensors = caches, scales: Tensors = scales) -> object:
            return form.expand(caches, scales, places, torch.bfloat16)

        write()
        moved = 2 * s.width * (2 + numbers.bits / 8)
        calls.append(
            Timed(
                f"{scheme} write k and v", lambda write=write: [*write().values()], s.tokens * moved, "GB/s"
            )
        )  # type: ignore[misc]
        calls.append(Timed(f"{scheme} window", read, s.cache_tokens * moved, "GB/s"))
    return calls


def row_calls(shape: Shape, device: str) -> list[Timed]:
    """What stands between two matmuls, in bf16 and as rowwise fp8."""
    torch.manual_seed(2)
    s = shape
    x, y = torch.randn(2, 1, s.tokens, s.width, device=device, dtype=torch.bfloat16)
    modulation = Modulation(
        torch.randn(1, s.chunk_frames, 6, s.width, device=device) * 0.3,
        torch.randn(6, s.width, device=device) * 0.3,
    )
    weight, bias = torch.randn(2, s.width, device=device)
    inner = torch.randn(1, s.tokens, s.ffn, device=device, dtype=torch.bfloat16)
    numbers = s.tokens * s.width
    calls = []
    for fp8, out in ((False, 2.0), (True, 1.0)):
        kind = "fp8" if fp8 else "bf16"
        calls += [
            Timed(
                f"gated_residual_norm_modulate {kind}",
                lambda fp8=fp8: gated_residual_norm_modulate(  # type: ignore[misc]
                    x, y, modulation.layer, 5, modulation, 0, 1, EPS, fp8=fp8
                ),
                numbers * (6 + out),
                "GB/s",
            ),
            Timed(
                f"gated_residual_norm {kind}",
                lambda fp8=fp8: gated_residual_norm(x, y, modulation, 2, weight, bias, EPS, fp8=fp8),  # type: ignore[misc]
                numbers * (6 + out),
                "GB/s",
            ),
            Timed(
                f"residual_norm_modulate {kind}",
                lambda fp8=fp8: residual_norm_modulate(x, y, modulation, 3, 4, EPS, fp8=fp8),  # type: ignore[misc]
                numbers * (6 + out),
                "GB/s",
            ),
        ]
    return [
        *calls,
        Timed("gated_residual bf16", lambda: gated_residual(x, y, modulation, 5), numbers * 6.0, "GB/s"),
        Timed("quantise_rows", lambda: quantise_rows(x), numbers * 3.0, "GB/s"),
        Timed("gelu_quantise", lambda: gelu_quantise(inner), s.tokens * s.ffn * 3.0, "GB/s"),
    ]


def matmul_calls(shape: Shape, device: str) -> list[Timed]:
    """The four matmuls of a layer's width, in bf16 and in fp8."""
    torch.manual_seed(3)
    s, calls = shape, []
    for name, inner, outer in (
        ("qkv", s.width, 3 * s.width),
        ("o", s.width, s.width),
        ("ffn up", s.width, s.ffn),
        ("ffn down", s.ffn, s.width),
    ):
        x = torch.randn(1, s.tokens, inner, device=device, dtype=torch.bfloat16)
        weight = torch.randn(outer, inner, device=device, dtype=torch.bfloat16) * inner**-0.5
        bias = torch.randn(outer, device=device, dtype=torch.bfloat16)
        rows, (weight_8, scale) = quantise_rows(x), quantise_weight(weight)
        flops = 2.0 * s.tokens * inner * outer

        def in_bf16(x: Tensor = x, weight: Tensor = weight, bias: Tensor = bias) -> Tensor:
            return F.linear(x, weight, bias)

        def in_fp8(
            rows: Rows = rows, w: Tensor = weight_8, scale: Tensor = scale, bias: Tensor = bias
        ) -> Tensor:
            return fp8_linear(rows, w, scale, bias, torch.bfloat16)

        calls += [Timed(f"matmul {name} bf16", in_bf16, flops, "TFLOP/s")]
        calls += [Timed(f"matmul {name} fp8", in_fp8, flops, "TFLOP/s")]
    return calls

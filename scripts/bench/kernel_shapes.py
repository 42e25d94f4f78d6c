"""Shapes and inputs of the kernel benchmark: a chunk, its cache and its weights, seeded, on the GPU. No timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from seko_export.families.layers.block import window_attention
from seko_kernels.attention import key_tiles, scratch_tokens, v_columns
from seko_kernels.fused_reference import FP8, fp8_scale
from seko_kernels.reference import nvfp4_global_scale
from seko_kernels.scratch import KeyRotation, fp8_expand


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
        The call.
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


def expansion(shape: Shape, device: str) -> Timed:
    """What 8-bit attention reads of an FP4 cache, expanded once a chunk: keys in int8, values in fp8."""
    torch.manual_seed(1)
    s = shape
    slots = torch.arange(s.cache_frames - s.chunk_frames, s.cache_frames, device=device)[None]
    cache = {}
    for name in ("k", "v"):
        cache[f"{name}_codes"] = torch.randint(
            0, 256, (s.cache_tokens, s.heads, s.head_dim // 2), device=device, dtype=torch.uint8
        )
        cache[f"{name}_scales"] = torch.randint(
            0x20, 0x60, (s.cache_tokens, s.heads, s.head_dim // 16), device=device, dtype=torch.uint8
        )
        cache[f"{name}_global_scale"] = nvfp4_global_scale(torch.full((s.heads,), 6.0)).to(device)
    cache["v_fp8_scale"] = fp8_scale(cache["v_global_scale"])
    past = s.cache_tokens - s.tokens
    out = {
        "k_out": torch.zeros(1, scratch_tokens(past), s.heads, s.head_dim, device=device, dtype=torch.int8),
        "k_out_scale": torch.zeros(1, s.heads, key_tiles(past), device=device),
        "v_out": torch.zeros(1, s.heads, s.head_dim, v_columns(past), device=device, dtype=torch.uint8).view(
            FP8
        ),
    }
    pairs = s.head_dim // 2 - 2 * (s.head_dim // 6)
    tables = (
        torch.rand(count, width, 2, device=device)
        for count, width in ((s.cache_frames, pairs), (s.frame_tokens, s.head_dim // 2 - pairs))
    )
    rotation = KeyRotation(torch.randn(s.heads, s.head_dim, device=device), *tables)
    valid = torch.tensor([s.cache_tokens], device=device)

    def run() -> None:
        fp8_expand(
            write_slots=slots, valid_tokens=valid, frame_tokens=s.frame_tokens, rotation=rotation, **cache, **out
        )  # fmt: skip

    return Timed("fp8_expand", run, (2 * 0.5625 + 2) * past * s.width, "GB/s")

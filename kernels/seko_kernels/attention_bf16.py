"""The 16-bit attention op: checks its arguments, calls Gluon (Hopper) or the reference (CPU)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import wrap_triton

from seko_kernels import fused_reference
from seko_kernels.attention_parts import SPLITS, WAVE_OF_PARTS_KEYS, Parts, softmax_scale, use_torchs_memory
from seko_kernels.checks import expect, expect_dims, expect_dtype
from seko_kernels.errors import KernelsError
from seko_kernels.hopper_attention_bf16 import (
    ARCH,
    HEAD_DIM,
    KEYS,
    QUERIES,
    STAGES,
    WARPS,
    attention_bf16_outline,
)
from seko_kernels.ops import FLOAT_DTYPES, kernel_op, takes_kernels
from seko_kernels.waves import Waves, cut


def attention_bf16(q: Tensor, k: Tensor, v: Tensor, valid_tokens: Tensor) -> Tensor:
    """Attend in 16 bits to the first ``valid_tokens[b]`` keys of each row b; later keys and values are never used.

    Parameters
    ----------
    q : Tensor
        Queries, ``[B, T, H, D]`` (rows, query tokens, heads, channels) bfloat16, on a CPU also float32, contiguous. On
        a GPU D is 128.
    k, v : Tensor
        Keys and values, ``[B, N, H, D]`` of q's dtype, contiguous, for N cached tokens of each row.
    valid_tokens : Tensor
        Number of keys of each row to which queries attend, ``[B]`` int64 on q's device.

    Returns
    -------
    Tensor
        The attention, ``[B, T, H * D]`` of q's dtype.

    Raises
    ------
    KernelsError
        If a tensor has another shape, dtype or layout than documented here; if the tensors are on different
        devices, or on a device that is neither CPU nor CUDA; if the GPU is no Hopper GPU, or the installed triton has
        no Gluon that works like that of triton 3.6.
    """
    expect_dims("q", q, 4, "[batch, tokens, heads, head_dim]")
    expect_dims("k", k, 4, "[batch, tokens, heads, head_dim]")
    batch, query_tokens, heads, head_dim = q.shape
    cache_tokens = k.shape[1]
    expect("q", q, tuple(q.shape), *FLOAT_DTYPES)
    for name, tensor in (("k", k), ("v", v)):
        expect(name, tensor, (batch, cache_tokens, heads, head_dim), q.dtype)
    expect("valid_tokens", valid_tokens, (batch,), torch.int64)
    if not takes_kernels(q, k, v, valid_tokens):
        return fused_reference.attention_bf16(q, k, v, valid_tokens)
    expect_dtype("q", q, torch.bfloat16)
    missing = no_kernel(q)
    if missing is not None:
        raise KernelsError(missing)
    slots = torch.cuda.get_device_properties(q.device).multi_processor_count
    waves = cut(batch * heads, query_tokens, cache_tokens, QUERIES, slots, SPLITS, 0, WAVE_OF_PARTS_KEYS)
    out: Tensor = _attention_bf16_cuda(q, k, v, valid_tokens, *(waves or Waves(query_tokens, 1)))
    return out


def no_kernel(q: Tensor) -> str | None:
    """Return why the GPU that holds the queries ``q`` [B, T, H, D] has no kernel for them; None if it has one."""
    if q.shape[-1] != HEAD_DIM:
        return f"head_dim must be {HEAD_DIM} on a GPU, got {q.shape[-1]}"
    major, minor = torch.cuda.get_device_capability(q.device)
    if f"sm_{major}{minor}" != ARCH:
        return f"this GPU is sm_{major}{minor}, the 16-bit attention is for {ARCH}; use torch's"
    return None


@kernel_op("seko::attention_bf16", mutates_args=())
def _attention_bf16_cuda(
    q: Tensor, k: Tensor, v: Tensor, valid_tokens: Tensor, whole: int, splits: int
) -> Tensor:
    batch, query_tokens, heads, head_dim = q.shape
    use_torchs_memory()
    out = torch.empty((batch, query_tokens, heads, head_dim), dtype=torch.bfloat16, device=q.device)
    parts = Parts.of(out, query_tokens - whole, splits)
    programs, places = parts.programs(whole, QUERIES, batch, heads)
    wrap_triton(attention_bf16_outline)[(programs,)](
        q,
        k,
        v,
        valid_tokens,
        out,
        parts.out,
        parts.lse,
        query_tokens,
        k.shape[1],
        *places,
        HEADS=heads,
        SOFTMAX_SCALE=softmax_scale(head_dim),
        KEYS=KEYS,
        STAGES=STAGES,
        num_warps=WARPS,
    )
    parts.combine(out)
    return out.view(batch, query_tokens, heads * head_dim)

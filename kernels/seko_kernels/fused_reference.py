"""The fused and fp8 operations in plain torch: what each kernel means. No kernels, no checks, no cache formats.

All is computed in float32, with one rounding where a result is stored; a quantised result has the bytes of
`e4m3_cast`. Scales of fp8 tensors are powers of two a head, so that multiplying by them is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seko_kernels.formats import E4M3_MAX

FP8 = torch.float8_e4m3fn


def e4m3_cast(x: Tensor) -> Tensor:
    """Nearest e4m3 number of float32 `x`, ties to even, saturating at 448, the sign of zero kept."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(FP8)


def attention_fp8(
    q: Tensor,
    k: Tensor,
    v_t: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    valid_tokens: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Softmax attention over the first ``valid_tokens[b]`` keys; a row with none gives zeros.

    Parameters
    ----------
    q : Tensor
        ``[B, T, H, D]`` e4m3.
    k : Tensor
        ``[B, N, H, D]`` e4m3.
    v_t : Tensor
        ``[B, H, D, columns]`` e4m3, columns >= N; those from N up are not read.
    q_scale, k_scale, v_scale : Tensor
        ``[H]`` float32.
    valid_tokens : Tensor
        ``[B]`` int64.
    out_dtype : torch.dtype
        Of the result.

    Returns
    -------
    Tensor
        ``[B, T, H * D]`` of `out_dtype`.
    """
    tokens, head_dim = k.shape[1], k.shape[3]
    live = torch.arange(tokens, device=k.device) < valid_tokens[:, None]  # [B, N]
    keys = torch.where(live[:, :, None, None], k.float(), 0.0)  # bytes never written may be NaN
    values = torch.where(live[:, None, None, :], v_t[..., :tokens].float(), 0.0)  # [B, H, D, N]
    factor = (q_scale * k_scale)[:, None, None] * head_dim**-0.5
    scores = torch.einsum("bthd,bnhd->bhtn", q.float(), keys) * factor
    scores = torch.where(live[:, None, None, :], scores, -torch.inf)
    top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(total > 0, total, 1.0)
    out = torch.einsum("bhtn,bhdn->bthd", weights, values) * v_scale[:, None]
    return out.flatten(2).to(out_dtype)

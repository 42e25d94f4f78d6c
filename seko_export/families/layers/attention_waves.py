"""Attention that is split along the keys, so that its query tiles also fill a GPU's last wave of thread blocks
(`seko_kernels.waves`).

On Hopper, cuDNN's attention gives each tile of 128 queries of a head to one multiprocessor, which loops over all
keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from seko_kernels.waves import Waves, cut

# queries in a tile of cuDNN (sm_90, head_dim 128), measured as the steps of its time over the number of queries
TILE = 128
MOST_SPLITS = 24


def waves_for(batch: int, heads: int, queries: int, keys: int, slots: int) -> Waves | None:
    """Return the split of the keys of an attention for a GPU that runs ``slots`` query tiles at a time; None if no
    split is faster.
    """
    splits = [number for number in range(2, MOST_SPLITS + 1) if keys % number == 0]
    return cut(batch * heads, queries, keys, TILE, slots, splits)


def waves_on(device: torch.device, batch: int, heads: int, queries: int, keys: int) -> Waves | None:
    """Return the result of `waves_for` for ``device``; None unless the device is a Hopper GPU, because cuDNN's tiles
    were measured on Hopper only.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    slots = torch.cuda.get_device_properties(device).multi_processor_count
    return waves_for(batch, heads, queries, keys, slots)


def cut_attention(q: Tensor, k: Tensor, v: Tensor, waves: Waves) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v as [B, T, H, D]; q [B, T, H, D], k and v [B, N, H, D].

    Each part of the split attention is rounded to q's dtype, and the parts are summed in float32.
    """
    rest = queries_in_parts(q.narrow(1, waves.whole, q.shape[1] - waves.whole), waves.splits)
    parts, lse = attention_with_lse(rest, keys_in_parts(k, waves.splits), keys_in_parts(v, waves.splits))
    first = q.narrow(1, 0, waves.whole).transpose(1, 2)
    whole = F.scaled_dot_product_attention(first, k.transpose(1, 2), v.transpose(1, 2))
    shape = (q.shape[0], waves.splits)
    weights = lse.unflatten(0, shape).softmax(dim=1)  # [B, S, R, H]
    summed = (parts.unflatten(0, shape).float() * weights.unsqueeze(-1)).sum(dim=1)  # [B, R, H, D]
    joined: Tensor = torch.cat((whole.transpose(1, 2), summed.to(q.dtype)), dim=1)
    return joined


def queries_in_parts(q: Tensor, splits: int) -> Tensor:
    """Return the queries [B, R, H, D] repeated for each of the S parts of the keys, as [B*S, R, H, D]."""
    parts: Tensor = q.unsqueeze(1).expand(-1, splits, -1, -1, -1).flatten(0, 1)
    return parts


def keys_in_parts(x: Tensor, splits: int) -> Tensor:
    """Return keys or values [B, N, H, D] split into S parts, as a view [B*S, N/S, H, D]."""
    parts: Tensor = x.unflatten(1, (splits, -1))
    return parts.flatten(0, 1)


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention [B, T, H, D] and log(sum(exp(q k^T / sqrt(D)))) [B, T, H] float32. On a GPU cuDNN computes
    both results."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    y: Tensor
    lse: Tensor
    if q.device.type == "cuda":
        y, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)  # [B, H, T, 1]
        lse = lse.squeeze(-1)
    else:
        scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
        y, lse = scores.softmax(dim=-1).to(v.dtype) @ v, scores.logsumexp(dim=-1)
    return y.transpose(1, 2), lse.transpose(1, 2)

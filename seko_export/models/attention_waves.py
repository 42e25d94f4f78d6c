"""Attention whose query tiles fill a GPU's last wave, too: the rest of the queries attends to parts of the keys.

cuDNN's attention on Hopper gives each tile of 128 queries of a head to one multiprocessor, from the first key to the
last. At 12 heads and 4,680 queries these are 444 tiles on 132 multiprocessors: three whole waves, and a fourth in which
two thirds of the GPU have nothing to do. So as many queries as fill whole waves go as they are; each tile that is left
takes a part of the keys, as many parts as fill the GPU, and what they give is summed by its weight in the softmax.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

TILE = 128  # queries that cuDNN gives to a multiprocessor (sm_90, head_dim 128; steps of its time over the queries)
MOST_SPLITS = 24
# Of a launch more, of short loops over keys, and of the sum: in keys that a tile could attend to in the meantime.
SPLIT_COST_KEYS = 5000
LEAST_GAIN = 0.03  # of the time: less is not worth two more launches


class Waves(NamedTuple):
    """How an attention is cut.

    Parameters
    ----------
    whole : int
        Queries of each row that attend to all keys at once.
    splits : int
        Parts of the keys for the others; divides the keys.
    """

    whole: int
    splits: int


def waves_for(batch: int, heads: int, queries: int, keys: int, slots: int) -> Waves | None:
    """Return how to cut an attention on a GPU that runs `slots` tiles at a time; None where whole tiles do as well."""
    tiles = -(-queries // TILE)
    pairs = batch * heads
    rounds = pairs * tiles // slots  # whole waves
    plain = -(-pairs * tiles // slots)
    per_pair = rounds * slots // pairs
    left = pairs * (tiles - per_pair)
    if not rounds or not left:
        return None
    found = {s: -(-left * s // slots) / s for s in range(2, MOST_SPLITS + 1) if keys % s == 0}
    if not found:
        return None
    splits = min(found, key=found.__getitem__)
    cost = rounds + found[splits] + SPLIT_COST_KEYS / keys
    return Waves(per_pair * TILE, splits) if cost <= (1 - LEAST_GAIN) * plain else None


def waves_on(device: torch.device, batch: int, heads: int, queries: int, keys: int) -> Waves | None:
    """Return `waves_for` this device: None for all but a Hopper GPU, where cuDNN's tiles were measured."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    slots = torch.cuda.get_device_properties(device).multi_processor_count
    return waves_for(batch, heads, queries, keys, slots)


def cut_attention(q: Tensor, k: Tensor, v: Tensor, waves: Waves) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v as [B, T, H, D]; q [B, T, H, D], k and v [B, N, H, D].

    The parts are rounded to q's dtype, each at most as large as the values are, and summed in float32.
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
    """Return [B*S, R, H, D], the same queries [B, R, H, D] for each part of the keys."""
    parts: Tensor = q.unsqueeze(1).expand(-1, splits, -1, -1, -1).flatten(0, 1)
    return parts


def keys_in_parts(x: Tensor, splits: int) -> Tensor:
    """Return [B*S, N/S, H, D] of keys or values [B, N, H, D]: a view."""
    parts: Tensor = x.unflatten(1, (splits, -1))
    return parts.flatten(0, 1)


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention [B, T, H, D] and log(sum(exp(q k^T / sqrt(D)))) [B, T, H] float32; cuDNN's on a GPU."""
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

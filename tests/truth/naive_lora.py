"""LoRA, rsLoRA and DoRA by their formulas, in float64 and numpy alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def merged(
    weight: Array,
    down: Array,
    up: Array,
    *,
    strength: float = 1.0,
    alpha: float | None = None,
    rank_stabilised: bool = False,
    magnitude: Array | None = None,
) -> Array:
    """Return a weight with a low-rank change: entry (o, i) gets the sum over k of up[o, k] down[k, i], scaled."""
    rank = len(down)
    scale = 1.0
    if alpha is not None:
        scale = alpha / (math.sqrt(rank) if rank_stabilised else rank)
    flat = weight.astype(np.float64).reshape(len(weight), -1)
    total = np.zeros_like(flat)
    for k in range(rank):
        total += np.outer(up.reshape(len(up), rank)[:, k], down.reshape(rank, -1)[k])
    changed = flat + strength * scale * total
    if magnitude is not None:
        for row in range(len(changed)):
            changed[row] *= magnitude.reshape(-1)[row] / math.sqrt(float((changed[row] ** 2).sum()))
    return changed.reshape(weight.shape)

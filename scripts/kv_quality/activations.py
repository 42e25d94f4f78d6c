"""Real Q, K and V of an exact stream: captured past the wrap, and how far each format's attention is off."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.kv_quality.sample import Sample
from scripts.kv_quality.streams import Places, Scales, SelfAttention, first_full_chunk
from seko_export.config.video import VideoBuild
from seko_export.families.layers.block import attention
from seko_export.video.calibration import KvStatistics
from seko_export.video.recording import GOLDEN_PROMPT, eager_session
from seko_kernels.kv_formats import KvFormat


@dataclass(frozen=True)
class Seen:
    """One layer's attention in one pass, on the CPU: q [B, T, H, D]; k (after RoPE), v [B, N, H, D]."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor


def capture(sample: Sample, config: VideoBuild, text: Tensor, seeds: list[int], chunk: int) -> list[Seen]:
    """Return every attention of chunk number ``chunk`` of an exact stream, pass by pass, layer by layer."""
    with eager_session(config, sample.weights(config), text, seeds) as session:
        for _ in range(chunk):
            session.run_chunk()
        with SelfAttention(config) as watched:
            session.run_chunk()
    return [Seen(call % config.model.layers, *qkv) for call, qkv in enumerate(watched.seen)]


def built_scales(form: KvFormat, sample: Sample, device: str) -> Scales:
    """Return what a build of the sample ships as the constants of a format: from the golden prompt alone."""
    exact = sample.build(1, device)
    seen = KvStatistics(exact, form)
    with eager_session(exact, sample.weights(exact), sample.embed([GOLDEN_PROMPT]), [0], seen) as session:
        for _ in range(first_full_chunk(exact) + 1):
            session.run_chunk()
    return seen.calibrate()


def errors(form: KvFormat, seen: list[Seen], layout: Places, constants: Scales) -> dict[str, list[float]]:
    """Return relative errors a layer, over all passes, rows and heads: ``k``, ``v``, ``attention`` (its output)."""
    layers, device = 1 + max(record.layer for record in seen), layout.cos.device
    sums = {name: torch.zeros(layers, 2, dtype=torch.float64) for name in ("k", "v", "attention")}
    for record in seen:
        q, true_k, true_v = (x.to(device).float() for x in (record.q, record.k, record.v))
        of_layer = f"blocks.{record.layer}.kv."
        scales = {
            name.removeprefix(of_layer): t.to(device)
            for name, t in constants.items()
            if name.startswith(of_layer)
        }
        k, v = _through(form, scales, true_k, true_v, layout)
        exact, lossy = attention(q, true_k, true_v, None), attention(q, k, v, None)
        for name, a, b in (("k", k, true_k), ("v", v, true_v), ("attention", lossy, exact)):
            sums[name][record.layer] += torch.stack(((a - b).square().sum(), b.square().sum())).cpu()
    return {name: (s[:, 0] / s[:, 1]).sqrt().tolist() for name, s in sums.items()}


def _through(
    form: KvFormat, scales: dict[str, Tensor], k: Tensor, v: Tensor, layout: Places
) -> tuple[Tensor, Tensor]:
    """Write keys and values [B, N, H, D] as a stream does and read them back, float32; the chunk's own as is."""
    batch, own = len(k), layout.chunk.repeat(len(k))
    written = (layout.unrotated(k) if form.keys_before_rope else k).flatten(0, 1)
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    tables = {**layout.tables, "slot_rotary": layout.tables["slot_rotary"].repeat(batch, 1, 1)}
    caches = {
        c.name: torch.zeros(len(k), *c.token_shape, dtype=c.dtype, device=k.device)
        for c in form.cache_tensors
    }
    dtype = caches["k"].dtype if "k" in caches else torch.float32
    index = torch.arange(len(k), device=k.device)
    form.write(caches, scales, index, written.to(dtype), v.to(dtype))
    read = (torch.where(own[:, None, None], true, x.float())
            for x, true in zip(form.expand(caches, scales, tables, dtype), (k, v), strict=True))  # fmt: skip
    read_k, read_v = (x.unflatten(0, (batch, -1)) for x in read)
    return read_k, read_v

"""Real Q, K and V of an exact stream: captured past the wrap, and how far each format's attention is off."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.kv_quality.sample import Sample
from scripts.kv_quality.streams import Places, Scales, first_full_chunk, run_stream
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
    recorded: list[Seen] = []

    def see(number: int, _pass: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if number == chunk:
            recorded.append(Seen(layer, *(x.to("cpu", copy=True) for x in (q, k, v))))

    run_stream(sample, config, text, seeds, chunk + 1, watch=see)
    return recorded


def built_scales(form: KvFormat, sample: Sample, device: str) -> Scales:
    """Return what a build of the sample ships as the constants of a format: from the golden prompt alone."""
    exact = sample.build(1, device)
    seen = KvStatistics(exact, form)
    with eager_session(exact, sample.weights(exact), sample.embed([GOLDEN_PROMPT]), [0], seen) as session:
        for _ in range(first_full_chunk(exact) + 1):
            session.run_chunk()
    scales: Scales = [{} for _ in range(exact.model.layers)]
    for name, constant in seen.calibrate().items():
        _, layer, _, short = name.split(".")  # blocks.{layer}.kv.NAME
        scales[int(layer)][short] = constant
    return scales


def errors(form: KvFormat, seen: list[Seen], layout: Places, constants: Scales) -> dict[str, list[float]]:
    """Return relative errors a layer, over all passes, rows and heads: ``k``, ``v``, ``attention`` (its output)."""
    scales = [{name: t.to(layout.cos.device) for name, t in of_layer.items()} for of_layer in constants]
    sums = {name: torch.zeros(len(scales), 2, dtype=torch.float64) for name in ("k", "v", "attention")}
    for record in seen:
        q, true_k, true_v = (x.to(layout.cos.device).float() for x in (record.q, record.k, record.v))
        k, v = _through(form, scales[record.layer], true_k, true_v, layout)
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

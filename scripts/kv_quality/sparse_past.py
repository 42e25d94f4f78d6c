"""The cost of attending to a share of the past (`--past-share`): errors with equal latents, and prompts followed.

The sample's frames have 36 tokens, so a tile of 128 keys has more than three frames, where at 480x832 it is a twelfth
of one. So the share is measured in small tiles, too, a ninth of a frame, by the reference of the attention. The ring
is that of Self-Forcing: of the sample's own, sink and newest chunk are more than half. Errors are those of 8-bit
attention over an FP4 cache against the exact cache, with equal latents in each pass, once the cache is full.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scripts.bench.rows import append_row
from scripts.kv_quality.activations import built_scales
from scripts.kv_quality.context_reuse import errors_of_ends, passes_of
from scripts.kv_quality.fp8_attention import constants_of, followed
from scripts.kv_quality.sample import Sample, decoded, draw_prompts, open_sample
from scripts.kv_quality.streams import Scales, first_full_chunk, run_stream
from seko_export.config.video import VideoBuild
from seko_export.families.layers.layer_ops import LayerOps
from seko_kernels import fused_reference
from seko_kernels.attention import OwnTokens
from seko_kernels.sparse_past import PastLayout, choose_past

RING_FRAMES = 21
SHARES = (0.4, 0.7)
SMALL = 4  # keys of a small tile, and queries that share a list of such tiles
EXACT, EVERY = "exact cache", "all cached keys"


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    """Measure streams of ``prompts``, ``chunks`` long (9 or more: 8 fill the cache), for each share."""
    counts = {"prompts": options.prompts, "chunks": options.chunks}
    for name, figures in measure(
        open_sample(options.sample), options.prompts, options.chunks, options.device
    ).items():
        shape = f"sample with a ring of {RING_FRAMES}, {name}"
        if "step" in figures:
            unit = "relative, against exact, equal latents in each pass, mean of prompts"
            append_row(options.rows, "past_step_error", shape, figures["step"], unit, None, **counts)
        append_row(
            options.rows,
            "past_following",
            shape,
            figures["followed"],
            "% of prompts followed",
            None,
            **counts,
        )


def measure(sample: Sample, count: int, chunks: int, device: str) -> dict[str, dict[str, float]]:
    """Return for each way its error with equal latents at the ends of chunks over a full cache, a mean over prompts,
    and the per cent of prompts that are followed at the end of streams that run freely."""
    prompts = draw_prompts(count)
    text, seeds = sample.embed(prompts), list(range(count))
    usual = sample.build(count, device)
    exact = usual.changed(stream=replace(usual.workload.stream, ring_frames=RING_FRAMES))
    every = exact.changed(kv_scheme="fp4", fused=True, attention="fp8")
    scales = constants_of(sample, every, built_scales(every.kv, sample, device))
    teacher = [latents for _, latents in passes_of(sample, exact, text, seeds, chunks)]
    full = first_full_chunk(exact)
    decode = sample.decoder(chunks * sample.stream.chunk_frames, device)

    def ends(config: VideoBuild, constants: Scales | None) -> dict[str, float]:
        video = decoded(decode, run_stream(sample, config, text, seeds, chunks, constants))
        return {"followed": followed(video, prompts)}

    def figures(config: VideoBuild) -> dict[str, float]:
        pairs = passes_of(sample, config, text, seeds, chunks, scales, teacher)
        return {"step": float(errors_of_ends(pairs, chunks)[full:].mean()), **ends(config, scales)}

    found = {EXACT: ends(exact, None), EVERY: figures(every)}
    for share in SHARES:
        config = every.changed(past_share=share)
        found[f"past share {share}, tiles of 128 keys"] = figures(config)
        with small_tiles(share):
            found[f"past share {share}, tiles of {SMALL} keys"] = figures(config)
    return found


@contextmanager
def small_tiles(share: float) -> Iterator[None]:
    """Context manager in which layers with a sparse past choose small tiles instead, as many as the share says."""

    def choose(q: Tensor, *given: Any) -> Tensor:
        k, k_scale, valid, slots, layout, _ = given
        small: PastLayout = layout._replace(key_tile=SMALL)
        return choose_past(q, k, k_scale, valid, slots, small, small.tiles_of(share), SMALL)

    def attend(
        q: Tensor,
        k: Tensor,
        k_scale: Tensor,
        v_t: Tensor,
        v_scale: Tensor,
        valid: Tensor,
        own: OwnTokens,
        *,
        chosen: Tensor,
    ) -> Tensor:
        return fused_reference.attention_fp8(
            q, k, k_scale, v_t, v_scale, valid, own.k, own.v, chosen=chosen, list_tiles=(SMALL, SMALL)
        )

    before: dict[str, Callable[..., Any]] = {
        name: vars(LayerOps)[name] for name in ("choose_past", "attention_fp8")
    }
    try:
        setattr(LayerOps, "choose_past", staticmethod(choose))  # noqa: B010 - a stand-in
        setattr(LayerOps, "attention_fp8", staticmethod(attend))  # noqa: B010
        yield
    finally:
        for name, op in before.items():
            setattr(LayerOps, name, op)

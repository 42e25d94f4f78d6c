"""The cost of leaving out the context pass (`--context reuse`): errors with equal latents, and prompts followed.

With equal latents: every pass of a stream gets the latents of the stream with context passes, and its own result is
compared with that stream's, so that an error does not feed on itself. An FP4 cache is measured alike, for comparison.
Prompts are judged on streams that run freely.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from scripts.bench.rows import append_row
from scripts.kv_quality.activations import built_scales
from scripts.kv_quality.compare import JUDGED_FRAMES
from scripts.kv_quality.fp8_attention import followed
from scripts.kv_quality.measures import relative_error
from scripts.kv_quality.sample import Sample, decoded, draw_prompts, open_sample
from scripts.kv_quality.streams import Scales, first_full_chunk, run_stream, weights_with
from seko_export.config.stream import REUSE
from seko_export.config.video import VideoBuild
from seko_export.goldens.eager import Engine
from seko_export.video.recording import eager_session

PASS, REUSED, FP4 = "context pass", "context reuse", "fp4"
ADVANCE = "advance"  # the engine that ends each pass; its first result are the next pass's latents


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    """Measure streams of ``prompts``, ``chunks`` long (5 or more, as a judged clip), without a context pass beside
    those with one."""
    ways = measure(open_sample(options.sample), options.prompts, options.chunks, options.device)
    counts = {"prompts": options.prompts, "chunks": options.chunks}
    unit = "relative, equal latents in each pass, mean of prompts"
    for name, part in product((REUSED, FP4), ("filling", "full")):
        shape = f"sample, {name}, cache {part}"
        append_row(options.rows, "context_latent_error", shape, ways[name][part], unit, None, **counts)
    for name, end in product((PASS, REUSED), ("start", "end")):
        shape, share = f"sample, {name}, {end} of the stream", ways[name][end]
        append_row(options.rows, "context_following", shape, share, "% of prompts followed", None, **counts)


def measure(sample: Sample, count: int, chunks: int, device: str) -> dict[str, dict[str, float]]:
    """Return for each way to fill the cache its error with equal latents, as a mean over prompts: of the ends of chunks
    while the cache fills, and once it is full. Also the per cent of prompts that are followed at both ends of streams
    that run freely."""
    prompts = draw_prompts(count)
    text, seeds = sample.embed(prompts), list(range(count))
    usual = sample.build(count, device)
    reused = usual.changed(stream=replace(usual.workload.stream, context=REUSE))
    fp4 = usual.changed(kv_scheme="fp4")
    scales = built_scales(fp4.kv, sample, device)
    teacher = [latents for _, latents in passes_of(sample, usual, text, seeds, chunks)]
    full = first_full_chunk(usual)
    figures: dict[str, dict[str, float]] = {PASS: {}}
    for name, config, constants in ((REUSED, reused, None), (FP4, fp4, scales)):
        pairs = passes_of(sample, config, text, seeds, chunks, constants, teacher)
        ends = errors_of_ends(pairs, chunks).mean(1)
        figures[name] = {"filling": float(ends[1:full].mean()), "full": float(ends[full:].mean())}
    for name, config in ((PASS, usual), (REUSED, reused)):
        video = decoded(
            sample.decoder(chunks * sample.stream.chunk_frames, device),
            run_stream(sample, config, text, seeds, chunks),
        )
        figures[name] |= {
            "start": followed(video[:, :, :JUDGED_FRAMES], prompts),
            "end": followed(video, prompts),
        }
    return figures


def errors_of_ends(pairs: Sequence[tuple[Tensor, Tensor]], chunks: int) -> Tensor:
    """Return the relative error [chunks, B] of each chunk's last denoise pass, of what `passes_of` returns."""
    errors = torch.stack([relative_error(own, given) for own, given in pairs])
    by_pass: Tensor = errors.unflatten(0, (chunks, -1))
    return by_pass[:, -1]


def passes_of(
    sample: Sample,
    config: VideoBuild,
    text: Tensor,
    seeds: list[int],
    chunks: int,
    scales: Scales | None = None,
    teacher: Sequence[Tensor] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Return for each pass its resulting latents [B, C, F, h, w], and those with which the stream went on: the
    ``teacher``'s, if there is one, else its own."""
    weights = weights_with(sample, config, scales)
    results: list[tuple[Tensor, Tensor]] = []

    def around(engine: Engine) -> Engine:
        def advance(inputs: list[Tensor]) -> Sequence[Tensor]:
            own, *more = engine(inputs)
            given = own if teacher is None else teacher[len(results)].to(own.device)
            results.append((own.cpu().clone(), given.cpu().clone()))
            return (given, *more)

        return advance

    with eager_session(config, weights, text, seeds, around={ADVANCE: around}) as session:
        for _ in range(chunks):
            session.run_chunk()
    return results

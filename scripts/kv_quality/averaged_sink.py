"""What `--sink-average` changes beside a sink that stays as it was: how far the sink moves, and the latents.

The sample runs in Reward Forcing's layout: a sink of 3 latent frames, a ring of 6, positions within the window, weight
0.001. "exact": averages in float32. "bfloat16": the sink moves by what the authors' arithmetic, which rounds each
product and their sum to bfloat16, moves it by; the stream is the same otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from scripts.bench.rows import append_row
from scripts.kv_quality.measures import relative_error
from scripts.kv_quality.sample import Sample, draw_prompts, open_sample
from seko_export.config.video import VideoBuild
from seko_export.families.layers.layer_pieces import SINK_AVERAGE
from seko_export.families.registry import graph_of
from seko_export.goldens.eager import Engine
from seko_export.video.recording import eager_session

WEIGHT = 0.001
SIDES = ("caches.k", "caches.v")


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    """Measure streams of ``prompts``, ``chunks`` long (4 or more: the fourth evicts a chunk), with an averaged and with
    a fixed sink."""
    counts = {"prompts": options.prompts, "weight": WEIGHT}
    for name, figures in measure(open_sample(options.sample), options.prompts, options.chunks).items():
        shape = f"sample, sink 3, ring 6, {name} averages, after {options.chunks} chunks"
        for figure, unit in (
            ("latents", "relative, against a fixed sink, mean of prompts"),
            ("moved", "of the sink's keys and values, relative"),
        ):
            append_row(options.rows, f"averaged_sink_{figure}", shape, figures[figure], unit, None, **counts)


def measure(sample: Sample, count: int, chunks: int) -> dict[str, dict[str, float]]:
    """Return for each arithmetic how far the latents of the last chunk are from those with a fixed sink, as a mean over
    prompts, and how far the sink has moved, as a mean over layers, keys and values; both relative."""
    prompts = draw_prompts(count)
    text, config = sample.embed(prompts), reward_forcings(sample.build(count, "cpu"))
    fixed_stream = replace(config.workload.stream, sink_average=0.0)
    fixed, still = last_chunk(sample, config.changed(stream=fixed_stream), text, chunks)
    ways: dict[str, dict[str, float]] = {}
    for name, around in (("exact", None), ("bfloat16", in_bfloat16(config))):
        latents, sinks = last_chunk(sample, config, text, chunks, around)
        moved = torch.stack([relative_error(*pair).mean() for pair in zip(sinks, still, strict=True)])
        ways[name] = {
            "latents": float(relative_error(latents, fixed).mean()),
            "moved": float(moved.mean()),
        }
    return ways


def reward_forcings(config: VideoBuild) -> VideoBuild:
    """Return a build in Reward Forcing's layout."""
    stream = replace(
        config.workload.stream,
        sink_frames=3,
        ring_frames=6,
        window_positions=True,
        sink_average=WEIGHT,
    )
    return config.changed(stream=stream)


def last_chunk(
    sample: Sample,
    config: VideoBuild,
    text: Tensor,
    chunks: int,
    around: Callable[[Engine], Engine] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return the latents [B, C, F, h, w] of the last of so many chunks, and the sink's keys and values of each layer,
    [B, tokens, H, D]."""
    wraps = {} if around is None else {SINK_AVERAGE: around}
    seeds, s = list(range(len(text))), config.workload.stream
    with eager_session(config, sample.weights(config), text, seeds, around=wraps) as session:
        for _ in range(chunks):
            latents = torch.from_numpy(session.run_chunk().to_host())
        caches = session.cache_sample(1)
    whole = [torch.from_numpy(caches[f"kv.{side}"]).unflatten(1, (len(text), -1)) for side in "kv"]
    return latents, [layer[:, : s.sink_frames * s.frame_tokens] for cache in whole for layer in cache]


def in_bfloat16(config: VideoBuild) -> Callable[[Engine], Engine]:
    """Return what puts bfloat16's average in place of float32's: the sink moves from where it is by the difference of
    its rounded average and its rounded numbers."""
    s = config.workload.stream
    names = [argument.name for argument in graph_of(config).pieces[SINK_AVERAGE].signature]

    def around(engine: Engine) -> Engine:
        def average(inputs: list[Tensor]) -> Sequence[Tensor]:
            given = dict(zip(names, inputs, strict=True))
            rows = len(given["frames"])
            slots = given["write_slots"][..., None] * s.frame_tokens + torch.arange(s.frame_tokens)
            before = {}
            for side in SIDES:
                cache = given[side].unflatten(0, (rows, -1))
                gone = torch.stack([of_row[at.flatten()] for of_row, at in zip(cache, slots, strict=True)])
                before[side] = (cache[:, : s.sink_frames * s.frame_tokens].clone(), gone)
            outputs = engine(inputs)
            for side, (sink, gone) in before.items():
                now = given[side].unflatten(0, (rows, -1))[:, : s.sink_frames * s.frame_tokens]
                if not torch.equal(now, sink):
                    rounded = sink.bfloat16()
                    averaged = (1 - WEIGHT) * rounded + WEIGHT * gone.bfloat16()
                    now.copy_(sink + (averaged.float() - rounded.float()))
            return outputs

        return average

    return around

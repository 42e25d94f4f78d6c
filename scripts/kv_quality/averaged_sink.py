"""What `--sink-average` changes beside a sink that stays as it was: how far the sink moves, and the latents.

    python -m scripts.kv_quality.averaged_sink --sample seko_export/sample --rows docs/benchmarks/kv-quality.jsonl

The sample runs in Reward Forcing's layout: a sink of 3 latent frames, a ring of 6, positions within the window, weight
0.001. "exact": averages in float32. "bfloat16": the sink moves by what the authors' arithmetic, which rounds each
product and their sum to bfloat16, moves it by; the stream is the same otherwise. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

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


def main(arguments: list[str] | None = None) -> None:
    """Measure streams with an averaged and with a fixed sink, append rows where that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m scripts.kv_quality.averaged_sink", description=__doc__)
    parser.add_argument("--sample", type=Path, required=True, help="folder that export_sample.py wrote")
    parser.add_argument("--prompts", type=int, default=4, help="held-out ones, a stream each, all at once")
    parser.add_argument("--chunks", type=int, default=20, help="length of the streams; 4 or more")
    parser.add_argument("--rows", type=Path, help="docs/benchmarks/NAME.jsonl, appended to")
    options = parser.parse_args(arguments)
    if options.prompts < 1 or options.chunks < 4:
        parser.error("--prompts: at least 1; --chunks: at least 4, with which the fourth evicts a chunk")
    report = measure(open_sample(options.sample), options.prompts, options.chunks)
    if options.rows is not None:
        _append_rows(report, options.rows)
    print(json.dumps(report))


def measure(sample: Sample, count: int, chunks: int) -> dict[str, object]:
    """Return for each arithmetic how far the latents of the last chunk are from those with a fixed sink, as a mean over
    prompts, and how far the sink has moved, as a mean over layers, keys and values; both relative."""
    prompts = draw_prompts(count, 0, held_out=True)
    text, config = sample.embed(prompts), reward_forcings(sample.build(count, "cpu"))
    fixed_stream = replace(config.workload.stream, sink_average=0.0)
    fixed, still = last_chunk(sample, config.changed(stream=fixed_stream), text, chunks)
    ways: dict[str, dict[str, float]] = {}
    for name, around in (("exact", None), ("bfloat16", in_bfloat16(config))):
        latents, sinks = last_chunk(sample, config, text, chunks, around)
        moved = torch.stack([relative_error(*pair).mean() for pair in zip(sinks, still, strict=True)])
        ways[name] = {
            "latents": float(relative_error(latents, fixed).mean()),
            "sink": float(moved.mean()),
        }
    return {"prompts": count, "chunks": chunks, "ways": ways}


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


def _append_rows(report: dict[str, object], rows: Path) -> None:
    ways: dict[str, dict[str, float]] = report["ways"]  # type: ignore[assignment]
    counts = {"prompts": report["prompts"], "weight": WEIGHT}
    for name, figures in ways.items():
        shape = f"sample, sink 3, ring 6, {name} averages, after {report['chunks']} chunks"
        append_row(
            rows,
            "averaged_sink_latents",
            shape,
            figures["latents"],
            "relative, against a fixed sink, mean of prompts",
            None,
            **counts,
        )
        append_row(
            rows,
            "averaged_sink_moved",
            shape,
            figures["sink"],
            "of the sink's keys and values, relative",
            None,
            **counts,
        )


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()

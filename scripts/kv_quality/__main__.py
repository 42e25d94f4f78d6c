"""Measures what lossy KV caches cost the sample: `python -m scripts.kv_quality --help`. Rows, pictures, a table."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from scripts.kv_quality import plots, report
from scripts.kv_quality.activations import (
    LayerStatistics,
    calibrate,
    capture,
    errors,
    scales_of,
)
from scripts.kv_quality.compare import WINDOW_CHUNKS, compare
from scripts.kv_quality.ideas import STREAMED, find, ideas, schemes
from scripts.kv_quality.sample import Sample, draw_prompts, open_sample
from scripts.kv_quality.streams import Scales, first_full_chunk, places, run_stream, with_format
from seko_export.config.video import VideoBuild
from seko_kernels.kv_formats import KvFormat

CALIBRATION_SEED = 1  # of training scenes; what is measured is held out, of seed 0
CALIBRATION_NOISE = (
    1_000_000  # first seed of the calibration's noise; the measured streams have theirs from 0
)
CALIBRATION_CHUNKS = 16  # looked at, from where the cache is full on


def main(arguments: list[str] | None = None) -> int:
    """Measure the quality of lossy KV caches on the sample, and end in a table."""
    parser = argparse.ArgumentParser(prog="python -m scripts.kv_quality", description=main.__doc__)
    parser.add_argument("--sample", type=Path, required=True, help="folder that export_sample.py wrote")
    parser.add_argument("--rows", type=Path, required=True, help="docs/benchmarks/NAME.jsonl, appended to")
    parser.add_argument("--pictures", type=Path, required=True, help="folder of the plots")
    parser.add_argument("--prompts", type=int, default=200, help="held-out ones")
    parser.add_argument("--chunks", default="7,20,100", help="after how many to look, rising")
    parser.add_argument(
        "--formats",
        default=",".join(STREAMED),
        help="ideas that run as streams beside every lossy scheme; an exact scheme is a control",
    )
    parser.add_argument(
        "--only", help="a lossy scheme by its name: its streams alone, without activations and pictures"
    )
    parser.add_argument("--batch", type=int, default=100, help="streams at once")
    parser.add_argument("--capture-prompts", type=int, default=8, help="whose activations are captured")
    parser.add_argument("--capture-chunk", type=int, default=19, help="number of the chunk that is captured")
    parser.add_argument("--calibration-chunks", type=int, default=CALIBRATION_CHUNKS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    options.chunks = [int(count) for count in options.chunks.split(",")]
    options.formats = [name.strip() for name in options.formats.split(",") if name.strip()]
    sample = open_sample(options.sample)
    _check(options, sample)
    _measure(options, sample)
    return 0


def _check(options: argparse.Namespace, sample: Sample) -> None:
    counts, full = options.chunks, first_full_chunk(sample.build(1, options.device))
    if sorted(set(counts)) != counts or not 2 <= counts[0] <= WINDOW_CHUNKS:
        raise ValueError(
            f"--chunks {counts}: expected them to rise from 2 to {WINDOW_CHUNKS} on, so that the first window "
            "is the start of the stream and long enough to be judged"
        )
    if options.capture_chunk < full:
        raise ValueError(
            f"--capture-chunk {options.capture_chunk}: the ring wraps at chunk {full}; take a later one"
        )
    if min(options.prompts, options.capture_prompts, options.batch, options.calibration_chunks) < 1:
        raise ValueError("prompts, batch and calibration chunks must be at least 1")


def _measure(options: argparse.Namespace, sample: Sample) -> None:
    began = time.monotonic()

    def show(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {text}", file=sys.stderr, flush=True)

    build = sample.build(1, options.device)
    shipped, tried = _wanted(options, build)
    streamed = shipped + find(options.formats, build)
    prompts = draw_prompts(options.prompts, 0, held_out=True)
    text = sample.embed(prompts)

    show("calibrating")
    statistics = _calibrated(options, sample)
    show("capturing")
    rows = min(options.capture_prompts, len(prompts))
    captured = sample.build(rows, options.device)
    seen = capture(sample, captured, text[:rows], list(range(rows)), options.capture_chunk)
    layout = places(captured, options.capture_chunk)
    table = {}
    constants = {}
    for form in [*shipped, *tried]:
        show(f"attention error of {form.name}")
        constants[form.name] = scales_of(form, statistics, sample, options.device)
        measured = errors(form, seen, layout, constants[form.name])
        report.append_activations(options.rows, form, measured, options.capture_chunk, rows)
        table[form.name] = (form.bits_per_number, measured)
    if not options.only:
        plots.draw_activations(options.pictures, seen, layout)
        plots.draw_attention_errors(options.pictures, table, {form.name for form in shipped})

    latents = {build.workload.kv_scheme: _streams(options, sample, text)}
    bits = {}
    for form in streamed:
        show(f"streams with {form.name}")
        name = form.name if form.name != build.workload.kv_scheme else f"{form.name} again"
        latents[name] = _streams(options, sample, text, form, constants.get(form.name))
        bits[name] = form.bits_per_number
    after, judged = compare(
        sample, latents, build.workload.kv_scheme, prompts, options.chunks, options.device, show
    )
    report.append_streams(options.rows, build.workload.kv_scheme, after, judged, bits)
    if not options.only:
        plots.draw_streams(
            options.pictures, latents, build.workload.kv_scheme, sample.stream.chunk_frames, after
        )
        default = next((name for name in latents if name.startswith("fp4")), list(latents)[1])
        # Exact, the default, the last idea.
        shown = list(dict.fromkeys([build.workload.kv_scheme, default, list(latents)[-1]]))
        plots.draw_frames(options.pictures, sample, latents, shown, prompts, options.chunks, options.device)
    report.print_tables(table, after, judged, build.workload.kv_scheme)
    show("done")


def _wanted(options: argparse.Namespace, build: VideoBuild) -> tuple[list[KvFormat], list[KvFormat]]:
    """Return the schemes that are measured, and the ideas of which only the attention's error is."""
    formats = schemes(build)
    if not options.only:
        return formats, ideas(build)
    options.formats = []
    named = [form for form in formats if form.name == options.only]
    if not named:
        raise ValueError(f"--only {options.only}: expected one of {', '.join(form.name for form in formats)}")
    return named, []


def _calibrated(options: argparse.Namespace, sample: Sample) -> list[LayerStatistics]:
    rows = options.capture_prompts
    config = sample.build(rows, options.device)
    text = sample.embed(draw_prompts(rows, CALIBRATION_SEED, held_out=False))
    seeds = list(range(CALIBRATION_NOISE, CALIBRATION_NOISE + rows))
    return calibrate(sample, config, text, seeds, options.calibration_chunks)


def _streams(
    options: argparse.Namespace,
    sample: Sample,
    text: Tensor,
    form: KvFormat | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """Return latents [prompts, C, frames, h, w]: with the exact cache, or a format's."""
    streams = []
    for rows in torch.arange(len(text)).split(options.batch):
        config = sample.build(len(rows), options.device)
        if form is not None:
            config = with_format(config, form)
        streams.append(run_stream(sample, config, text[rows], rows.tolist(), options.chunks[-1], scales))
    return torch.cat(streams)


if __name__ == "__main__":
    sys.exit(main())

"""Measures what lossy KV caches cost the sample: `python -m scripts.kv_quality --help`. Rows, pictures, a table."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from scripts.kv_quality import plots, report
from scripts.kv_quality.activations import built_scales, capture, errors
from scripts.kv_quality.compare import WINDOW_CHUNKS, compare
from scripts.kv_quality.sample import Sample, draw_prompts, open_sample
from scripts.kv_quality.streams import Scales, first_full_chunk, places, run_stream
from seko_export.config.video import VideoBuild
from seko_kernels.formats import NUMBER_FORMATS
from seko_kernels.kv_formats import KvFormat


def main(arguments: list[str] | None = None) -> int:
    """Measure the quality of lossy KV caches on the sample, and end in a table."""
    parser = argparse.ArgumentParser(prog="python -m scripts.kv_quality", description=main.__doc__)
    parser.add_argument("--sample", type=Path, required=True, help="folder that export_sample.py wrote")
    parser.add_argument("--rows", type=Path, required=True, help="docs/benchmarks/NAME.jsonl, appended to")
    parser.add_argument("--pictures", type=Path, required=True, help="folder of the plots")
    parser.add_argument("--prompts", type=int, default=200, help="held-out ones")
    parser.add_argument("--chunks", default="7,20,100", help="after how many to look, rising")
    parser.add_argument("--kv", help="lossy schemes with commas, all by default; the exact one is a control")
    parser.add_argument("--batch", type=int, default=100, help="streams at once")
    parser.add_argument("--capture-prompts", type=int, default=8, help="whose activations are captured")
    parser.add_argument("--capture-chunk", type=int, default=19, help="number of the chunk that is captured")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    options.chunks = [int(count) for count in options.chunks.split(",")]
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
    if min(options.prompts, options.capture_prompts, options.batch) < 1:
        raise ValueError("prompts and batch must be at least 1")


def _measure(options: argparse.Namespace, sample: Sample) -> None:
    began = time.monotonic()

    def show(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {text}", file=sys.stderr, flush=True)

    build = sample.build(1, options.device)
    exact, chosen = build.workload.kv_scheme, formats(options.kv, build)
    prompts = draw_prompts(options.prompts, 0, held_out=True)
    text = sample.embed(prompts)

    show("capturing")
    rows = min(options.capture_prompts, len(prompts))
    captured = sample.build(rows, options.device)
    seen = capture(sample, captured, text[:rows], list(range(rows)), options.capture_chunk)
    layout = places(captured, options.capture_chunk)
    table = {}
    latents = {exact: streams(options, sample, text)}
    bits = {}
    for scheme, form in chosen.items():
        name = f"{scheme} again" if scheme == exact else form.name
        show(f"streams with {name}")
        constants = built_scales(form, sample, options.device) if scheme != exact else []
        latents[name] = streams(options, sample, text, scheme, constants)
        bits[name] = form.bits_per_number
        if scheme != exact:
            measured = errors(form, seen, layout, constants)
            report.append_activations(options.rows, form, measured, options.capture_chunk, rows)
            table[name] = (form.bits_per_number, measured)
    after, judged = compare(sample, latents, exact, prompts, options.chunks, options.device, show)
    report.append_streams(options.rows, exact, after, judged, bits)
    plots.draw_streams(options.pictures, latents, exact, sample.stream.chunk_frames, after)
    shown = [exact, *(name for name in latents if name.startswith("fp4"))]
    plots.draw_frames(options.pictures, sample, latents, shown, prompts, options.chunks, options.device)
    report.print_tables(table, after, judged, exact)
    show("done")


def formats(names: str | None, build: VideoBuild) -> dict[str, KvFormat]:
    """Return the cache formats of schemes by their names with commas; None: of every lossy one that the heads fit.

    Raises
    ------
    ValueError
        If there is no such scheme.
    """
    fitting = [name for name, form in NUMBER_FORMATS.items() if build.model.head_dim % form.unit == 0]
    chosen = fitting if names is None else names.split(",")
    if odd := [name for name in chosen if name not in (*fitting, build.workload.kv_scheme)]:
        raise ValueError(f"--kv {odd[0]}: expected some of {', '.join(fitting)}")
    return {name: build.changed(kv_scheme=name).kv for name in chosen}


def streams(
    options: argparse.Namespace,
    sample: Sample,
    text: Tensor,
    scheme: str | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """Return latents [prompts, C, frames, h, w]: with the exact cache, or a scheme's."""
    streams = []
    for rows in torch.arange(len(text)).split(options.batch):
        config = sample.build(len(rows), options.device)
        if scheme is not None:
            config = config.changed(kv_scheme=scheme)
        streams.append(run_stream(sample, config, text[rows], rows.tolist(), options.chunks[-1], scales))
    return torch.cat(streams)


if __name__ == "__main__":
    sys.exit(main())

"""What lossy KV caches cost the sample: the case `quality` of `python -m scripts.bench`. Rows and pictures."""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor

from scripts.kv_quality import plots, report
from scripts.kv_quality.activations import built_scales, capture, errors
from scripts.kv_quality.compare import compare
from scripts.kv_quality.sample import Sample, draw_prompts, open_sample
from scripts.kv_quality.streams import Scales, places, run_stream
from seko_export.config.video import VideoBuild
from seko_kernels.formats import NUMBER_FORMATS
from seko_kernels.kv_formats import KvFormat


def run(options: argparse.Namespace) -> None:
    """Measure the quality of lossy KV caches on the sample.

    ``prompts`` held-out ones, ``batch`` streams at once; after which ``chunks`` to look, rising, the first at most
    `compare.WINDOW_CHUNKS`; the lossy schemes ``kv``, or all (the exact one is a control); whose activations are
    captured, ``captured_prompts`` and ``captured_chunk``, behind the ring's wrap; where ``pictures`` go.
    """
    began = time.monotonic()

    def show(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {text}", file=sys.stderr, flush=True)

    sample, device = open_sample(options.sample), options.device
    build = sample.build(1, device)
    exact, chosen = build.workload.kv_scheme, formats(options.kv, build)
    prompts = draw_prompts(options.prompts)
    text = sample.embed(prompts)

    show("capturing")
    rows = min(options.captured_prompts, len(prompts))
    captured = sample.build(rows, device)
    seen = capture(sample, captured, text[:rows], list(range(rows)), options.captured_chunk)
    layout = places(captured, options.captured_chunk)
    latents = {exact: streams(options, sample, text)}
    bits = {}
    for scheme, form in chosen.items():
        name = f"{scheme} again" if scheme == exact else form.name
        show(f"streams with {name}")
        constants = built_scales(form, sample, device) if scheme != exact else {}
        latents[name] = streams(options, sample, text, scheme, constants)
        bits[name] = form.bits_per_number
        if scheme != exact:
            measured = errors(form, seen, layout, constants)
            report.append_activations(options.rows, form, measured, options.captured_chunk, rows)
    after, judged = compare(sample, latents, exact, prompts, options.chunks, device, show)
    report.append_streams(options.rows, exact, after, judged, bits)
    pictures = options.pictures or options.work
    plots.draw_streams(pictures, latents, exact, sample.stream.chunk_frames, after)
    shown = [exact, *(name for name in latents if name.startswith("fp4"))]
    plots.draw_frames(pictures, sample, latents, shown, prompts, options.chunks, device)
    show("done")


def formats(names: tuple[str, ...] | None, build: VideoBuild) -> dict[str, KvFormat]:
    """Return the cache formats of schemes by name; None: of every lossy one that the heads fit."""
    fitting = (name for name, form in NUMBER_FORMATS.items() if build.model.head_dim % form.unit == 0)
    return {name: build.changed(kv_scheme=name).kv for name in names or fitting}


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

"""The VAE's decoding on one GPU against its decoding on several ranks: the third part of `ranks.py`."""

from __future__ import annotations

import argparse
import statistics

import numpy as np

from scripts.bench import vae, vae_engines
from scripts.bench.rank_comparison import kernels_compared
from scripts.bench.rank_processes import run_ranks
from scripts.bench.rows import append_row


def decoded(options: argparse.Namespace) -> None:
    """Compare the VAE's decoding on one GPU and on several."""
    facts = {"height": options.height, "width": options.width, "name": options.vae}
    counts = {"one": 1, "several": options.ranks}
    configs = {name: vae.build_config(**facts, ranks=count) for name, count in counts.items()}
    if configs["several"][0].decode_ranks != options.ranks:
        raise ValueError(configs["several"][0].no_shared_decoding)
    for name, (config, _) in configs.items():
        if not options.eager:
            vae_engines.build(config, options.work / f"vae-{name}")
    if options.prepare:
        return
    reports = {
        name: run_ranks(
            options,
            name,
            count,
            {"decode": facts, "eager": options.eager, "engines": str(options.work / f"vae-{name}")},
        )
        for name, count in counts.items()
    }
    by_rank = {name: [statistics.median(rank["ms"]) for rank in by_run] for name, by_run in reports.items()}
    ms = {name: max(times) for name, times in by_rank.items()}  # a picture is there when its last part is
    parts = {
        name: [np.load(options.work / f"{name}.npz.{rank}.npz") for rank in range(count)]
        for name, count in counts.items()
    }
    chunks = parts["one"][0].files
    apart = [
        np.abs(
            parts["one"][0][chunk].astype(int) - np.concatenate([part[chunk] for part in parts["several"]], 1)
        )
        for chunk in chunks
    ]
    append_row(
        options.rows,
        f"sp{options.ranks}_vae",
        f"{vae.described(configs['several'][0], options.vae)}, {options.ranks} GPUs",
        ms["one"] / ms["several"],
        "decode of 1 GPU / of all",
        {4: 2.8}.get(options.ranks),
        ms=ms,
        by_rank=by_rank["several"],
        engines="uncompiled" if options.eager else "aoti",
        levels_apart=int(max(difference.max() for difference in apart)),
        share_apart=float(np.mean([(difference > 0).mean() for difference in apart])),
        peak_bytes=[rank["peak_bytes"] for by_run in reports.values() for rank in by_run],
        **kernels_compared({name: by_run[0] for name, by_run in reports.items()}, 1, options.ranks),
    )

"""Image to video at full size on one GPU: what 36 input channels and the image branch add to a step.

    python scripts/bench/i2v.py --work /tmp/seko-i2v --rows docs/benchmarks/h200.jsonl

No checkpoint and no artifact is written: engines are compiled as in a build, weights are drawn on the device, and the
runtime's own session captures and replays the chunk. Both models have the same layout, schedule, cache and kernels.
``--eager`` runs every engine uncompiled, and with ``--preset i2v-tiny`` a CPU tries the script.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from full_model import FullModelBench, full_model_parser, measure
from rows import append_row

from scripts.bench.counting import chunk_times, peak_bytes, spread
from seko_export import BuildOptions
from seko_export.config.model import ModelConfig
from seko_export.config.video import VideoBuild
from seko_export.options.resolve import resolve_build

FULL, TINY = "wan-i2v-14b", "i2v-tiny"
BAR = 1.08
OF_TEXT = ("name", "layers", "dim", "heads", "ffn_dim", "out_channels", "text_dim", "text_tokens", "freq_dim")


class Bench(FullModelBench):
    """The options, and the builds that are compared."""

    def configs(self) -> tuple[VideoBuild, VideoBuild]:
        """Return the build of the image-to-video model, and the same without channels and branch for the picture."""
        more: dict[str, Any] = {"kv": "fp4", "fp8": True, "kernels": "fused", "attention": "fp8"}
        if not self.on_gpu:
            more = {"kv": "bf16", "kernels": "plain", "attention": "torch"}
        asked = BuildOptions(
            preset=self.options.preset, no_vae=True, no_text=True, resident_window=self.on_gpu, **more
        )
        pictured = resolve_build(asked).config
        sizes = {name: getattr(pictured.model, name) for name in OF_TEXT}
        plain = ModelConfig(**sizes, in_channels=pictured.model.out_channels)
        return pictured, replace(pictured, model=replace(plain, name=f"{plain.name} without a picture"))

    def folder(self, config: VideoBuild) -> Path:
        """Return where a build's engines lie."""
        return self.options.work / f"{config.model.family}-{config.model.dim}"


def step(bench: Bench) -> None:
    """Chunks with a full cache of both models, on the same GPU, one after the other."""
    configs = bench.configs()
    bench.compile(configs)
    times, peaks = [], []
    for config in configs:
        with bench.opened(config) as session:
            s = config.workload.stream
            for _ in range(-(-s.cache_frames // s.chunk_frames) + 2):
                session.run_chunk()
            times.append(spread(chunk_times(session.run_chunk, bench.options.chunks)))
            peaks.append(peak_bytes())
    config, s = configs[0], configs[0].workload.stream
    cache = "fp4 cache, fp8 matmuls, resident window" if config.target.fp8 else "exact cache"
    shape = (
        f"{config.model.name}, {s.height}x{s.width}, chunk {s.chunk_frames}, ring {s.ring_frames}, {cache}"
    )
    append_row(
        bench.options.rows,
        "i2v_step_vs_t2v",
        shape,
        times[0]["median"] / times[1]["median"],
        "36 channels and image branch / without",
        BAR if bench.on_gpu and bench.options.preset == FULL else None,
        engines="uncompiled" if bench.options.eager else "aoti",
        weights="random",
        i2v_chunk_ms=times[0],
        t2v_chunk_ms=times[1],
        peak_bytes=peaks,
    )


PARTS = {"step": step}


def main() -> int:
    """Measure the step; return the exit code."""
    parser = full_model_parser(__doc__, list(PARTS), (FULL, TINY), "step")
    return measure(Bench(parser.parse_args()), PARTS)


if __name__ == "__main__":
    sys.exit(main())

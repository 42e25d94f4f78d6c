"""Peers B0 and B3 beside our engines, on one GPU, in one run: same weights, inputs and attention backend.

Each is written anew from its description (`peers/peers.py` says what it does) and runs in a process of its own, one
after another; what is not timed (checkpoint, artifacts) is made before, side by side. A stream that is not what the
exact model makes of the same inputs is reported as failed, and no ratio is taken of it. What does not fit into the
case's seconds is named in the report. Ratios are of one run.
The last line of output is one JSON object; the exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from scripts.bench import built
from scripts.bench.peers import figures, running
from scripts.bench.peers.shapes import SHAPES, Shape
from scripts.bench.rows import append_row

DECODERS: dict[
    str, tuple[str, tuple[str, ...]]
] = {  # extras: their measurements, and more options of a build
    "e2e": ("end to end", ()),
    "tiny": (figures.TINY, ()),
    "e2e_fp8": (figures.VAE_FP8, ("--vae-fp8",)),
}
LARGE = 20e9  # bytes of weights from which on artifacts are made one at a time, and removed once measured
BATCH = 4


class Comparison:
    """One run of the comparison.

    Parameters
    ----------
    options : argparse.Namespace
        Of the case.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.started = time.monotonic()
        self.results: dict[str, dict[str, Any]] = {name: {} for name in options.shapes}
        self.runner = running.Runner(self.started + options.seconds, _show)
        self.engines: tuple[str, ...] = options.engines
        self.written: set[tuple[str, str]] = set()

    def run(self) -> dict[str, Any]:
        """Measure everything that fits, write rows as they get ready, and return the report."""
        shapes = [SHAPES[name] for name in self.options.shapes]
        self._prepare([shape for shape in shapes if not _large(shape)])
        if self.options.prepare:
            return self._report()
        for shape in shapes:
            self._measure_figures(shape)
        for shape in shapes:
            self._measure_extras(shape)
        return self._report()

    def _prepare(self, shapes: list[Shape]) -> None:
        """Make what is not timed, side by side."""
        tasks: list[Callable[[], None]] = [partial(self._reference, shape) for shape in shapes]
        buildable = shapes if self.engines else []
        for preset in {shape.preset for shape in buildable}:
            self._checkpoint(preset)
        for shape in buildable:
            tasks += [partial(self._build, shape, name) for name in self.engines]
            if "batch4" in self.options.extras and shape.name in ("S1", "S3"):
                tasks.append(partial(self._build, shape, self.engines[-1], "-batch4", "--batch", str(BATCH)))
        asked = DECODERS if "S1" in self.options.shapes and self.engines else {}
        for extra in (extra for extra in asked if extra in self.options.extras):
            vae = self._vae(extra)
            job = {"kind": "vae_file", "tiny": extra == "tiny", "output": str(vae)}
            if self.runner.measure(f"{extra} weights", job) is not None:
                more = (f"-{extra}", "--vae", str(vae), "--no-text", *DECODERS[extra][1])
                tasks.append(partial(self._build, SHAPES["S1"], self.engines[-1], *more))
        self.runner.together(tasks)

    def _measure_figures(self, shape: Shape) -> None:
        """Measure what the figures' steps are made of."""
        if _large(shape):
            tasks: list[Callable[[], None]] = [partial(self._reference, shape)]
            if self.engines:
                tasks.append(partial(self._checkpoint, shape.preset))
            self.runner.together(tasks)
        if "B3" in self.options.peers:
            self._peer(shape, "B3")
        for name in self.engines:
            if _large(shape):
                self._build(shape, name)
            self._engine(shape, name)
            if _large(shape):
                shutil.rmtree(self._artifact(shape, name), ignore_errors=True)
        if "B0" in self.options.peers:
            self._peer(shape, "B0")

    def _measure_extras(self, shape: Shape) -> None:
        """Measure rows at different chunks, and chunk to frames."""
        extras = self.options.extras
        if not self.engines:
            return
        last = self.engines[-1]
        if "batch4" in extras and shape.name in ("S1", "S3"):
            self._job(shape, "batch4", kind="batch", artifact=str(self._artifact(shape, last, "-batch4")))
        decoded = DECODERS if shape.name == "S1" else {}
        for extra in (extra for extra in decoded if extra in extras and self._vae(extra).exists()):
            artifact = str(self._artifact(shape, last, f"-{extra}"))
            self._job(shape, DECODERS[extra][0], kind="end_to_end", artifact=artifact)
            if "eager VAE" not in self.results[shape.name]:
                self._job(shape, "eager VAE", kind="eager_vae")

    def _vae(self, extra: str) -> Path:
        path: Path = self.options.work / f"{extra}.safetensors"
        return path

    def _reference(self, shape: Shape) -> None:
        file = self._reference_file(shape)
        job = {"kind": "reference", "shape": shape.name, "reference": str(file)}

        def build() -> dict[str, Any] | None:
            file.unlink(missing_ok=True)  # an older one must not be compared with if this one fails
            return None if self.runner.measure(f"{shape.name} reference", job) is None else {}

        built.build_once(file, job, build)

    def _checkpoint(self, preset: str) -> None:
        import torch

        path = self.options.work / f"{preset}.pt"
        if not path.exists():
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self.runner.script(f"checkpoint {preset}", "scripts/make_checkpoint.py", "--preset", preset, "--format",
                               "self-forcing", "--device", device, "-o", str(path))  # fmt: skip

    def _build(self, shape: Shape, engine: str, suffix: str = "", *more: str) -> None:
        checkpoint, output = self.options.work / f"{shape.preset}.pt", self._artifact(shape, engine, suffix)
        arguments = running.build_arguments(shape, engine, checkpoint, output, *more)

        def build() -> dict[str, Any] | None:
            shutil.rmtree(output, ignore_errors=True)  # an older one must not be measured if this build fails
            return (
                None if self.runner.build(f"{shape.name} build {engine}{suffix}", arguments) is None else {}
            )

        built.build_once(output, arguments, build)

    def _peer(self, shape: Shape, name: str) -> None:
        self._job(shape, name, kind="peer", peer=name)

    def _engine(self, shape: Shape, name: str) -> None:
        self._job(shape, name, kind="engine", artifact=str(self._artifact(shape, name)), engine=name)

    def _job(self, shape: Shape, name: str, **job: Any) -> None:
        job |= {
            "shape": shape.name,
            "reference": str(self._reference_file(shape)),
            "chunks": self.options.chunks,
        }
        self._keep(shape, name, self.runner.measure(f"{shape.name} {name}", job))

    def _keep(self, shape: Shape, name: str, report: dict[str, Any] | None) -> None:
        if report is None:
            return
        self.results[shape.name][name] = report
        verdict = report.get("verdict")
        if verdict is not None and not verdict["ok"]:
            self.runner.failed[f"{shape.name} {name}"] = f"is not the exact model: {verdict}"
        for figure in self._figures():
            key = (figure.name, figure.shape)
            if not figure.missing and key not in self.written:
                bar = figures.BARS[figure.name]
                append_row(self.options.rows, *key, figure.value, figure.unit, bar, **figure.more)
                self.written.add(key)

    def _figures(self) -> list[figures.Figure]:
        return list(figures.figures(self.results, tuple(self.options.shapes), self.engines))

    def _report(self) -> dict[str, Any]:
        return {
            "shapes": {
                name: {
                    "shape": SHAPES[name].text,
                    "measured": result,
                }
                for name, result in self.results.items()
            },
            "rows": sorted(" at ".join(key) for key in self.written),
            "no_row": {f"{f.name} at {f.shape}": list(f.missing) for f in self._figures() if f.missing},
            "skipped": self.runner.skipped,
            "failed": self.runner.failed,
            "seconds": round(time.monotonic() - self.started, 1),
        }

    def _artifact(self, shape: Shape, engine: str, suffix: str = "") -> Path:
        return Path(self.options.work, f"{shape.name}-{engine}{suffix}")

    def _reference_file(self, shape: Shape) -> Path:
        return Path(self.options.work, f"{shape.name}-reference.safetensors")


def run(options: argparse.Namespace) -> int:
    """Run the comparison and print its report; return the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, running.end_with_children)
    report = Comparison(options).run()
    for name, lacking in report["no_row"].items():
        print(f"no row {name}: {', '.join(lacking)} not measured", file=sys.stderr)
    print(json.dumps(report, sort_keys=True))
    return 1 if report["failed"] else 0


def _large(shape: Shape) -> bool:
    m = shape.model
    return m.layers * (6 * m.dim**2 + 2 * m.dim * m.ffn_dim) * 2 > LARGE


def _show(name: str, report: dict[str, Any]) -> None:
    print(json.dumps({"measured": name} | report, sort_keys=True), flush=True)

"""The server over full-size models with random weights on one GPU: the figures of `serve`.

Engines are compiled as in a build and used again, weights are drawn on the device, and the server's own thread opens
the pool. Parts:

- ``overhead`` and ``misses``: 1.3B, FP4 cache, fp8 matmuls, resident window, Wan's VAE, 480x832; two viewers at 15 fps;
- ``s3``: ``serve_misses_s3``: the same at 320x576 and 16 fps, as many viewers as are admitted;
- ``encode``: ``serve_encode_cores``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from scripts.bench.full_model import FAST, TRIAL_VAE, FullModelBench, measure
from scripts.bench.serve import Served, encode, misses, overhead
from seko_export import BuildOptions
from seko_export.config.video import VideoBuild
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.options.resolve import resolve_build
from seko_export.video.recording import golden_text
from seko_runtime import Pool

FULL, TINY = "self-forcing-1.3b", "tiny"


class Bench(FullModelBench):
    """The options, and the servers that are opened one after another."""

    @property
    def strict(self) -> bool:
        """Whether rows have bars: of the full model on a GPU."""
        return self.on_gpu and not self.tiny

    def config(self, *, sessions: int, batch: tuple[int, ...], small: bool = False) -> VideoBuild:
        """Return a build with a VAE."""
        preset = TINY if self.tiny else FULL
        more: dict[str, Any] = {"sessions": sessions, "batch": batch} if sessions > 1 else {}
        if not self.tiny:
            more |= {**FAST, "resident_window": True}
            if small:
                more |= {"height": 320, "width": 576, "ring_frames": 12}
        resolved = resolve_build(BuildOptions(preset=preset, no_vae=True, no_text=True, **more))
        return resolved.config.changed(vae=TRIAL_VAE if self.tiny else WanVaeConfig())

    @contextmanager
    def served(self, config: VideoBuild) -> Iterator[tuple[Served, str]]:
        """Open a server over a build; yield it and the rows' shape."""
        self.compile([config])
        with Served(lambda: self._with_text(config)) as served:
            stream = config.workload.stream
            kind = "tiny" if self.tiny else "fp4 cache, fp8 matmuls, resident window"
            shape = (
                f"{config.model.name}, {stream.height}x{stream.width}, chunk {stream.chunk_frames}, ring "
                f"{stream.ring_frames}, {kind}, Wan VAE, {served.device.capacity} rows"
            )
            yield served, shape

    @contextmanager
    def _with_text(self, config: VideoBuild) -> Iterator[Pool]:
        """Open a pool whose sessions begin with the same embeddings: there is no text encoder."""
        with self.pool(config) as pool:
            opened: Any = pool
            opened.open_session = partial(pool.open_session, text=golden_text(config))
            yield pool


def _overhead(bench: Bench) -> None:
    floor = 0.97 if bench.strict else None
    with bench.served(bench.config(sessions=2, batch=(1, 2))) as (served, shape):
        for sessions in (1, 2):
            overhead(served, shape, bench.options.rows, sessions, bench.options.overhead_seconds, floor)


def _misses(bench: Bench) -> None:
    with bench.served(bench.config(sessions=2, batch=(1, 2))) as (served, shape):
        misses(
            served,
            shape,
            bench.options.rows,
            2,
            15.0,
            bench.options.misses_of,
            most=0.0 if bench.strict else None,
        )


def _s3(bench: Bench) -> None:
    sessions = 2 if bench.tiny else bench.options.sessions_s3
    config = bench.config(sessions=sessions, batch=(1, 2) if bench.tiny else (1, 2, 4), small=True)
    with bench.served(config) as (served, shape):
        chunks = bench.options.misses_s3_of
        misses(
            served,
            shape,
            bench.options.rows,
            sessions,
            16.0,
            chunks,
            "serve_misses_s3",
            0.0 if bench.strict else None,
        )


def _encode(bench: Bench) -> None:
    if not bench.options.prepare:
        encode(bench.options.rows, size=(48, 80) if bench.options.trial else (480, 832))


PARTS: dict[str, Callable[[Bench], None]] = {
    "overhead": _overhead,
    "misses": _misses,
    "s3": _s3,
    "encode": _encode,
}


def run(options: argparse.Namespace) -> int:
    """Measure the parts of the case; return the exit code."""
    return measure(Bench(options), PARTS)

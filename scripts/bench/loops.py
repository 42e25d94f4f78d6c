"""Other loops over the 1.3B and the 14B model, at full size on one GPU, with random weights. Parts:

- ``reuse``: ``context_reuse_vs_pass``: a chunk whose last denoise pass writes the cache, against one with a context
  pass;
- ``video_in``: ``v2v_fps_1p3b``: video frames a second of a stream that turns a film into another, with two passes, the
  frames encoded before each chunk and decoded while the next one is made;
- ``rolling``: ``rolling_fps``: the same of Rolling Forcing, whose passes have five chunks, in plain layers over an
  exact cache;
- ``krea``: ``krea14_fps``: the same of Krea's 14B model, whose cache is made again before each chunk.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from scripts.bench.counting import paced_times, peak_bytes
from scripts.bench.full_model import FAST, TRIAL_VAE, FullModelBench, measure, steady
from seko_export import BuildOptions
from seko_export.config.stream import REBUILD
from seko_export.config.video import VideoBuild
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.options.resolve import resolve_build
from seko_runtime.video.session import Session

BARS = {"context_reuse_vs_pass": 0.83, "v2v_fps_1p3b": 30.0, "rolling_fps": None, "krea14_fps": 9.0}
STRENGTH, TWO_PASSES = 0.7, (1000.0, 750.0)
FILM_FPS = 16.0
FPS = "video frames a second, on the host"
# The same loops of a trial's small model.
SMALL: dict[str, dict[str, Any]] = {
    "rolling-forcing-1.3b": {
        "sink_frames": 3,
        "ring_frames": 21,
        "rolling": True,
        "timesteps": (1000.0,),
        "first_timesteps": (1000.0, 750.0, 500.0, 250.0),
        "shift": 5.0,
    },
    "krea-14b": {"sink_frames": 3, "ring_frames": 3, "window_positions": True, "context": "rebuild"},
}


class Bench(FullModelBench):
    """The options of the case."""

    bars: ClassVar[Mapping[str, float | None]] = BARS

    def config(self, **more: Any) -> VideoBuild:
        """Return a build with an FP4 cache, fp8 matmuls and a resident window; on a CPU the plain one of a trial."""
        fast = {**FAST, "resident_window": True} if self.on_gpu else {}
        options = BuildOptions(preset=self.options.preset, no_vae=True, no_text=True, **fast)
        return resolve_build(type(options)(**{**vars(options), **more})).config

    def of_preset(self, preset: str, **more: Any) -> VideoBuild:
        """Return a build of a preset with its VAE, over an exact cache; in a trial of the small model in its loop."""
        own = {"preset": preset, **more} if self.on_gpu else {"preset": self.options.preset, **SMALL[preset]}
        config = resolve_build(BuildOptions(no_vae=True, no_text=True, **own)).config
        return config.changed(vae=WanVaeConfig() if self.on_gpu else TRIAL_VAE)

    def shape(self, config: VideoBuild) -> str:
        """Return what rows call a build."""
        s, passes = config.workload.stream, len(config.workload.schedule.timesteps)
        cache = "exact cache" if config.workload.kv_scheme == config.exact_scheme else "fp4 cache"
        cache += ", fp8 matmuls" if config.target.fp8 else ""
        cache += ", resident window" if config.target.resident_window else ""
        if s.rolling:
            cache = f"{config.workload.chunks_at_once} chunks a pass, {cache}"
        vae = ", Wan VAE" if config.workload.vae else ""
        vae += " both ways" if s.strength is not None or s.context == REBUILD else ""
        return (
            f"{config.model.name}, {s.height}x{s.width}, chunk {s.chunk_frames}, ring {s.ring_frames}, "
            f"{passes} passes, {cache}{vae}"
        )


def reuse(bench: Bench) -> None:
    """A chunk of latents with and without a context pass."""
    with_pass, without = bench.config(), bench.config(context="reuse")
    bench.compile([with_pass, without])
    chunk_ms = {}
    for name, config in (("pass", with_pass), ("reuse", without)):
        with bench.opened(config) as session:
            chunk_ms[name] = steady(session, config, bench.options.chunks)["median"]
    bench.row(
        "context_reuse_vs_pass", without, chunk_ms["reuse"] / chunk_ms["pass"], "chunk / with a context pass",
        chunk_ms=chunk_ms["reuse"], pass_ms=chunk_ms["pass"],
    )  # fmt: skip


def video_in(bench: Bench) -> None:
    """A steady stream over a film of noise, with every frame on the host."""
    config = bench.config(strength=STRENGTH, timesteps=TWO_PASSES, shift=5.0)
    config = config.changed(vae=WanVaeConfig() if bench.on_gpu else TRIAL_VAE)
    bench.compile([config])
    s = config.workload.stream
    film = np.random.default_rng(0).integers(0, 256, (48, s.height, s.width, 3), np.uint8)
    with bench.opened(config) as session:
        session.controls["video_in"].take({"clip": film, "fps": FILM_FPS})
        _paced(bench, "v2v_fps_1p3b", config, session)


def rolling(bench: Bench) -> None:
    """A steady stream whose passes have several chunks."""
    _of_preset(bench, "rolling_fps", bench.of_preset("rolling-forcing-1.3b"))


def krea(bench: Bench) -> None:
    """A steady stream whose cache is made again before each chunk."""
    _of_preset(bench, "krea14_fps", bench.of_preset("krea-14b", fp8=True))


def _of_preset(bench: Bench, figure: str, config: VideoBuild) -> None:
    bench.compile([config])
    with bench.opened(config) as session:
        _paced(bench, figure, config, session)


def _paced(bench: Bench, figure: str, config: VideoBuild, session: Session) -> None:
    """Append the row of a stream's video frames a second, once its cache is full."""
    s = config.workload.stream
    chunk_ms = statistics.median(paced_times(session, s, bench.options.chunks))
    frames = s.chunk_frames * s.temporal_stride
    bench.row(figure, config, 1e3 * frames / chunk_ms, FPS, chunk_ms=chunk_ms, peak_bytes=peak_bytes())


PARTS: dict[str, Callable[[Bench], None]] = {part.__name__: part for part in (reuse, video_in, rolling, krea)}


def run(options: argparse.Namespace) -> int:
    """Measure the parts of the case; return the exit code."""
    return measure(Bench(options), PARTS)

"""lingbot-world at full size on one GPU: a chunk, the same by torch.compile, the camera's share, keys to frames.

No checkpoint and no artifact is written: engines are compiled as in a build, weights are drawn on the device, and the
runtime's own session captures and replays the chunk. Each part is one or two rows; a part that fails is named in the
last line, a JSON object, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from scripts.bench.counting import chunk_times, fill_chunks, peak_bytes, spread
from scripts.bench.full_model import (
    FAST,
    PLAIN,
    TRIAL_VAE,
    Engine,
    FullModelBench,
    compiled_engines,
    measure,
    steady,
)
from seko_export import BuildOptions
from seko_export.config.video import VideoBuild
from seko_export.families.lingbot.model import LingbotModel
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.options.resolve import resolve_build
from seko_export.video.recording import golden_text
from seko_runtime.video.session import Session

V1, V2, TINY = "lingbot-v1-fast", "lingbot-v2-fast", "lingbot-tiny"
# What must not be exceeded, of the full model on a GPU.
BARS = {
    "lingbot_v2_chunk_ms": 1750.0,
    "lingbot_vs_compiled": 0.58,
    "lingbot_camera_share": 0.05,
    "lingbot_key_to_frame": 1.15,
    "world_first_picture_s": 1.0,
}


@dataclass
class Bench(FullModelBench):
    """The options, and what was measured."""

    bars: ClassVar[Mapping[str, float | None]] = BARS
    chunk_ms: dict[str, float] = field(default_factory=dict)  # median, by way of the camera

    def config(
        self,
        *,
        exact: bool = False,
        camera: str = "chunk",
        preset: str = "",
        size: Mapping[str, Any] | None = None,
    ) -> VideoBuild:
        """Return a build: FP4 cache, fp8 matmuls, a resident window; or torch's own layers over an exact cache."""
        more = (
            {**PLAIN} if exact else {**FAST, "resident_window": size is None}
        )  # a large picture wants the memory
        asked = BuildOptions(preset=preset or self.options.preset, camera=camera, no_vae=True, no_text=True,
                             **more, **(size or {}))  # fmt: skip
        return resolve_build(asked).config

    def shape(self, config: VideoBuild) -> str:
        """Return what rows call a build."""
        s, model = config.workload.stream, config.model
        cache = "fp4 cache, fp8 matmuls" if config.target.fp8 else f"{config.workload.kv_scheme} cache"
        window = ", resident window" if config.target.resident_window else ""
        return (
            f"{model.name}, {s.height}x{s.width}, chunk {s.chunk_frames}, ring {s.ring_frames}, sink {s.sink_frames}, "
            f"{cache}{window}, camera once a {camera_of(config)}"
        )


def camera_of(config: VideoBuild) -> str:
    """Return how often the camera is computed: once a ``chunk``, or a ``pass``."""
    assert isinstance(config.model, LingbotModel)
    return config.model.camera


def steer(session: Session, keys: str = "wl") -> None:
    """Hold keys of the session's camera."""
    session.controls["camera"].take({"held": [*keys]})


def steered(session: Session, config: VideoBuild, chunks: int) -> dict[str, float]:
    """Return the spread of the milliseconds of some chunks with a full cache, while keys are held."""
    steer(session)
    return steady(session, config, chunks)


def chunk(bench: Bench) -> None:
    """The chunk, with what the camera gives each layer computed once and kept, and computed in every pass."""
    configs = [bench.config(camera=how) for how in ("chunk", "pass")]
    bench.compile(configs)
    for config in configs:
        with bench.opened(config) as session:
            times: dict[str, Any] = steered(session, config, bench.options.chunks)
            camera_bytes = sum(
                buffer.nbytes for buffer in session.manifest.buffers if buffer.name.startswith("chunk.camera")
            )
            bench.chunk_ms[camera_of(config)] = times["median"]
            bench.row("lingbot_v2_chunk_ms", config, times["median"], "ms a chunk, 4 passes and context", **times,
                      camera_bytes=camera_bytes, kv_bytes=session.manifest.workload.kv.pool_bytes,
                      peak_bytes=peak_bytes())  # fmt: skip


def compiled(bench: Bench) -> None:
    """The same step by torch.compile, captured, over an exact cache; what it is compared with is `chunk`'s best."""
    _need_chunk(bench)
    config = bench.config(exact=True)
    engines = None if bench.options.eager else compiled_engines(config)
    with bench.opened(config, engines) as session:
        times = steered(session, config, max(3, bench.options.chunks // 2))
        how = min(bench.chunk_ms, key=bench.chunk_ms.__getitem__)
        ours = bench.chunk_ms[how]
        bench.row(
            "lingbot_vs_compiled", bench.config(camera=how), ours / times["median"], "chunk / compiled and captured",
            chunk_ms=ours, compiled_ms=times["median"], compiled_p90_ms=times["p90"], peak_bytes=peak_bytes(),
            peer="each engine's graph by torch.compile, plain layers, exact cache of fixed size, camera once a chunk; "
            "all passes and the sampler in one captured graph",
        )  # fmt: skip


def share(bench: Bench) -> None:
    """Time of the camera's own engines, call by call on the device, of the chunk that was captured."""
    _need_chunk(bench)
    config, clock = bench.config(), _Clock(bench.on_gpu)
    bench.compile([config])
    with bench.opened(config, captured=False, wrap=clock.around) as session:
        steer(session)
        session.run_chunk()
        totals = []
        for _ in range(3):
            clock.calls.clear()
            clock.on = True
            session.run_chunk()
            clock.on = False
            totals.append(clock.total_ms())
    spent = statistics.median(totals)
    bench.row("lingbot_camera_share", config, spent / bench.chunk_ms["chunk"], "of a chunk", camera_ms=spent,
              chunk_ms=bench.chunk_ms["chunk"])  # fmt: skip


def key(bench: Bench) -> None:
    """From reading the keys to the chunk's frames on the host, with Wan's VAE; in chunks without frames."""
    config = _with_vae(bench)
    with bench.opened(config) as session:
        steer(session)
        for _ in range(fill_chunks(config.workload.stream)):
            session.run_chunk().video()
        latencies = []
        for number in range(bench.options.latencies):
            began = time.perf_counter()
            steer(session, "w" + "jl"[number % 2])
            frames = session.run_chunk().video()
            latencies.append(1e3 * (time.perf_counter() - began))
            if bench.elapsed > bench.options.seconds:
                break
        alone = spread(chunk_times(lambda: _to_latents(session), min(5, bench.options.chunks)))
    figures = spread(latencies)
    chunk_ms = bench.chunk_ms.get("chunk", alone["median"])
    bench.row("lingbot_key_to_frame", config, figures["p99"] / chunk_ms, "p99, keys to frames / chunk",
              chunk_ms=chunk_ms, latency_ms=figures, chunk_with_decoding_ms=alone,
              video_frames=int(frames.shape[1]))  # fmt: skip


def first_picture(bench: Bench) -> None:
    """From a new start picture to the first frames on the host: a world that is left for another one."""
    config = _with_vae(bench)
    s = config.workload.stream
    picture = np.random.default_rng(0).integers(0, 256, (s.height, s.width, 3), np.uint8)
    seconds, opened = [], []
    with bench.pool(config) as pool:
        for _ in range(1 + bench.options.openings):  # the first captures the chunk
            began = time.perf_counter()
            with pool.open_session(text=golden_text(config), image=picture) as session:
                steer(session)
                opened.append(time.perf_counter() - began)
                next(session.run_chunk().video_parts())
                seconds.append(time.perf_counter() - began)
    bench.row("world_first_picture_s", config, statistics.median(seconds[1:]), "s, new start picture to first frames",
              opened_s=statistics.median(opened[1:]), slowest_s=max(seconds[1:]), captured_s=seconds[0])  # fmt: skip


def fits(bench: Bench) -> None:
    """720p: whether the first version with a ring of 18 and a sink of 3 runs, and what it takes."""
    small = bench.options.preset == TINY
    size = {"height": 48, "width": 80} if small else {"height": 720, "width": 1280}
    config = bench.config(preset=TINY if small else V1, camera=bench.options.camera_720p, size=size)
    bench.compile([config])
    with bench.opened(config) as session:
        times = steered(session, config, 2)
        steer(session)
        latents = session.run_chunk().to_host()
        if not bool((abs(latents) < 1e3).all()):
            raise ValueError(f"latents up to {abs(latents).max()}: expected numbers near 1")
        sizes = {buffer.name: buffer.nbytes for buffer in session.manifest.buffers}
        bench.row("lingbot_720p_fits", config, max(peak_bytes(), sum(sizes.values())) / 1e9, "GB at the peak",
                  chunk_ms=times["median"], kv_bytes=session.manifest.workload.kv.pool_bytes,
                  buffer_bytes=sum(sizes.values()),
                  camera_bytes=sum(size for name, size in sizes.items() if name.startswith("chunk.camera")),
                  weight_bytes=sum(weight.nbytes for weight in session.manifest.weights))  # fmt: skip


PARTS = {part.__name__: part for part in (chunk, compiled, share, key, first_picture, fits)}


@dataclass
class _Clock:
    """Times the calls of the camera's engines."""

    on_gpu: bool
    on: bool = False
    calls: list[tuple[Any, Any]] = field(default_factory=list)

    def around(self, name: str, engine: Engine) -> Engine:
        if not name.startswith(("chunk_camera", "chunk_injection")):
            return engine

        def timed(inputs: list[Tensor]) -> Sequence[Tensor]:
            if not self.on:
                return engine(inputs)
            begin = self._now()
            results = engine(inputs)
            self.calls.append((begin, self._now()))
            return results

        return timed

    def total_ms(self) -> float:
        if not self.calls:
            raise ValueError("no engine of the camera was called")
        if not self.on_gpu:
            return float(1e3 * sum(end - begin for begin, end in self.calls))
        torch.cuda.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in self.calls))

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _with_vae(bench: Bench) -> VideoBuild:
    """Return the build with Wan's VAE, its engines compiled."""
    vae = WanVaeConfig() if bench.options.preset != TINY else TRIAL_VAE
    config = bench.config().changed(vae=vae)
    bench.compile([config])
    return config


def _need_chunk(bench: Bench) -> None:
    if "chunk" not in bench.chunk_ms:
        chunk(bench)


def _to_latents(session: Session) -> None:
    session.run_chunk()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run(options: argparse.Namespace) -> int:
    """Measure the parts of the case; return the exit code."""
    return measure(Bench(options), PARTS)

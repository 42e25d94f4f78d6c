"""Seko-Talk at full size on one GPU: a step, the same by torch.compile, its hearing's share, sessions that fit.

No checkpoint and no artifact is written: engines are compiled as in a build, weights are drawn on the device, and the
runtime's own pool captures and replays the chunks. Each part makes one row; a part that fails is named in the last
line, a JSON object, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from scripts.bench.counting import chunk_times, fill_chunks, launches_of, peak_bytes, spread
from scripts.bench.full_model import (
    Engine,
    Engines,
    FullModelBench,
    compiled_engines,
    eager_engines,
    measure,
    random_weights,
)
from seko_export import BuildOptions
from seko_export.config.media import HubertConfig
from seko_export.config.video import VideoBuild
from seko_export.families.seko_talk.presets import HYBRID, TINY, evenly
from seko_export.options.resolve import resolve_build
from seko_export.video.recording import golden_inputs, golden_reference, golden_text
from seko_runtime.video.pool import Pool
from seko_runtime.video.session import Session

SESSIONS, HYBRID_SESSIONS = 2, 4
CHUNK_FRAMES = 3
CHUNKS_EACH = 3  # that every session of a pool makes
PEER_PASSES = 2  # two of its caches fit beside its weights, four do not; a step is a step of either
# What must not be exceeded, or for sessions be reached, of the full model on a GPU.
BARS = {
    "talk_step_vs_compiled": 0.60,
    "talk_audio_ms": 0.03,
    "talk_launches_per_chunk": 1.0,
    "talk_sessions_fit": float(SESSIONS),
    "talk_hybrid_sessions_fit": float(HYBRID_SESSIONS),
}
SMALL_HUBERT = HubertConfig(
    48, 2, 2, 32, (8,) * 7, position_kernel=16, position_groups=4
)  # the tiny preset's


@dataclass
class Hearing:
    """The calls of the engines that run once a chunk, as one chunk makes them."""

    calls: list[tuple[str, Engine, list[Tensor]]] = field(default_factory=list)
    whole: bool = False

    def around(self, name: str, engine: Engine) -> Engine:
        """Return an engine that notes its calls until a second chunk begins."""
        if not name.startswith("chunk_"):
            return engine

        def noted(inputs: list[Tensor]) -> Sequence[Tensor]:
            self.whole = self.whole or bool(self.calls and name == self.calls[0][0])
            if not self.whole:
                self.calls.append((name, engine, list(inputs)))
            return engine(inputs)

        return noted

    def ms(self) -> float:
        """Return the milliseconds of these calls, on a GPU of one captured graph of them."""
        if not self.calls:
            raise ValueError("no engine that hears was called")

        def run() -> None:
            for _, engine, inputs in self.calls:
                engine(list(inputs))  # a compiled engine takes what is in its list

        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                run()
            run = graph.replay
        return spread(chunk_times(run, 20))["median"]


@dataclass(frozen=True)
class Measured:
    """What was measured of a session whose cache is full.

    Parameters
    ----------
    config : VideoBuild
        Its build.
    times, audio_ms
        Of a chunk, and of what runs once in it.
    calls : int
        Of engines that run once a chunk.
    launches : dict of str to int
        What the host sends for a chunk.
    peak_bytes : int
        On the GPU, at most.
    """

    config: VideoBuild
    times: dict[str, float]
    audio_ms: float
    calls: int
    launches: dict[str, Any]
    peak_bytes: int

    @property
    def step_ms(self) -> float:
        """Of a pass, without what runs once a chunk."""
        return (self.times["median"] - self.audio_ms) / len(self.config.workload.schedule.timesteps)


@dataclass
class Bench(FullModelBench):
    """The options, and what was measured."""

    bars: ClassVar[Mapping[str, float | None]] = BARS
    weights: dict[str, Tensor] = field(default_factory=dict)  # of our build, with and without a pool
    ours: Measured | None = None

    def config(self, sessions: int | None = None, *, hybrid: bool = False) -> VideoBuild:
        """Return the build that is measured, an FP4 cache with fp8 matmuls, or a pool of it."""
        layout: dict[str, Any] = {} if self.tiny else {"chunk_frames": CHUNK_FRAMES}
        preset = self.options.preset
        if hybrid:
            layout = {"layer_rings": (2, 4), "rope_max_frames": 40} if self.tiny else {}
            preset = TINY if self.tiny else HYBRID
        asked = BuildOptions(preset=preset, kv="fp4", kernels="fused", fp8=True, no_vae=True, no_text=True,
                             sessions=sessions, batch=(1,), **layout)  # fmt: skip
        return self._hearing(resolve_build(asked).config)

    def peer(self) -> VideoBuild:
        """Return the same step over an exact cache in plain torch, with fewer passes."""
        layout: dict[str, Any] = {} if self.tiny else {"chunk_frames": CHUNK_FRAMES}
        asked = BuildOptions(preset=self.options.preset, kernels="plain", attention="torch", no_vae=True, no_text=True,
                             **layout)  # fmt: skip
        return self._hearing(resolve_build(asked).config).changed(schedule=evenly(PEER_PASSES))

    def _hearing(self, config: VideoBuild) -> VideoBuild:
        return config.changed(audio=SMALL_HUBERT if self.tiny else HubertConfig())

    def shape(self, config: VideoBuild) -> str:
        """Return what rows call a build."""
        s = config.workload.stream
        rings = "-".join(map(str, s.layer_rings)) or str(s.ring_frames)
        return (
            f"{config.model.name}, {s.height}x{s.width}, chunk {s.chunk_frames}, ring {rings}, sink {s.sink_frames}, "
            f"reference {s.reference_frames}, {len(config.workload.schedule.timesteps)} passes, fp4 cache, "
            "fp8 matmuls, "
            f"{config.target.attention} attention, sessions {config.workload.rows}"
        )

    def of_ours(self) -> dict[str, Tensor]:
        """Return random weights of our build, which are drawn once."""
        if not self.weights:
            self.weights = random_weights(self.config())
        return self.weights

    def measured(self) -> Measured:
        """Return what was measured of our build, by now or earlier."""
        if self.ours is None:
            config = self.config()
            self.compile([config])
            with self.session(config, weights=self.of_ours()) as (run, hearing):
                self.ours = full_cache(run, config, hearing, self.options.chunks)
            self.say(f"ours: {self.ours.step_ms:.1f} ms a step, {self.ours.audio_ms:.2f} ms once a chunk")
        return self.ours

    @contextmanager
    def session(
        self, config: VideoBuild, engines: Engines | None = None, weights: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[Callable[[], object], Hearing]]:
        """Open a session and yield what makes its next chunk, and its engines that run once a chunk."""
        hearing, inputs = Hearing(), golden_inputs(config, 0)
        with self.opened(config, engines, wrap=hearing.around, weights=weights) as session:
            yield (lambda: session.run_chunk(inputs)), hearing
            hearing.calls.clear()


def opened_session(pool: Pool, config: VideoBuild, seed: int) -> Session:
    """Open a session with random text, portrait and features."""
    reference = golden_reference(config)
    if reference is None:
        raise ValueError("a Seko-Talk build without a reference frame")
    return pool.open_session(
        seed=seed,
        text=golden_text(config),
        reference=reference[0].numpy(),
        inputs=golden_inputs(config, None),
    )


def full_cache(run: Callable[[], object], config: VideoBuild, hearing: Hearing, chunks: int) -> Measured:
    """Fill a session's cache, then measure some chunks of it."""
    for _ in range(fill_chunks(config.workload.stream)):
        run()
    times = spread(chunk_times(run, chunks))
    return Measured(config, times, hearing.ms(), len(hearing.calls), launches_of(run), peak_bytes())


def peer_engines(config: VideoBuild) -> Engines:
    """Return the engines of a pass by `torch.compile`, and as they are those that run once a chunk or a prompt."""
    plain = eager_engines(config)
    once = {name for name in plain if name.startswith(("chunk_", "prompt"))}
    return {**plain, **compiled_engines(config, without=once)}


def measured_peer(bench: Bench) -> Measured:
    """Measure the peer, which is compiled in this process while other processes compile our engines."""
    config = bench.peer()
    with bench.compiling([bench.config(), bench.config(SESSIONS)]) as wait:
        engines = None if bench.options.eager else peer_engines(config)
        with bench.session(config, engines) as (run, hearing):
            wait()
            return full_cache(run, config, hearing, max(3, bench.options.chunks // 2))


def step(bench: Bench) -> None:
    """A pass, against the same one by torch.compile; each without what runs once a chunk."""
    peer = measured_peer(bench)
    torch.compiler.reset()
    bench.say(f"the peer: {peer.step_ms:.1f} ms a step, {peer.audio_ms:.2f} ms once a chunk")
    ours = bench.measured()
    bench.row(
        "talk_step_vs_compiled", ours.config, ours.step_ms / peer.step_ms, "step / compiled and captured",
        step_ms=ours.step_ms, chunk_ms=ours.times, audio_ms=ours.audio_ms, peak_bytes=ours.peak_bytes,
        compiled_step_ms=peer.step_ms, compiled_chunk_ms=peer.times, compiled_audio_ms=peer.audio_ms,
        compiled_peak_bytes=peer.peak_bytes,
        peer=f"each engine of a pass by torch.compile, plain layers, exact cache of fixed size; {PEER_PASSES} passes "
        "and the sampler in one captured graph; of both what runs once a chunk is taken off",
    )  # fmt: skip


def audio(bench: Bench) -> None:
    """HuBERT, projector and each layer's keys and values of the voice, as a share of the chunk."""
    ours = bench.measured()
    bench.row("talk_audio_ms", ours.config, ours.audio_ms / ours.times["median"], "of a chunk", audio_ms=ours.audio_ms,
              chunk_ms=ours.times, calls=ours.calls)  # fmt: skip


def launches(bench: Bench) -> None:
    """What the host sends for one chunk."""
    ours = bench.measured()
    bench.row(
        "talk_launches_per_chunk", ours.config, ours.launches["graphs"], "graph launches", **ours.launches
    )


def fits(bench: Bench) -> None:
    """Sessions with a cache for each of four passes, allocated side by side, each with chunks of its own."""
    config = bench.config(SESSIONS)
    bench.compile([config])
    with bench.pool(config, weights=bench.of_ours()) as pool:
        filled(bench, pool, config, "talk_sessions_fit")


def hybrid(bench: Bench) -> None:
    """Sessions of the model of two passes and two window sizes; uncompiled engines, which take no less memory."""
    bench.weights.clear()
    config = bench.config(HYBRID_SESSIONS, hybrid=True)
    with bench.pool(config, eager_engines(config), captured=False) as pool:
        filled(bench, pool, config, "talk_hybrid_sessions_fit", engines="uncompiled")


def filled(bench: Bench, pool: Pool, config: VideoBuild, figure: str, **more: Any) -> None:
    """Open as many sessions as a pool has room for, make some chunks of each, and append a row of how many they are."""
    sessions, chunk_s = [opened_session(pool, config, seed) for seed in range(pool.capacity)], []
    for number in range(CHUNKS_EACH):
        for session in sessions:
            began = time.perf_counter()
            (chunk,) = pool.run([session], [golden_inputs(config, number)])
            latents = chunk.to_host()
            chunk_s.append(time.perf_counter() - began)
            if not np.isfinite(latents).all():
                raise ValueError(f"chunk {number} of a session holds a number that is not finite")
    manifest = pool.manifest
    bench.row(
        figure, config, float(len(sessions)), f"sessions, each made {CHUNKS_EACH} chunks", peak_bytes=peak_bytes(),
        kv_bytes=manifest.workload.kv.pool_bytes, buffer_bytes=sum(buffer.nbytes for buffer in manifest.buffers),
        weight_bytes=sum(weight.nbytes for weight in manifest.weights), last_chunk_s=chunk_s[-1], **more,
    )  # fmt: skip


PARTS = {part.__name__: part for part in (step, audio, launches, fits, hybrid)}


def run(options: argparse.Namespace) -> int:
    """Measure the parts of the case; return the exit code."""
    return measure(Bench(options), PARTS)

"""lingbot-world at full size on one GPU: a chunk, the same by torch.compile, the camera's share, keys to frames.

    python scripts/bench/lingbot.py --work /tmp/seko-lingbot --rows docs/benchmarks/h200.jsonl --parts chunk,compiled

No checkpoint and no artifact is written: engines are compiled as in a build, weights are drawn on the device, and the
runtime's own session captures and replays the chunk. Each part is one or two rows; a part that fails is named in the
last line, a JSON object, and the exit code is 1. Nothing begins behind ``--seconds``.
``--eager`` runs every engine uncompiled, and with ``--preset lingbot-tiny`` a CPU tries the script.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rows import append_row
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from vae import random_weights as random_vae  # noqa: E402

from scripts.bench.peers.counting import chunk_times, peak_bytes, spread  # noqa: E402
from seko_export import BuildOptions  # noqa: E402
from seko_export.artifact.describe import describe  # noqa: E402
from seko_export.artifact.writer import hash_files  # noqa: E402
from seko_export.backends import EAGER, export_backend  # noqa: E402
from seko_export.backends.aoti import attention_backends  # noqa: E402
from seko_export.backends.workers import compiled_beside  # noqa: E402
from seko_export.config.build import BuildConfig  # noqa: E402
from seko_export.engines.piece import dtype_name  # noqa: E402
from seko_export.families.base import MediaTensors  # noqa: E402
from seko_export.families.registry import family_of, graph_of, presets  # noqa: E402
from seko_export.goldens.calibration import layer_constants  # noqa: E402
from seko_export.goldens.record import eager_engine, golden_inputs, golden_text  # noqa: E402
from seko_export.host.progress import silent  # noqa: E402
from seko_export.lowering.trace import trace  # noqa: E402
from seko_export.media.wan_vae.config import WanVaeConfig  # noqa: E402
from seko_export.media.wan_vae.modules import latent_statistics  # noqa: E402
from seko_export.options.resolve import resolve_build  # noqa: E402
from seko_kernels.kv_formats import ChannelStatistics  # noqa: E402
from seko_runtime.backends import open_backend  # noqa: E402
from seko_runtime.backends.aoti import torch_memory  # noqa: E402
from seko_runtime.format.manifest import Manifest, Weight  # noqa: E402
from seko_runtime.video.conditioning import KeyboardCamera  # noqa: E402
from seko_runtime.video.session import Session  # noqa: E402

Engines = Mapping[str, Callable[[list[Tensor]], Sequence[Tensor]]]
V1, V2, TINY = "lingbot-v1-fast", "lingbot-v2-fast", "lingbot-tiny"
AMAX = 8.0  # of the keys and values that the cache's constants are made for: speed does not depend on it
# What must not be exceeded, of the full model on a GPU.
BARS = {
    "lingbot_v2_chunk_ms": 1750.0,
    "lingbot_vs_compiled": 0.68,
    "lingbot_camera_share": 0.05,
    "lingbot_key_to_frame": 1.15,
}


class RandomSource:
    """Weights by the checkpoint's names, drawn on the device when asked for."""

    def __init__(self, config: BuildConfig) -> None:
        keys = family_of(config).keys
        self._shapes, self._spread, self._device = keys.shapes(config.model), keys.spread, config.device
        self._random = torch.Generator(config.device).manual_seed(0)

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor, bf16."""
        shape = self._shapes[name]
        drawn = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return drawn.normal_(*self._spread(name, shape), generator=self._random)


@dataclass
class Bench:
    """The options, and what was measured."""

    options: argparse.Namespace
    started: float = field(default_factory=time.monotonic)
    chunk_ms: dict[str, float] = field(default_factory=dict)  # median, by way of the camera

    @property
    def on_gpu(self) -> bool:
        return torch.cuda.is_available()

    def config(
        self, *, exact: bool = False, camera: str = "chunk", preset: str = "", **layout: int
    ) -> BuildConfig:
        """Return a build: FP4 cache, fp8 matmuls and the past in 8 bits, or torch's own layers over an exact cache."""
        more: dict[str, Any] = {"kv": "bf16", "kernels": "plain", "attention": "torch"}
        if not exact:
            more = {"kv": "fp4", "fp8": True, "kernels": "fused", "attention": "fp8"}
            more["resident_window"] = not layout  # a large picture wants the memory
        asked = BuildOptions(preset=preset or self.options.preset, camera=camera, no_vae=True, no_text=True,
                             **more, **layout)  # fmt: skip
        return resolve_build(asked).config

    def row(self, figure: str, config: BuildConfig, value: float, unit: str, **more: object) -> None:
        """Append a row."""
        s, model = config.stream, config.model
        cache = "fp4 cache, fp8 matmuls" if config.fp8 else f"{config.kv_scheme} cache"
        window = ", resident window" if config.resident_window else ""
        shape = (
            f"{model.name}, {s.height}x{s.width}, chunk {s.chunk_frames}, ring {s.ring_frames}, sink {s.sink_frames}, "
            f"{cache}{window}, camera once a {getattr(model, 'camera', 'none')}"
        )
        bar = BARS.get(figure) if self.on_gpu and self.options.preset == V2 else None
        kind = "uncompiled" if self.options.eager else "aoti"
        append_row(self.options.rows, figure, shape, value, unit, bar, engines=kind, weights="random", **more)

    @contextmanager
    def opened(
        self, config: BuildConfig, engines: Engines | None = None, *, captured: bool = True, wrap: Any = None
    ) -> Iterator[Session]:
        """Open a session of random weights over a build's engines, or over others."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        weights = random_weights(config)
        table = tuple(Weight(name, tuple(one.shape), dtype_name(one.dtype)) for name, one in weights.items())
        manifest, backend = describe(config, EAGER, table, {}), None
        if engines is None and self.options.eager:
            engines = {name: eager_engine(piece) for name, piece in graph_of(config).pieces.items()}
        elif engines is None:
            manifest, backend, engines = self._loaded(config, table)
        if wrap is not None:
            engines = {name: wrap(name, engine) for name, engine in engines.items()}
        memory = torch_memory(torch.device(config.device))
        memory.captures = memory.captures and captured and not self.options.eager
        begun = time.monotonic()
        try:
            with (
                torch.no_grad(),
                attention_backends(config.device),
                Session(manifest, engines, weights, memory, seeds=[0], text=golden_text(config),
                        inputs=golden_inputs(config, None)) as session,
            ):  # fmt: skip
                print(f"# {config.model.name}: ready after {time.monotonic() - begun:.0f} s, "
                      f"{self.elapsed:.0f} s in all", flush=True)  # fmt: skip
                yield session
        finally:
            if backend is not None:
                backend.close()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def folder(self, config: BuildConfig) -> Path:
        """Return where a build's engines lie."""
        s, m = config.stream, config.model
        parts = (m.name, s.height, s.width, m.camera, *(["vae"] if config.vae else []))
        return self.options.work / "-".join(map(str, parts))

    def compile(self, configs: Sequence[BuildConfig]) -> None:
        """Compile the engines of some builds side by side, but for those that are there."""
        if self.options.eager:
            return
        with ThreadPoolExecutor(len(configs)) as pool:
            list(pool.map(self._compile, configs))
        print(f"# engines compiled, {self.elapsed:.0f} s in all", flush=True)

    def _compile(self, config: BuildConfig) -> None:
        folder = self.folder(config)
        if (folder / "done").exists():
            return
        folder.mkdir(parents=True)
        with compiled_beside(config, export_backend("aoti"), folder, silent) as wait:
            wait()
        (folder / "done").touch()

    def _loaded(self, config: BuildConfig, table: tuple[Weight, ...]) -> tuple[Manifest, Any, Engines]:
        folder = self.folder(config)
        manifest = describe(config, export_backend("aoti"), table, hash_files(folder))
        backend = open_backend("aoti", config.device)
        files = {one.file: memoryview((folder / one.file).read_bytes()) for one in manifest.engines}
        return manifest, backend, backend.load_engines(manifest, files)


def random_weights(config: BuildConfig) -> dict[str, Tensor]:
    """Return all weights, tables and constants of a build, on its device."""
    vae, media = config.vae, None
    if isinstance(vae, WanVaeConfig):
        media = MediaTensors(vae=random_vae(vae) | latent_statistics(vae, torch.float32))
    made = dict(family_of(config).weights(graph_of(config).pieces, RandomSource(config), media))
    made |= config.schedule.tables(config.stream)
    shape = (config.model.heads, config.model.head_dim)
    seen = ChannelStatistics(torch.full(shape, -AMAX), torch.full(shape, AMAX), torch.zeros(shape))
    if not config.lossless:
        for layer in range(config.model.layers):
            made |= {
                f"blocks.{layer}.kv.{name}": one for name, one in config.kv.calibrate(seen, seen).items()
            }
        made |= layer_constants(config, made)
    return {name: one.to(config.device) for name, one in made.items()}


def compiled_engines(config: BuildConfig) -> Engines:
    """Return each engine as `torch.compile` makes it of the same graph; the session's warm-up compiles it."""
    if config.device == "cuda":
        torch._inductor.config.cpp.vec_isa_ok = (
            False  # finding out takes half a minute, and a GPU has no use for it
        )

    def one(piece: Any) -> Callable[[list[Tensor]], Sequence[Tensor]]:
        run = torch.compile(trace(piece, config.device).module(check_guards=False))

        def engine(inputs: list[Tensor]) -> Sequence[Tensor]:
            results = run(*inputs)
            return [results] if isinstance(results, Tensor) else list(results)

        return engine

    return {name: one(piece) for name, piece in graph_of(config).pieces.items()}


def keyboard(config: BuildConfig) -> KeyboardCamera:
    """Return a camera whose keys are held."""
    s = config.stream
    camera = KeyboardCamera(s.height, s.width, s.chunk_frames)
    camera.press("wl")
    return camera


def steady(session: Session, config: BuildConfig, chunks: int) -> dict[str, float]:
    """Fill the cache, then return the spread of the milliseconds of some chunks."""
    camera, s = keyboard(config), config.stream
    for _ in range(-(-s.cache_frames // s.chunk_frames) + 2):
        session.run_chunk(camera.next_chunk())
    return spread(chunk_times(lambda: session.run_chunk(camera.next_chunk()), chunks))


def chunk(bench: Bench) -> None:
    """The chunk, with what the camera gives each layer computed once and kept, and computed in every pass."""
    configs = [bench.config(camera=how) for how in ("chunk", "pass")]
    bench.compile(configs)
    for config in configs:
        with bench.opened(config) as session:
            times = steady(session, config, bench.options.chunks)
            kept = sum(one.nbytes for one in session.manifest.buffers if one.name.startswith("chunk.camera"))
            bench.chunk_ms[config.model.camera] = times["median"]
            bench.row("lingbot_v2_chunk_ms", config, times["median"], "ms a chunk, 4 passes and context", **times,
                      camera_bytes=kept, kv_bytes=session.manifest.kv.pool_bytes, peak_bytes=peak_bytes())  # fmt: skip


def compiled(bench: Bench) -> None:
    """The same step by torch.compile, captured, over an exact cache; what it is compared with is `chunk`'s best."""
    _need_chunk(bench)
    config = bench.config(exact=True)
    engines = None if bench.options.eager else compiled_engines(config)
    with bench.opened(config, engines) as session:
        times = steady(session, config, max(3, bench.options.chunks // 2))
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
        camera = keyboard(config)
        session.run_chunk(camera.next_chunk())
        totals = []
        for _ in range(3):
            clock.calls.clear()
            clock.on = True
            session.run_chunk(camera.next_chunk())
            clock.on = False
            totals.append(clock.total_ms())
    spent = statistics.median(totals)
    bench.row("lingbot_camera_share", config, spent / bench.chunk_ms["chunk"], "of a chunk", camera_ms=spent,
              chunk_ms=bench.chunk_ms["chunk"])  # fmt: skip


def key(bench: Bench) -> None:
    """From reading the keys to the chunk's frames on the host, with Wan's VAE; in chunks without frames."""
    vae = WanVaeConfig() if bench.options.preset != TINY else WanVaeConfig(base_dim=8)
    config = replace(bench.config(), vae=vae)
    bench.compile([config])
    with bench.opened(config) as session:
        camera = keyboard(config)
        s = config.stream
        for _ in range(-(-s.cache_frames // s.chunk_frames) + 2):
            session.run_chunk(camera.next_chunk()).video()
        latencies = []
        for number in range(bench.options.latencies):
            camera.release("jl")
            began = time.perf_counter()
            camera.press("jl"[number % 2])
            frames = session.run_chunk(camera.next_chunk()).video()
            latencies.append(1e3 * (time.perf_counter() - began))
            if bench.elapsed > bench.options.seconds:
                break
        alone = spread(chunk_times(lambda: _to_latents(session, camera), min(5, bench.options.chunks)))
    told = spread(latencies)
    chunk_ms = bench.chunk_ms.get("chunk", alone["median"])
    bench.row("lingbot_key_to_frame", config, told["p99"] / chunk_ms, "p99, keys to frames / chunk", chunk_ms=chunk_ms,
              latency_ms=told, chunk_with_decoding_ms=alone, video_frames=int(frames.shape[1]))  # fmt: skip


def fits(bench: Bench) -> None:
    """720p: whether the first version with a ring of 18 and a sink of 3 runs, and what it takes."""
    small = bench.options.preset == TINY
    layout = {"height": 48, "width": 80} if small else {"height": 720, "width": 1280}
    config = bench.config(preset=TINY if small else V1, camera=bench.options.camera_720p, **layout)
    bench.compile([config])
    with bench.opened(config) as session:
        times = steady(session, config, 2)
        latents = session.run_chunk(keyboard(config).next_chunk()).to_host()
        if not bool((abs(latents) < 1e3).all()):
            raise ValueError(f"latents up to {abs(latents).max()}: expected numbers near 1")
        sizes = {one.name: one.nbytes for one in session.manifest.buffers}
        bench.row("lingbot_720p_fits", config, max(peak_bytes(), sum(sizes.values())) / 1e9, "GB at the peak",
                  chunk_ms=times["median"], kv_bytes=session.manifest.kv.pool_bytes, buffer_bytes=sum(sizes.values()),
                  camera_bytes=sum(size for name, size in sizes.items() if name.startswith("chunk.camera")),
                  weight_bytes=sum(one.nbytes for one in session.manifest.weights))  # fmt: skip


PARTS = {one.__name__: one for one in (chunk, compiled, share, key, fits)}


@dataclass
class _Clock:
    """Times the calls of the camera's engines."""

    on_gpu: bool
    on: bool = False
    calls: list[tuple[Any, Any]] = field(default_factory=list)

    def around(self, name: str, engine: Any) -> Any:
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
            return 1e3 * sum(end - begin for begin, end in self.calls)
        torch.cuda.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in self.calls))

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _need_chunk(bench: Bench) -> None:
    if "chunk" not in bench.chunk_ms:
        chunk(bench)


def _to_latents(session: Session, camera: KeyboardCamera) -> None:
    session.run_chunk(camera.next_chunk())
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> int:
    """Measure the parts that were asked for; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of the engines; those that are there are used"
    )
    parser.add_argument("--rows", type=Path, required=True, help="jsonl file to append to")
    parser.add_argument("--preset", choices=(V2, TINY), default=V2)
    parser.add_argument(
        "--parts", default="chunk,compiled,share", help=f"some of {','.join(PARTS)}, with commas"
    )
    parser.add_argument("--chunks", type=int, default=8, help="steady chunks to time")
    parser.add_argument("--latencies", type=int, default=100, help="chunks from keys to frames")
    parser.add_argument("--seconds", type=float, default=540, help="no part begins behind these")
    parser.add_argument("--camera-720p", choices=("chunk", "pass"), default="chunk")
    parser.add_argument(
        "--eager", action="store_true", help="engines as they are, uncompiled: to try the script"
    )
    options = parser.parse_args()
    unknown = set(options.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}: expected some of {', '.join(PARTS)}")
    check_presets()
    options.work.mkdir(parents=True, exist_ok=True)
    bench, failed, skipped = Bench(options), {}, []
    for name in options.parts.split(","):
        if bench.elapsed > options.seconds:
            skipped.append(name)
            continue
        try:
            PARTS[name](bench)
        except Exception as fault:  # the other parts' rows are worth their time
            traceback.print_exc()
            failed[name] = f"{type(fault).__name__}: {fault}"[:500]
    print(json.dumps({"failed": failed, "skipped": skipped, "seconds": round(bench.elapsed, 1)}))
    return 1 if failed or skipped else 0


def check_presets() -> None:
    """Say at once if a preset is gone."""
    missing = {V1, V2, TINY} - set(presets())
    if missing:
        raise SystemExit(f"presets {sorted(missing)} are not there")


if __name__ == "__main__":
    sys.exit(main())

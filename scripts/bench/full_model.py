"""Full-size models with random weights on one device, without a checkpoint or an artifact; for the benches of families.

Engines are compiled as in a build, or by `torch.compile`; weights are drawn on the device; the runtime's own session
captures and replays the chunk. A bench is made of parts, and a part that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import shutil
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from scripts.bench.built import build_once
from scripts.bench.counting import chunk_times, fill_chunks, spread
from scripts.bench.rows import append_row
from scripts.bench.vae_engines import random_weights as random_vae
from seko_export.artifact.describe import describe
from seko_export.artifact.writer import hash_files
from seko_export.backends import EAGER, export_backend
from seko_export.backends.workers import compiled_in_background
from seko_export.config.video import VideoBuild
from seko_export.engines.piece import dtype_name
from seko_export.families.base import MediaTensors
from seko_export.families.registry import family_of, graph_of
from seko_export.goldens.eager import eager_engine
from seko_export.host.progress import silent
from seko_export.lowering.attention_backends import attention_backends
from seko_export.lowering.trace import trace
from seko_export.media.pieces import AUDIO_ENCODER
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.media.wan_vae.modules import VaeTensors
from seko_export.video.calibration import layer_constants
from seko_export.video.recording import golden_inputs, golden_reference, golden_text
from seko_kernels.kv_formats import ChannelStatistics
from seko_runtime.backends import open_backend
from seko_runtime.backends.aoti import torch_memory
from seko_runtime.format.manifest import Manifest, Weight
from seko_runtime.sessions.loaded import Loaded
from seko_runtime.video.contract import resolve_video
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.opened_rows import open_video_rows
from seko_runtime.video.options import VideoOptions
from seko_runtime.video.pool import Pool
from seko_runtime.video.rows import VideoRows
from seko_runtime.video.session import Session

Engine = Callable[[list[Tensor]], Sequence[Tensor]]
Engines = Mapping[str, Engine]
Wrap = Callable[[str, Engine], Engine]
# Options of a build with all that is fast, but for a resident window; and of torch's own layers over an exact cache.
FAST: Mapping[str, Any] = {"kv": "fp4", "fp8": True, "kernels": "fused", "attention": "fp8"}
PLAIN: Mapping[str, Any] = {"kv": "bf16", "kernels": "plain", "attention": "torch"}
TRIAL_VAE = WanVaeConfig(base_dim=2)
AMAX = 8.0  # of the keys and values that the cache's constants are made for: speed does not depend on it


class RandomSource:
    """Weights by the checkpoint's names, drawn on the device when asked for."""

    def __init__(self, config: VideoBuild, device: str) -> None:
        keys = family_of(config).keys
        self._shapes, self._spread, self._device = keys.shapes(config.model), keys.spread, device
        self._random = torch.Generator(device).manual_seed(0)

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor, bf16."""
        shape = self._shapes[name]
        drawn = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return drawn.normal_(*self._spread(name, shape), generator=self._random)


def random_weights(config: VideoBuild) -> dict[str, Tensor]:
    """Return all weights, tables and constants of a build, on its device."""
    source, pieces = RandomSource(config, config.target.device), graph_of(config).pieces
    weights = dict(family_of(config).weights(pieces, source, _random_media(config)))
    weights |= tables_of_passes(config)
    shape = (config.model.heads, config.model.head_dim)
    seen = ChannelStatistics(torch.full(shape, -AMAX), torch.full(shape, AMAX), torch.zeros(shape))
    if not config.lossless:
        for layer in range(config.model.layers):
            weights |= {
                f"blocks.{layer}.kv.{name}": tensor
                for name, tensor in config.kv.calibrate(seen, seen).items()
            }
        weights |= layer_constants(config, weights)
    return {name: tensor.to(config.target.device) for name, tensor in weights.items()}


def tables_of_passes(config: VideoBuild) -> dict[str, Tensor]:
    """Return the tables that hang on the schedule, on the build's device."""
    tables = dict(family_of(config).tables(config, RandomSource(config, "cpu")))
    tables |= config.workload.schedule.tables(config.as_batch.workload.stream)
    return {name: tensor.to(config.target.device) for name, tensor in tables.items()}


def _random_media(config: VideoBuild) -> MediaTensors:
    """Return random weights of the VAE and of the audio encoder, if the build has them."""
    vae, audio = config.workload.vae, None
    vae_weights = None
    if isinstance(vae, WanVaeConfig):
        vae_weights = VaeTensors(random_vae(vae), vae)
    if config.workload.audio is not None:
        random = torch.Generator().manual_seed(0)
        prefix = f"weight:{AUDIO_ENCODER}."
        shapes = {
            argument.ref.removeprefix(prefix): argument.shape
            for piece in graph_of(config).pieces.values()
            for argument in piece.parameters
            if argument.ref.startswith(prefix)
        }
        audio = {name: 0.02 * torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return MediaTensors(vae=vae_weights, audio=audio)


def compiled_engines(config: VideoBuild, *, without: Collection[str] = ()) -> dict[str, Engine]:
    """Return each engine as `torch.compile` makes it of the same graph; the session's warm-up compiles it."""
    if config.target.device == "cuda":
        torch._inductor.config.cpp.vec_isa_ok = (
            False  # finding out takes half a minute, and a GPU has no use for it
        )

    def compiled(piece: Any) -> Engine:
        run = torch.compile(trace(piece, config.target.device).module(check_guards=False))

        def engine(inputs: list[Tensor]) -> Sequence[Tensor]:
            results = run(*inputs)
            return [results] if isinstance(results, Tensor) else list(results)

        return engine

    return {name: compiled(piece) for name, piece in graph_of(config).pieces.items() if name not in without}


def eager_engines(config: VideoBuild) -> dict[str, Engine]:
    """Return each engine's module as it is."""
    return {name: eager_engine(piece) for name, piece in graph_of(config).pieces.items()}


class PreparedError(Exception):
    """Ends a part behind its builds, with ``--prepare``."""


@dataclass
class FullModelBench:
    """The options of a bench, its engines and its sessions.

    Parameters
    ----------
    options : argparse.Namespace
        As `cases.py` has them.
    started : float
        When the bench began, by the monotonic clock.
    compiled : dict of Path to VideoBuild
        The builds whose engines lie in their folders, compiled by this process or found of this commit.
    """

    options: argparse.Namespace
    started: float = field(default_factory=time.monotonic)
    compiled: dict[Path, VideoBuild] = field(default_factory=dict)
    bars: ClassVar[Mapping[str, float | None]] = {}  # of the full model on a GPU

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU."""
        return torch.cuda.is_available()

    @property
    def tiny(self) -> bool:
        """Whether the case is only tried."""
        return "tiny" in self.options.preset

    @property
    def elapsed(self) -> float:
        """Seconds since the bench began."""
        return time.monotonic() - self.started

    def say(self, text: str) -> None:
        """Print a line that is no row, with the time."""
        print(f"# {text}, {self.elapsed:.0f} s in all", flush=True)

    def folder(self, config: VideoBuild) -> Path:
        """Return where a build's engines lie."""
        digest = hashlib.sha256(repr(config).encode()).hexdigest()
        return Path(self.options.work, f"{config.model.name}-{digest[:12]}")

    def shape(self, config: VideoBuild) -> str:
        """Return what rows call a build."""
        raise NotImplementedError

    def row(
        self,
        figure: str,
        config: VideoBuild,
        value: float,
        unit: str,
        *,
        barred: bool = True,
        more: str = "",
        **columns: Any,
    ) -> None:
        """Append a row, which is held against the figure's bar if it is ``barred``; ``more`` ends its shape."""
        bar = self.bars.get(figure) if barred and self.on_gpu and not self.tiny else None
        facts = {"engines": "uncompiled" if self.options.eager else "aoti", "weights": "random"} | columns
        append_row(self.options.rows, figure, self.shape(config) + more, value, unit, bar, **facts)

    def compile(self, configs: Sequence[VideoBuild]) -> None:
        """Compile the engines of some builds side by side, but for those that this commit has compiled."""
        with self.compiling(configs) as wait:
            wait()

    @contextmanager
    def compiling(self, configs: Sequence[VideoBuild]) -> Iterator[Callable[[], None]]:
        """Compile the engines of some builds beside the caller's block, but for those that this commit has compiled.

        Yields
        ------
        callable
            Waits for the engines, as the end of the block does. It raises what made one fail.
        """
        if self.options.eager:
            yield lambda: None
            return
        with ThreadPoolExecutor(len(configs)) as pool:
            running = [pool.submit(self._compile, config) for config in configs]

            def wait() -> None:
                for future in running:
                    future.result()
                self.say("engines compiled")

            if self.options.prepare:
                wait()
                raise PreparedError
            yield wait
            for future in running:
                future.result()

    def _compile(self, config: VideoBuild) -> None:
        folder = self.folder(config)
        if self.compiled.get(folder) != config:
            build_once(folder, config, lambda: self._compile_into(folder, config))
            self.compiled[folder] = config

    def _compile_into(self, folder: Path, config: VideoBuild) -> dict[str, Any]:
        shutil.rmtree(folder, ignore_errors=True)  # of another commit, or of a run that was cut off
        folder.mkdir()
        with compiled_in_background(config, export_backend("aoti"), folder, silent) as wait:
            seconds = wait()
        slowest = sorted(seconds, key=seconds.__getitem__)[-3:]
        self.say(f"{folder.name}: {', '.join(f'{name} {seconds[name]:.0f} s' for name in slowest)}")
        return {}

    @contextmanager
    def engines(
        self, config: VideoBuild, weights: Mapping[str, Tensor], engines: Engines | None = None
    ) -> Iterator[tuple[VideoManifest, Engines]]:
        """Open a build's compiled engines, or take others for it."""
        table = tuple(
            Weight(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in weights.items()
        )
        if engines is not None or self.options.eager:
            yield (
                as_video(describe(config, EAGER, table, {})),
                eager_engines(config) if engines is None else engines,
            )
            return
        folder = self.folder(config)
        manifest = as_video(describe(config, export_backend("aoti"), table, hash_files(folder)))
        backend = open_backend("aoti", config.target.device)
        try:
            files = {entry.file: memoryview((folder / entry.file).read_bytes()) for entry in manifest.engines}
            yield manifest, backend.load_engines(manifest, files)
        finally:
            backend.close()

    @contextmanager
    def opened(
        self,
        config: VideoBuild,
        engines: Engines | None = None,
        *,
        captured: bool = True,
        wrap: Wrap | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> Iterator[Session]:
        """Open a session over a build's engines, or over others; of random weights, unless some are given."""
        reference = golden_reference(config)
        with (
            self.pool(config, engines, captured=captured, wrap=wrap, weights=weights) as pool,
            pool.open_session(
                text=golden_text(config) if config.model.takes_text else None,
                reference=None if reference is None else reference.numpy(),
                inputs=golden_inputs(config, None),
            ) as session,
        ):
            yield session

    @contextmanager
    def pool(
        self,
        config: VideoBuild,
        engines: Engines | None = None,
        *,
        captured: bool = True,
        wrap: Wrap | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> Iterator[Pool]:
        """Open a pool over a build's engines, or over others; of random weights, unless some are given."""
        self.forget()
        begun = time.monotonic()
        weights = random_weights(config) if weights is None else weights
        with (
            self.engines(config, weights, engines) as (manifest, loaded),
            torch.no_grad(),
            attention_backends(config.target.device),
            Pool(
                self._rows(manifest, loaded, wrap, weights, self._memory(config, engines, captured))
            ) as pool,
        ):
            self.say(f"{config.model.name}: a pool of {pool.capacity} after {time.monotonic() - begun:.0f} s")
            yield pool

    def _rows(
        self,
        manifest: VideoManifest,
        engines: Engines,
        wrap: Wrap | None,
        weights: Mapping[str, Tensor],
        memory: Any,
    ) -> VideoRows:
        programs = resolve_video(manifest)
        loaded = Loaded(manifest, programs, wrapped(engines, wrap), weights, lambda: memory)
        return open_video_rows(loaded, VideoOptions())

    def _memory(self, config: VideoBuild, engines: Engines | None, captured: bool) -> Any:
        """Return the device's memory. Engines of a package are ready; others compile, tune and copy constants in their
        first run, which no capture survives."""
        memory = torch_memory(torch.device(config.target.device))
        memory.captures = memory.captures and captured and not self.options.eager
        if engines is not None:
            memory.warm_up_runs = 1
        return memory

    def forget(self) -> None:
        """Give back what nothing holds, and count the peak of the device's memory anew."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def as_video(manifest: Manifest) -> VideoManifest:
    """Return the manifest of a video build, as what it is."""
    assert isinstance(manifest, VideoManifest)
    return manifest


def steady(session: Session, config: VideoBuild, chunks: int) -> dict[str, float]:
    """Fill the cache, then return the spread of the milliseconds of some chunks."""
    for _ in range(fill_chunks(config.workload.stream)):
        session.run_chunk()
    return spread(chunk_times(lambda: session.run_chunk(), chunks))


def wrapped(engines: Engines, wrap: Wrap | None) -> Engines:
    """Return the engines, each in what ``wrap`` makes of it."""
    return engines if wrap is None else {name: wrap(name, engine) for name, engine in engines.items()}


def measure(bench: FullModelBench, parts: Mapping[str, Callable[[Any], None]]) -> int:
    """Measure the parts of a case, say in a last line what failed or was left, and return the exit code."""
    failed: dict[str, str] = {}
    skipped, seconds = [], {}
    for name in bench.options.parts:
        if bench.elapsed > bench.options.seconds:
            skipped.append(name)
            continue
        began = bench.elapsed
        try:
            parts[name](bench)
        except PreparedError:
            pass
        except Exception as fault:  # the other parts' rows are worth their time
            traceback.print_exc()
            failed[name] = f"{type(fault).__name__}: {fault}"[:500]
        seconds[name] = round(bench.elapsed - began, 1)
    report = {
        "failed": failed,
        "skipped": skipped,
        "seconds": round(bench.elapsed, 1),
        "seconds_of_parts": seconds,
    }
    print(json.dumps(report))
    return 1 if failed or skipped else 0

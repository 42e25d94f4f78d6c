"""The toy on the build machine: its family and its workload, outside the package. No tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from seko_export.checkpoints.key_table import KeyTable, Naming
from seko_export.config.build import BuildConfig, ModelIdentity, WorkloadConfig
from seko_export.config.target import TargetConfig
from seko_export.engines.key import EngineKey
from seko_export.engines.piece import Argument, Piece, on_meta
from seko_export.engines.weight_source import WeightSource
from seko_export.errors import UsageError
from seko_export.families.base import Family, MediaTensors, ModelGraph
from seko_export.families.registry import graph_of
from seko_export.goldens.eager import GOLDEN_FILE, eager_engine, eager_manifest, eager_memory, write_goldens
from seko_export.host.environment import Target
from seko_export.host.progress import Progress
from seko_export.media.sources import MediaSources
from seko_export.options.declaration import BuildOptions, option
from seko_export.options.resolved import ResolvedBuild
from seko_export.workloads.base import ExportWorkload
from seko_runtime.executor.programs_check import resolve_programs
from seko_runtime.executor.resolved import Programs
from seko_runtime.format.manifest import Buffer, Manifest
from seko_runtime.sessions.loaded import Loaded
from tests.toy_workload import workload as runtime
from tests.toy_workload.model import (
    BUCKETS,
    DIM,
    KIND,
    LENGTHS,
    POSITIONS,
    SAMPLES,
    SLOTS,
    WORDS,
    Golden,
    Prefill,
    Step,
    ToyManifest,
    ToyWorkload,
)

GOLDEN_WORDS, GOLDEN_STEPS, TOLERANCE = (4, 5, 6, 7, 8), 3, 1e-5
SHAPES = {"table": (WORDS, DIM), "inner": (DIM, DIM), "outer": (DIM, DIM), "voice": (DIM, SAMPLES)}
F32, I64 = torch.float32, torch.int64
STATE = (
    Argument("hidden", "buffer:hidden", (SLOTS, DIM), F32),
    Argument("history", "buffer:history", (SLOTS * POSITIONS, DIM), F32),
)


@dataclass(frozen=True)
class ToyModel(ModelIdentity):
    """The toy's net, of one size."""

    workload: ClassVar[str] = f"{__name__}:WORKLOAD"

    family: str = field(default=f"{__name__}:FAMILY", kw_only=True)


@dataclass(frozen=True)
class ToyConfig(WorkloadConfig):
    """What a toy build adds to model and target."""

    lengths: tuple[int, ...] = LENGTHS

    @property
    def state_rows(self) -> int:
        """Three sessions and the spare row."""
        return SLOTS

    @property
    def buckets(self) -> tuple[int, ...]:
        """Rows of its steps."""
        return BUCKETS


CONFIG = BuildConfig(ToyModel("toy-speech"), ToyConfig(), TargetConfig("cpu"))


@dataclass(frozen=True)
class ToyOptions(BuildOptions):
    """What a person may ask of a toy build: the options of any build, and one of its own."""

    lengths: tuple[int, ...] | None = option(
        "Numbers of words that a call reads.", group="Toy (words)", workload=ToyModel.workload, plan=True
    )


class ToyFamily(Family[BuildConfig]):
    """The one net that there is."""

    name = f"{__name__}:FAMILY"
    presets = MappingProxyType({"toy-speech": CONFIG.model})

    @property
    def keys(self) -> KeyTable:
        """Four matrices."""
        return KeyTable("safetensors", lambda _: SHAPES, (Naming("toy", str, str),), (), "table")

    def graph(self, config: BuildConfig) -> ModelGraph:
        """Return a prefill for each length and a step for each bucket of rows."""
        pieces = [_prefill(length) for length in config.workload.lengths] + [_step(rows) for rows in BUCKETS]
        most, longest = BUCKETS[-1], config.workload.lengths[-1]
        host = {"words": (longest,), "length": (1,), "row": (1,), "rows": (most,), "positions": (most,)}
        buffers = (
            *(Buffer(state.name, state.shape, "float32", "cache") for state in STATE),
            *(Buffer(name, shape, "int64", "host") for name, shape in host.items()),
            Buffer("samples", (most, SAMPLES), "float32", "state"),
            Buffer("stop", (most,), "uint8", "state"),
        )
        return ModelGraph({p.name: p for p in pieces}, {p.name: p.calls() for p in pieces}, buffers)

    def weights(
        self, pieces: Mapping[str, Piece], checkpoint: WeightSource, media: MediaTensors | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's matrices."""
        del pieces, media
        yield from ((name, checkpoint[name].contiguous()) for name in SHAPES)


def _weight(name: str) -> Argument:
    return Argument(name, f"weight:{name}", SHAPES[name], F32)


def _numbers(name: str, count: int, *, bucket: bool = False) -> Argument:
    return Argument(name, f"buffer:{name}{'[bucket]' if bucket else ''}", (count,), I64)


def _prefill(length: int) -> Piece:
    inputs = (
        _numbers("words", length, bucket=True),
        _numbers("length", 1),
        _numbers("row", 1),
        _weight("table"),
        _weight("inner"),
        *STATE,
    )
    last = Argument("last", "value:last", (1, DIM), F32)
    key = EngineKey("prefill", bucket=length)
    mutates = tuple(state.name for state in STATE)
    return Piece(key, on_meta(Prefill), "", 0, inputs, (last,), mutates, positional=True)


def _step(rows: int) -> Piece:
    inputs = (
        _numbers("rows", rows, bucket=True),
        _numbers("positions", rows, bucket=True),
        *(_weight(name) for name in ("inner", "outer", "voice")),
        *STATE,
    )
    outputs = (
        Argument("samples", "buffer:samples[bucket]", (rows, SAMPLES), F32),
        Argument("stop", "buffer:stop[bucket]", (rows,), torch.uint8),
    )
    key = EngineKey("step", bucket=rows)
    mutates = tuple(state.name for state in STATE)
    return Piece(key, on_meta(Step), "", 0, inputs, outputs, mutates, positional=True)


@dataclass(frozen=True)
class ToyRecording:
    """Samples of the eager net [steps, SAMPLES]; nothing is calibrated."""

    samples: Tensor
    scales: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def table(self) -> Golden:
        """The manifest's table of it."""
        return Golden(GOLDEN_FILE, GOLDEN_WORDS, GOLDEN_STEPS, TOLERANCE)

    def write(self, folder: Path) -> None:
        """Write the samples into an artifact's folder."""
        write_goldens(folder, {"samples": self.samples})


class ToyExport(ExportWorkload[BuildConfig]):
    """The toy's workload on the build machine."""

    name = ToyModel.workload
    manifest = ToyManifest
    options = ToyOptions

    def check_options(self, options: BuildOptions) -> None:
        """Refuse lengths that no engine has."""
        if isinstance(options, ToyOptions) and not {*(options.lengths or LENGTHS)} <= {*LENGTHS}:
            raise UsageError(f"--lengths: expected some of {', '.join(map(str, LENGTHS))}")

    def resolve_options(
        self, options: BuildOptions, *, machine: Target | None = None
    ) -> ResolvedBuild[BuildConfig]:
        """Return the one net, with the lengths that were asked for."""
        del machine
        asked = options.lengths if isinstance(options, ToyOptions) else None
        return ResolvedBuild(CONFIG.changed(lengths=asked or LENGTHS), options.checkpoint, MediaSources())

    def describe(self, config: BuildConfig, golden: Golden | None) -> ToyWorkload:
        """Return lengths and positions."""
        return ToyWorkload(KIND, config.workload.lengths, POSITIONS, golden)

    def resolve(self, manifest: Manifest) -> Programs:
        """Return the programs, checked by the runtime's contract."""
        return resolve_programs(manifest, runtime.WORKLOAD.contract(manifest))

    def record(
        self,
        config: BuildConfig,
        weights: Mapping[str, Tensor],
        checkpoint: WeightSource,
        media: MediaSources,
        progress: Progress,
        wait_for_kernels: Callable[[], None],
    ) -> ToyRecording:
        """Record what the eager net says of some words."""
        del checkpoint, media, wait_for_kernels
        progress("recording goldens", 0, 1)
        manifest = eager_manifest(config, weights)
        engines = {name: eager_engine(piece) for name, piece in graph_of(config).pieces.items()}
        loaded = Loaded(manifest, self.resolve(manifest), engines, weights, lambda: eager_memory(config))
        with (
            torch.no_grad(),
            runtime.ToyPool(runtime.WORKLOAD.open_rows(loaded, {})) as pool,
            pool.open_session(GOLDEN_WORDS) as session,
        ):
            samples = [torch.from_numpy(pool.step([session])[0]) for _ in range(GOLDEN_STEPS)]
        return ToyRecording(torch.stack(samples))


FAMILY = ToyFamily()
WORKLOAD = ToyExport()

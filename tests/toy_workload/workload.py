"""The toy as a workload of the runtime: its contract, rows, sessions, pool and artifact. No tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import Memory, Tensor
from seko_runtime.errors import ManifestError, SnapshotError, UsageError
from seko_runtime.executor.contract import Contract, ProgramRule
from seko_runtime.format.manifest import Buffer, TensorSpec
from seko_runtime.format.safetensors_map import MappedTensor, check_tensor
from seko_runtime.sessions.artifact import OpenArtifact, OpenedFiles
from seko_runtime.sessions.device import Device
from seko_runtime.sessions.engines import Engines
from seko_runtime.sessions.loaded import Loaded
from seko_runtime.sessions.pool import RowPool
from seko_runtime.sessions.row_state import RowState, StateForm
from seko_runtime.sessions.rows import LocalRows
from seko_runtime.sessions.session import PendingResult, RowSession
from seko_runtime.sessions.snapshot import content_digest
from seko_runtime.sessions.workload import RuntimeWorkload
from tests.toy_workload.model import KIND, SAMPLES, ToyManifest

ROLES = frozenset({"cache", "state", "host"})
Words = Sequence[int]
Samples = NDArray[np.float32]


class ToyDevice(Device):
    """Hidden states and histories, and the programs that read and write them."""

    def __init__(self, loaded: Loaded[ToyManifest], memory: Memory) -> None:
        super().__init__(loaded, memory, ())
        self._manifest = loaded.manifest

    def prepare(self) -> None:
        """Run every program once, clear what that wrote, and capture if the memory does so."""
        memory = self._memory
        if memory.warm_up_runs:
            with memory.ordered():
                self._fill({"positions": 1})
                for runs in self.programs.values():
                    for _ in range(memory.warm_up_runs):
                        self.run_all(runs)
                for spec in self._manifest.buffers:
                    if spec.role in ("cache", "state"):
                        memory.zero(self.buffers[spec.name])
            memory.wait()
        if memory.captures:
            for name, runs in self.programs.items():
                self.capture(name, runs, name)

    def tensors(self, row: int) -> Mapping[str, Tensor]:
        """A row's hidden state and history."""
        return {
            spec.name: self.row_of(spec.name, row) for spec in self._manifest.buffers if spec.role == "cache"
        }

    def prefill(self, row: int, words: Words) -> int:
        """Queue the prefill of a row in the smallest length bucket; return the number of graphs launched."""
        length = next(length for length in self._manifest.workload.lengths if length >= len(words))
        padded = [*words, *[0] * (self._manifest.workload.lengths[-1] - len(words))]
        self._fill({"words": padded, "length": len(words), "row": row})
        return self._call(f"prefill.{length}")

    def step(self, rows: Sequence[int], positions: Sequence[int]) -> int:
        """Queue a step of some rows in the smallest bucket; return the number of graphs launched."""
        pool, spare = self._manifest.pool, self._manifest.state_rows - 1
        empty = len(self.host.tensors["rows"]) - len(rows)
        self._fill({"rows": [*rows, *[spare] * empty], "positions": [*positions, *[1] * empty]})
        return self._call(f"step.{pool.bucket(len(rows))}")

    def _fill(self, values: Mapping[str, object]) -> None:
        host = self.host.acquire()
        for name, array in host.items():
            array[...] = values.get(name, 0)
        self.host.send()

    def _call(self, program: str) -> int:
        return self.launch(program, self.programs[program])


@dataclass(frozen=True)
class Numbers:
    """What the host knows of a row: the positions that it has filled, and whether its last samples were its last."""

    position: int
    stopped: bool


FORM = StateForm(lambda fields: Numbers(fields.integer("position"), fields.flag("stopped", default=False)))


@dataclass(frozen=True)
class Made:
    """A step of one row. Whether it was one too many is known; its samples may still be computed."""

    surplus: bool
    samples: Callable[[], Samples]


class ToyRows(LocalRows[ToyManifest, ToyDevice]):
    """The rows of a toy artifact."""

    def __init__(self, loaded: Loaded[ToyManifest], memory: Memory) -> None:
        super().__init__(loaded, memory, FORM)
        self.positions = [0] * loaded.manifest.rows
        self.launches = 0
        # Whether a row's last samples were its last: waits for their step. Without an entry they were not.
        self._flags: dict[int, Callable[[], bool]] = {}
        self._open(lambda: ToyDevice(loaded, memory))

    def begin(self, row: int, words: Words) -> None:
        """Queue the prefill of an empty row."""
        most = self.manifest.workload.lengths[-1]
        if not 1 <= len(words) <= most:
            raise UsageError(f"{len(words)} words, expected 1 to {most}")
        with self.settled([row]):
            self.launches += self.device().prefill(row, words)
        with self.counted([row]):
            self.positions[row] = len(words)

    def run(self, rows: Sequence[int], inputs: Sequence[None] | None = None) -> list[Made]:
        """Queue a step of some rows; the flags of their last steps are read while it runs."""
        del inputs
        device = self.device()
        self.check_whole(rows)
        full = [row for row in rows if self.positions[row] == self.manifest.workload.positions]
        if full:
            raise UsageError(
                f"row {full[0]} has filled its {self.positions[full[0]]} positions; open another"
            )
        before = [self._flags.get(row) for row in rows]
        with self.settled(rows):
            self.launches += device.step(rows, [self.positions[row] for row in rows])
        read = self.read_later({name: device.buffers[name] for name in ("samples", "stop")})
        with self.counted(rows):
            for place, row in enumerate(rows):
                self.positions[row] += 1
                self._flags[row] = lambda place=place: bool(read()["stop"][place])
        return [
            Made(flag is not None and flag(), lambda place=place: _samples(read(), place))
            for place, flag in enumerate(before)
        ]

    def begin_owner(self, row: int, tenant: str | None) -> None:
        """Do nothing: rows share nothing."""

    def reserve(self, row: int) -> None:
        """Do nothing."""

    def _begin(self, row: int) -> None:
        self.positions[row] = 0
        self._flags.pop(row, None)

    def _save(self, row: int) -> tuple[Any, Mapping[str, NDArray[np.uint8]]]:
        return Numbers(self.positions[row], row in self._flags and self._flags[row]()), {}

    def _check_load(self, state: RowState) -> None:
        most = self.manifest.workload.positions
        if not 1 <= state.numbers.position <= most:
            raise SnapshotError(f"a row at position {state.numbers.position}, expected 1 to {most}")

    def _load(self, row: int, state: RowState) -> None:
        numbers = state.numbers
        self.positions[row], self._flags[row] = numbers.position, lambda: numbers.stopped


def _samples(arrays: Mapping[str, NDArray[np.uint8]], place: int) -> Samples:
    return arrays["samples"].view(np.float32).reshape(-1, SAMPLES)[place].copy()


class ToySession(RowSession):
    """A session that says some words."""

    _pool: ToyPool

    def speak(self) -> Iterator[Samples]:
        """Yield samples [SAMPLES] until they end."""
        while (samples := self._pool.step([self])[0]) is not None:
            yield samples

    def request_samples(self, due: float) -> PendingResult:
        """Request the next samples by a due time."""
        return self._ask(due, None)


class ToyPool(RowPool[ToySession, None, Made]):
    """The rows of a toy artifact."""

    _rows: ToyRows

    def __init__(self, rows: ToyRows, digest: str = "", snapshot_key: bytes | None = None) -> None:
        digests = digest, content_digest(rows.manifest, [rows.manifest.workload.positions]) or digest
        super().__init__(rows, ToySession, digests=digests, snapshot_key=snapshot_key)

    def open_session(self, words: Words, *, name: str = "", lease_s: float | None = None) -> ToySession:
        """Open a session on a free row."""
        return self._open(lambda row: self._rows.begin(row, words), name, lease_s, None)

    def step(self, sessions: Sequence[ToySession]) -> list[Samples | None]:
        """Make the next samples of some sessions in one call; None for one that ended before, which is closed."""
        results: list[Samples | None] = []
        for session, result in zip(sessions, self._run(sessions, None), strict=True):
            if result.surplus:
                session.close()
            results.append(None if result.surplus else result.samples())
        return results


@dataclass(frozen=True)
class ToyError:
    """How much replayed samples differ from the recorded ones."""

    size: float
    tolerance: float

    @property
    def within(self) -> bool:
        """Whether they are near enough."""
        return self.size <= self.tolerance

    def row(self) -> dict[str, object]:
        """Return it for JSON."""
        return {"error": self.size, "tolerance": self.tolerance}

    def __str__(self) -> str:
        return f"samples {self.size:.3g} (at most {self.tolerance:.3g})"


class ToyArtifact(OpenArtifact[ToyManifest]):
    """An open toy artifact."""

    def __init__(self, files: OpenedFiles[ToyManifest], engines: Engines) -> None:
        super().__init__(files, engines)
        self._golden = files.golden

    def open_pool(self, *, snapshot_key: bytes | None = None) -> ToyPool:
        """Open the artifact's pool."""
        pool = ToyPool(self.engines.open_rows({}), self.digest, snapshot_key)
        self._keep(pool)
        return pool

    def verify(self) -> list[ToyError]:
        """Replay the recorded samples."""
        golden = self.manifest.workload.golden
        with self.open_pool() as pool, pool.open_session(golden.words) as session:
            replayed = np.stack([pool.step([session])[0] for _ in range(golden.steps)])
        recorded = self._golden["samples"].to_numpy()
        return [ToyError(float(np.abs(replayed - recorded).max()), golden.tolerance)]


class ToyKind(RuntimeWorkload[ToyManifest]):
    """The toy, as the runtime knows it."""

    kind = KIND
    manifest_type = ToyManifest
    form = FORM

    def contract(self, manifest: ToyManifest) -> Contract:
        """A prefill for each length, a step for each bucket of rows."""
        writes = frozenset({"cache", "state"})
        rules = {f"prefill.{n}": ProgramRule(ROLES, writes, bucket=n) for n in manifest.workload.lengths}
        rules |= {f"step.{n}": ProgramRule(ROLES, writes, bucket=n) for n in manifest.pool.buckets}
        return Contract(rules, check_buffers=lambda buffers: _check_host(manifest, buffers))

    def golden_file(self, manifest: ToyManifest) -> str | None:
        """The file of recorded samples."""
        return None if manifest.workload.golden is None else manifest.workload.golden.file

    def check_golden(self, manifest: ToyManifest, golden: Mapping[str, MappedTensor]) -> None:
        """Check the shape of the samples."""
        table = manifest.workload.golden
        check_tensor(golden, TensorSpec("samples", (table.steps, SAMPLES), "float32"), table.file)

    def open_rows(self, loaded: Loaded[ToyManifest], options: Mapping[str, Any]) -> ToyRows:
        """Return the artifact's rows."""
        assert not options
        rows = ToyRows(loaded, loaded.memory())
        rows.device().prepare()
        return rows

    def artifact(self, files: OpenedFiles[ToyManifest], engines: Engines) -> ToyArtifact:
        """Return the open artifact."""
        return ToyArtifact(files, engines)

    def described(self, manifest: ToyManifest) -> tuple[Sequence[str], Mapping[str, object]]:
        """Say how many words it takes."""
        most = manifest.workload.lengths[-1]
        return [f"words    up to {most}"], {"words": most}


def _check_host(manifest: ToyManifest, buffers: Mapping[str, Buffer]) -> None:
    calls, most = manifest.call_rows, manifest.workload.lengths[-1]
    host = {"words": (most,), "length": (1,), "row": (1,), "rows": (calls,), "positions": (calls,)}
    shapes = {name: spec.shape for name, spec in buffers.items() if spec.role == "host"}
    if shapes != host:
        raise ManifestError(f"the host fills {host}, the manifest has {shapes}")


WORKLOAD = ToyKind()

"""The device side of a pool's rows: their buffers, bound programs and captured calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from seko_runtime.backends.memory import Memory, Tensor
from seko_runtime.executor.cache_offload import CacheOffload
from seko_runtime.executor.program import BoundProgram, BoundTensors
from seko_runtime.executor.resolved import Programs
from seko_runtime.executor.weight_streaming import WeightStreaming
from seko_runtime.format.manifest import Buffer, Manifest
from seko_runtime.host.faults import captured
from seko_runtime.sessions.loaded import Loaded


class Device:
    """The buffers of a pool's rows and the programs bound to the buffers; both are released together.

    Each workload derives its own subclass of `Device`. The constructor must be called inside `Memory.ordered`, the
    context of queued device work.

    Parameters
    ----------
    loaded : Loaded
        The opened artifact with its engines.
    memory : Memory
        The memory of the pool's tensors.
    units : sequence of sequence of str
        Programs that run one after another in one kind of call: `Contract.units` of the artifact.

    Attributes
    ----------
    host : HostBlock
        The buffers that the host fills before an engine call.
    specs, buffers : mapping
        The manifest's buffers and their tensors, by name.
    programs : mapping of str to list of BoundProgram
        For the name of each program of this process, a list with one bound program for each run of the program.
    replays : dict
        Captured CUDA graphs, by the key that the workload passed to `capture`.
    """

    def __init__(self, loaded: Loaded[Any], memory: Memory, units: Sequence[Sequence[str]]) -> None:
        manifest: Manifest = loaded.manifest
        self._state_rows, self._memory = manifest.state_rows, memory
        self.host = memory.host_block([spec for spec in manifest.buffers if spec.role == "host"])
        self.specs = {spec.name: spec for spec in manifest.buffers}
        fewest = _fewest_indices(loaded.programs)
        self.buffers: dict[str, Tensor] = {
            spec.name: memory.allocate(_cut_as_indexed(spec.on_device, fewest))
            for spec in manifest.buffers
            if spec.role != "host"
        }
        self.buffers.update(self.host.tensors)
        self.layers = CacheOffload(manifest, loaded.programs, units, self.buffers, memory)
        engines = {engine.name: engine for engine in manifest.engines}
        self.streaming = WeightStreaming(manifest.weights, loaded.weights, memory, loaded.programs)
        tensors = BoundTensors(
            loaded.engines, engines, loaded.weights, self.buffers, memory, self.layers, self.streaming
        )
        self.programs: dict[str, list[BoundProgram]] = {
            name: [
                BoundProgram(calls, tensors, self.layers.visits(name, number))
                for number, calls in enumerate(runs)
            ]
            for name, runs in loaded.programs.items()
            if loaded.rank.runs(name)
        }
        self.replays: dict[Hashable, Callable[[], None]] = {}

    def tensors(self, row: int) -> Mapping[str, Tensor]:
        """Return views of all device tensors of a row, by name. The device tensors of a row and the host's state of the
        row are the whole state of its session.
        """
        raise NotImplementedError

    def prepare(self) -> None:
        """Run every program once, zero the buffers that it wrote, and capture the calls if the memory can.

        The first runs of the programs load each engine's kernels, which is not permitted during a CUDA graph capture,
        and check the results of the engines.
        """
        raise NotImplementedError

    def join(self) -> None:
        """Make later work on the device wait for work that runs at the same time as the calls. The base class `Device`
        has no work beside the calls; a workload that has some overrides the method.
        """

    def row_of(self, buffer: str, row: int) -> Tensor:
        """Return a view of the part of a buffer that belongs to a row. If the buffer has an axis of layers, the view
        keeps it as the first axis."""
        spec = self.specs[buffer]
        return self._memory.row(self.buffers[buffer], spec.row_axis, row, self._state_rows)

    def run_all(self, programs: Sequence[BoundProgram]) -> None:
        """Queue the programs of one call on the device, in order."""
        with self.layers.unit():
            for program in programs:
                program.run()

    def capture(self, key: Hashable, programs: Sequence[BoundProgram], what: str) -> None:
        """Capture the programs of a call as a CUDA graph. The programs of the call must have run before; `launch`
        replays the captured graph.

        Parameters
        ----------
        key : hashable
            Key of the call, which `launch` takes, too.
        programs : sequence of BoundProgram
            The programs of the call, in the order in which they run.
        what : str
            Description of the call for error messages.
        """
        self.replays[key] = captured(self._memory, partial(self.run_all, programs), what)

    def launch(self, key: Hashable, programs: Sequence[BoundProgram]) -> int:
        """Queue a call: launch its captured graph if there is one, otherwise run its programs; return the number of
        graphs launched."""
        self.layers.arm()
        if self.replays:
            self.replays[key]()
            return 1
        self.run_all(programs)
        return 0

    def drop(self) -> None:
        """Release the captured graphs first, then the tensors that the graphs use."""
        self.replays.clear()
        self.programs.clear()
        self.buffers.clear()
        self.layers.drop()
        self.streaming.drop()
        del self.host


def _fewest_indices(programs: Programs) -> Mapping[str, int]:
    """Return, by a buffer's name, the smallest number of leading axes that a reference to the buffer indexes."""
    fewest: dict[str, int] = {}
    for runs in programs.values():
        for calls in runs:
            for call in calls:
                for ref in (*call.inputs, *call.outputs):
                    if ref.kind == "buffer":
                        fewest[ref.name] = min(len(ref.index), fewest.get(ref.name, len(ref.index)))
    return fewest


def _cut_as_indexed(spec: Buffer, fewest: Mapping[str, int]) -> Buffer:
    """Return a buffer as `Memory.allocate` shall see it: with as many axes of layers as every engine's argument
    indexes. `allocate` may leave unused bytes between layers, and a tensor of several layers must have none."""
    return replace(spec, row_axis=min(spec.row_axis, fewest.get(spec.name, spec.row_axis)))


def has_rows(spec: Buffer, state_rows: int) -> bool:
    """Return whether a buffer has a part for each of a pool's rows, the spare row included."""
    return len(spec.shape) > spec.row_axis and not spec.shape[spec.row_axis] % state_rows

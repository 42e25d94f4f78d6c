"""Programs (lists of engine calls) that are bound to engines and tensors. Names of engines and tensors are looked up
once, when a program is bound. Running a bound program only calls engines with lists of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from seko_runtime.backends.memory import Engine, Memory, Tensor
from seko_runtime.errors import ArtifactError, SekoRuntimeError
from seko_runtime.executor.cache_offload import BoundVisit, CacheOffload
from seko_runtime.executor.resolved import Ref, ResolvedCall
from seko_runtime.executor.weight_streaming import Turn, WeightStreaming
from seko_runtime.format.manifest import EngineSpec
from seko_runtime.host.faults import engine_fault


class BoundProgram:
    """One run of a program (for example one pass), whose engine calls are bound to their tensors.

    Parameters
    ----------
    calls : Sequence[ResolvedCall]
        The engine calls of the run, from `programs_check.resolve_programs`.
    tensors : BoundTensors
        The object that finds the tensor of each reference.
    visits : mapping of int to BoundVisit
        The copies between host and device that `CacheOffload` makes around calls, by call number.
    """

    def __init__(
        self, calls: Sequence[ResolvedCall], tensors: BoundTensors, visits: Mapping[int, BoundVisit]
    ) -> None:
        self._memory, self._layers, self._streaming = tensors.memory, tensors.layers, tensors.streaming
        cell_of: dict[str, int] = {}
        turns = self._streaming.turns(calls)
        self._first_turn = turns[min(turns)] if turns else None
        self._calls = [
            _bind_call(call, tensors, cell_of, visits.get(at), turns.get(at)) for at, call in enumerate(calls)
        ]
        self._cells: list[Tensor] = [None] * len(cell_of)
        self._checked = False

    def run(self) -> None:
        """Run all engine calls of the program in order.

        Raises
        ------
        ArtifactError
            Only in the first run: if the number, a shape or a dtype of an engine's results differs from the manifest's.
        EngineRunError
            If an engine fails while it runs.
        """
        cells, memory = self._cells, self._memory
        memory.program_begins()
        try:
            if self._first_turn is not None:
                self._streaming.begin(self._first_turn)
            for call in self._calls:
                inputs = call.inputs.copy()
                for position, cell, index in call.values_in:
                    inputs[position] = memory.index(cells[cell], index) if index else cells[cell]
                if call.visit is not None:
                    self._layers.before(call.visit)
                if call.turn is not None:
                    self._streaming.before(call.turn)
                try:
                    results = call.engine(inputs)
                except SekoRuntimeError:
                    raise
                except Exception as fault:
                    raise engine_fault(f"engine {call.spec.name}", fault) from fault
                if not self._checked:
                    _check_results(call.spec, results, memory)
                for position, cell in call.values_out:
                    cells[cell] = results[position]
                for position, buffer in call.buffers_out:
                    memory.copy(buffer, results[position])
            self._checked = True
        finally:
            cells[:] = [None] * len(
                cells
            )  # values are dropped: a kept one would hold memory that the capture could reuse


@dataclass(frozen=True)
class BoundTensors:
    """The engines, weights and buffers of a pool by name. Views of a tensor are made once and shared by all calls."""

    engines: Mapping[str, Engine]
    specs: Mapping[str, EngineSpec]
    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    memory: Memory
    layers: CacheOffload
    streaming: WeightStreaming
    _views: dict[Ref, Tensor] = field(default_factory=dict)

    def tensor(self, ref: Ref) -> Tensor:
        """Return the tensor or view to which a weight or buffer reference points."""
        if ref not in self._views:
            if ref.kind == "weight":
                view = self.memory.constant(self.weights[ref.name], ref.index)
            else:
                whole = self.buffers[ref.name]
                view = self.memory.index(whole, self.layers.index(ref)) if ref.index else whole
            if ref.leading:
                view = self.memory.leading(view, ref.leading)
            if (
                not ref.by_pass
            ):  # a view that differs between passes must not be declared as a constant address
                self.memory.keep_static(view)
            self._views[ref] = view
        return self._views[ref]


@dataclass(frozen=True)
class _BoundCall:
    engine: Engine
    spec: EngineSpec
    inputs: list[Tensor]  # arguments; None at positions that values fill
    values_in: tuple[tuple[int, int, tuple[int, ...]], ...]  # values to insert: input position, cell, index
    values_out: tuple[tuple[int, int], ...]  # values to keep: output position, cell
    buffers_out: tuple[tuple[int, Tensor], ...]  # results to copy: output position, buffer
    visit: BoundVisit | None
    turn: Turn | None


def _bind_call(
    call: ResolvedCall,
    tensors: BoundTensors,
    cell_of: dict[str, int],
    visit: BoundVisit | None,
    turn: Turn | None,
) -> _BoundCall:
    seats: Mapping[Ref, Tensor] = {} if turn is None else turn.seats
    values_in = tuple(
        (position, cell_of[ref.name], ref.index)
        for position, ref in enumerate(call.inputs)
        if ref.kind == "value"
    )
    for ref in call.outputs:
        if ref.kind == "value":
            cell_of.setdefault(ref.name, len(cell_of))
    return _BoundCall(
        engine=tensors.engines[call.engine],
        spec=tensors.specs[call.engine],
        inputs=[
            None if ref.kind == "value" else seats[ref] if ref in seats else tensors.tensor(ref)
            for ref in call.inputs
        ],
        values_in=values_in,
        values_out=tuple(
            (position, cell_of[ref.name]) for position, ref in enumerate(call.outputs) if ref.kind == "value"
        ),
        buffers_out=tuple(
            (position, tensors.tensor(ref))
            for position, ref in enumerate(call.outputs)
            if ref.kind == "buffer"
        ),
        visit=visit,
        turn=turn,
    )


def _check_results(spec: EngineSpec, results: Sequence[Tensor], memory: Memory) -> None:
    if len(results) != len(spec.outputs):
        raise ArtifactError(
            f"engine {spec.name} gave {len(results)} tensors, the manifest says {len(spec.outputs)}; rebuild it"
        )
    for result, wanted in zip(results, spec.outputs, strict=True):
        shape, dtype = memory.describe(result)
        if (shape, dtype) != (wanted.shape, wanted.dtype):
            raise ArtifactError(
                f"engine {spec.name} gave {wanted.name} as {dtype} {list(shape)}, "
                f"the manifest says {wanted.dtype} {list(wanted.shape)}; rebuild the artifact"
            )

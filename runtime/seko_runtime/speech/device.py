"""The device side of a pool of speech sessions: the tensors of each row, and the programs of a prefill, a step and a
voice."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import Memory, Tensor
from seko_runtime.executor.program import BoundProgram
from seko_runtime.format.manifest import Buffer, TensorSpec
from seko_runtime.sessions.device import Device
from seko_runtime.sessions.loaded import Loaded
from seko_runtime.speech import contract
from seko_runtime.speech.manifest import SpeechManifest
from seko_runtime.speech.prompts import Floats, SpeechPrompt

Number = int | float


class SpeechDevice(Device):
    """The tensors and programs of a pool of speech sessions. The constructor must be called inside `Memory.ordered`,
    the context of queued device work.

    Parameters
    ----------
    loaded, memory
        The parameters of `Device` with the same names.
    filled : callable
        Function that takes a row number; returns the row's first place in the caches and the number of places filled,
        or None for a row without a session.
    """

    def __init__(
        self, loaded: Loaded[SpeechManifest], memory: Memory, filled: Callable[[int], tuple[int, int] | None]
    ) -> None:
        manifest = loaded.manifest
        self.contract = contract.speech_contract(manifest)
        super().__init__(loaded, memory, self.contract.units)
        self._manifest, self._filled = manifest, filled
        self._empty = contract.empty_numbers(manifest)
        alone = ((contract.LEAD_IN,), (contract.VOICE_PROGRAM,))
        self.of_rows = {spec.name: spec for spec in manifest.buffers if spec.role == "cache"}
        self.calls: dict[Hashable, list[BoundProgram]] = {
            names: [run for name in names for run in self.programs[name]]
            for names in (*self.contract.units, *alone)
        }

    def prepare(self) -> None:
        """Run every program once, zero the buffers that the runs wrote, and capture the calls if the memory can."""
        memory = self._memory
        if memory.warm_up_runs:
            with memory.ordered():
                self._fill({})
                for runs in self.calls.values():
                    for _ in range(memory.warm_up_runs):
                        self.run_all(runs)
                for spec in self._manifest.buffers:
                    if spec.role != "host":
                        memory.zero(self.buffers[spec.name])
            memory.wait()
        if memory.captures:
            for names, runs in self.calls.items():
                self.capture(names, runs, f"a call of {names}")

    def tensors(self, row: int) -> Mapping[str, Tensor]:
        """Return views of a row's entry in each buffer with rows, and of the row's filled places in each cache."""
        start, count = self._filled(row) or (0, 0)
        return {
            name: self.row_of(name, row)
            if spec.row_axis != contract.PLACES_AXIS
            else self._memory.part(self.buffers[name], contract.PLACES_AXIS, start, count)
            for name, spec in self.of_rows.items()
            if count or spec.row_axis != contract.PLACES_AXIS
        }

    def forms(self, filled: int) -> dict[str, TensorSpec]:
        """Return the names, shapes and dtypes of the tensors of a session with ``filled`` positions in the cache."""
        return state_forms(self.of_rows.values(), filled)

    def begin(self, row: int, context: Floats) -> int:
        """Queue the work before a text's prompt: zero the decoder's states, then run the decoder over ``context``, the
        last patches [n, P, C] of the voice that the text continues. The result is the number of CUDA graphs launched.
        """
        self._memory.zero(self.row_of(contract.VAE_STATES, row))
        launches = 0
        for patch in context:
            self._memory.write(self.buffers[contract.LEAD_IN_PATCH], patch[None])
            self._fill({contract.PREFILL_ROWS: [row]})
            launches += self._call((contract.LEAD_IN,))
        return launches

    def prefill(self, row: int, start: int, first: int, part: SpeechPrompt) -> int:
        """Queue a prefill: run the language models over tokens of a session's prompt, from position ``first`` on. The
        result is the number of CUDA graphs launched."""
        workload, count = self._manifest.workload, len(part.ids)
        size = workload.prefill_size(count)
        padding = (0, size - count)
        written: dict[str, NDArray[Any]] = {
            contract.IDS: np.pad(part.ids, padding),
            contract.IS_AUDIO: np.pad(part.is_audio, padding),
            contract.PROMPT_PATCHES: np.pad(part.patches, (padding, (0, 0), (0, 0))),
        }
        for name, array in written.items():
            self._memory.write(self._memory.leading(self.buffers[name], size), array)
        self._fill(
            {
                contract.PREFILL_ROWS: [row],
                contract.PREFILL_STARTS: [start],
                contract.PREFILL_FIRST: [first],
                contract.PREFILL_COUNT: [count],
            }
        )
        length = workload.read_length(max(first + count, size))
        return self._call((contract.prefill_program(size, length),))

    def step(self, numbers: Mapping[str, Sequence[Number]]) -> tuple[int, Mapping[str, Tensor]]:
        """Queue a step, which makes the next patch of some sessions; return the number of CUDA graphs launched, and the
        buffers of the step's samples, stop flags and patches.

        ``numbers`` maps the name of each buffer that the host fills to one number for each session. The next call of
        `step` overwrites the returned buffers.
        """
        rows, first = numbers[contract.ROWS], numbers[contract.FIRST]
        pool = self._manifest.pool
        assert pool is not None, "the contract refuses speech without a pool"
        bucket, length = pool.bucket(len(rows)), self._manifest.workload.step_length(int(max(first)) + 1)
        self._fill(numbers)
        launches = self._call(contract.step_programs(bucket, length))
        return launches, self.results(bucket, contract.SAMPLES, contract.STOP, contract.PATCH)

    def results(self, rows: int, *names: str) -> Mapping[str, Tensor]:
        """Return views of the last step's results (patch, samples, stop flag) for the first ``rows`` batch indices."""
        return {name: self._memory.leading(self.buffers[name], rows) for name in names}

    def encode(self, stretch: Floats, *, first: bool) -> tuple[int, Mapping[str, Tensor]]:
        """Queue the encoding of the next stretch [n] of a voice recording; return the number of CUDA graphs launched,
        and the stretch's latents.
        """
        if first:
            self._memory.zero(self.buffers[contract.VOICE_STATES])
        self._memory.write(self.buffers[contract.VOICE], stretch[None])
        self._fill({})
        launches = self._call((contract.VOICE_PROGRAM,))
        return launches, {contract.VOICE_LATENTS: self.buffers[contract.VOICE_LATENTS]}

    def set_state(self, row: int, state: Mapping[str, Floats]) -> None:
        """Write the model states from which a session's next step begins (`contract.STATES`), for the replay of
        recorded steps."""
        for name, array in state.items():
            self._memory.write(self.row_of(name, row), array[None])

    def state(self, row: int) -> Mapping[str, NDArray[np.float32]]:
        """Return the model states from which a session's next step begins (`contract.STATES`); waits for the device."""
        return {name: self._memory.read(self.row_of(name, row))[0] for name in contract.STATES}

    def drop(self) -> None:
        """Release the captured graphs first, then the tensors that the graphs use."""
        self.replays.clear()
        self.calls.clear()
        super().drop()

    def _fill(self, numbers: Mapping[str, Sequence[Number]]) -> None:
        """Send the small tensors of a call to the device. A number that is left out has its value for a batch index
        without a session."""
        empty = self._empty
        of_prefill = {
            contract.PREFILL_ROWS: empty[contract.ROWS],
            contract.PREFILL_STARTS: empty[contract.STARTS],
            contract.PREFILL_COUNT: 1,
        }
        for name, array in self.host.acquire().items():
            array[...] = empty.get(name, of_prefill.get(name, 0))
            if name in numbers:
                array[: len(numbers[name])] = numbers[name]
        self.host.send()

    def _call(self, names: tuple[str, ...]) -> int:
        return self.launch(names, self.calls[names])


def state_forms(buffers: Iterable[Buffer], filled: int) -> dict[str, TensorSpec]:
    """Return the names, shapes and dtypes of the parts of cache buffers that a session of ``filled`` positions has."""
    forms = {}
    for spec in buffers:
        sizes = {0: 1} if spec.row_axis != contract.PLACES_AXIS else {contract.PLACES_AXIS: filled}
        if 0 not in sizes.values():
            shape = tuple(sizes.get(axis, size) for axis, size in enumerate(spec.shape))
            forms[spec.name] = TensorSpec(spec.name, shape, spec.dtype)
    return forms

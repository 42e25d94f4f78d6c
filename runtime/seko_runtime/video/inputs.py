"""Model inputs that the caller supplies, such as a camera: checked, held on the host, and kept with each chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import as_array, check_magnitude, items_of, mapping_of, shown
from seko_runtime.backends.device_tensor import BFLOAT16, host_dtype, to_bytes
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import InputSpec, TensorSpec
from seko_runtime.video.clocks import KeptChunk
from seko_runtime.video.contract import saved_input
from seko_runtime.video.manifest import VideoManifest

Array = NDArray[Any]
Inputs = Mapping[str, object]  # arrays by the name of the input
Rows = Sequence[int]
STEADY = ("session", "prompt")  # values of `InputSpec.per` for inputs that are set, not given with each chunk


class CallerInputs:
    """The manifest's inputs with the source ``caller``: their last values, for each stream of the pool.

    Inputs that change per chunk or pass are held on the host: the last supplied values, and the values of each kept
    chunk, from which the KV cache is rebuilt. Inputs that are set per session or prompt are in buffers of
    `VideoDevice`, and so are the frames of an input video, which nothing rebuilds.

    Parameters
    ----------
    manifest : VideoManifest
        The manifest, whose inputs were already checked against its buffers.
    kept_slots : int
        Number of chunks per stream whose latents and inputs are kept to rebuild the cache.
    """

    def __init__(self, manifest: VideoManifest, kept_slots: int) -> None:
        self._all = {spec.name: spec for spec in manifest.caller_inputs}
        self._steady = {name: spec for name, spec in self._all.items() if spec.per in STEADY}
        roles = {buffer.name: buffer.role for buffer in manifest.buffers}
        by_chunk = {name: spec for name, spec in self._all.items() if name not in self._steady}
        # frames of a chunk, which are written to the device for each row, and not kept
        self._passing = {name: spec for name, spec in by_chunk.items() if roles[spec.buffer] == "session"}
        self._specs = {name: spec for name, spec in by_chunk.items() if name not in self._passing}
        self._latest: dict[str, Array] = {}  # [rows, ...]
        self._kept: dict[str, Array] = {}  # [kept_slots, rows, ...]
        for name, spec in self._specs.items():
            shape, dtype = (manifest.rows, *spec.shape), host_dtype(spec.dtype)
            self._latest[name], self._kept[name] = (
                np.zeros(shape, dtype),
                np.zeros((kept_slots, *shape), dtype),
            )

    def of_chunk(self, row: int, inputs: Inputs | None) -> dict[str, Array]:
        """Return the inputs of the next chunk of a stream, by name.

        Parameters
        ----------
        row : int
            Number of the stream's row.
        inputs : mapping of str to array, optional
            Arrays by input name, [*shape] or [1, *shape], in the input's dtype; float32 for a bfloat16 input, which is
            rounded.

        Returns
        -------
        dict of str to numpy.ndarray
            The checked inputs, [1, *shape] each, in the input's `host_dtype`.

        Raises
        ------
        UsageError
            If a required input is missing, a name is unknown or not an input per chunk, or an array has a wrong shape,
            dtype or value.
        """
        specs = {**self._specs, **self._passing}
        arrays = self._checked(inputs, specs, "set_inputs() takes it")
        for name, spec in specs.items():
            if name in arrays:
                continue
            if spec.default == "required":
                raise UsageError(f"input {name!r} is required for every chunk; {self._known_names()}")
            latest = self._latest[name][[row]]  # a copy
            arrays[name] = latest if spec.default == "hold" else np.zeros_like(latest)
        return arrays

    def of_each(self, rows: Rows, inputs: Sequence[Inputs | None]) -> dict[str, Array]:
        """Return the inputs of the next chunk of some streams as `of_chunk` does, from a mapping, or None, for each
        stream."""
        each = [self.of_chunk(row, row_inputs) for row, row_inputs in zip(rows, inputs, strict=True)]
        if len(each) == 1:  # without another copy of a chunk's frames
            return each[0]
        names = (*self._specs, *self._passing)
        return {name: np.concatenate([row_inputs[name] for row_inputs in each]) for name in names}

    def steady(self, inputs: Inputs | None) -> list[tuple[InputSpec, Array]]:
        """Return inputs per session or prompt as pairs (input, array [1, *shape]), ready for `Memory.write`.

        Raises
        ------
        UsageError
            If an input's name is unknown, or its array has a wrong shape, dtype or value.
        """
        arrays = self._checked(inputs, self._steady, "run_chunk() takes it", bits=False)
        return [(self._steady[name], array) for name, array in arrays.items()]

    def check_opening(self, inputs: Inputs | None, from_image: str = "") -> None:
        """Raise a UsageError if an input that a session needs at its beginning is missing. The input ``from_image`` is
        computed from the start picture, so passing both this input and a start picture is also an error.
        """
        by_name = mapping_of(inputs, "inputs")
        if from_image in by_name:
            raise UsageError(f"found both image and the input {from_image!r}, which is made of it; give one")
        for name, spec in self._steady.items():
            if spec.default == "required" and name not in by_name and name != from_image:
                raise UsageError(f"input {name!r} is required per {spec.per}; {self._known_names()}")

    def frames(self, values: Mapping[str, Array]) -> Array | None:
        """Return the frames of the input video among the inputs of a call's streams, uint8 [k, T, H, W, 3]; None for an
        artifact that takes no video."""
        return next((values[name] for name in self._passing), None)

    def fill(self, host: Mapping[str, Array], values: Mapping[str, Array]) -> None:
        """Write the inputs of a call's streams into the arrays that are copied to the device, and zeros at unused batch
        indices.
        """
        for name, spec in self._specs.items():
            target = host[spec.buffer]
            if spec.per == "pass":
                target = target.swapaxes(0, 1)  # [rows, passes, ...]
            target[...] = 0
            if name in values:
                target[: len(values[name])] = values[name]

    def chunk_made(self, rows: Rows, kept_slots: Sequence[int], values: Mapping[str, Array]) -> None:
        """Store the inputs of the chunk that some streams have just finished, twice: as each stream's last supplied
        values, and under the slot that keeps the chunk's latents for a rebuild of the cache.
        """
        for name in self._specs:
            self._latest[name][list(rows)] = values[name]
            self._kept[name][list(kept_slots), list(rows)] = values[name]

    def of_kept_chunks(self, rows: Rows, entries: Sequence[KeptChunk]) -> dict[str, Array]:
        """Return the inputs of the chunks that one step of a cache rebuild writes, one chunk for each stream; zeros for
        a stream that has made no chunk."""
        arrays = {}
        for name, by_slot in self._kept.items():
            arrays[name] = np.stack(
                [
                    np.zeros_like(by_slot[0, 0]) if entry.kept_slot is None else by_slot[entry.kept_slot, row]
                    for row, entry in zip(rows, entries, strict=True)
                ]
            )
        return arrays

    def restart(self, row: int) -> None:
        """Forget the inputs of a stream's chunks; keep the inputs that were set for its session or prompt."""
        for latest in self._latest.values():
            latest[row] = 0
        for by_slot in self._kept.values():
            by_slot[:, row] = 0

    def rewind(self, row: int, kept_slot: int | None) -> None:
        """Set a stream's last supplied inputs back to the inputs of the chunk whose latents slot ``kept_slot`` keeps.
        With ``kept_slot`` None, the inputs get their values at the start of a stream.
        """
        for name, latest in self._latest.items():
            latest[row] = 0 if kept_slot is None else self._kept[name][kept_slot, row]

    def state(self, row: int) -> dict[str, NDArray[np.uint8]]:
        """Return a stream's last supplied inputs and the inputs of its kept chunks as bytes, by name, for a
        snapshot."""
        return {name: np.frombuffer(array.tobytes(), np.uint8) for name, array in self._views(row).items()}

    def load(self, row: int, state: Mapping[str, NDArray[np.uint8]]) -> None:
        """Set a stream's inputs to values that `state` returned."""
        for name, view in self._views(row).items():
            view[...] = state[name].view(view.dtype).reshape(view.shape)

    def layout(self) -> dict[str, TensorSpec]:
        """Return name, shape and dtype of each entry of `state`."""
        return {name: TensorSpec(name, (array.nbytes,), "uint8") for name, array in self._views(0).items()}

    def _views(self, row: int) -> dict[str, Array]:
        views = {saved_input(name): latest[row : row + 1] for name, latest in self._latest.items()}
        for name, by_slot in self._kept.items():
            views |= {
                f"{saved_input(name)}.{place}": by_slot[place, row : row + 1] for place in range(len(by_slot))
            }
        return views

    def _checked(
        self, inputs: Inputs | None, specs: Mapping[str, InputSpec], elsewhere: str, *, bits: bool = True
    ) -> dict[str, Array]:
        """Return the supplied arrays as [1, *shape]. If ``bits`` is true, dtypes that numpy lacks become integers with
        the same bits."""
        arrays = {}
        for name, value in mapping_of(inputs, "inputs").items():
            if name not in specs:
                known = self._all.get(name)
                why = f"is per {known.per}: {elsewhere}" if known else "does not exist"
                raise UsageError(f"input {shown(name)} {why}; {self._known_names()}")
            arrays[name] = as_rows(specs[name], value, 1, bits=bits)
        return arrays

    def _known_names(self) -> str:
        """Return the names of the artifact's inputs, as text for error messages."""
        each = [
            f"{name} ({spec.dtype} {list(spec.shape)}, per {spec.per}, {spec.default})"
            for name, spec in self._all.items()
        ]
        return f"this artifact takes {', '.join(each) or 'no inputs of the caller'}"


def check_call(rows: Sequence[object], inputs: object) -> None:
    """Raise a UsageError unless ``inputs`` has one mapping of inputs, or None, for each stream of the call."""
    each = items_of(
        inputs, f"inputs are a {type(inputs).__name__}, expected a list of a mapping for each session"
    )
    for row_inputs in each:
        mapping_of(row_inputs, "inputs")
    if len(each) != len(rows):
        raise UsageError(f"{len(each)} inputs given for {len(rows)} sessions, expected one mapping each")


def as_rows(spec: InputSpec, value: object, rows: int, *, bits: bool) -> Array:
    """Return a copy [rows, *shape] of a caller's array, which is [*shape] (the same for all rows) or [rows, *shape].

    If ``bits`` is true, an input of a dtype that numpy lacks becomes integers with the same bits, ready for the device.

    Raises
    ------
    UsageError
        If the array has another shape or dtype, or a number that is not finite.
    """
    wanted = np.dtype(np.float32) if spec.dtype == BFLOAT16 else host_dtype(spec.dtype)
    array = as_array(value, f"input {spec.name!r}")
    each = (rows, *spec.shape)
    if array.dtype != wanted or array.shape not in (spec.shape, each):
        raise UsageError(
            f"input {spec.name!r} is {array.dtype} {list(array.shape)}, expected {wanted} {list(spec.shape)} or "
            f"{list(each)}"
        )
    if array.dtype.kind == "f":
        check_magnitude(array, f"input {spec.name!r}")
    array = np.array(np.broadcast_to(array, each))
    if bits and spec.dtype == BFLOAT16:
        return to_bytes(array, BFLOAT16).view(host_dtype(BFLOAT16)).reshape(each)
    return array

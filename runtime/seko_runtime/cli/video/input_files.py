"""The option ``--input NAME=FILE.npy`` of `run`: arrays for the model's inputs, checked before an artifact is
opened."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.cli.output import note
from seko_runtime.controls import Controls
from seko_runtime.controls.recording import Entry
from seko_runtime.controls.registry import unsteered
from seko_runtime.errors import UsageError, one_line
from seko_runtime.format.manifest import InputSpec
from seko_runtime.media_files.arrays import load_array
from seko_runtime.video.inputs import as_rows
from seko_runtime.video.manifest import VideoManifest


@dataclass(frozen=True)
class RunInputs:
    """The model inputs that ``--input`` passes, by name.

    Parameters
    ----------
    steady : mapping of str to numpy.ndarray
        Inputs that are set once for a session or prompt, [rows, *shape].
    changing : mapping of str to sequence of numpy.ndarray
        Inputs that change with each chunk or pass, [rows, *shape] for each chunk of the run, or one for all chunks.
    controls : sequence of Controls
        The controls of each session.
    entries : sequence of Entry
        What the recording of ``--events`` says.
    """

    steady: Mapping[str, NDArray[Any]]
    changing: Mapping[str, Sequence[NDArray[Any]]]
    controls: Sequence[Controls]
    entries: Sequence[Entry] = ()

    @property
    def replays(self) -> bool:
        """Whether the recording of ``--events`` has all inputs of its chunks."""
        return bool(self.entries) and self.entries[0].has_controls

    @property
    def controlled(self) -> set[str]:
        """Names of the inputs that controls with events give."""
        return {
            name for control in self.controls[0].values() if control.active for name in control.input_names
        }

    @property
    def fits_recording(self) -> bool:
        """Whether inputs that the build recorded go with what the controls give."""
        return all(control.fits_recording or not control.active for control in self.controls[0].values())

    def sound_track(self, samples: int) -> NDArray[np.float32] | None:
        """Return the sound that is played with the video, float32 [N]; None without sound. That of a recording comes
        while it is replayed: it is ``samples`` of silence, which `hear` fills."""
        sounding = self.controls[0].sounding()
        if sounding is None:
            return None
        sound: NDArray[np.float32] | None = sounding.sound_track()
        if sound is not None and not self.entries:
            return sound
        speaks = any(entry.control == sounding.name for entry in self.entries)
        return np.zeros(samples, np.float32) if speaks or sound is not None else None

    def hear(self, sound: NDArray[np.float32], at: int, first_frame: int) -> None:
        """Write what is played with a chunk of a recording, which begins at latent frame ``first_frame`` of its stream,
        into the run's ``sound`` from a sample on."""
        sounding = self.controls[0].sounding()
        if sounding is not None and self.entries:
            heard = sounding.sound(first_frame)[: len(sound) - at]
            sound[at : at + len(heard)] = heard

    def recorded(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the recorded inputs that the run uses: those that no control gives."""
        if not self.fits_recording:
            return {}
        return {name: array for name, array in arrays.items() if name not in self.controlled}

    def lateness(self, times: Sequence[float]) -> list[float]:
        """Return for each chunk by how many seconds it came after what it heard; see `Control.lateness`."""
        active = [control for control in self.controls[0].values() if control.active]
        return [late for control in active for late in control.lateness(times)]

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """What the first session's controls have counted, by the name of the control."""
        return {name: dict(control.counts) for name, control in self.controls[0].items() if control.counts}

    def of_chunk(self, number: int) -> dict[str, NDArray[Any]]:
        """Return the model inputs of chunk ``number`` by name."""
        return {name: arrays[number % len(arrays)] for name, arrays in self.changing.items()}


def read_inputs(arguments: Sequence[str] | None) -> dict[str, NDArray[Any]]:
    """Return the array of each ``NAME=FILE.npy``.

    Raises
    ------
    UsageError
        If an argument is not NAME=FILE.npy, an input is passed twice, or a file cannot be read.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for argument in arguments or ():
        name, equals, file = argument.partition("=")
        if not (name and equals and file):
            raise UsageError(f"--input {argument[:200]!r}: expected NAME=FILE.npy")
        if name in arrays:
            raise UsageError(f"--input {name} is given twice; give it once")
        arrays[name] = load_array(Path(file), "--input")
    return arrays


def fit_inputs(
    arrays: Mapping[str, NDArray[Any]],
    options: argparse.Namespace,
    manifest: VideoManifest,
    controls: Sequence[Controls],
    entries: Sequence[Entry] = (),
) -> RunInputs:
    """Check the arrays of inputs against the manifest, for as many sessions as there are ``controls``. An input without
    an array gets the recorded values of the golden (recorded results), unless the run's controls do not fit a
    recording; a line on stderr names this input.

    Raises
    ------
    UsageError
        If the artifact has no input with this name, an array has a wrong shape, dtype or value, or a required input has
        neither an array nor a recorded value.
    """
    specs = {spec.name: spec for spec in manifest.caller_inputs}
    for name in arrays:
        if name not in specs:
            known = ", ".join(specs) or "none"
            raise UsageError(f"--input {name[:80]}: this artifact has no such input; its inputs: {known}")
    run = RunInputs({}, {}, controls, entries)
    given = run.controlled
    if entries and "inputs" in entries[0].opening:  # with which the recorded session began
        given |= {name for name, spec in specs.items() if spec.per in ("session", "prompt")}
    if run.replays:
        given |= {name for name, spec in specs.items() if spec.per not in ("session", "prompt")}
    absent = unsteered(manifest)
    for name, spec in specs.items():
        if name in arrays or name in given:
            continue
        if run.fits_recording and manifest.workload.golden is not None:
            lacking = (
                f", as does the control {absent[name]!r}, which is not installed" if name in absent else ""
            )
            note(
                one_line(
                    f"input    {name}: as recorded in the golden; --input {name}=FILE.npy gives another{lacking}"
                )
            )
        elif spec.default == "required":
            raise UsageError(
                f"input {name!r} is required per {spec.per}: give {_option_of(name, controls[0])}"
            )
    steady = {name for name, spec in specs.items() if spec.per in ("session", "prompt")}
    rows = len(controls)
    return RunInputs(
        {
            name: as_rows(specs[name], array, rows, bits=False)
            for name, array in arrays.items()
            if name in steady
        },
        {
            name: _of_chunks(specs[name], array, rows, options.chunks)
            for name, array in arrays.items()
            if name not in steady
        },
        controls,
        entries,
    )


def _option_of(name: str, controls: Controls) -> str:
    """Return the option that gives an input: the first one of the control that fills it, otherwise ``--input``."""
    for control in controls.values():
        if control.options and name in {spec.name for spec in control.inputs.values()}:
            option = control.options[0]
            often = ", once or several times" if option.repeatable else ""
            return f"{option.name} {option.metavar}{often}"
    return f"--input {name}=FILE.npy"


def _of_chunks(spec: InputSpec, array: NDArray[Any], rows: int, chunks: int) -> list[NDArray[Any]]:
    """Return an array [rows, *shape] for each chunk, from an array with an axis of chunks in front, or a single one
    for all chunks."""
    if array.shape == spec.shape:
        return [as_rows(spec, array, rows, bits=False)]
    if array.shape[1:] not in (spec.shape, (rows, *spec.shape)) or len(array) < chunks:
        each = list(spec.shape)
        raise UsageError(
            f"--input {spec.name} is {list(array.shape)}, expected {each} for every chunk, or {chunks} chunks: "
            f"{[chunks, *each]} or {[chunks, rows, *each]}"
        )
    return [as_rows(spec, np.asarray(chunk), rows, bits=False) for chunk in array[:chunks]]

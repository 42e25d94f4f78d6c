"""Runs the recorded prompt and steps of an artifact, and measures how much they differ from the recording.

The exporter records with the same function, over the eager model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import Memory
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.format.safetensors_map import MappedTensor, check_tensor
from seko_runtime.speech import contract
from seko_runtime.speech.device import SpeechDevice
from seko_runtime.speech.manifest import Golden, GoldenBounds, SpeechManifest
from seko_runtime.speech.prompts import Floats, SpeechPrompt

PROMPT_IDS, PROMPT_IS_AUDIO, PROMPT_PATCHES = "prompt.ids", "prompt.is_audio", "prompt.patches"
PATCHES, STOP_LOGITS, SAMPLES = "patches", "stop_logits", "samples"
VOICE_SAMPLES, VOICE_LATENTS = "voice.samples", "voice.latents"
_OF_STEP = {PATCHES: contract.PATCH, STOP_LOGITS: contract.STOP_LOGITS, SAMPLES: contract.SAMPLES}
# Which bound is whose.
_BOUND = {
    **dict.fromkeys(contract.STATES, "states"),
    PATCHES: "patches",
    STOP_LOGITS: "stop_logits",
    SAMPLES: "samples",
    VOICE_LATENTS: "voice",
}


@dataclass(frozen=True)
class GoldenInputs:
    """What recorded steps are made of.

    Parameters
    ----------
    prompt : SpeechPrompt
        Every row's prompt.
    seeds : sequence of int
        A row's seed.
    steps : int
        Steps to run.
    voice : array
        [K, m] float32: consecutive stretches of a voice.
    """

    prompt: SpeechPrompt
    seeds: Sequence[int]
    steps: int
    voice: Floats


@dataclass(frozen=True)
class SpeechError:
    """How much the steps of one bucket, or the voice encoder, differ from the recorded ones.

    Parameters
    ----------
    rows : int
        Rows of the steps; 0: the voice encoder.
    errors : mapping of str to float
        By recorded tensor, of all its steps: the norm of the difference over the norm of the recording.
    bounds : GoldenBounds
        The largest that pass.
    """

    rows: int
    errors: Mapping[str, float]
    bounds: GoldenBounds

    @property
    def within(self) -> bool:
        """Whether all errors are within their bounds; never if a number is NaN."""
        return all(error <= self._bound(name) for name, error in self.errors.items())

    @property
    def size(self) -> float:
        """The error that is largest beside its bound, as a share of it; infinite if a number is NaN."""
        return max(_nan_last(error / self._bound(name)) for name, error in self.errors.items())

    def row(self) -> dict[str, object]:
        """Return it for JSON, which has no NaN and no infinity."""
        finite = {name: error if math.isfinite(error) else str(error) for name, error in self.errors.items()}
        bounds = {name: self._bound(name) for name in self.errors}
        worst = max(self.errors, key=lambda name: _nan_last(self.errors[name] / bounds[name]))
        return {
            "rows": self.rows,
            "golden": finite[worst],
            "tolerance": bounds[worst],
            "errors": finite,
            "bounds": bounds,
        }

    def __str__(self) -> str:
        of = f"steps of {self.rows} rows" if self.rows else "voice encoder"
        errors = (
            f"{name} {error:.3g} (at most {self._bound(name):.3g})" for name, error in self.errors.items()
        )
        return f"{of}: {', '.join(errors)}"

    def _bound(self, name: str) -> float:
        bound: float = getattr(self.bounds, _BOUND[name])
        return bound


def golden_inputs(golden: Golden, tensors: Mapping[str, MappedTensor]) -> GoldenInputs:
    """Return what recorded steps are made of."""
    prompt = SpeechPrompt(
        tensors[PROMPT_IDS].to_numpy().astype(np.int64),
        tensors[PROMPT_IS_AUDIO].to_numpy().astype(np.bool_),
        tensors[PROMPT_PATCHES].to_numpy().astype(np.float32),
    )
    voice = tensors[VOICE_SAMPLES].to_numpy().astype(np.float32)
    return GoldenInputs(prompt, golden.seeds, golden.steps, voice)


def check_golden(manifest: SpeechManifest, golden: Golden, tensors: Mapping[str, MappedTensor]) -> None:
    """Check the shapes of the tensors that `replay` needs; ArtifactError if they are wrong."""
    workload, seeds, steps = manifest.workload, len(golden.seeds), golden.steps
    patch, voice = workload.patch, workload.voice
    width = next(buffer.shape[-1] for buffer in manifest.buffers if buffer.name == contract.BASE_STATE)
    tokens = tensors[PROMPT_IDS].shape[0] if PROMPT_IDS in tensors and tensors[PROMPT_IDS].shape else 1
    stretches = (
        tensors[VOICE_SAMPLES].shape[0] if VOICE_SAMPLES in tensors and tensors[VOICE_SAMPLES].shape else 1
    )
    f32 = "float32"
    for name, shape, dtype in (
        (PROMPT_IDS, (tokens,), "int64"),
        (PROMPT_IS_AUDIO, (tokens,), "uint8"),
        (PROMPT_PATCHES, (tokens, *patch.shape), f32),
        (contract.BASE_STATE, (steps + 1, seeds, width), f32),
        (contract.RESIDUAL_STATE, (steps + 1, seeds, width), f32),
        (contract.LAST_PATCH, (steps + 1, seeds, *patch.shape), f32),
        (PATCHES, (steps, seeds, *patch.shape), f32),
        (STOP_LOGITS, (steps, seeds, 2), f32),
        (SAMPLES, (steps, seeds, patch.samples), f32),
        (VOICE_SAMPLES, (stretches, voice.samples), f32),
        (VOICE_LATENTS, (stretches, voice.patches * patch.latents, patch.channels), f32),
    ):
        check_tensor(tensors, TensorSpec(name, shape, dtype), golden.file)


def replay(
    device: SpeechDevice,
    memory: Memory,
    manifest: SpeechManifest,
    inputs: GoldenInputs,
    states: Mapping[str, Floats] | None = None,
) -> dict[str, Floats]:
    """Prefill a row for each seed, run steps, and return their results by recorded tensor.

    Parameters
    ----------
    device : SpeechDevice
        No row of it is in use.
    memory : Memory
        Its memory.
    manifest : SpeechManifest
        The artifact's.
    inputs : GoldenInputs
        What to run.
    states : mapping of str to array, optional
        By `contract.STATES`, [steps + 1, B or more, ...]: with what each step begins; without it with what the one
        before left.
    """
    rows, workload = range(len(inputs.seeds)), manifest.workload
    prompt, largest = inputs.prompt, workload.prefill_tokens[-1]
    tokens = len(prompt.ids)
    results: dict[str, list[Floats]] = {name: [] for name in (*contract.STATES, *_OF_STEP)}
    with memory.ordered():
        for row in rows:
            device.begin(row, prompt.context)
            for first in range(0, tokens, largest):
                part = slice(first, first + largest)
                device.prefill(
                    row,
                    row * workload.positions,
                    first,
                    SpeechPrompt(prompt.ids[part], prompt.is_audio[part], prompt.patches[part]),
                )
        for step in range(inputs.steps + 1):
            _keep_states(device, rows, results)
            if step == inputs.steps:
                break
            if states is not None:
                for row in rows:
                    device.set_state(row, {name: states[name][step, row] for name in contract.STATES})
            device.step(
                {
                    contract.ROWS: [*rows],
                    contract.STARTS: [row * workload.positions for row in rows],
                    contract.FIRST: [tokens + step] * len(rows),
                    contract.COUNT: [1] * len(rows),
                    contract.SEEDS: [*inputs.seeds],
                    contract.PATCH_NUMBERS: [step] * len(rows),
                    contract.TEMPERATURE: [workload.solver.temperature] * len(rows),
                    contract.GUIDANCE: [workload.solver.guidance] * len(rows),
                }
            )
            for name, made in device.results(len(rows), *_OF_STEP.values()).items():
                recorded = next(ours for ours, buffer in _OF_STEP.items() if buffer == name)
                results[recorded].append(memory.read(made))
    return {name: np.stack(arrays) for name, arrays in results.items()}


def replay_voice(device: SpeechDevice, memory: Memory, stretches: Floats) -> Floats:
    """Encode consecutive stretches [K, m] of a voice and return their latents [K, l, C]."""
    latents = []
    with memory.ordered():
        for number, stretch in enumerate(stretches):
            _, made = device.encode(stretch, first=number == 0)
            latents.append(memory.read(made[contract.VOICE_LATENTS])[0])
    return np.stack(latents)


def compare(
    golden: Golden, recorded: Mapping[str, NDArray[np.generic]], made: Mapping[str, Floats], rows: int
) -> SpeechError:
    """Return the errors of what was made of the first ``rows`` seeds, or with 0 of a voice."""
    errors = {}
    for name, found in made.items():
        wanted = recorded[name][:, :rows] if rows else recorded[name]
        errors[name] = relative_error(found, wanted)
    return SpeechError(rows, errors, golden.bounds)


def relative_error(found: NDArray[np.generic], recorded: NDArray[np.generic]) -> float:
    """Return ||found - recorded|| / ||recorded|| over all numbers, in float64."""
    wanted = recorded.astype(np.float64)
    norm = float(np.linalg.norm(wanted))
    difference = float(np.linalg.norm(found.astype(np.float64) - wanted))
    return difference / norm if norm else difference


def _keep_states(device: SpeechDevice, rows: Sequence[int], results: Mapping[str, list[Floats]]) -> None:
    states = [device.state(row) for row in rows]
    for name in contract.STATES:
        results[name].append(np.stack([state[name] for state in states]))


def _nan_last(error: float) -> float:
    return math.inf if math.isnan(error) else error

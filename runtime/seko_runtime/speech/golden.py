"""Replays recorded steps of speech, and measures how far the new results differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import ArtifactError
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.format.safetensors_map import MappedTensor, check_tensor
from seko_runtime.speech import contract
from seko_runtime.speech.manifest import Golden, SpeechManifest
from seko_runtime.speech.pool import SpeechPool
from seko_runtime.speech.prompts import SpeechPrompt

PROMPT = ("prompt.ids", "prompt.is_audio", "prompt.patches")
PATCHES, STOP_LOGITS, SAMPLES = "patches", "stop_logits", "samples"
VOICE_SAMPLES, VOICE_LATENTS = "voice.samples", "voice.latents"
_RESULTS = {PATCHES: contract.PATCH, STOP_LOGITS: contract.STOP_LOGITS, SAMPLES: contract.SAMPLES}
Numbers = NDArray[np.float32]


@dataclass(frozen=True)
class StepError:
    """The difference between a replayed and a recorded prefill, step or stretch of a voice.

    Parameters
    ----------
    what : str
        Name of the compared result: ``prefill``, ``step 0``, ``voice 0``.
    errors : mapping of str to float
        For each kind of result, the largest absolute difference of a number, divided by the largest recorded magnitude.
    bounds : mapping of str to float
        For each kind of result, the largest error that passes.
    """

    what: str
    errors: Mapping[str, float]
    bounds: Mapping[str, float]

    @property
    def within(self) -> bool:
        """Whether all errors of the replayed step are within their bounds; False if a number is NaN."""
        return all(error <= self.bounds[name] for name, error in self.errors.items())

    @property
    def size(self) -> float:
        """The largest error of the replayed step; infinite if a number is NaN."""
        return max(math.inf if math.isnan(error) else error for error in self.errors.values())

    def row(self) -> dict[str, object]:
        """Return the errors as a dict for JSON, which has no NaN and no infinity."""
        finite = {name: error if math.isfinite(error) else str(error) for name, error in self.errors.items()}
        return {"what": self.what, "errors": finite, "bounds": dict(self.bounds)}

    def __str__(self) -> str:
        parts = (
            f"{name} {error:.3g} (at most {self.bounds[name]:.3g})" for name, error in self.errors.items()
        )
        return f"{self.what}: {', '.join(parts)}"


def check_golden(manifest: SpeechManifest, golden: Mapping[str, MappedTensor]) -> None:
    """Check names, shapes and dtypes of recorded tensors, and the recorded token ids; ArtifactError if they are
    wrong."""
    table = manifest.workload.golden
    if table is None:
        return
    workload = manifest.workload
    patch, voice, rows = workload.patch.shape, workload.voice, len(table.seeds)
    tokens = golden[PROMPT[0]].shape[:1] if PROMPT[0] in golden else (1,)
    stretches = golden[VOICE_SAMPLES].shape[:1] if VOICE_SAMPLES in golden else (1,)
    width = next(spec.shape[1:] for spec in manifest.buffers if spec.name == contract.BASE_STATE)
    steps, before = (table.steps, rows), (table.steps + 1, rows)
    wanted: dict[str, tuple[tuple[int, ...], str]] = {
        **dict(
            zip(PROMPT, ((tokens, "int64"), (tokens, "uint8"), ((*tokens, *patch), "float32")), strict=True)
        ),
        contract.BASE_STATE: ((*before, *width), "float32"),
        contract.RESIDUAL_STATE: ((*before, *width), "float32"),
        contract.LAST_PATCH: ((*before, *patch), "float32"),
        PATCHES: ((*steps, *patch), "float32"),
        STOP_LOGITS: ((*steps, 2), "float32"),
        SAMPLES: ((*steps, workload.patch.samples), "float32"),
        VOICE_SAMPLES: ((*stretches, voice.samples), "float32"),
        VOICE_LATENTS: ((*stretches, voice.patches * patch[0], patch[1]), "float32"),
    }
    for name, (shape, dtype) in wanted.items():
        check_tensor(golden, TensorSpec(name, shape, dtype), table.file)
    ids = golden[PROMPT[0]].to_numpy()
    if ids.ndim != 1 or not ids.size or ids.min() < 0 or ids.max() >= workload.vocabulary:
        raise ArtifactError(
            f"{PROMPT[0]} in {table.file} holds no list of token ids below {workload.vocabulary}; rebuild the artifact"
        )


def replay(pool: SpeechPool, golden: Golden, recorded: Mapping[str, MappedTensor]) -> Iterator[StepError]:
    """Yield the errors of the replayed prefill, of each step, and of each stretch of the voice.

    Each replayed step begins with recorded states, so that rounding errors do not grow from step to step.

    Parameters
    ----------
    pool : SpeechPool
        A pool without open sessions.
    golden : Golden
        The manifest's description of the recorded steps.
    recorded : mapping of str to MappedTensor
        The golden file's tensors, by name.
    """
    tensors: dict[str, NDArray[Any]] = {name: tensor.to_numpy() for name, tensor in recorded.items()}
    bounds, rows, device = golden.bounds, pool._rows, pool._rows.device()
    ids, is_audio, patches = (tensors[name] for name in PROMPT)
    prompt = SpeechPrompt(ids, is_audio != 0, patches)
    states = {name: tensors[name].astype(np.float32) for name in contract.STATES}
    count = len(golden.seeds)
    positions = min(len(prompt.ids) + golden.steps, pool.manifest.workload.positions)
    with ExitStack() as opened:
        sessions = [
            opened.enter_context(pool.open_session(seed=seed, positions=positions)) for seed in golden.seeds
        ]
        pool_rows = [session._running_row() for session in sessions]
        for session, row in zip(sessions, pool_rows, strict=True):
            session.begin_prompt(prompt, golden.steps)
            while rows.row(row).pending is not None:
                rows.run([row])
        of_states = dict.fromkeys(states, bounds.states)
        values = _states(pool, pool_rows)
        wanted = {name: array[0] for name, array in states.items()}
        yield StepError("prefill", _errors(values, wanted), of_states)
        allowed = {PATCHES: bounds.patches, STOP_LOGITS: bounds.stop_logits, SAMPLES: bounds.samples}
        for step in range(golden.steps):
            with rows.memory.ordered():
                for batch_index, row in enumerate(pool_rows):
                    device.set_state(row, {name: array[step, batch_index] for name, array in states.items()})
            rows.run(pool_rows)
            buffers = device.results(count, *_RESULTS.values())
            values = {name: rows.memory.read(buffers[buffer]) for name, buffer in _RESULTS.items()}
            values |= _states(pool, pool_rows)
            wanted = {name: tensors[name][step] for name in _RESULTS}
            wanted |= {name: array[step + 1] for name, array in states.items()}
            for row in pool_rows:
                rows.row(row).ending = None  # also steps behind a flag are recorded
            yield StepError(f"step {step}", _errors(values, wanted), {**allowed, **of_states})
    for number, stretch in enumerate(tensors[VOICE_SAMPLES]):
        latents = rows.encode(stretch, first=number == 0)()
        error = _errors({VOICE_LATENTS: latents}, {VOICE_LATENTS: tensors[VOICE_LATENTS][number]})
        yield StepError(f"voice {number}", error, {VOICE_LATENTS: bounds.voice})


def _states(pool: SpeechPool, rows: Sequence[int]) -> dict[str, Numbers]:
    states = [pool._rows.device().state(row) for row in rows]
    return {name: np.stack([state[name] for state in states]) for name in contract.STATES}


def _errors(
    values: Mapping[str, NDArray[np.generic]], recorded: Mapping[str, NDArray[np.generic]]
) -> dict[str, float]:
    errors = {}
    for name, wanted in recorded.items():
        difference = np.abs(values[name].astype(np.float64) - wanted.astype(np.float64)).max()
        scale = np.abs(wanted.astype(np.float64)).max()
        errors[name] = float(difference / scale) if scale else (0.0 if difference == 0 else math.inf)
    return errors

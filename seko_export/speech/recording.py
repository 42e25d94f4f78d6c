"""Recording of the goldens of speech: a prompt and steps of the eager model, which `verify` replays with the engines.

The eager model consists of the engines' own torch modules, which the runtime runs with the same programs. In a second
run the last bits of the inputs of the networks are changed, because such a change may flip quantised levels of a hidden
state. The error bounds follow from the effect of this change on the results. A third run changes the last bits in every
layer, like an engine that rounds at other places. The build prints the errors of the third run beside the errors of the
engines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from seko_export.errors import UsageError
from seko_export.families.registry import graph_of
from seko_export.families.speech.config import SpeechBuild
from seko_export.goldens.eager import (
    GOLDEN_FILE,
    eager_engine,
    eager_manifest,
    eager_memory,
    write_goldens,
)
from seko_export.goldens.sensitivity import perturbed
from seko_export.host.progress import Progress
from seko_export.lowering.attention_backends import attention_backends
from seko_runtime.backends.memory import Memory
from seko_runtime.sessions.loaded import Loaded
from seko_runtime.speech import contract, golden
from seko_runtime.speech.device import SpeechDevice
from seko_runtime.speech.manifest import Golden, GoldenBounds, SpeechManifest
from seko_runtime.speech.prompts import Floats, SpeechMarks, SpeechPrompt, assemble
from seko_runtime.speech.tokens import SpeechTokenizer

GOLDEN_TEXT = "hello, this is the sound of a voice"
STEPS, REFERENCE_PATCHES, CONTINUED_PATCHES, VOICE_STRETCHES = 3, 3, 2, 2
_MARKS = 3  # tokens between the parts of the prompt
_RANDOM_TOKENS = 12  # of a text without a tokenizer
_OF_STEP = {
    golden.PATCHES: contract.PATCH,
    golden.STOP_LOGITS: contract.STOP_LOGITS,
    golden.SAMPLES: contract.SAMPLES,
}
_ENTRIES = frozenset({"prompt_tokens", "condition"})  # what the language models and the solver start from
_LAYERS = _ENTRIES | {
    "base_layer", "residual_layer", "fusion", "patch_tokens", "patch_layer", "patch_embedding", "solver_tokens",
    "solver_layer", "solver_step", "decode",
}  # fmt: skip
_NOT_OF_LAYERS = (golden.STOP_LOGITS, golden.VOICE_LATENTS)  # of the recorded state, and of the voice alone
# How far an engine may be from the eager model: the largest difference over the largest recorded magnitude. States have
# passed a quantisation: where the last bits differ, some of its levels do. The voice's encoder is float32 everywhere.
LEAST = {
    torch.float32: GoldenBounds(states=0.03, patches=1e-4, stop_logits=1e-4, samples=1e-3, voice=1e-4),
    torch.bfloat16: GoldenBounds(states=0.2, patches=0.1, stop_logits=0.1, samples=0.1, voice=1e-3),
}


@dataclass(frozen=True)
class GoldenInputs:
    """Inputs of the recorded steps.

    Parameters
    ----------
    prompt : SpeechPrompt
        The prompt, which is the same for every row.
    seeds : tuple of int
        The seed of each row.
    steps : int
        Number of steps to run.
    voice : array
        Consecutive stretches of a voice recording, [K, m] float32.
    """

    prompt: SpeechPrompt
    seeds: tuple[int, ...]
    steps: int
    voice: Floats


@dataclass(frozen=True)
class SpeechRecord:
    """The recorded steps and everything needed to replay them.

    Parameters
    ----------
    inputs : GoldenInputs
        Inputs of the recorded steps.
    results : mapping of str to array
        Results of the steps, by tensor name in the golden file.
    bounds : GoldenBounds
        Error bounds for `verify`.
    rounding : mapping of str to float
        Error of each result of the eager model if the last bits of each layer's output are changed. Each step starts
        from the recorded states, so that errors of earlier steps do not add up. The results of a correct engine may
        have an error of this size. Results that no layer computes have no entry.
    error_vs_exact : mapping of str to float
        For a build with quantised caches or weights, the difference of each result a from the result b of exact caches
        and weights, as ||a - b|| / ||b||. Each step starts from the recorded states. Empty for an exact build.
    """

    inputs: GoldenInputs
    results: Mapping[str, Floats]
    bounds: GoldenBounds
    rounding: Mapping[str, float]
    error_vs_exact: Mapping[str, float] = field(default_factory=dict)
    scales: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def table(self) -> Golden:
        """The manifest's description of the recorded steps (goldens)."""
        return Golden(GOLDEN_FILE, self.inputs.seeds, self.inputs.steps, self.bounds)

    def write(self, folder: Path) -> None:
        """Write the golden file into an artifact's folder."""
        prompt = self.inputs.prompt
        prompt_arrays = (prompt.ids, prompt.is_audio.astype(np.uint8), prompt.patches)
        arrays = dict(zip(golden.PROMPT, prompt_arrays, strict=True))
        arrays |= {golden.VOICE_SAMPLES: self.inputs.voice, **self.results}
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        write_goldens(folder, tensors)


def record(
    config: SpeechBuild,
    weights: Mapping[str, Tensor],
    exact_weights: Mapping[str, Tensor],
    tokenizer: Path | None,
    progress: Progress,
) -> SpeechRecord:
    """Run the eager model several times and record its first steps in the largest bucket.

    Parameters
    ----------
    config : SpeechBuild
        The configuration of the build.
    weights : mapping of str to Tensor
        Weights and tables of the artifact, on the CPU.
    exact_weights : mapping of str to Tensor
        Weights that are needed only for the model with exact caches and weights.
    tokenizer : Path, optional
        File of the tokenizer for the recorded text; without a tokenizer the token ids are random.
    progress : callable
        Function that is called before each run, to show progress.
    """
    on_device = {name: tensor.to(config.target.eager_device) for name, tensor in weights.items()}
    inputs = golden_inputs(config, tokenizer)
    runs = 3 + (not config.lossless)
    progress("recording goldens", 0, runs)
    results = run_eager(config, on_device, inputs)
    progress("recording goldens (perturbed)", 1, runs)
    states = {name: results[name] for name in contract.STATES}
    shaken = run_eager(config, on_device, inputs, states, shake=_ENTRIES)
    entries = {name: _error(shaken[name], results[name]) for name in results}
    progress("recording goldens (every layer perturbed)", 2, runs)
    shaken = run_eager(config, on_device, inputs, states, shake=_LAYERS)
    rounding = {name: _error(shaken[name], results[name]) for name in results if name not in _NOT_OF_LAYERS}
    least = LEAST[config.target.dtype]
    bounds = GoldenBounds(
        states=max(least.states, *(2 * entries[name] for name in contract.STATES)),
        patches=max(least.patches, 2 * entries[golden.PATCHES]),
        stop_logits=max(least.stop_logits, 2 * entries[golden.STOP_LOGITS]),
        samples=max(least.samples, 2 * entries[golden.SAMPLES]),
        voice=least.voice,
    )
    lossy: dict[str, float] = {}
    if not config.lossless:
        progress("recording goldens (exact)", 3, runs)
        exact_on_device = {
            name: tensor.to(config.target.eager_device) for name, tensor in exact_weights.items()
        }
        exact = run_eager(config.as_exact, on_device | exact_on_device, inputs, states)
        lossy = {
            name: float(np.linalg.norm(results[name] - wanted) / np.linalg.norm(wanted))
            for name, wanted in exact.items()
        }
    return SpeechRecord(inputs, results, bounds, rounding, lossy)


def golden_inputs(config: SpeechBuild, tokenizer: Path | None) -> GoldenInputs:
    """Return a prompt with a voice to imitate, a text and a voice to continue, and sound for the voice encoder."""
    work, patch = config.workload, config.model.patch
    drawn = np.random.default_rng(0)
    voices = REFERENCE_PATCHES + CONTINUED_PATCHES + _MARKS
    room = work.positions - STEPS - voices
    if room < 1:
        raise UsageError(f"--positions {work.positions}: goldens take at least {STEPS + voices + 1}")
    if tokenizer is None:
        ids = drawn.integers(0, config.model.vocabulary, _RANDOM_TOKENS)
    else:
        ids = SpeechTokenizer(tokenizer.read_bytes(), tokenizer.name, config.model.vocabulary).ids(
            GOLDEN_TEXT
        )
    reference, continued = (
        drawn.standard_normal((count, *patch.shape)).astype(np.float32)
        for count in (REFERENCE_PATCHES, CONTINUED_PATCHES)
    )
    prompt = assemble(ids[:room], patch.shape, reference=reference, continued=continued, marks=SpeechMarks())
    samples = config.model.voice_encoder(work.voice_patches).samples
    voice = 0.3 * drawn.standard_normal((VOICE_STRETCHES, samples)).astype(np.float32)
    return GoldenInputs(prompt, tuple(range(work.call_rows)), STEPS, voice)


@torch.no_grad()
def run_eager(
    config: SpeechBuild,
    weights: Mapping[str, Tensor],
    inputs: GoldenInputs,
    states: Mapping[str, Floats] | None = None,
    *,
    shake: Collection[str] = (),
) -> dict[str, Floats]:
    """Return the results of the eager model, by tensor name in the golden file.

    Parameters
    ----------
    config : SpeechBuild
        The configuration of the build.
    weights : mapping of str to Tensor
        Every weight that the programs use, by name, on the build's device.
    inputs : GoldenInputs
        Prompt, seeds and number of the steps to run.
    states : mapping of str to array, optional
        States from which each step starts; see `replay`.
    shake : collection of str
        Roles of the engines in whose first output the last bits are changed, to measure the effect of rounding.
    """
    pieces = graph_of(config).pieces
    engines = {name: eager_engine(piece) for name, piece in pieces.items()}
    engines |= {name: perturbed(engines[name]) for name, piece in pieces.items() if piece.key.role in shake}
    manifest = cast(SpeechManifest, eager_manifest(config, weights))
    memory = eager_memory(config)
    loaded = Loaded(manifest, contract.resolve_speech(manifest), engines, weights, lambda: memory)
    with attention_backends(config.target.eager_device):
        with memory.ordered():
            device = SpeechDevice(loaded, memory, lambda _: None)
        try:
            with memory.ordered():
                results = _steps(device, memory, manifest, inputs, states)
                results[golden.VOICE_LATENTS] = _voice(device, memory, inputs.voice)
        finally:
            device.drop()
            memory.close()
    return results


def _steps(
    device: SpeechDevice,
    memory: Memory,
    manifest: SpeechManifest,
    inputs: GoldenInputs,
    states: Mapping[str, Floats] | None,
) -> dict[str, Floats]:
    """Run the prefill for a row of each seed, then steps, and return the results of the steps."""
    rows, work, prompt = range(len(inputs.seeds)), manifest.workload, inputs.prompt
    results: dict[str, list[Floats]] = {name: [] for name in (*contract.STATES, *_OF_STEP)}
    for row in rows:
        device.begin(row, prompt.context)
        first, rest = 0, prompt
        while len(rest.ids):
            part, rest = rest.split(work.prefill_tokens[-1])
            device.prefill(row, row * work.positions, first, part)
            first += len(part.ids)
    for step in range(inputs.steps + 1):
        left = [device.state(row) for row in rows]
        for name in contract.STATES:
            results[name].append(np.stack([state[name] for state in left]))
        if step == inputs.steps:
            break
        if states is not None:
            for row in rows:
                device.set_state(row, {name: states[name][step, row] for name in contract.STATES})
        device.step(
            {
                contract.ROWS: [*rows],
                contract.STARTS: [row * work.positions for row in rows],
                contract.FIRST: [len(prompt.ids) + step] * len(rows),
                contract.COUNT: [1] * len(rows),
                contract.SEEDS: inputs.seeds,
                contract.PATCH_NUMBERS: [step] * len(rows),
                contract.TEMPERATURE: [work.solver.temperature] * len(rows),
                contract.GUIDANCE: [work.solver.guidance] * len(rows),
            }
        )
        buffers = device.results(len(rows), *_OF_STEP.values())
        for name, buffer in _OF_STEP.items():
            results[name].append(memory.read(buffers[buffer]))
    return {name: np.stack(arrays) for name, arrays in results.items()}


def _voice(device: SpeechDevice, memory: Memory, stretches: Floats) -> Floats:
    """Encode consecutive stretches [K, m] of a voice and return their latents [K, l, C]."""
    latents = []
    for number, stretch in enumerate(stretches):
        _, buffers = device.encode(stretch, first=number == 0)
        latents.append(memory.read(buffers[contract.VOICE_LATENTS])[0])
    return np.stack(latents)


def _error(replayed: Floats, recorded: Floats) -> float:
    """Return the largest difference of a number, divided by the largest recorded magnitude, as `verify` measures it."""
    return float(np.abs(replayed - recorded).max() / np.abs(recorded).max())

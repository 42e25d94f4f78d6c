"""The manifest of a speech artifact: the tables that manifests of all workloads have, and the object ``workload`` with
sizes, defaults, limits and recorded steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

from seko_runtime.errors import ManifestError
from seko_runtime.format.manifest import (
    MAX_SEED,
    UNKNOWN_WORD,
    Count,
    FilePath,
    KvPool,
    Manifest,
    Workload,
)
from seko_runtime.format.records import Check, Limit, OneOf, Within
from seko_runtime.speech.prompts import SpeechMarks

KIND = "speech"
MAX_GUIDANCE, MAX_TEMPERATURE = (
    10.0,
    2.0,
)  # as a session takes them: far beyond, the solver's numbers overflow
MAX_POSITIONS = 1 << 20  # of one session
MAX_STEPS = 1024  # of the solver, for a patch
_LENGTHS = Limit("MAX_BUCKETS", "lengths")


@dataclass(frozen=True)
class Patch:
    """A patch: the short piece of sound that one step of the model makes.

    Parameters
    ----------
    latents, channels : int
        Number of latents in a patch, and number of channels of a latent.
    samples : int
        Number of sound samples to which a patch is decoded.
    sample_rate : int
        Sample rate of the generated sound, in samples a second.
    """

    latents: Count
    channels: Count
    samples: Count
    sample_rate: Count

    @property
    def shape(self) -> tuple[int, int]:
        """Number of latents and number of channels in a patch."""
        return (self.latents, self.channels)

    @property
    def seconds(self) -> float:
        """Duration of a patch in seconds."""
        return self.samples / self.sample_rate


@dataclass(frozen=True)
class VoiceEncoder:
    """The encoder of voices. Its calls take consecutive stretches of a recording, of equal length.

    Parameters
    ----------
    patches : int
        Number of patches that one call of the encoder makes.
    patch_samples : int
        Number of samples of a patch, at ``sample_rate``. A voice is padded to whole patches, then to whole calls.
    sample_rate : int
        Sample rate of the recorded voice, in samples a second.
    """

    patches: Count
    patch_samples: Count
    sample_rate: Count

    @property
    def samples(self) -> int:
        """Number of samples that one call of the encoder takes."""
        return self.patches * self.patch_samples


@dataclass(frozen=True)
class Solver:
    """The solver of the differential equation that turns noise into a patch. The artifact fixes the number of solver
    ``steps``; a session may choose guidance and temperature.

    Parameters
    ----------
    steps : int
        Number of solver steps. The first ``steps - moving_steps`` solver steps have no velocity and run no engine.
    moving_steps : int
        Number of solver steps that have a velocity: runs of the program `solve`.
    guidance : float
        Default strength of classifier-free guidance.
    temperature : float
        Default standard deviation of the noise from which a patch is made.
    """

    steps: Annotated[int, Within(2, MAX_STEPS)]
    moving_steps: Annotated[int, Within(1, MAX_STEPS - 1)]
    guidance: float
    temperature: float = 1.0


@dataclass(frozen=True)
class SpeechLimits:
    """The least and the largest number of patches that are made of a sentence. The model's authors have chosen these
    bounds.

    Parameters
    ----------
    least_patches : int
        Number of patches before which a stop flag of the model is ignored.
    patches_a_token, further_patches, most_patches : int
        A text of n tokens ends after ``patches_a_token * n + further_patches`` patches or after ``most_patches``
        patches, whichever is less, even if the model has not ended the text.
    """

    least_patches: int = 4
    patches_a_token: Count = 6
    further_patches: int = 10
    most_patches: Count = 2000

    def patches(self, text_tokens: int) -> int:
        """Return the number of patches after which a text of ``text_tokens`` tokens ends, even if the model has not
        ended the text."""
        return min(self.patches_a_token * text_tokens + self.further_patches, self.most_patches)


@dataclass(frozen=True)
class GoldenBounds:
    """Largest errors of replayed steps that pass: the largest absolute difference, relative to the largest recorded
    magnitude.

    Parameters
    ----------
    states : float
        Of the rows' states.
    patches, stop_logits, samples : float
        Of a step's results.
    voice : float
        Of a voice's latents.
    """

    states: float
    patches: float
    stop_logits: float
    samples: float
    voice: float


@dataclass(frozen=True)
class Golden:
    """The golden: recorded steps of one call with a row for each seed. The recorded steps are teacher-forced: each step
    begins with recorded states, not with the result of the previous step.

    The golden's file contains tensors for T tokens, N steps and B seeds, with P latents and C channels of a patch, and
    d numbers of a hidden state.

    The tensors ``prompt.ids`` [T] int64, ``prompt.is_audio`` [T] uint8 and ``prompt.patches`` [T, P, C] float32 are
    every row's prompt. The tensors ``state.base`` and ``state.residual`` [N + 1, B, d] and ``state.patch`` [N + 1, B,
    P, C], float32, are the states before each step and after the last step. The states before the first step are the
    prefill's results. The tensors ``patches`` [N, B, P, C], ``stop_logits`` [N, B, 2] and ``samples`` [N, B, n] are the
    results of each step. The tensors ``voice.samples`` [K, m] and ``voice.latents`` [K, l, C] float32 are consecutive
    stretches of a voice.

    Parameters
    ----------
    file : str
        Path of the safetensors file in the artifact.
    seeds : tuple of int
        Seed of each row: at most as many seeds as the largest call has rows.
    steps : int
        Number N of recorded steps.
    bounds : GoldenBounds
        Largest errors of an engine's results that pass.
    """

    file: FilePath
    seeds: Annotated[tuple[Annotated[int, Within(0, MAX_SEED)], ...], _LENGTHS]
    steps: Annotated[int, Within(1, 1000)]
    bounds: GoldenBounds


@dataclass(frozen=True)
class SpeechWorkload(Workload):
    """The speech workload's part of a manifest.

    Parameters
    ----------
    kind : str
        ``speech``.
    positions : int
        Largest number of positions of one session: tokens of the prompt and patches together.
    places : int
        Number of places in each cache. A session has as many consecutive places as it has positions; the last place
        belongs to no session, and padding is written there.
    read_lengths : tuple of int
        Numbers of positions that a prefill can read, ascending; the last is ``positions``.
    step_lengths : tuple of int
        Numbers of positions that a step can read, ascending. Layers that read a session's positions directly from the
        cache have only one such number.
    prefill_tokens : tuple of int
        Numbers of tokens that a prefill call can take, ascending.
    vocabulary : int
        Number of token ids; each token id is below this number.
    patch, voice, solver
        Sizes of a patch, of the voice encoder and of the solver, with default settings.
    kv : KvPool
        Format and size of the KV caches.
    marks : SpeechMarks
        Token ids that separate the parts of a prompt.
    limits : SpeechLimits
        The bounds of the number of patches of a sentence.
    tokenizer : str or None
        Path of a JSON file of the library `tokenizers` in the artifact; if None, callers pass token ids.
    golden : Golden or None
        The recorded steps with which `verify` compares; None if nothing was recorded.
    """

    kind: Annotated[str, OneOf((KIND,), complaint=UNKNOWN_WORD)]
    positions: Annotated[int, Within(2, MAX_POSITIONS)]
    places: Count
    read_lengths: Annotated[tuple[Count, ...], _LENGTHS]
    step_lengths: Annotated[tuple[Count, ...], _LENGTHS]
    prefill_tokens: Annotated[tuple[Count, ...], _LENGTHS]
    vocabulary: Count
    patch: Patch
    voice: VoiceEncoder
    solver: Solver
    kv: KvPool
    marks: SpeechMarks = field(default_factory=SpeechMarks)
    limits: SpeechLimits = field(default_factory=SpeechLimits)
    tokenizer: FilePath | None = None
    golden: Golden | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the workload's own files in the artifact: recorded steps and tokenizer."""
        golden = () if self.golden is None else (self.golden.file,)
        return golden if self.tokenizer is None else (*golden, self.tokenizer)

    def read_length(self, positions: int) -> int:
        """Return the smallest number of positions a prefill can read that is at least ``positions``."""
        return next(length for length in self.read_lengths if length >= positions)

    def step_length(self, positions: int) -> int:
        """Return the smallest number of positions a step can read that is at least ``positions``."""
        return next(length for length in self.step_lengths if length >= positions)

    def prefill_size(self, tokens: int) -> int:
        """Return the number of tokens that the smallest fitting prefill call takes; if no prefill call takes ``tokens``
        tokens, the number of the largest call."""
        return next((size for size in self.prefill_tokens if size >= tokens), self.prefill_tokens[-1])


@dataclass(frozen=True)
class SpeechManifest(Manifest):
    """The manifest of a speech artifact."""

    workload: SpeechWorkload

    @property
    def buckets(self) -> tuple[int, ...]:
        """Numbers of rows that a step can have, ascending. Every row of a step is a separate session."""
        if self.pool is None:
            raise ManifestError("a speech artifact needs the table pool, which is not there; rebuild it")
        return self.pool.buckets

    @property
    def session_positions(self) -> int:
        """Number of positions that a session of a pool has by default: an equal share of a cache's places."""
        return min(self.workload.positions, (self.workload.places - 1) // self.rows)


def _check_workload(workload: SpeechWorkload, where: str) -> None:
    for name in ("read_lengths", "step_lengths", "prefill_tokens"):
        lengths = getattr(workload, name)
        if not lengths or any(low >= high for low, high in pairwise(lengths)):
            raise ManifestError(f"{where}.{name} are {list(lengths)[:8]}, expected rising numbers")
        if lengths[-1] > workload.positions:
            raise ManifestError(
                f"{where}.{name} end with {lengths[-1]}, more than the {workload.positions} positions of a session"
            )
    for name in ("read_lengths", "step_lengths"):
        if getattr(workload, name)[-1] != workload.positions:
            raise ManifestError(
                f"{where}.{name} end with {getattr(workload, name)[-1]}, expected the {workload.positions} positions "
                "of a session"
            )
    if workload.places <= workload.positions:
        raise ManifestError(
            f"{where}.places is {workload.places}, expected more than the {workload.positions} positions of a session: "
            "the last place is nobody's"
        )
    marks = workload.marks
    for mark in ("audio_start", "reference_start", "reference_end"):
        if not 0 <= getattr(marks, mark) < workload.vocabulary:
            raise ManifestError(
                f"{where}.marks.{mark} is {getattr(marks, mark)}, the model knows ids below {workload.vocabulary}"
            )


def _check_solver(solver: Solver, where: str) -> None:
    if solver.moving_steps >= solver.steps:
        raise ManifestError(
            f"{where}.moving_steps is {solver.moving_steps}, expected fewer than the {solver.steps} steps: the first "
            "has no velocity"
        )


CHECKS: Mapping[type, Check] = {SpeechWorkload: _check_workload, Solver: _check_solver}

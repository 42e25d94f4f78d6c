"""The manifest of a speech artifact: the core's tables, and ``workload`` with sizes, defaults, limits and goldens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

from seko_runtime.errors import ManifestError, UsageError
from seko_runtime.format.manifest import (
    UNKNOWN_WORD,
    Count,
    FilePath,
    KvPool,
    Manifest,
    Workload,
)
from seko_runtime.format.manifest_reader import parse_manifest
from seko_runtime.format.records import Check, Limit, OneOf, Within
from seko_runtime.speech.prompts import SpeechMarks

KIND = "speech"
MAX_SEED = (1 << 62) - 1  # as a session takes them
MAX_POSITIONS = 1 << 20  # of one session
_LENGTHS = Limit("MAX_BUCKETS", "lengths")


@dataclass(frozen=True)
class Patch:
    """A patch: what one step makes.

    Parameters
    ----------
    latents, channels : int
        Its latents, and their channels.
    samples : int
        Samples that it decodes to.
    sample_rate : int
        Samples a second of the sound that comes out.
    """

    latents: Count
    channels: Count
    samples: Count
    sample_rate: Count

    @property
    def shape(self) -> tuple[int, int]:
        """Latents and channels."""
        return (self.latents, self.channels)

    @property
    def seconds(self) -> float:
        """How long it sounds."""
        return self.samples / self.sample_rate


@dataclass(frozen=True)
class VoiceEncoder:
    """The encoder of voices, which takes stretches of equal length one after another.

    Parameters
    ----------
    patches : int
        Patches that one call makes.
    patch_samples : int
        Samples of a patch at ``sample_rate``; a voice is filled up to whole patches, then to whole calls.
    sample_rate : int
        Samples a second of the sound that goes in.
    """

    patches: Count
    patch_samples: Count
    sample_rate: Count

    @property
    def samples(self) -> int:
        """Samples of a call."""
        return self.patches * self.patch_samples


@dataclass(frozen=True)
class Solver:
    """The solver of a patch. ``steps`` are fixed by the artifact; a session may choose the other two.

    Parameters
    ----------
    steps : int
        Solver steps, of which the first have no velocity and run nothing.
    moving_steps : int
        The others: runs of the program `solve`.
    guidance : float
        Default of how far the velocity is moved away from the one without a condition.
    temperature : float
        Default standard deviation of the noise that a patch begins with.
    """

    steps: Annotated[int, Within(2, 1024)]
    moving_steps: Annotated[int, Within(1, 1023)]
    guidance: float
    temperature: float = 1.0


@dataclass(frozen=True)
class SpeechLimits:
    """The bounds of a sentence's patches, as the original has them.

    Parameters
    ----------
    least_patches : int
        The stop flag of an earlier patch is ignored.
    patches_a_token, further_patches, most_patches : int
        A text of n tokens ends after ``patches_a_token * n + further_patches`` patches, and at most after
        ``most_patches``, whatever the model says.
    """

    least_patches: int = 4
    patches_a_token: Count = 6
    further_patches: int = 10
    most_patches: Count = 2000

    def patches(self, text_tokens: int) -> int:
        """Return after how many patches a text of so many tokens ends, whatever the model says."""
        return min(self.patches_a_token * text_tokens + self.further_patches, self.most_patches)


@dataclass(frozen=True)
class GoldenBounds:
    """Largest errors of recorded numbers, relative to their largest magnitude."""

    states: float
    patches: float
    stop_logits: float
    samples: float
    voice: float


@dataclass(frozen=True)
class Golden:
    """Recorded steps of one call with a row for each seed, teacher-forced: each step begins with recorded states.

    Its file holds, with T tokens, N steps, B seeds, P latents and C channels of a patch, d numbers of a hidden state:

    ``prompt.ids`` [T] int64, ``prompt.is_audio`` [T] uint8, ``prompt.patches`` [T, P, C] float32: every row's prompt;
    ``state.base``, ``state.residual`` [N + 1, B, d] and ``state.patch`` [N + 1, B, P, C] float32: the states before
    each step and after the last one; those before the first are the prefill's;
    ``patches`` [N, B, P, C], ``stop_logits`` [N, B, 2] and ``samples`` [N, B, n] float32: what each step made;
    ``voice.samples`` [K, m] and ``voice.latents`` [K, l, C] float32: consecutive stretches of a voice.

    Parameters
    ----------
    file : str
        The safetensors file.
    seeds : tuple of int
        A row's seed. At most as many as rows of the largest call.
    steps : int
        N.
    bounds : GoldenBounds
        How far an engine may be from them.
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
    positions : int
        Positions of one session at most, prompt and patches together.
    places : int
        Places of each cache. A session has as many consecutive ones as its positions; the last place is nobody's, and
        padding is written there.
    read_lengths : tuple of int
        Positions that a prefill can read, ascending; the last is ``positions``.
    step_lengths : tuple of int
        The same of a step. Layers that read what a row holds where it lies have one length.
    prefill_tokens : tuple of int
        Tokens that a prefill call can take, ascending.
    vocabulary : int
        Token ids are below it.
    patch, voice, solver
        Sizes and defaults.
    kv : KvPool
        Format and size of the caches.
    marks : SpeechMarks
        Token ids that separate the parts of a prompt.
    limits : SpeechLimits
        The bounds of a sentence.
    tokenizer : str or None
        A JSON file of the library `tokenizers`, in the artifact; without it a caller gives token ids.
    golden : Golden or None
        What `verify` compares with.
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
        """The golden's file and the tokenizer."""
        golden = () if self.golden is None else (self.golden.file,)
        return golden if self.tokenizer is None else (*golden, self.tokenizer)

    def read_length(self, positions: int) -> int:
        """Return the shortest length of a prefill that reaches so many positions."""
        return next(length for length in self.read_lengths if length >= positions)

    def step_length(self, positions: int) -> int:
        """Return the shortest length of a step that reaches so many positions."""
        return next(length for length in self.step_lengths if length >= positions)

    def prefill_size(self, tokens: int) -> int:
        """Return the smallest prefill that takes so many tokens; the largest if none does."""
        return next((size for size in self.prefill_tokens if size >= tokens), self.prefill_tokens[-1])


@dataclass(frozen=True)
class SpeechManifest(Manifest):
    """The manifest of a speech artifact."""

    workload: SpeechWorkload

    @property
    def buckets(self) -> tuple[int, ...]:
        """Rows of its steps, ascending; rows of speech are always separate sessions."""
        if self.pool is None:
            raise ManifestError("a speech artifact needs the table pool, which is not there; rebuild it")
        return self.pool.buckets


def parse_speech_manifest(document: bytes) -> SpeechManifest:
    """Read the manifest of a speech artifact; see `parse_manifest`."""
    return parse_manifest(document, SpeechManifest, CHECKS)


def speech_manifest(manifest: Manifest) -> SpeechManifest:
    """Return a manifest as that of a speech artifact; UsageError if its workload is another."""
    if not isinstance(manifest, SpeechManifest):
        raise UsageError(f"the artifact's workload is {manifest.workload.kind!r}, expected {KIND!r}")
    return manifest


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

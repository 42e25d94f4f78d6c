"""Configuration of a speech build: the sizes of its sessions and calls, and their requirements on model and target."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from seko_export.config.build import BuildConfig, ModelIdentity, WorkloadConfig
from seko_export.config.pool import PoolConfig, with_commas
from seko_export.errors import UsageError
from seko_runtime.speech.manifest import MAX_STEPS

if TYPE_CHECKING:  # a model's dimensions are looked at before torch is loaded
    from seko_runtime.speech.manifest import Patch, VoiceEncoder

VOICE_PATCHES = 8  # of a voice that one call encodes
QUANTISED = ("int8", "fp4")  # formats of caches without calibration


@dataclass(frozen=True)
class SpeechModel(ModelIdentity):
    """Base class of a speech model's dimensions: the fields that the speech workload reads."""

    workload: ClassVar[str] = "speech"

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of token ids in the vocabulary: all ids are below this number."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """Largest number of positions of a sequence."""

    @property
    @abstractmethod
    def patch(self) -> Patch:
        """Sizes of the patch (short piece of sound) that a step generates."""

    @abstractmethod
    def voice_encoder(self, patches: int) -> VoiceEncoder:
        """Return the sizes of a voice encoder that takes this number of patches in a call."""


@dataclass(frozen=True)
class SpeechConfig(WorkloadConfig):
    """The speech workload's part of a build.

    Parameters
    ----------
    pool : PoolConfig
        Number of sessions, and number of sessions that one step can carry.
    positions : int
        Largest number of positions of a session: tokens of the prompt and patches together.
    read_lengths : tuple of int
        Numbers of positions that a call can read, ascending; the last is ``positions``. Each number needs engines of
        its own.
    prefill_tokens : tuple of int
        Numbers of tokens that a prefill call can take, ascending. Each number needs engines of its own.
    steps : int
        Number of solver steps for a patch.
    kv_scheme : str
        Format of keys and values in the caches: ``bf16`` and ``fp32`` are exact, `QUANTISED` are not.
    voice_patches : int
        Number of patches of a voice that one call encodes.
    tokenizer : bool
        Whether the artifact includes a tokenizer. An artifact without a tokenizer takes token ids.

    Raises
    ------
    UsageError
        If two fields of the configuration contradict each other.
    """

    pool: PoolConfig
    positions: int
    read_lengths: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    steps: int = 10
    kv_scheme: str = "bf16"
    voice_patches: int = VOICE_PATCHES
    tokenizer: bool = True

    def __post_init__(self) -> None:
        if self.positions < 2:
            raise UsageError(f"--positions {self.positions}: expected at least 2")
        if self.steps < 2:
            raise UsageError(
                f"--steps {self.steps}: expected at least 2, as the first solver step has no velocity"
            )
        if self.steps > MAX_STEPS:
            raise UsageError(f"--steps {self.steps}: expected at most {MAX_STEPS}")
        for option, lengths in (("--read-lengths", self.read_lengths), ("--prefill", self.prefill_tokens)):
            rising = all(low < high for low, high in pairwise((1, *lengths)))
            if not lengths or not rising or lengths[-1] > self.positions:
                raise UsageError(
                    f"{option} {with_commas(lengths)}: expected rising numbers from 2 to --positions "
                    f"{self.positions}"
                )
        if self.read_lengths[-1] != self.positions:
            raise UsageError(
                f"--read-lengths {with_commas(self.read_lengths)}: the last must be --positions {self.positions}"
            )

    @property
    def state_rows(self) -> int:
        """Number of rows of the states: one for each session, and one for batch indices without a session."""
        return self.pool.sessions + 1

    @property
    def buckets(self) -> tuple[int, ...]:
        """Numbers of rows of a step's calls, ascending."""
        return self.pool.buckets

    @property
    def call_rows(self) -> int:
        """Number of rows of the largest step."""
        return self.pool.buckets[-1]

    @property
    def places(self) -> int:
        """Number of token places of each cache: the positions of all sessions, and one for padding."""
        return self.pool.sessions * self.positions + 1


@dataclass(frozen=True)
class SpeechBuild(BuildConfig):
    """The configuration of a build of a speech artifact.

    Raises
    ------
    UsageError
        If sessions have more positions than the model, or a feature is not supported for speech.
    """

    model: SpeechModel
    workload: SpeechConfig

    def __post_init__(self) -> None:
        if self.workload.positions > self.model.longest:
            raise UsageError(
                f"--positions {self.workload.positions}: {self.model.name!r} has {self.model.longest} at most"
            )
        if self.target.ranks != 1:
            raise UsageError(
                f"--ranks {self.target.ranks}: a step of speech runs on one GPU, as its layers are too small to share; "
                "leave it out, and run a process on each GPU"
            )

    @property
    def step_lengths(self) -> tuple[int, ...]:
        """Numbers of positions that a step can read, ascending. With fused layers there is one number, because a fused
        layer reads exactly a row's cached tokens.
        """
        return self.workload.read_lengths[-1:] if self.target.fused else self.workload.read_lengths

    @property
    def lossless(self) -> bool:
        """Whether caches and weights are exact, so that the engines differ from the eager model by rounding only."""
        return self.workload.kv_scheme == self.exact_scheme and not self.target.fp8

    @property
    def as_exact(self) -> SpeechBuild:
        """Return the same build with exact caches and weights. Builds with quantised caches or weights are compared
        with the exact build."""
        return self.changed(kv_scheme=self.exact_scheme, fp8=False)

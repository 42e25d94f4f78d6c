"""Which case a number is, and which endings are good enough for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from errno import ENOMEM
from pathlib import Path
from random import Random

import seko_runtime.opening.artifact
from seko_export.errors import CheckpointError, ExportError
from seko_runtime.errors import SekoRuntimeError

from .bases import Bases, DoubleBackend
from .corpus import CORPUS
from .file_cases import (
    checkpoint_case,
    lora_case,
    safetensors_case,
    snapshot_case,
    tar_case,
    trust_case,
    vae_case,
)
from .guarded import Limits, NotGoodEnoughError, Outcome, guarded
from .manifest_cases import manifest_case, member_case

MAX_MESSAGE = 4096  # letters
ARTIFACT, ENVIRONMENT = 4, 5
CHECKPOINT = CheckpointError.exit_code

Work = Callable[[Bases, Random, Path, list[str]], str]


@dataclass(frozen=True)
class Kind:
    """A kind of case.

    Parameters
    ----------
    name : str
        For people.
    weight : int
        How often it comes.
    work : callable
        Does it.
    codes : tuple of int
        Exit codes of the errors that it may end in.
    """

    name: str
    weight: int
    work: Work
    codes: tuple[int, ...] = (ARTIFACT, ENVIRONMENT)


KINDS = (
    Kind("manifest", 50, manifest_case),
    Kind("member", 10, member_case),
    Kind("tar", 10, tar_case),
    Kind("safetensors", 8, safetensors_case, (ARTIFACT,)),
    Kind("snapshot", 10, snapshot_case),
    Kind("trust", 6, trust_case),
    Kind("checkpoint", 8, checkpoint_case, (CHECKPOINT,)),
    Kind("lora", 6, lora_case, (CHECKPOINT,)),
    Kind("vae", 4, vae_case, (CHECKPOINT,)),
)


def install_double() -> None:
    """Let `open_artifact` load engines that are plain callables, in this process."""
    seko_runtime.opening.artifact.open_backend = lambda *_: DoubleBackend()  # type: ignore[assignment]


def drawn(seed: int, number: int) -> tuple[Kind, Random]:
    """Return the kind of a case, and the generator that its choices come from; the same numbers are the same case."""
    random = Random(f"{seed} {number}")
    (kind,) = random.choices(KINDS, [kind.weight for kind in KINDS])
    return kind, random


def run_case(bases: Bases, seed: int, number: int, folder: Path) -> Outcome:
    """Run one case in a child."""
    kind, random = drawn(seed, number)
    return run_guarded(lambda notes: kind.work(bases, random, folder, notes), kind.codes, folder)


def run_named(bases: Bases, name: str, folder: Path) -> Outcome:
    """Run a named case in a child; it must be refused."""
    case = CORPUS[name]

    def refused(_: list[str]) -> str:
        case.work(bases, folder)
        raise AssertionError("it was taken, expected a refusal")

    return run_guarded(refused, case.codes, folder, case.limits)


def run_guarded(
    work: Callable[[list[str]], str], codes: tuple[int, ...], folder: Path, limits: Limits | None = None
) -> Outcome:
    """Run something in a child with limits; its errors must have one of the exit codes."""
    limits = Limits() if limits is None else limits
    return guarded(work, lambda error: judged(error, codes), limits, folder / "log")


def judged(error: Exception, codes: tuple[int, ...]) -> str | None:
    """Return the name of an error of ours that may end a case, None for another one.

    Raises
    ------
    NotGoodEnoughError
        If it is ours and yet not good enough.
    """
    if not isinstance(error, SekoRuntimeError | ExportError):
        return None
    if error.exit_code not in codes:
        raise NotGoodEnoughError(f"exit code {error.exit_code}, expected one of {codes}")
    message = str(error)
    if not message or len(message) > MAX_MESSAGE:
        raise NotGoodEnoughError(f"a message of {len(message)} letters")
    if not all(letter.isprintable() for letter in message.replace("\n", " ")):
        raise NotGoodEnoughError(f"a message with control characters: {message[:200]!r}")
    if any(isinstance(cause, MemoryError) or getattr(cause, "errno", 0) == ENOMEM for cause in chain(error)):
        raise NotGoodEnoughError("the memory limit stopped it, and not a check")
    return type(error).__name__


def chain(error: BaseException) -> list[BaseException]:
    """An error and all that it was raised from or while."""
    causes: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        cause = left.pop()
        if cause is not None and cause not in causes:
            causes.append(cause)
            left += [cause.__cause__, cause.__context__]
    return causes

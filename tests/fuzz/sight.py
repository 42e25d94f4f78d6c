"""Whether the fuzzer sees: what is whole must pass, and what is bad must be told, or its verdicts mean nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from seko_export.checkpoints.sources import LoraFile
from seko_runtime.errors import ManifestError, UsageError
from seko_runtime.format.unpacking import unpack_artifact
from seko_runtime.opening.artifact import open_artifact

from .bases import SNAPSHOT_KEY, Bases, put
from .cases import load, load_media, merge, replay, restore, snapshot_of, snapshot_parts, trusted
from .child import Limits, Outcome, run_in_child


class BlindError(Exception):
    """The fuzzer does not see what it is for."""


class UnboundedError(ManifestError):
    """An error of the runtime's whose message is not cut and escaped as that of all others is."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.args = (message,)


def check_sight(bases: Bases, folder: Path) -> None:
    """Run what is whole and what is bad; BlindError if a verdict is wrong."""

    def unpacked() -> None:
        put(folder / "packed.tar", bases.tar)
        unpack_artifact(folder / "packed.tar", folder / "made", trust=None)

    def restored(content: bytes, key: bytes | None = None) -> None:
        put(folder / "saved", content)
        restore(bases, folder / "saved", key)

    def opened(path: Path) -> None:
        with open_artifact(path) as artifact:
            replay(artifact)

    whole: dict[str, Callable[[], object]] = {
        "a tar": unpacked,
        "a snapshot": lambda: restored(bases.snapshot),
        "a snapshot hashed anew": lambda: restored(snapshot_of(snapshot_parts(bases.snapshot))),
        "a snapshot with its key": lambda: restored(bases.keyed_snapshot, SNAPSHOT_KEY),
        "a signature": lambda: trusted(bases, folder, bases.trust, bases.signature),
    }
    whole |= {name: lambda base=base: opened(base.folder) for name, base in bases.artifacts.items()}
    whole |= {name: lambda path=path: load(path) for name, path in bases.checkpoints.items()}
    whole |= {
        f"lora {name}": lambda path=path: merge(bases, LoraFile(path)) for name, path in bases.loras.items()
    }
    whole |= {f"VAE {name}": lambda path=path: load_media(path) for name, path in bases.vaes.items()}
    for name, work in whole.items():
        outcome = _run(folder, work, Limits())
        if not outcome.caught or outcome.ending.endswith("Error"):
            raise BlindError(f"{name} is whole and ended with {outcome.ending}: {outcome.detail}")
    bad: dict[str, tuple[Callable[[], object], str]] = {
        "a loop": (_spin, "took more than 0.2 s of processor time"),
        "a gigabyte": (lambda: bytearray(1 << 30), "MemoryError"),
        "an abort": (os.abort, "died by SIGABRT"),
        "an exit": (lambda: os._exit(0), "exited with 0 and no word"),
        "a foreign error": (lambda: {}["x"], "KeyError"),
        "an interrupt": (lambda: _raise(KeyboardInterrupt()), "KeyboardInterrupt"),
        "another exit code": (lambda: _raise(UsageError("no")), "UsageError"),
        "a long message": (lambda: _raise(UnboundedError("x" * 100_000)), "UnboundedError"),
        "letters that move the cursor": (lambda: _raise(UnboundedError("\x1b[2J")), "UnboundedError"),
    }
    for name, (work, ending) in bad.items():
        outcome = _run(folder, work, Limits(cpu_s=0.2, memory_bytes=64 << 20))
        if outcome.caught or outcome.ending != ending:
            raise BlindError(f"{name} ended with {outcome.ending}, expected {ending} as uncaught")


def _run(folder: Path, work: Callable[[], object], limits: Limits) -> Outcome:
    folder.mkdir()
    try:
        return run_in_child(work, (4, 5), folder, limits)
    finally:
        shutil.rmtree(folder)


def _spin() -> NoReturn:
    while True:
        pass


def _raise(error: BaseException) -> NoReturn:
    raise error

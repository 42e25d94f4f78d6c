"""Whether the fuzzer sees: what is whole must pass, and what is bad must be told, or its verdicts mean nothing."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

from seko_export.checkpoints.sources import LoadOptions, LoraFile
from seko_export.families.model_files import load_checkpoint
from seko_export.media.load import load_vae
from seko_export.media.vaes import vae_config_of
from seko_runtime.errors import ManifestError, UsageError
from seko_runtime.format.manifest import SIGNATURE_FILE
from seko_runtime.format.unpacking import unpack_artifact
from seko_runtime.opening.artifact import open_artifact
from seko_runtime.opening.checked_artifact import read_manifest

from .bases import MODEL, SNAPSHOT_KEY, Bases, linked, put
from .cases import run_guarded
from .file_cases import restore, snapshot_of, snapshot_parts
from .guarded import Limits, Outcome
from .manifest_cases import replay

SHORT = Limits(cpu_s=0.2, memory_bytes=64 << 20)


class BlindError(Exception):
    """The fuzzer does not see what it is for."""


class UnboundedError(ManifestError):
    """An error of the runtime's whose message is not cut and escaped as that of all others is."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.args = (message,)


def check_sight(bases: Bases, folder: Path) -> None:
    """Run what is whole and what is bad; BlindError if a verdict is wrong."""
    whole: dict[str, Callable[[], object]] = {
        "a tar": lambda: _unpacked(bases, folder),
        "a snapshot": lambda: _restored(bases, folder, bases.snapshot),
        "a snapshot hashed anew": lambda: _restored(
            bases, folder, snapshot_of(snapshot_parts(bases.snapshot))
        ),
        "a snapshot with its key": lambda: _restored(bases, folder, bases.keyed_snapshot, SNAPSHOT_KEY),
        "a signature": lambda: _trusted(bases, folder),
    }
    whole |= {
        f"artifact {name}": lambda base=base: _opened(base.folder) for name, base in bases.artifacts.items()
    }
    whole |= {
        f"checkpoint {name}": lambda path=path: _loaded(path) for name, path in bases.checkpoints.items()
    }
    whole |= {f"lora {name}": lambda path=path: _merged(bases, path) for name, path in bases.loras.items()}
    whole |= {f"VAE {name}": lambda path=path: _vae_read(path) for name, path in bases.vaes.items()}
    for name, work in whole.items():
        outcome = _run(folder, lambda _, work=work: str(work()), Limits())
        if not outcome.caught or outcome.ending.endswith("Error"):
            raise BlindError(f"{name} is whole and ended with {outcome.ending}: {outcome.detail}")
    bad: dict[str, tuple[Callable[[], object], str]] = {
        "a loop": (_spin, "took more than 0.2 s of processor time"),
        "a gigabyte": (lambda: bytearray(1 << 30), "MemoryError"),
        "an abort": (os.abort, "died by SIGABRT"),
        "an exit": (lambda: os._exit(0), "exited with 0 and no word"),
        "a foreign error": (lambda: {}["x"], "KeyError"),
        "an interrupt": (lambda: _raised(KeyboardInterrupt()), "KeyboardInterrupt"),
        "another exit code": (lambda: _raised(UsageError("no")), "UsageError"),
        "a long message": (lambda: _raised(UnboundedError("x" * 100_000)), "UnboundedError"),
        "letters that move the cursor": (lambda: _raised(UnboundedError("\x1b[2J")), "UnboundedError"),
    }
    for name, (work, ending) in bad.items():
        outcome = _run(folder, lambda _, work=work: str(work()), SHORT)
        if outcome.caught or outcome.ending != ending:
            raise BlindError(f"{name} ended with {outcome.ending}, expected {ending} as uncaught")


def _run(folder: Path, work: Callable[[list[str]], str], limits: Limits) -> Outcome:
    folder.mkdir()
    try:
        return run_guarded(work, (4, 5), folder, limits)
    finally:
        shutil.rmtree(folder)


def _spin() -> None:
    while True:
        pass


def _raised(error: BaseException) -> None:
    raise error


def _opened(folder: Path) -> str:
    with open_artifact(folder) as artifact:
        return replay(artifact)


def _unpacked(bases: Bases, folder: Path) -> str:
    (folder / "packed.tar").write_bytes(bases.tar)
    unpack_artifact(folder / "packed.tar", folder / "made", trust=None)
    return _opened(folder / "made")


def _restored(bases: Bases, folder: Path, content: bytes, key: bytes | None = None) -> str:
    (folder / "saved").write_bytes(content)
    return restore(bases, folder / "saved", key)


def _trusted(bases: Bases, folder: Path) -> str:
    place = linked(bases.artifacts["whole"], folder / "whole")
    put(place / SIGNATURE_FILE, bases.signature)
    (folder / "trust").write_bytes(bases.trust)
    read_manifest(place, trust=folder / "trust")
    return "trusted"


def _merged(bases: Bases, path: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in load_checkpoint(
            bases.checkpoints["wan"], MODEL, LoadOptions(loras=[LoraFile(path)])
        ).items():
            pass
    return "merged"


def _vae_read(path: Path) -> str:
    for _ in load_vae(path, vae_config_of(path)).items():
        pass
    return "loaded"


def _loaded(path: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in load_checkpoint(path, MODEL).items():
            pass
    return "loaded"

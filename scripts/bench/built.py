"""What a bench builds before it measures, kept for a later run of the same commit.

Where a GPU is lent by the minute, the engines of many benches are built side by side first (``--prepare``). Nothing
should be built while something is measured: a build on the same GPU can double the times.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scripts.bench.children import last_json, run_python
from scripts.bench.rows import measured_commit

KERNELS = Path(__file__).parents[2] / "kernels" / "seko_kernels"


def build_once(
    output: Path, inputs: object, build: Callable[[], dict[str, Any] | None]
) -> dict[str, Any] | None:
    """Build a file or folder, unless this commit has built it of the same inputs.

    Another process that builds the same output at the same time is waited for.

    Parameters
    ----------
    output : Path
        File or folder of the build.
    inputs : object
        What is built: a configuration or arguments, compared by their representation.
    build : callable
        Builds the output, of which an older one may be there. Returns what a row says of the build, as JSON can hold
        it; None if the build failed, which is then tried again in a later run.

    Returns
    -------
    dict or None
        What ``build`` returned, now or in the earlier run.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.with_name(f".{output.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (facts := known(output, inputs)) is not None:
            return facts
        _mark(output).unlink(missing_ok=True)
        facts = build()
        if facts is not None:
            mark(output, inputs, **facts)
        return facts


def checkpoint(work: Path, preset: str, form: str = "self-forcing") -> Path:
    """Return a preset's checkpoint of random weights in the work folder, made there once; it may be waited for."""
    path = work / f"{preset}.{'pt' if form == 'self-forcing' else 'safetensors'}"
    return _made(path, "--preset", preset, "--format", form, "--device", _device())


def vae_file(work: Path, name: str) -> Path:
    """Return a file of a VAE or tiny decoder with random weights, likewise."""
    return _made(work / f"{name}.pth", "--vae", name)


def text_encoder(work: Path, name: str) -> Path:
    """Return a folder of a text encoder with random weights, likewise."""
    return _made(work / name, "--text", name, "--device", _device())


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _made(path: Path, *arguments: str) -> Path:
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            run_python("scripts/make_checkpoint.py", *arguments, "-o", str(path))
    return path


def artifact(output: Path, *arguments: str) -> Path:
    """Return an artifact's folder, built by `seko-export build` unless this commit has built the same there."""

    def build() -> dict[str, Any]:
        last_json("-m", "seko_export", "build", *arguments, "-o", str(output), "--force", "--json")
        return {}

    build_once(output, arguments, build)
    return output


def known(output: Path, inputs: object) -> dict[str, Any] | None:
    """Return the facts that `mark` noted of a build, if this commit built the same there; else None.

    A build is of another commit where nobody knows the commit, or where files differ from it.
    """
    commit = measured_commit()
    if commit is None or commit.endswith("+") or not output.exists():
        return None
    try:
        facts: dict[str, Any] = json.loads(_mark(output).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    same = (facts.pop("commit"), facts.pop("inputs", None)) == (commit, _fingerprint(inputs))
    return facts if same else None


def mark(output: Path, inputs: object, **facts: object) -> None:
    """Note beside a file or folder that this commit built it, with what a row says of the build."""
    content = {"commit": measured_commit(), "inputs": _fingerprint(inputs), **facts}
    _mark(output).write_text(json.dumps(content), encoding="utf-8")


def _fingerprint(inputs: object) -> str:
    """Return what is built, with the SHA-256 of the kernels' tables, which measurements write between two commits."""
    tables = b"".join(table.read_bytes() for table in sorted(KERNELS.glob("tuned*.json")))
    return f"{inputs!r} {hashlib.sha256(tables).hexdigest()}"


def _mark(output: Path) -> Path:
    return output.with_name(f".{output.name}.built.json")

"""Packs a run for the way between two machines, and unpacks it: bfloat16, one tar a group of tensors.

A finished run travels as its EMA alone, else EMA, weights and second moments (6 bytes a parameter): first moments and
Muon's momenta are forgotten within some ten steps anyway. Logs grow with the steps, so they have a tar of their own and
the tensors' stay as large as the model makes them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

from scripts.train_sample.curve import CURVE
from scripts.train_sample.progress import FACTS, LOSSES, STATE, newest_state

LOG_GROUP = "log"


def pack(source: Path, goal: Path) -> dict[str, int]:
    """Pack a run in bfloat16 for a transfer, each group of tensors as one tar: unpacked together they resume.

    A finished run travels as its EMA alone. Facts go with the EMA, loss log and curve in ``NAME.log.tar``.

    Returns
    -------
    dict of str to int
        Bytes of each file.
    """
    state = newest_state(source)
    if state is None:
        raise FileNotFoundError(f"{source} holds no training state; run that stage first")
    facts = state / FACTS
    finished = json.loads(facts.read_text(encoding="utf-8"))["finished"]
    there = {path.stem for path in state.glob("*.safetensors")}
    # Beside a fake score the student's EMA is near enough to its weights: a call's files must stay below 64 MiB.
    unfinished = ["ema", "fake"] if "fake" in there else ["ema", "weights", "second_moments"]
    groups = ["ema"] if finished else unfinished
    goal.mkdir(parents=True, exist_ok=True)
    for old in goal.glob(f"{source.name}.*.tar"):
        old.unlink()
    sizes = {}
    for name in groups:
        path = goal / f"{source.name}.{name}.tar"
        with tempfile.TemporaryDirectory() as folder, tarfile.open(path, "w") as tar:
            tensors = {n: t.bfloat16() for n, t in load_file(state / f"{name}.safetensors").items()}
            save_file(tensors, Path(folder, name))
            tar.add(Path(folder, name), f"{STATE}/{name}.safetensors")
            if name == "ema":
                tar.add(facts, f"{STATE}/{FACTS}")
        sizes[path.name] = path.stat().st_size
    logs = [name for name in (LOSSES, CURVE) if (source / name).exists()]
    if logs:
        path = goal / f"{source.name}.{LOG_GROUP}.tar"
        with tarfile.open(path, "w") as tar:
            for name in logs:
                tar.add(source / name, name)
        sizes[path.name] = path.stat().st_size
    return sizes


def unpack(source: Path, goal: Path) -> None:
    """Unpack what `pack` made of the run that ``goal`` is named after; does nothing if there is none.

    Packed runs from before logs had a file of their own hold them beside the EMA; they unpack to the same files.
    """
    for path in sorted(source.glob(f"{goal.name}.*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                _extract(tar, member, goal)


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, goal: Path) -> None:
    """Write one packed file; tarfile's own filters are younger than Python 3.11."""
    target, data = (goal / member.name).resolve(), tar.extractfile(member)
    if data is None or not target.is_relative_to(goal.resolve()):
        raise ValueError(f"{tar.name} holds {member.name!r}, which is no file of a run")
    target.parent.mkdir(parents=True, exist_ok=True)
    with data, target.open("wb") as out:
        shutil.copyfileobj(data, out)


def main(arguments: list[str] | None = None) -> int:
    """Pack a run for a transfer, or unpack one."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("run", type=Path, help="folder of the run; its name names the files")
    parser.add_argument("files", type=Path, help="folder of the packed files")
    options = parser.parse_args(arguments)
    if options.action == "pack":
        print(json.dumps({"packed": pack(options.run, options.files)}))
    else:
        unpack(options.files, options.run)
    return 0


if __name__ == "__main__":
    sys.exit(main())

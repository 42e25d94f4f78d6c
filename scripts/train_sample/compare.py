"""Tries several ways to train a stage, several GPUs at once, and prints one JSON line each.

    python -m scripts.train_sample.compare --run R/dit --vae R/vae --seconds 40 \\
        "graphs batch-scale=0.5" "graphs batch-scale=0.25 optimizer=muon rate=6e-4"
    python -m scripts.train_sample.compare --stage dmd --begin R/ode --teacher R/dit --vae R/vae --gpus 8 --ranks 2 \\
        "compile graphs" "compile graphs fake-steps=5" "compile graphs turns=near,far,first"

The words of a variant are options of the stage's script without their dashes. With ``--run`` each goes on in a copy of
that finished run by a new leg (as ``--more`` does), so each sees a whole warm-up and fall of its rate; a student may
begin anew instead. A line holds steps, milliseconds a step once warm and the mean losses of the last fifth; of a
teacher `probe`'s losses before and after, of a student ``followed`` at the start and the end of a stream and the rest
of `evaluate`'s report. A process that fails says so there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.train_sample.distillation import METHODS
from scripts.train_sample.variant import Variant, told_as_json

# Samples a rank of a teacher: what one of four holds of `train_dit`'s pool. To encode all takes longer than to compare.
RANK_POOL = 2048


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all variants, as many at once as there are GPUs for; return their lines in the order asked for."""
    places = [
        [str(gpu) for gpu in range(first, first + options.ranks)]
        for first in range(0, options.gpus - options.ranks + 1, options.ranks)
    ]
    if not places:
        raise ValueError(f"{options.ranks} ranks a variant, but {options.gpus} GPUs; ask for fewer ranks")
    cores = max(1, (os.cpu_count() or 1) // (len(places) * options.ranks))
    lines: list[dict[str, Any]] = [{} for _ in options.variants]
    waiting = list(enumerate(options.variants))
    running: dict[int, tuple[subprocess.Popen[bytes], int, Path]] = {}  # process, place, log
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < len(places):
                number, variant = waiting.pop(0)
                taken = {place for _, place, _ in running.values()}
                place = next(i for i in range(len(places)) if i not in taken)
                goal, log = Path(options.keep or folder, str(number)), Path(folder, f"{number}.log")
                if goal.exists():
                    raise FileExistsError(f"{goal} is there already; give --keep another folder")
                if options.run is not None:
                    shutil.copytree(options.run, goal)
                process = _start(options, variant, goal, log, places[place], cores)
                running[number] = (process, place, log)
            time.sleep(0.2)
            for number in [n for n, (process, _, _) in running.items() if process.poll() is not None]:
                process, _, log = running.pop(number)
                lines[number] = {"variant": options.variants[number], **_told(process.returncode, log)}
                print(json.dumps(lines[number]), flush=True)
    return lines


def command(options: argparse.Namespace, variant: str, goal: Path, count: int) -> list[str]:
    """Return what trains a variant in a folder on ``count`` GPUs."""
    words = variant.split()
    if options.stage == "dit":
        words.insert(0, f"pool={RANK_POOL * count}")
    told = Variant(
        stage=options.stage,
        folder=str(goal),
        vae=str(options.vae),
        teacher=None if options.teacher is None else str(options.teacher),
        begin=None if options.begin is None else str(options.begin),
        more=options.run is not None,
        seconds=options.seconds,
        prompts=options.prompts,
        chunks=options.chunks,
        device=options.device,
        options=tuple(f"--{word}" for word in words),
    )
    launch = [sys.executable]
    if count > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        launch += ["--nproc-per-node", str(count)]
    return [*launch, "-m", "scripts.train_sample.variant", told_as_json(told)]


def _start(
    options: argparse.Namespace, variant: str, goal: Path, log: Path, gpus: list[str], cores: int
) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    environment |= {name: str(cores) for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")}
    with log.open("wb") as file:
        return subprocess.Popen(
            command(options, variant, goal, len(gpus)), env=environment, stdout=file, stderr=subprocess.STDOUT
        )


def _told(code: int, log: Path) -> dict[str, Any]:
    """Return what a variant's last line says, or how it failed."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    if code == 0:
        told: dict[str, Any] = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
        return told
    return {"failed": code, "said": lines[-12:]}


def main(arguments: list[str] | None = None) -> int:
    """Compare variants of one stage's training."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "variants",
        nargs="+",
        help="quoted words, each an option of the stage's script: graphs batch-scale=0.5",
    )
    parser.add_argument("--stage", choices=("dit", *METHODS), default="dit")
    parser.add_argument(
        "--run", type=Path, help="folder of a finished run of the stage to go on from; it stays as it is"
    )
    parser.add_argument("--vae", type=Path, required=True, help="folder of the VAE's run")
    parser.add_argument("--teacher", type=Path, help="of a student: folder of the teacher's run")
    parser.add_argument(
        "--begin", type=Path, help="of a student: folder of an earlier distillation to begin from"
    )
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="training of each variant, without compiling"
    )
    parser.add_argument(
        "--prompts", type=int, default=192, help="of a student: held-out ones that it is judged by"
    )
    parser.add_argument(
        "--chunks", type=int, default=20, help="of a student: of each judged stream; 20 are 15 s"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep the runs as FOLDER/0, FOLDER/1, ... in the order asked for",
    )
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of each variant")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    if options.stage == "dit" and (options.run is None or options.teacher or options.begin):
        parser.error("dit is compared behind --run, without --teacher and --begin")
    if options.stage != "dit" and options.teacher is None:
        parser.error(f"{options.stage} needs --teacher")
    if options.run is not None and options.begin is not None:
        parser.error("--run and --begin both say where to begin; give one of them")
    return 1 if any("failed" in line for line in compare(options)) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Tries several ways to go on with a teacher, each from a copy of the same run, several GPUs at once.

    python -m scripts.train_sample.compare --run R/dit --vae R/vae --seconds 40 \\
        "graphs batch-scale=0.5" "graphs batch-scale=0.25 optimizer=muon rate=6e-4"

The words of a variant are options of `train_dit` without their dashes. A finished run begins a new leg (as ``--more``
does), so each variant sees a whole warm-up and fall of its rate. One JSON line a variant: steps, milliseconds a step
once warm, the mean loss of the last fifth, and `probe`'s losses, before and after. A process that fails says so there.
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

# Samples a rank: what one of four holds of `train_dit`'s pool. To encode all of it would take longer than to compare.
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
                goal, log = Path(folder, str(number)), Path(folder, f"{number}.log")
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
    words = [f"pool={RANK_POOL * count}", *variant.split()]
    told = {
        "folder": str(goal),
        "vae": str(options.vae),
        "seconds": options.seconds,
        "device": options.device,
        "options": [f"--{word}" for word in words],
    }
    launch = [sys.executable]
    if count > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        launch += ["--nproc-per-node", str(count)]
    return [*launch, "-m", "scripts.train_sample.variant", json.dumps(told)]


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
    """Compare variants of a teacher's training from one run."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "variants", nargs="+", help="quoted words, each an option of train_dit: graphs batch-scale=0.5"
    )
    parser.add_argument(
        "--run", type=Path, required=True, help="folder of the teacher's run; it stays as it is"
    )
    parser.add_argument("--vae", type=Path, required=True, help="folder of the VAE's run")
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="training of each variant, without compiling"
    )
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of each variant")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    return 1 if any("failed" in line for line in compare(options)) else 0


if __name__ == "__main__":
    sys.exit(main())

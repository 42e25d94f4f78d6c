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

from scripts.train_sample import ranks, train_dit
from scripts.train_sample.latent_pool import LAYOUTS
from scripts.train_sample.probe import probe
from scripts.train_sample.progress import LOSSES
from scripts.train_sample.train_vae import FrozenVae

# Samples a rank: what one of four holds of `train_dit`'s pool. To encode all of it would take longer than to compare.
RANK_POOL = 2048
LAST_SHARE = 0.2


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


def train_and_probe(folder: Path, vae: Path, seconds: float, device: str, variant: list[str]) -> None:
    """Be one variant: train in the folder, then print its line."""
    arguments = ["--folder", str(folder), "--vae", str(vae), "--device", device, "--resume"]
    arguments += ["--more", str(seconds / 60), *variant]
    options, began = train_dit.read_options(arguments), time.monotonic()
    with ranks.joined(device) as own:
        encode_video = FrozenVae(vae, own).encode
        rows = {"rows": 2, "draws": 1, "pool_size": 8} if "--rehearse" in variant else {}
        before = probe(folder, encode_video, own, **rows) if ranks.is_first() else {}
        options.device = own
        first = train_dit.run_with(options).leg
        if not ranks.is_first():
            return
        after = probe(folder, encode_video, own, **rows)
    print(json.dumps({"steps": first["steps"], "minutes": first["minutes"], "wall_s": round(time.monotonic() - began),
                      **summary(folder / LOSSES, first["first_step"]), "probe": after, "before": before}))  # fmt: skip


def summary(log: Path, first_step: int) -> dict[str, Any]:
    """Return milliseconds a step over the log's second half, and each layout's mean loss over its last fifth.

    Parameters
    ----------
    log : Path
        The loss log.
    first_step : int
        Lines of earlier steps are left out.

    Returns
    -------
    dict
        ``ms_a_step`` (None where the log is too short to say), ``loss`` by layout.
    """
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line["step"] >= first_step]
    late = lines[len(lines) // 2 :]
    steps = late[-1]["step"] - late[0]["step"] if late else 0
    spent = 1000 * (late[-1]["seconds"] - late[0]["seconds"]) / steps if steps else None
    losses = {}
    for layout in LAYOUTS:
        values = [line[layout] for line in lines if layout in line]
        last = values[-max(1, round(LAST_SHARE * len(values))) :]
        losses[layout] = round(sum(last) / len(last), 5) if last else None
    return {"ms_a_step": None if spent is None else round(spent, 2), "loss": losses}


def _start(
    options: argparse.Namespace, variant: str, goal: Path, log: Path, gpus: list[str], cores: int
) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    environment |= {name: str(cores) for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")}
    launch = [sys.executable]
    if len(gpus) > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        launch += ["--nproc-per-node", str(len(gpus))]
    command = [
        *launch,
        "-m",
        __spec__.name if __spec__ else __name__,
        f"--alone=pool={RANK_POOL * len(gpus)} {variant}",
    ]
    command += ["--run", str(goal), "--vae", str(options.vae), "--seconds", str(options.seconds)]
    command += ["--device", options.device]
    with log.open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


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
        "variants", nargs="*", help="quoted words, each an option of train_dit: graphs batch-scale=0.5"
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
    parser.add_argument(
        "--alone", metavar="VARIANT", help="run one variant in --run itself, as this script's children do"
    )
    options = parser.parse_args(arguments)
    if options.alone is not None:
        variant = [f"--{word}" for word in options.alone.split()]
        train_and_probe(options.run, options.vae, options.seconds, options.device, variant)
        return 0
    if not options.variants:
        parser.error("give at least one variant")
    return 1 if any("failed" in line for line in compare(options)) else 0


if __name__ == "__main__":
    sys.exit(main())

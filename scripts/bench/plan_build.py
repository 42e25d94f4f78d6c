"""How long a build of TensorRT plans takes, from a checkpoint of random weights that is written before it.

    python scripts/bench/plan_build.py FOLDER [--preset self-forcing-1.3b] [--target sm_89] [--kv fp4] [--out FILE]

FOLDER needs room for the checkpoint, which stays there for the next run, and for the artifact, which is removed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import shutil
import sys
import time
from pathlib import Path

from rows import append_row

from seko_export.families.model_files import write_random_checkpoint
from seko_export.families.registry import presets

ROOT = Path(__file__).parents[2]
BAR_S = 60.0  # of wall time on two idle cores, for the 1.3B model with an exact cache
IDLE = 0.1  # others' share of the processors' time, up to which the cores count as idle
BARRED = ("self-forcing-1.3b", "bf16")
PR_SET_CHILD_SUBREAPER = 36  # of prctl: processes whose parent ended become children of this one


def main() -> None:
    """Build once and append a row: the processor time of all processes, the wall time, and how busy the machine was.

    The bar is of the wall time, which says nothing where others work: such a row has none.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--preset", default=BARRED[0])
    parser.add_argument("--target", default="sm_89")
    parser.add_argument("--kv", default=BARRED[1])
    parser.add_argument("--attention", default="torch")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks" / "cpu.jsonl")
    options = parser.parse_args()
    checkpoint, artifact = options.folder / f"{options.preset}.pt", options.folder / "artifact"
    if not checkpoint.exists():
        write_random_checkpoint(checkpoint, presets()[options.preset].model, seed=0)
    command = [sys.executable, "-m", "seko_export", "build", "--preset", options.preset]
    if options.kv == "bf16":
        command.insert(4, str(checkpoint))
    else:  # the scales of a quantised cache are calibrated with goldens, which take hours on a CPU
        command += ["--random-weights", "0"]
    command += ["--kv", options.kv, "--attention", options.attention, "--no-goldens", "--no-vae", "--no-text"]
    command += ["--backend", "tensorrt-rtx", "--target", options.target, "-o", str(artifact), "--force"]
    load, wall_s, processor_s, busy_s = _measured(command)
    shutil.rmtree(artifact)
    idle = busy_s - processor_s <= IDLE * busy_s
    append_row(
        options.out,
        "plan_build_s",
        f"{options.preset}, {options.kv}, attention {options.attention}, {options.target}",
        wall_s,
        "s",
        BAR_S if idle and (options.preset, options.kv) == BARRED else None,
        processor_s=round(processor_s, 1),
        others_s=round(busy_s - processor_s, 1),
        load_before=load,
        cores=len(os.sched_getaffinity(0)),
        checkpoint=options.kv == "bf16",
    )


def _measured(command: list[str]) -> tuple[float, float, float, float]:
    """Run a command; return the load before it, its wall seconds, its processor seconds and those of the machine.

    Compile workers are not children of the build, so this process becomes the parent of what they leave.
    """
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise SystemExit("prctl refused: the workers' processor time cannot be counted")
    load, busy, started = os.getloadavg()[0], _busy_s(), time.monotonic()
    build = os.posix_spawn(command[0], command, os.environ)
    wall_s = 0.0
    while True:
        try:
            ended, status = os.wait()
        except ChildProcessError:
            break
        if ended == build:
            wall_s = time.monotonic() - started
            if status:
                raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return load, wall_s, usage.ru_utime + usage.ru_stime, _busy_s() - busy


def _busy_s() -> float:
    """Processor seconds that all processes of this machine have had."""
    line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    user, nice, system, _, _, irq, softirq, *_ = map(int, line.split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()

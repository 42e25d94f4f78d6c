"""Start the ranks that `ranks.py` measures, one process each, and end all of them when one fails."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
CHILD = ("-m", "scripts.bench.rank_child")
SAID_BYTES = 3000  # of what a child that failed wrote last
CHILD_S = 240.0


def run_ranks(
    options: argparse.Namespace,
    name: str,
    ranks: int,
    spec: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    *,
    apart: bool = False,
) -> list[dict[str, Any]]:
    """Return what each rank's process measures, by rank; if one fails, the others are ended. ``environment`` has
    variables for the processes besides this one's. With ``apart`` each process is alone on its GPU, without the others:
    GPUs of one box differ by a few percent."""
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        shared = dict(spec) | {
            "ranks": 1 if apart else ranks,
            "meeting": f"{folder}/store",
            "chunks": options.steady,
        }
        processes, words = [], []
        try:
            for rank in range(ranks):
                own = shared | {"rank": 0 if apart else rank, "device": f"cuda:{rank}" if cuda else "cpu"}
                own["latents"] = str(options.work / f"{name}{f'-{rank}' if apart and rank else ''}.npz")
                words.append((Path(folder) / f"out{rank}", Path(folder) / f"err{rank}"))
                with words[-1][0].open("wb") as out, words[-1][1].open("wb") as err:
                    command = [sys.executable, *CHILD, json.dumps(own)]
                    variables = os.environ | dict(environment or {})
                    processes.append(
                        subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err, env=variables)
                    )
            _wait_for(processes, words)
            return [json.loads(out.read_text().strip().splitlines()[-1]) for out, _ in words]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _wait_for(processes: Sequence[subprocess.Popen[bytes]], words: Sequence[tuple[Path, Path]]) -> None:
    deadline = time.monotonic() + CHILD_S
    while any(process.poll() is None for process in processes):
        late = time.monotonic() > deadline
        for rank, process in enumerate(processes):
            if process.poll() or late:
                said = words[rank][1].read_text(errors="replace")[-SAID_BYTES:]
                raise RuntimeError(f"rank {rank}: exit {process.poll()}, late {late}: {said}")
        time.sleep(0.2)
    for rank, process in enumerate(processes):
        if process.returncode:
            raise RuntimeError(f"rank {rank}: {words[rank][1].read_text(errors='replace')[-SAID_BYTES:]}")

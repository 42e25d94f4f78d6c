"""Kills ranks at random moments, beside another group that must not notice. One row.

    python scripts/bench/rank_faults.py ARTIFACT --kills 50 --rows docs/benchmarks/h200.jsonl

Each time, one rank is killed while a session is opened or a chunk is made. What must follow: one `RankLostError` that
names the rank, and no process left. With ``--beside`` a second group of the same artifact makes chunks all the while
(on GPUs it takes as many more, from ``--beside-device`` on), and must make the bytes of an undisturbed one.
`sp_kill_error_s` is the longest time from a kill to the error.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime import open_artifact, read_manifest
from seko_runtime.errors import RankLostError

PATIENCE_S = 60.0
MOST_DELAY_S = 1.0
BAR_S = 5.0


def main() -> int:
    """Kill, count and append the row; return the exit code."""
    from rows import append_row

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, help="artifact of several ranks")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--beside-device", default="auto")
    parser.add_argument("--rows", type=Path, required=True)
    options = parser.parse_args()
    manifest, _ = read_manifest(options.artifact)
    draw = random.Random(options.seed)
    faults: list[dict[str, Any]] = []
    wrong: list[str] = []

    def kill_all() -> None:
        for _ in range(options.kills):
            rank, delay = draw.randrange(manifest.ranks), draw.uniform(0.0, MOST_DELAY_S)
            try:
                faults.append(kill_once(options.artifact, rank, delay))
            except AssertionError as fault:
                wrong.append(str(fault))

    if options.beside:
        with beside(options.artifact, options.beside_device) as faults_beside:
            kill_all()
        wrong += faults_beside
    else:
        kill_all()
    longest = max((record["seconds"] for record in faults), default=float("nan"))
    shape = f"{manifest.name}, {manifest.ranks} GPUs"
    append_row(options.rows, "sp_kill_error_s", shape, longest, "s from a kill to the error, the longest", BAR_S,
               kills=len(faults), wrong=wrong, beside=options.beside)  # fmt: skip
    return 1 if wrong else 0


def kill_once(folder: Path, rank: int, delay: float) -> dict[str, Any]:
    """Kill a rank ``delay`` seconds after a session was asked for; return what followed.

    Returns
    -------
    dict
        ``rank``, ``chunks`` made before, ``seconds`` from the kill to the error, ``error``.

    Raises
    ------
    AssertionError
        If another error came, or a process is left.
    """
    killed: list[float] = []
    with open_artifact(folder) as artifact:
        members = artifact.processes

        def kill() -> None:
            time.sleep(delay)
            killed.append(time.monotonic())
            os.kill(members[rank], signal.SIGKILL)

        thread, chunks = threading.Thread(target=kill), 0
        thread.start()
        try:
            session = artifact.open_session()
            while True:
                session.run_chunk().to_host()
                chunks += 1
        except RankLostError as fault:
            seconds, error = time.monotonic(), str(fault)
        finally:
            thread.join()
        _expect(f"rank {rank} of" in error, f"rank {rank} was killed, and the error is {error!r}")
    deadline = time.monotonic() + PATIENCE_S
    while any(map(is_running, members)):
        _expect(time.monotonic() < deadline, f"processes {[*filter(is_running, members)]} are left")
        time.sleep(0.05)
    return {"rank": rank, "chunks": chunks, "seconds": seconds - killed[0], "error": error}


@contextmanager
def beside(folder: Path, device: str = "auto") -> Iterator[list[str]]:
    """Make chunks with another group during the block, over and over the same ones.

    Yields
    ------
    list of str
        What went wrong, complete behind the block: an error, other bytes than before, or no chunk at all.
    """
    wrong: list[str] = []
    ready, done = threading.Event(), threading.Event()
    chunks: list[NDArray[np.float32]] = []

    def run() -> None:
        try:
            with open_artifact(folder, device) as artifact, artifact.open_session() as session:
                while not done.is_set() or len(chunks) < 2:
                    session.restart()
                    chunks.append(session.run_chunk().to_host())
                    ready.set()
                    if not np.array_equal(chunks[-1], chunks[0]):
                        wrong.append(f"chunk {len(chunks)} has other bytes than the first")
        except Exception as fault:
            wrong.append(f"{type(fault).__name__}: {fault}")
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        yield wrong
    finally:
        done.set()
        thread.join()


def is_running(process: int) -> bool:
    """Return whether a process has not ended; one that nobody has waited for yet has."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _expect(true: bool, otherwise: str) -> None:
    if not true:
        raise AssertionError(otherwise)


if __name__ == "__main__":
    sys.exit(main())

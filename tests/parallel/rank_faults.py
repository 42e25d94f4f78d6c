"""Kills ranks, beside another group that must not notice.

What must follow: one `RankLostError` that names the rank, and no process left; the second group of the same artifact
makes the bytes of an undisturbed one all the while.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime import open_artifact
from seko_runtime.errors import RankLostError

PATIENCE_S = 60.0  # until a test gives up; what it waits for takes seconds


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
    await_all(members)
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


def await_all(processes: Iterable[int]) -> None:
    """Wait until these have ended."""
    deadline = time.monotonic() + PATIENCE_S
    while left := [*filter(is_running, processes)]:
        _expect(time.monotonic() < deadline, f"processes {left} are left")
        time.sleep(0.05)


def _expect(true: bool, otherwise: str) -> None:
    if not true:
        raise AssertionError(otherwise)

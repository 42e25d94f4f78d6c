"""What a session gets alone it gets whatever happens to it and beside it: for families of several kinds. No tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seko_runtime.video.pool import Pool
from tests.support.tolerances import relative_error


def run(session: Any, chunks: int) -> list[np.ndarray]:
    """Return the latents of the next chunks."""
    return [session.run_chunk().to_host().copy() for _ in range(chunks)]


def equal(chunks: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> bool:
    """Return whether these chunks are the same to the last bit."""
    return all(np.array_equal(*both) for both in zip(chunks, wanted, strict=True))


def check_lives(
    opened: Callable[[int], AbstractContextManager[Pool]],
    begin: Callable[[Pool, int], Any],
    control: str,
    keys: tuple[str, str],
    *,
    chunks: int,
    bound: float,
    folder: Path,
) -> None:
    """Compare sessions with what they make alone: on a row that was another's, after a pause with another one on the
    row, from a snapshot, after a restart and a step back to the beginning; and, but for rounding, in calls with another
    row that is at another chunk.

    Parameters
    ----------
    opened : callable
        Opens a pool of so many rows.
    begin : callable
        Opens the session of a row: one seed for each.
    control, keys
        The control that ``keys`` are given to, other ones for each of two sessions.
    chunks : int
        Of a session, past the wrap.
    bound : float
        Error that the order of sums may make.
    folder : Path
        For the snapshot.
    """

    def steered(session: Any, row: int) -> Any:
        session.controls[control].take({"keys": keys[row]})
        return session

    with opened(1) as pool:
        wanted = []
        for row in range(2):
            with steered(begin(pool, row), row) as session:
                wanted.append(run(session, chunks))
        assert relative_error(*(torch.from_numpy(made[0]) for made in wanted)) > 0.1
        with steered(begin(pool, 0), 0) as session:
            made = run(session, chunks - 2)
            session.save(folder / "stream")
            state = session.controls.state()
            session.pause()
            with steered(begin(pool, 1), 1) as other:
                run(other, 2)
            session.resume()
            assert equal(made + run(session, 2), wanted[0])
            session.restart()
            assert equal(run(steered(session, 0), 2), wanted[0][:2])
            session.rewind(0)
            session.controls[control].reset()
            assert equal(run(steered(session, 0), 2), wanted[0][:2])
        with pool.restore(folder / "stream") as again:
            again.controls.load(state)
            assert equal(run(again, 2), wanted[0][-2:])
    with opened(3) as pool, steered(begin(pool, 0), 0) as early:
        found = [run(early, 1), []]
        with steered(begin(pool, 1), 1) as late:
            for _ in range(chunks - 1):
                for row, chunk in enumerate(pool.run([early, late])):
                    found[row].append(chunk.to_host().copy())
    for latents, others in zip(found, wanted, strict=True):
        for one, other in zip(latents, others, strict=False):
            assert relative_error(torch.from_numpy(one), torch.from_numpy(other)) <= bound

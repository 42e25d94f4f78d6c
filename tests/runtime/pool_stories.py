"""What the tests of pools share: a pool that ends with its sessions, and what one session was asked and gave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from seko_runtime.video.pool import Pool

from . import toy
from .toy_pool import open_alone

PROMPTS = ("a red disc", "a blue ring", "a green square bounces")
FILL_CHUNKS = -(-toy.CACHE // toy.CHUNK)  # the last of them finds a full cache


@contextmanager
def closing(pool: Pool) -> Iterator[Pool]:
    """Give a pool and end it with its sessions."""
    try:
        yield pool
    finally:
        for session in pool.sessions:
            session.close()
        pool.close()


@dataclass
class Story:
    """What was asked of one session, in order, and the bytes that it gave."""

    seed: int
    prompt: str
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    gave: list[bytes] = field(default_factory=list)

    def alone(self) -> list[bytes]:
        """The bytes of the same requests to a session of its own."""
        gave = []
        with open_alone(seeds=[self.seed], prompt=self.prompt) as session:
            for what, *rest in self.asked:
                if what == "run":
                    chunk = session.run_chunk()
                    gave.append(chunk.to_host().tobytes() + chunk.video().tobytes())
                elif what == "prompt":
                    session.set_prompt(rest[0], recache=rest[1])
                else:
                    session.restart_row(0, seed=rest[0])
        return gave


def take(chunk: Any) -> bytes:
    assert chunk.frames.shape[0] == 1
    return bytes(chunk.to_host().tobytes() + chunk.video().tobytes())

"""Sessions of a pool that advance together, and their chunks as arrays with a batch axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.video.chunk import Chunk, SessionStats
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.pool import Pool
from seko_runtime.video.session import Session

_TENANT = "together"  # the common tenant of these sessions, by which a prompt for all of them is encoded once


@dataclass(frozen=True)
class RowChunks:
    """The chunks of all streams of one engine call, as arrays with a batch axis."""

    rows: Sequence[Chunk]

    def to_host(self) -> NDArray[np.float32]:
        """Return the latents of all streams, float32 [B, C, F, h, w]."""
        return np.concatenate([chunk.to_host() for chunk in self.rows])

    def video(self) -> NDArray[np.uint8]:
        """Return the video frames of all streams, uint8 [B, T, H, W, 3]."""
        return np.concatenate([chunk.video() for chunk in self.rows])


@dataclass(frozen=True)
class Lockstep:
    """Sessions of a pool that advance together in one engine call, for `seko-run verify` and `seko-run run`.

    Parameters
    ----------
    pool : Pool
        The pool to which the sessions belong.
    sessions : sequence of Session
        The sessions, in the order of their rows in the pool.
    """

    pool: Pool
    sessions: Sequence[Session]

    @property
    def manifest(self) -> VideoManifest:
        """The artifact's manifest."""
        return self.pool.manifest

    @property
    def stats(self) -> SessionStats:
        """Counters of the pool."""
        return self.pool.stats

    def run_chunk(self, inputs: Mapping[str, NDArray[Any]] | None = None) -> RowChunks:
        """Make the next chunk of every session of the batch; inputs are [B, *shape]."""
        named = (inputs or {}).items()
        row_inputs = [{name: array[row] for name, array in named} for row in range(len(self.sessions))]
        return RowChunks(self.pool.run(self.sessions, row_inputs))

    def set_prompt(self, prompt: str, *, recache: bool = False) -> None:
        """Set the prompt of all sessions of the batch; see `Session.set_prompt`."""
        for session in self.sessions:
            session.set_prompt(prompt, recache=recache)

    def set_text(self, text: Any, *, recache: bool = False) -> None:
        """Set the prompts of the batch to text embeddings [B, tokens, text_dim]; see `Session.set_text`."""
        for row, session in enumerate(self.sessions):
            session.set_text(text[row : row + 1], recache=recache)

    def cache_sample(self, step: int) -> dict[str, NDArray[np.float32]]:
        """Copy every ``step``-th token of the KV cache to the host; see `Pool.cache_sample`."""
        return self.pool.cache_sample(step)


@contextmanager
def opened_in_lockstep(pool: Pool, beginnings: Iterable[Mapping[str, Any]]) -> Iterator[Lockstep]:
    """Context manager that opens a session of a pool for each of ``beginnings``, the arguments of
    `Pool.open_session`."""
    with ExitStack() as opened:
        sessions = [
            opened.enter_context(pool.open_session(tenant=_TENANT, **beginning)) for beginning in beginnings
        ]
        yield Lockstep(pool, sessions)

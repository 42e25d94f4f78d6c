"""Sessions of a pool that advance together, and their chunks as arrays of all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.video.chunk import Chunk, SessionStats
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.pool import Pool
from seko_runtime.video.session import Session

TOGETHER = (
    "together"  # the common tenant of these sessions, by which a prompt for all of them is encoded once
)


@dataclass(frozen=True)
class RowChunks:
    """The chunks of all rows of one call, as arrays with a batch axis."""

    rows: Sequence[Chunk]

    def to_host(self) -> NDArray[np.float32]:
        """Return the latents of all rows, float32 [B, C, F, h, w]."""
        return np.concatenate([chunk.to_host() for chunk in self.rows])

    def video(self) -> NDArray[np.uint8]:
        """Return the video frames of all rows, uint8 [B, T, H, W, 3]."""
        return np.concatenate([chunk.video() for chunk in self.rows])


@dataclass(frozen=True)
class Together:
    """A batch: sessions of a pool that advance together, one for each row of its largest bucket.

    Parameters
    ----------
    pool : Pool
        The pool of the sessions.
    sessions : sequence of Session
        The sessions in the order of their rows.
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
        """Make the next chunk of every row; inputs are [B, *shape]."""
        named = (inputs or {}).items()
        row_inputs = [{name: array[row] for name, array in named} for row in range(len(self.sessions))]
        return RowChunks(self.pool.run(self.sessions, row_inputs))

    def set_prompt(self, prompt: str, *, recache: bool = False) -> None:
        """Set the prompt of all rows; see `Session.set_prompt`."""
        for session in self.sessions:
            session.set_prompt(prompt, recache=recache)

    def push_audio(self, samples: Any, *, last: bool = False) -> None:
        """Append samples to the voices of all rows; see `Session.push_audio`."""
        for session in self.sessions:
            session.push_audio(samples, last=last)

    def set_text(self, text: Any, *, recache: bool = False) -> None:
        """Set the rows' prompts to embeddings [B, tokens, text_dim]; see `Session.set_text`."""
        for row, session in enumerate(self.sessions):
            session.set_text(text[row : row + 1], recache=recache)

    def cache_sample(self, step: int) -> dict[str, NDArray[np.float32]]:
        """Copy every ``step``-th token of the cache; see `Pool.cache_sample`."""
        return self.pool.cache_sample(step)

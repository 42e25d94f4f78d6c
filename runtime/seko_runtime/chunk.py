"""What a session gives out: a finished chunk, and its counters. How chunks are made is in `session`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from seko_runtime.memory import Tensor

if TYPE_CHECKING:
    from seko_runtime.session import Session


@dataclass(frozen=True)
class Chunk:
    """One finished (on CUDA: queued) chunk.

    Parameters
    ----------
    index : int
        Number of the chunk in its session.
    frames : numpy.ndarray
        int64 [B, F], absolute latent-frame numbers of each row.
    latents : tensor
        float32 [B, C, F, h, w], the session's own buffer: valid until its next `run_chunk`.
    session : Session
        The session that made it.
    """

    index: int
    frames: NDArray[np.int64]
    latents: Tensor
    session: Session

    def to_host(self) -> NDArray[np.float32]:
        """Return a float32 copy [B, C, F, h, w]; waits for the chunk.

        Raises
        ------
        StaleChunkError
            If the session has begun another chunk, or rebuilt its cache, which overwrites the latents.
        SessionClosedError
            If the session is closed.
        """
        return self.session._read_chunk(self.index)

    def video(self) -> NDArray[np.uint8]:
        """Return the chunk's video frames, a uint8 copy [B, T, H, W, 3]; waits for their copy to the host.

        Raises
        ------
        StaleChunkError
            If the session has queued so many chunks since that these frames are overwritten.
        UsageError
            If the artifact makes no video, or rows differ in T: those that begin with this chunk have fewer frames.
        SessionClosedError
            If the session is closed.
        """
        return self.session._decoder().frames(self.index)

    def video_rows(self) -> list[NDArray[np.uint8]]:
        """Return each row's video frames, uint8 copies [T, H, W, 3]; as `video`, but rows may differ in T."""
        return self.session._decoder().row_frames(self.index)


@dataclass(frozen=True)
class SessionStats:
    """Counters of a session.

    ``graph_launches`` counts launches of captured chunks; it equals ``chunks`` where the backend captures, and leaves
    out the launches of captured decoding. ``prompt_cache_hits`` and ``prompt_cache_misses`` count the different
    prompts of each `set_prompt`.
    """

    chunks: int
    graph_launches: int
    captured_graphs: int
    pool_bytes: int
    prompt_cache_hits: int = 0
    prompt_cache_misses: int = 0

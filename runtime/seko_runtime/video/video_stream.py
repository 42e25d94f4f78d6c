"""The video frames of a session, chunk by chunk, for a loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from seko_runtime.video.chunk import Chunk
from seko_runtime.video.turns import Turns


class VideoStream:
    """Iterator over a session's video frames; what `Session.stream` gives.

    Threads may share it as they may share the session: each takes whole chunks, in order.

    Parameters
    ----------
    turns : Turns
        The session's.
    run_chunk : callable
        Makes its next chunk.
    queued : deque of Chunk
        The session's chunks that were made and not given out: given first.
    ahead : int
        How many chunks more than was given out are made.
    chunks : int, optional
        How many to give; without it there is no end.
    """

    def __init__(
        self,
        turns: Turns,
        run_chunk: Callable[[], Chunk],
        queued: deque[Chunk],
        ahead: int,
        chunks: int | None,
    ) -> None:
        self._turns, self._run_chunk, self._queued = turns, run_chunk, queued
        self._ahead, self._left = ahead, chunks

    def __iter__(self) -> VideoStream:
        return self

    def __next__(self) -> NDArray[np.uint8]:
        with self._turns.take():
            if self._left is not None and self._left <= 0:
                raise StopIteration
            wanted = 1 + self._ahead if self._left is None else min(1 + self._ahead, self._left)
            while len(self._queued) < wanted:
                self._queued.append(self._run_chunk())
            chunk = self._queued.popleft()
            if self._left is not None:
                self._left -= 1
            return chunk.video()

"""The video frames of a session, chunk by chunk, for a loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.video.call_lock import CallLock
from seko_runtime.video.chunk import Chunk
from seko_runtime.video.inputs import Inputs

_ENDED: Any = object()


class VideoStream:
    """Iterator over a session's video frames; what `Session.stream` gives.

    Threads may share it as they may share the session: each takes whole chunks, in order.

    Parameters
    ----------
    call_lock : CallLock
        The session's.
    run_chunk : callable
        Makes its next chunk.
    queued : deque of Chunk
        The session's chunks that were made and not given out: given first.
    ahead : int
        How many chunks more than was given out are made.
    chunks : int, optional
        How many to give; without it there is no end.
    inputs : iterable of mappings, optional
        What the caller gives, a chunk each; where they end, no more chunks are made.
    """

    def __init__(
        self,
        call_lock: CallLock,
        run_chunk: Callable[[Inputs | None], Chunk],
        queued: deque[Chunk],
        ahead: int,
        chunks: int | None,
        inputs: Iterable[Inputs] | None,
    ) -> None:
        self._call_lock, self._run_chunk, self._queued = call_lock, run_chunk, queued
        self._ahead, self._left = ahead, chunks
        self._inputs: Iterator[Inputs | None] = repeat(None) if inputs is None else iter(inputs)

    def __iter__(self) -> VideoStream:
        return self

    def __next__(self) -> NDArray[np.uint8]:
        with self._call_lock.take():
            if self._left is not None and self._left <= 0:
                raise StopIteration
            wanted = 1 + self._ahead if self._left is None else min(1 + self._ahead, self._left)
            while len(self._queued) < wanted and (own := next(self._inputs, _ENDED)) is not _ENDED:
                self._queued.append(self._run_chunk(own))
            if not self._queued:
                raise StopIteration
            chunk = self._queued.popleft()
            if self._left is not None:
                self._left -= 1
            return chunk.video()

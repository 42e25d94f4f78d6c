"""The iterator over a session's video frames."""

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
    """Iterator over a session's video frames, returned by `Session.stream`.

    Threads may share it as they may share the session: each takes whole chunks, in order.

    Parameters
    ----------
    call_lock : CallLock
        The session's lock.
    run_chunk : callable
        Makes the session's next chunk.
    queued : deque of Chunk
        Chunks that were made and not yielded yet; they are yielded first.
    ahead : int
        How many chunks are made ahead.
    chunks : int, optional
        Number of chunks; without it the stream is endless.
    inputs : iterable of mappings, optional
        Inputs of each chunk; when they end, no more chunks are made.
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

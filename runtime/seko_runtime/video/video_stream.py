"""The iterator over a session's video frames."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.video.chunk import Chunk
from seko_runtime.video.inputs import Inputs

_ENDED: Any = object()


class QueuedChunks(deque[Chunk]):
    """Chunks of a session that `Session.stream` has queued and not yielded yet.

    The lock ``turn`` of a session is held while the session's next chunk is made and read. Each session has a lock of
    its own, so that other sessions of the pool run while this session waits for frames or inputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.turn = threading.RLock()


class VideoStream:
    """Iterator over a session's video frames, returned by `Session.stream`.

    Several threads may share the iterator: each thread takes whole chunks, and the chunks are taken in order.

    Parameters
    ----------
    run_chunk : callable
        Function that makes the session's next chunk.
    queued : QueuedChunks
        The session's queued chunks, which are yielded first.
    ahead : int
        Number of chunks that are made before they are yielded.
    chunks : int, optional
        Number of chunks to make; default: endless.
    inputs : iterable of mappings, optional
        Inputs of each chunk; when the iterable ends, no more chunks are made.
    """

    def __init__(
        self,
        run_chunk: Callable[[Inputs | None], Chunk],
        queued: QueuedChunks,
        ahead: int,
        chunks: int | None,
        inputs: Iterable[Inputs] | None,
    ) -> None:
        self._run_chunk, self._queued = run_chunk, queued
        self._ahead, self._left = ahead, chunks
        self._inputs: Iterator[Inputs | None] = repeat(None) if inputs is None else iter(inputs)

    def __iter__(self) -> VideoStream:
        return self

    def __next__(self) -> NDArray[np.uint8]:
        with self._queued.turn:
            if self._left is not None and self._left <= 0:
                raise StopIteration
            wanted = 1 + self._ahead if self._left is None else min(1 + self._ahead, self._left)
            while len(self._queued) < wanted and (own := next(self._inputs, _ENDED)) is not _ENDED:
                self._queued.append(self._run_chunk(own))
            try:
                chunk = self._queued.popleft()
            except IndexError:  # the inputs have ended, or another thread closed the session just now
                raise StopIteration from None
            if self._left is not None:
                self._left -= 1
            return chunk.video()

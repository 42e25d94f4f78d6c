"""A session of a pool, as its user sees it. The pool decides which sessions share a launch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import UsageError
from seko_runtime.sessions.session import RowSession, SharedRows
from seko_runtime.video.chunk import Chunk
from seko_runtime.video.conditioning import Camera, steered
from seko_runtime.video.inputs import Inputs
from seko_runtime.video.rows import VideoRows
from seko_runtime.video.session import video_stream
from seko_runtime.video.video_stream import QueuedChunks


class SharedStreams(SharedRows, Protocol):
    """What a session needs of its pool."""

    _rows: VideoRows

    def run(
        self, sessions: Sequence[PooledSession], inputs: Sequence[Inputs | None] | None = None
    ) -> list[Chunk]:
        """Make the next chunk of each of some sessions."""


class PooledSession(RowSession):
    """One stream in a pool. Made by `Pool.open_session`; use it as a context manager, or call `close`.

    Any thread may call it, also at the same time as other calls of the pool: one call runs, the others wait.

    Parameters
    ----------
    pool : Pool
        Its pool.
    name : str
        Name in messages.
    lease_s : float or None
        Seconds after which it ends if it is not run or renewed.
    tenant : str or None
        Sessions of this tenant share cached prompts; None: it finds its own only.
    """

    _pool: SharedStreams

    def __init__(self, pool: SharedStreams, name: str, lease_s: float | None, tenant: str | None) -> None:
        super().__init__(pool, name, lease_s, tenant)
        self._ahead = QueuedChunks()

    def run_chunk(self, inputs: Inputs | None = None, *, camera: Camera | None = None) -> Chunk:
        """Make the next chunk of this session alone; see `Pool.run` and, for ``camera``, `Session.run_chunk`."""
        return steered(lambda all_inputs: self._pool.run([self], [all_inputs])[0], inputs, camera)

    def request_chunk(self, due: float, inputs: Inputs | None = None) -> None:
        """Ask for the next chunk by a due time; `Pool.serve_next` makes it. Asking again replaces both.

        Parameters
        ----------
        due : float
            When the chunk should be there, in seconds of the pool's clock: `time.monotonic` by default.
        inputs : mapping, optional
            As `run_chunk` takes them.

        Raises
        ------
        UsageError
            If the due time is not finite, or an input does not fit or is missing.
        SessionClosedError
            If the session is paused or has ended.
        """
        self._ask(due, inputs)

    def stream(
        self,
        prompt: str | None = None,
        *,
        chunks: int | None = None,
        recache: bool = False,
        inputs: Iterable[Inputs] | None = None,
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield video frames chunk by chunk, uint8 [1, T, H, W, 3]; see `Session.stream`."""
        return video_stream(self, self._pool._rows, prompt, chunks, recache, inputs)

    def set_prompt(self, prompt: str, *, recache: bool = False) -> None:
        """Set the prompt to a sentence, from the next chunk on; see `Session.set_prompt`."""
        with self._pool._call_lock.take():
            self._pool._rows.set_prompt([self._running_row()], prompt, recache=recache)

    def set_text(self, text: object, *, recache: bool = False) -> None:
        """Set the prompt to embeddings [1, tokens, text_dim], from the next chunk on."""
        with self._pool._call_lock.take():
            self._pool._rows.set_text([self._running_row()], text, recache=recache)

    def set_inputs(self, inputs: Inputs) -> None:
        """Set the caller's inputs per session or prompt; see `Session.set_inputs`."""
        with self._pool._call_lock.take():
            self._pool._rows.set_inputs([self._running_row()], inputs)

    def rewind(self, chunk: int) -> None:
        """Step back to before a chunk was made; see `Session.rewind`."""
        with self._pool._call_lock.take():
            row = self._running_row()
            self._check_idle()
            self._pool._rows.rewind([row], chunk)

    def push_audio(self, samples: object, *, at: int | None = None, last: bool = False) -> None:
        """Append samples to the voice that the coming chunks hear; see `Session.push_audio`.

        A pause keeps them. A snapshot does not: push them again from where `audio_needed` says.
        """
        with self._pool._call_lock.take():
            self._pool._rows.push_audio([self._running_row()], samples, at, last=last)

    def audio_needed(self) -> tuple[int, int]:
        """Return which samples of the voice its next chunk uses; see `Session.audio_needed`."""
        with self._pool._call_lock.take():
            return self._pool._rows.audio_needed(self._running_row())

    def restart(self, *, seed: int | None = None, image: object = None, reference: object = None) -> None:
        """Restart the stream at frame 0 with an empty cache; the prompt stays."""
        with self._pool._call_lock.take():
            row = self._running_row()
            self._pool._rows.restart(row, seed=seed, image=image, reference=reference)

    def _check_idle(self) -> None:
        if self._ahead:
            raise UsageError(
                f"session {self.name!r} has a chunk that `stream` has not given out; take it first"
            )

    def _ended(self) -> None:
        self._ahead.clear()

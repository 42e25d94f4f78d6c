"""A session of a pool, as its user sees it. The pool decides which sessions share a launch."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import path_of, shown
from seko_runtime.errors import SessionClosedError, UsageError
from seko_runtime.video.call_lock import CallLock
from seko_runtime.video.chunk import Chunk
from seko_runtime.video.conditioning import Camera, steered
from seko_runtime.video.inputs import Inputs
from seko_runtime.video.session import video_stream
from seko_runtime.video.snapshot import RowState, write_snapshot
from seko_runtime.video.streams import Streams
from seko_runtime.video.video_stream import QueuedChunks


class SessionLeakWarning(ResourceWarning):
    """A session was garbage-collected without being closed; the message names it. Its row is free again."""


class SharedRows(Protocol):
    """What a session needs of its pool: its streams, its lock and its rows."""

    _streams: Streams
    _call_lock: CallLock
    _digests: Sequence[str]
    _snapshot_key: bytes | None
    _clock: Callable[[], float]
    _lost: deque[str]

    def run(
        self, sessions: Sequence[PooledSession], inputs: Sequence[Inputs | None] | None = None
    ) -> list[Chunk]:
        """Make the next chunk of each of some sessions."""

    def reap(self) -> list[str]:
        """End the sessions whose lease has run out; return their names."""

    def _free_row(self, tenant: str | None) -> int:
        """Return a free row, prepared for a tenant; PoolFullError if there is none."""


class PooledSession:
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

    # Its row, its state on the host, or None: never opened, or closed. What it is and whose the row is changes with
    # one assignment, which comes last; `Pool` finds its free rows from here.
    _place: int | RowState | None = None

    def __init__(self, pool: SharedRows, name: str, lease_s: float | None, tenant: str | None) -> None:
        self.name, self.tenant = name, tenant
        self._pool, self._lease_s = pool, lease_s
        self._ahead = QueuedChunks()
        self.expires: float | None = None

    def run_chunk(self, inputs: Inputs | None = None, *, camera: Camera | None = None) -> Chunk:
        """Make the next chunk of this session alone; see `Pool.run` and, for ``camera``, `Session.run_chunk`."""
        return steered(lambda all_inputs: self._pool.run([self], [all_inputs])[0], inputs, camera)

    def stream(
        self,
        prompt: str | None = None,
        *,
        chunks: int | None = None,
        recache: bool = False,
        inputs: Iterable[Inputs] | None = None,
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield video frames chunk by chunk, uint8 [1, T, H, W, 3]; see `Session.stream`."""
        return video_stream(self, self._pool._streams, prompt, chunks, recache, inputs)

    def set_prompt(self, prompt: str, *, recache: bool = False) -> None:
        """Set the prompt to a sentence, from the next chunk on; see `Session.set_prompt`."""
        with self._pool._call_lock.take():
            self._pool._streams.set_prompt([self._running_row()], prompt, recache=recache)

    def set_text(self, text: object, *, recache: bool = False) -> None:
        """Set the prompt to embeddings [1, tokens, text_dim], from the next chunk on."""
        with self._pool._call_lock.take():
            self._pool._streams.set_text([self._running_row()], text, recache=recache)

    def set_inputs(self, inputs: Inputs) -> None:
        """Set the caller's inputs per session or prompt; see `Session.set_inputs`."""
        with self._pool._call_lock.take():
            self._pool._streams.set_inputs([self._running_row()], inputs)

    def rewind(self, chunk: int) -> None:
        """Step back to before a chunk was made; see `Session.rewind`."""
        with self._pool._call_lock.take():
            row = self._running_row()
            if self._ahead:
                raise UsageError(
                    f"session {self.name!r} has a chunk that `stream` has not given out; take it first"
                )
            self._pool._streams.rewind([row], chunk)

    def push_audio(self, samples: object, *, at: int | None = None, last: bool = False) -> None:
        """Append samples to the voice that the coming chunks hear; see `Session.push_audio`.

        A pause keeps them. A snapshot does not: push them again from where `audio_needed` says.
        """
        with self._pool._call_lock.take():
            self._pool._streams.push_audio([self._running_row()], samples, at, last=last)

    def audio_needed(self) -> tuple[int, int]:
        """Return which samples of the voice its next chunk uses; see `Session.audio_needed`."""
        with self._pool._call_lock.take():
            return self._pool._streams.audio_needed(self._running_row())

    def restart(self, *, seed: int | None = None, image: object = None, reference: object = None) -> None:
        """Restart the stream at frame 0 with an empty cache; the prompt stays."""
        with self._pool._call_lock.take():
            row = self._running_row()
            self._pool._streams.restart(row, seed=seed, image=image, reference=reference)

    def pause(self) -> None:
        """Move the session's state to the host and free its row. Chunks that `stream` queued must have been taken.

        Raises
        ------
        UsageError
            If `stream` has queued a chunk that was not taken.
        """
        with self._pool._call_lock.take():
            row = self._running_row()
            if self._ahead:
                raise UsageError(
                    f"session {self.name!r} has a chunk that `stream` has not given out; take it first"
                )
            state = self._pool._streams.store(row)
            self._pool._streams.begin_owner(row, None)
            self._place = state

    def resume(self) -> None:
        """Take a free row again; the next chunk has the same bytes as without the pause.

        Raises
        ------
        PoolFullError
            If every row is taken; the session stays paused.
        UsageError
            If it is not paused, or its lease ran out meanwhile.
        """
        with self._pool._call_lock.take():
            self._pool.reap()
            state = self._place
            if not isinstance(state, RowState):
                raise UsageError(
                    f"session {self.name!r} is not paused{'; it is closed' if self.closed else ''}"
                )
            row = self._pool._free_row(self.tenant)
            self._pool._streams.load(row, state)
            self.renew()
            self._place = row

    def save(self, path: str | Path) -> None:
        """Write the session's whole state to a safetensors file of mode 0600, for `Pool.restore` here or elsewhere.

        Raises
        ------
        UsageError
            If the path is something else than a regular file.
        DiskError
            If it cannot be written.
        """
        path = path_of(path, "path")
        self._pool._call_lock.check_process()
        state = self._place
        if not isinstance(state, RowState):
            state = self._stored()
        write_snapshot(path, self._pool._digests, state, self._pool._snapshot_key)

    def renew(self) -> None:
        """Restart the lease; no effect on a session that has ended."""
        if self._lease_s is not None:
            self.expires = self._pool._clock() + self._lease_s

    @property
    def paused(self) -> bool:
        """Whether its state is on the host."""
        return isinstance(self._place, RowState)

    @property
    def closed(self) -> bool:
        """Whether the session has ended."""
        return self._place is None

    def close(self) -> None:
        """End the session and free its row, or its state on the host; a second call does nothing.

        It waits for the running call. In a forked process it does nothing.
        """
        if not self._pool._call_lock.forked:
            with self._pool._call_lock.lock:
                if self._row is not None:
                    self._pool._streams.begin_owner(self._row, None)
                self._place = None
                self._ahead.clear()

    def __enter__(self) -> PooledSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._row is not None and not self._pool._call_lock.forked:
            self._pool._lost.append(self.name)
            text = f"session {self.name!r} was never closed; its row is free again"
            warnings.warn(text, SessionLeakWarning, stacklevel=2)

    @property
    def _row(self) -> int | None:
        """Its row; None if it is paused or closed."""
        place = self._place
        return place if isinstance(place, int) else None

    def _stored(self) -> RowState:
        with self._pool._call_lock.take():
            place = self._place  # which another thread may have changed meanwhile
            return place if isinstance(place, RowState) else self._pool._streams.store(self._running_row())

    def _running_row(self, pool: SharedRows | None = None) -> int:
        if pool is not None and pool is not self._pool:
            raise UsageError(f"session {self.name!r} is another pool's")
        row = self._row
        if row is None:
            state = "paused; call resume()" if self.paused else "closed; open another one"
            raise SessionClosedError(f"session {self.name!r} is {state}")
        return row


def checked_name(name: object) -> str:
    """Return a session's name, which may be empty; UsageError for what is no text."""
    if isinstance(name, str):
        return name
    raise UsageError(f"name is {shown(name)}, expected a text")


def checked_lease(lease_s: object) -> float | None:
    """Return a lease in seconds, or None; UsageError if it is neither."""
    if lease_s is None:
        return None
    number = isinstance(lease_s, int | float | np.integer | np.floating)
    try:
        seconds = float(lease_s) if number and not isinstance(lease_s, bool | np.timedelta64) else None  # type: ignore[arg-type]
    except OverflowError:
        seconds = math.inf
    if seconds is None or not 0 < seconds < math.inf:
        found = type(lease_s).__name__ if seconds is None else seconds
        raise UsageError(f"lease_s is {found}, expected a finite number of seconds above 0, or None")
    return seconds

"""A pool: sessions with one stream each that come and go; each engine call carries some of them.

A session ends by `PooledSession.close`, when its lease runs out, or when nothing refers to it any more; never because
a call went without it.

Only the session knows its row: `PooledSession._place`, changed by one assignment. Free rows are computed from that
and stored nowhere, so an error or Ctrl-C between two lines cannot make the two disagree.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from seko_runtime.arguments import iterates, path_of
from seko_runtime.errors import PoolFullError, UsageError
from seko_runtime.video.chunk import Chunk, SessionStats
from seko_runtime.video.clocks import checked_seeds
from seko_runtime.video.inputs import Inputs
from seko_runtime.video.pooled_session import PooledSession, SessionLeakWarning, checked_lease, checked_name
from seko_runtime.video.prompts import checked_tenant
from seko_runtime.video.reference_frames import with_portrait
from seko_runtime.video.snapshot import checked_key, read_snapshot, stream_content
from seko_runtime.video.streams import Streams

__all__ = ["Pool", "PooledSession", "SessionLeakWarning"]


class Pool:
    """The rows of an artifact that was built with ``--sessions``.

    All methods of a pool, its sessions and their chunks may be called from any thread: one call runs at a time, and
    the others wait. In a process forked from the one that opened the pool they raise a ForkedProcessError.

    Parameters
    ----------
    streams : Streams
        The artifact's streams, prepared. The pool owns them.
    digest : str
        The artifact's digest, which snapshots name.
    clock : callable
        Returns seconds, for leases.
    snapshot_key : bytes, optional
        Key of the snapshots that sessions save and the pool restores; see `OpenArtifact.open_pool`.
    """

    def __init__(
        self,
        streams: Streams,
        *,
        digest: str = "",
        clock: Callable[[], float] = time.monotonic,
        snapshot_key: bytes | None = None,
    ) -> None:
        self.manifest = streams.manifest
        if self.manifest.pool is None:
            raise UsageError("this artifact was built without a pool; rebuild it with --sessions N")
        self._buckets = self.manifest.pool.buckets
        self._streams, self._clock = streams, clock
        self._digests: Sequence[str] = digest, stream_content(self.manifest) or digest
        self._snapshot_key = checked_key(snapshot_key)
        self._call_lock = streams.call_lock
        self._call_lock.waits = True
        self._members: list[
            weakref.ref[PooledSession]
        ] = []  # running, paused, or closed and still held by someone
        self._lost: deque[str] = deque()  # names of sessions that nobody held when they were dropped
        self._named = 0

    def open_session(
        self,
        *,
        seed: int = 0,
        prompt: str | None = None,
        text: object = None,
        image: object = None,
        conditioning_latents: object = None,
        reference: object = None,
        inputs: Inputs | None = None,
        name: str = "",
        lease_s: float | None = None,
        tenant: str | None = None,
    ) -> PooledSession:
        """Open a session on a free row; nothing of the row's last session remains.

        Parameters
        ----------
        seed : int
            Seed of the noise.
        prompt, text
            A sentence, or embeddings [1, tokens, text_dim]; one of them, if the artifact takes text.
        image, conditioning_latents
            A picture uint8 [H, W, 3], or latents [C, n, h, w], that the stream begins with.
        reference
            The reference frames, required if the artifact has some; see `reference_frames.set_reference`.
        inputs
            The caller's inputs per session or prompt; see `Session.set_inputs`.
        name : str
            Name in messages; default: a number.
        lease_s : float, optional
            Seconds, finite and above 0. The session ends if it is not run or renewed for so long, paused or not.
        tenant : str, optional
            Sessions of one tenant share cached prompts; other tenants never see them. A session without a tenant
            finds its own prompts only.

        Raises
        ------
        PoolFullError
            If every row is taken.
        UsageError
            If an argument does not fit; no row is taken then.
        SessionClosedError
            If the pool is closed.
        """
        checked_seed = int(checked_seeds([seed], 1)[0])
        name = checked_name(name)
        lease_s, tenant = checked_lease(lease_s), checked_tenant(tenant)
        with self._call_lock.take():
            self.reap()
            row = self._free_row(tenant)
            self._streams.forget(row, checked_seed)
            given = with_portrait(self.manifest, inputs, reference)
            self._streams.set_inputs([row], given, opening=True, image=image)
            if prompt is not None and text is not None:
                raise UsageError("found both prompt and text; give one")
            if prompt is not None:
                self._streams.set_prompt([row], prompt)
            else:
                self._streams.set_text([row], text)
            self._streams.set_conditioning([row], image, conditioning_latents)
            self._streams.set_reference([row], reference)
            return self._opened_on(row, name, lease_s, tenant)

    def restore(
        self, path: str | Path, *, name: str = "", lease_s: float | None = None, tenant: str | None = None
    ) -> PooledSession:
        """Open a session from a snapshot; its next chunk has the same bytes as without the interruption.

        Other sessions continue while the file is read. The file does not say whose the session is; ``tenant`` does.

        Raises
        ------
        SnapshotError
            If the file is no regular file, damaged, of another artifact, or not written with the pool's key.
        PoolFullError
            If every row is taken.
        UsageError
            If ``lease_s`` is no finite number above 0, or ``tenant`` no name.
        """
        path, name = path_of(path, "path"), checked_name(name)
        lease_s, tenant = checked_lease(lease_s), checked_tenant(tenant)
        with self._call_lock.take():
            self.reap()
            self._vacant_row()  # a full pool says so before it reads anything
            layout = self._streams.layout()
        state = read_snapshot(path, self._digests, layout, self._snapshot_key)
        with self._call_lock.take():
            self.reap()
            row = self._free_row(tenant)
            self._streams.load(row, state)
            return self._opened_on(row, name, lease_s, tenant)

    def run(
        self, sessions: Sequence[PooledSession], inputs: Sequence[Inputs | None] | None = None
    ) -> list[Chunk]:
        """Make the next chunk of several sessions in one call.

        They may be at different chunks, prompts and fill levels. If the artifact has separate engines for full caches,
        a call with full and filling caches takes two launches, otherwise one. If it fails, no session has advanced,
        and running them again gives the same bytes.

        Parameters
        ----------
        sessions : sequence of PooledSession
            Distinct, of this pool, at most as many as the largest call carries.
        inputs : sequence of mappings, optional
            The inputs of each session, in the order of ``sessions``; see `Session.run_chunk`.

        Returns
        -------
        list of Chunk
            One for each session, B = 1, valid until that session's next chunk.

        Raises
        ------
        UsageError
            If they do not fit into one call, or an input does not fit.
        SessionClosedError
            If one has ended.
        """
        several = isinstance(sessions, Collection) and iterates(sessions)
        if not several or not all(isinstance(s, PooledSession) for s in sessions):
            raise UsageError("expected a list of the pool's sessions")
        with self._call_lock.take():
            self.reap()
            rows = [session._running_row(self) for session in sessions]
            if not rows or len(rows) > self._buckets[-1] or len(set(rows)) < len(rows):
                raise UsageError(
                    f"a call of {len(rows)} sessions, {len(set(rows))} of them different; expected 1 to "
                    f"{self._buckets[-1]} different ones"
                )
            chunk = self._streams.run_chunk(rows, [None] * len(rows) if inputs is None else inputs)
            for session in sessions:
                session.renew()
            return [self._streams.row_chunk(chunk, place, row) for place, row in enumerate(rows)]

    def reap(self) -> list[str]:
        """End the sessions whose lease has run out, also paused ones; return their names and those of leaked
        sessions.

        A leaked session's row became free when its last reference went; here it is only reported.
        """
        with self._call_lock.take():
            names = [self._lost.popleft() for _ in range(len(self._lost))]
            now = self._clock()
            for known in list(self._members):
                session = known()
                if session is None:
                    self._members.remove(known)
                elif not session.closed and session.expires is not None and session.expires <= now:
                    session.close()
                    names.append(session.name)
            return names

    @property
    def sessions(self) -> list[PooledSession]:
        """Open sessions that are not paused, by row."""
        rows = self._held()
        return [rows[row] for row in sorted(rows)]

    @property
    def capacity(self) -> int:
        """Number of sessions that can hold a row at a time."""
        return self.manifest.rows

    @property
    def free(self) -> int:
        """Number of free rows."""
        return self.capacity - len(self._held())

    @property
    def session_bytes(self) -> int:
        """Bytes of one session's own state on the device."""
        with self._call_lock.take():
            return sum(spec.nbytes for spec in self._streams.layout().values())

    @property
    def stats(self) -> SessionStats:
        """Counters of all sessions together."""
        return self._streams.stats

    def close(self) -> None:
        """End all sessions and free all memory; sessions that are still open are reported. A second call does
        nothing.

        It waits for the running call; waiting calls are refused. In a forked process it does nothing.
        """
        if self._call_lock.forked:
            return
        with self._call_lock.last():
            if self._streams.closed:
                return
            left = self.sessions
            for session in left:
                session.close()
            self._streams.close()
            for session in left:  # last: a warning may be an error
                warnings.warn(f"session {session.name!r} was never closed", SessionLeakWarning, stacklevel=2)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _held(self) -> dict[int, PooledSession]:
        """Return the session of each taken row."""
        found = [(session._row, session) for known in list(self._members) if (session := known()) is not None]
        return {row: session for row, session in found if row is not None}

    def _vacant_row(self) -> int:
        """Return a free row; a PoolFullError does not reveal the other tenants."""
        self._streams.live()
        held = self._held()
        row = next((row for row in range(self.capacity) if row not in held), None)
        if row is None:
            raise PoolFullError(
                f"all {self.capacity} rows of the pool are taken; a session takes {self.session_bytes} bytes, "
                f"{self._streams.free_bytes()} are free on the device: close or pause one, or rebuild with more "
                "--sessions"
            )
        return row

    def _free_row(self, tenant: str | None) -> int:
        """Return a free row, ready for a tenant's stream; it stays free until a session takes it."""
        row = self._vacant_row()
        self._streams.reserve(row)
        self._streams.begin_owner(row, tenant)
        return row

    def _opened_on(self, row: int, name: str, lease_s: float | None, tenant: str | None) -> PooledSession:
        """Return a session on a row whose stream is ready; if this fails, the row stays free."""
        self._named += 1
        session = PooledSession(self, name or f"session-{self._named}", lease_s, tenant)
        session.renew()
        self._members.append(weakref.ref(session))
        try:
            session._place = row
            return session
        except BaseException:
            session._place = None
            raise

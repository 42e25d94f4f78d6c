"""A simulated session: its viewer's clock as the server keeps it, its snapshots, and the chunks that the viewer
received."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from simpy import Environment, Event

from seko_serve.live.admission import Demand
from seko_serve.live.pace import Pace
from seko_serve.live.session import MAX_ENCODING
from seko_serve.load import View
from seko_serve.simulation.durations import BoxTimes

Steps = Generator[Event, Any, Any]  # a process of SimPy, or a part of one
TENANT = "viewers"
DONE, KILLED, STOPPED = "done", "killed", "stopped"  # why a socket ends


class Session:
    """A session and its viewer, who plays chunks as they arrive and acknowledges each after it was shown.

    Parameters
    ----------
    env : Environment
        The simulation's clock.
    name : str
        Id of the session.
    times : BoxTimes
        Rate of frames and sizes of chunks.
    seconds : float
        Seconds of video that the viewer watches.
    buffer : int
        Chunks that the viewer collects before it plays.

    Attributes
    ----------
    over : Event
        Event that occurs when the socket ends; its value is the reason.
    lease, place : str
        Name of the box that has the session, and of the box in whose queue its viewer waits; empty if there is none.
    refused : str
        Code of the error with which the viewer was refused; empty if the viewer was not refused.
    lost : bool
        Whether the session was lost because its box was lost and the session had no snapshot.
    views : list of View
        The viewer's records, one for each socket.
    waits : list of float
        Seconds from the end of each socket to the next chunk.
    again : list of int
        For each socket that ended, the number of chunks that the viewer received again.
    saved : int or None
        Number of chunks that the last snapshot contains; None without a snapshot.
    """

    def __init__(self, env: Environment, name: str, times: BoxTimes, seconds: float, buffer: int) -> None:
        self._env, self.name, self._times, self._buffer = env, name, times, buffer
        self.demand = Demand(TENANT, times.period_s)
        self._wanted = math.ceil(seconds * times.fps)
        self._first = times.first_frames or times.chunk_frames
        self.opened_at = env.now
        self.over: Event = env.event()
        self.lease = self.place = self.refused = ""
        self.lost = False
        self.views: list[View] = []
        self.waits: list[float] = []
        self.again: list[int] = []
        self.saved: int | None = None
        self.unsaved, self.saving, self.asked, self.on_hold = 0, False, False, False
        self._encoding = 0  # chunks that were made and have not arrived
        self._waits_since: float | None = None  # when the device was first asked for the next chunk
        self._pace = Pace(times.fps, buffer)
        self._end: float | None = None  # when what the viewer plays is over; None while it collects chunks
        self._collected: list[tuple[int, int]] = []  # numbers and frames of chunks
        self._lost_at: float | None = None
        self._socket = 0  # acknowledgements of earlier sockets are lost
        self._ready: Callable[[Session], None] = _nobody

    @property
    def made_chunks(self) -> int:
        """Number of chunks that were made and encoded."""
        return self._pace.chunks

    @property
    def variant(self) -> int:
        """Number of the launch variant of the session's next chunk."""
        return bisect_right(self._times.variant_starts, self._pace.chunks + self._encoding)

    def frames(self, chunks: int) -> int:
        """Return the number of video frames in a stream's first ``chunks`` chunks."""
        return 0 if chunks == 0 else self._first + (chunks - 1) * self._times.chunk_frames

    def attach(self, ready: Callable[[Session], None]) -> None:
        """Begin to receive chunks; ``ready`` is called with the session each time the session's next chunk may be
        made."""
        self.over, self._socket, self._ready = self._env.event(), self._socket + 1, ready
        self._end, self._collected = None, []
        self.asked = self.on_hold = False
        self._encoding, self._waits_since = 0, None
        if self._lost_at is not None:  # it continues from the snapshot
            chunks = self.saved or 0
            self.again.append(self.made_chunks - chunks)
            frames = self.frames(chunks)
            self._pace = Pace(
                self._times.fps, self._buffer, chunks, frames, self._times.chunk_frames, chunks, first=frames
            )
            self.unsaved = 0
        self.views.append(View(self.opened_at if not self.views else self._env.now, self._times.fps))
        ready(self)

    def detach(self, reason: str) -> None:
        """End the socket."""
        if not self.over.triggered:
            self._ready = _nobody
            self._socket += 1
            self._lost_at = self._env.now
            self.over.succeed(reason)

    def may_run(self, *, alone: bool) -> bool:
        """Return whether the next chunk may be made; with ``alone`` all earlier chunks must be encoded."""
        free = not (self.asked or self.on_hold or self.over.triggered)
        fits = self._encoding < (1 if alone else MAX_ENCODING)
        return free and fits and self._pace.may_run(self._encoding)

    def due(self) -> float:
        """Return the time at which the viewer needs the next chunk, as the server knows it.

        A chunk that is being encoded is not on the viewer's clock yet. So a stream's second chunk is due at once, if
        the device asks before the first chunk is encoded.
        """
        if self._waits_since is None:
            self._waits_since = self._env.now
        return self._pace.due(self._waits_since, self._encoding)

    def accept_chunk(self, encode_s: float, ack_s: float) -> None:
        """Accept a chunk that the device has made. The chunk arrives when the chunk is encoded, and is acknowledged
        ``ack_s`` seconds after the chunk was shown.
        """
        self.asked, self._waits_since = False, None
        if self.over.triggered:
            return
        self._encoding += 1
        self.unsaved += 1
        if encode_s:
            encoded = self._env.timeout(encode_s)
            assert encoded.callbacks is not None  # it has not happened
            encoded.callbacks.append(partial(self._arrived, self._socket, ack_s))
        else:
            self._arrived(self._socket, ack_s)

    def _arrived(self, socket: int, ack_s: float, _: Event | None = None) -> None:
        """Count a chunk that was encoded, and give it to the viewer."""
        if socket != self._socket:
            return
        self._encoding -= 1
        number, came, view = self._pace.chunks, self._env.now, self.views[-1]
        frames = self._times.chunk_frames if number else self._first
        self._pace.count_chunk(frames, came)
        if view.first_at is None:
            view.first_at = came
        if self._lost_at is not None:
            self.waits.append(came - self._lost_at)
            self._lost_at = None
        view.came_at.append(came)
        view.frames.append(frames)
        if self._end is not None:
            self._play(number, frames, came, ack_s)
        else:
            self._collected.append((number, frames))
            if len(self._collected) == self._buffer:
                self._end = came
                for chunk, count in self._collected:
                    self._play(chunk, count, came, ack_s)
        self._ready(self)

    def _play(self, chunk: int, frames: int, came: float, ack_s: float) -> None:
        """Show a chunk after those that wait to be shown, and acknowledge it afterwards."""
        assert self._end is not None  # the viewer plays
        view = self.views[-1]
        if came > self._end:
            view.underruns += 1
            view.stall_s += came - self._end
        self._end = max(self._end, came) + frames / self._times.fps
        shown = self._env.timeout(self._end - self._env.now + ack_s)
        assert shown.callbacks is not None  # it has not happened
        shown.callbacks.append(partial(self._shown, chunk, self._socket))

    def _shown(self, chunk: int, socket: int, _: Event) -> None:
        if socket != self._socket:
            return
        self._pace.acknowledge(chunk, self._env.now)
        if self.frames(chunk + 1) >= self._wanted:
            self.detach(DONE)
        else:
            self._ready(self)


def _nobody(_: Session) -> None:
    """Make no chunk: the session has no box."""

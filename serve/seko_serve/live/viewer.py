"""The viewer of one session: its socket, the messages sent to it, and its clock."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from seko_serve.errors import ServeError
from seko_serve.live.connection import Connection
from seko_serve.live.pace import Pace
from seko_serve.live.watchers import Watchers
from seko_serve.protocol import Codec, Media, codec_of

_COUNTS = ("chunks", "frames", "last_frames", "shown", "late", "due_chunks")  # of the clock, saved by name


@dataclass(frozen=True)
class _Sent:
    """A message that was sent, the message's chunk, and a serial number. A client lacks the message if the last serial
    that the client received is smaller."""

    chunk: int
    serial: int
    content: str | bytes


@dataclass(frozen=True)
class Timing:
    """The place of a finished chunk on the viewer's clock, and whether the chunk was late.

    Parameters
    ----------
    first : int
        Number of the chunk's first unit (video frame or sample) in the session.
    lateness : float
        Seconds by which the chunk is late; 0 if it is on time.
    awaited : bool
        Whether the viewer was playing, so that the chunk had a due time.
    """

    first: int
    lateness: float
    awaited: bool


class Viewer:
    """The viewer of one session, who may lose the socket and reconnect. Any thread may call the methods of `Viewer`.

    Messages about a chunk are kept until the viewer has shown the chunk, so that the messages can be sent again on a
    resumed socket.

    Parameters
    ----------
    rate : float
        Units of the viewer's clock (video frames or samples) per second.
    loop : asyncio.AbstractEventLoop
        The event loop that sends messages.

    Attributes
    ----------
    detached_at : float or None
        Time since which the session has no socket; None while it has one.
    end : ServeError or None
        The error with which the session has ended; None while the session is open.
    codecs : tuple of Codec
        The codecs of the client that came last; none before the first socket.
    watchers : Watchers
        Those who see what the viewer is sent, and cannot be answered.
    """

    def __init__(self, rate: float, loop: asyncio.AbstractEventLoop) -> None:
        self.detached_at: float | None = time.monotonic()
        self.end: ServeError | None = None
        self.codecs: tuple[Codec, ...] = ()
        self._loop, self._lock = loop, threading.Lock()
        self._pace, self.watchers = Pace(rate), Watchers(loop)
        self._connection: Connection | None = None
        self._serial = 0  # of the next binary message
        self._sent: deque[_Sent] = deque()
        self._whole = 0  # chunks of which all messages were sent
        self._reopened = False  # from a snapshot, and no socket has come since
        self._went_back = False  # whether the next chunk is one that the viewer has seen already

    # -- the socket --------------------------------------------------------------------------------------------

    def enter(self) -> Connection:
        """Reserve the session for a new socket, and close the previous socket; messages are sent after `attach`.

        Raises
        ------
        ServeError
            If the session has ended.
        """
        connection = Connection()
        with self._lock:
            if self.end is not None:
                raise self.end
            before, self._connection = self._connection, connection
            self.detached_at = None
            if before is not None:
                before.end = ServeError("conflict", "another socket took over the session")
                before.open = False
                self._pace.stop()
        if before is not None:
            self._notify(before)
        return connection

    def attach(
        self,
        connection: Connection,
        begin: Callable[[], str],
        last_serial: int | None,
        buffer: int,
        codecs: Sequence[Codec],
    ) -> None:
        """Begin or resume sending: first the message ``ready``, then the earlier messages that a resumed client has
        not received. Media in other codecs than those of the client are left out, and count as shown.

        Parameters
        ----------
        connection : Connection
            The connection that `enter` returned.
        begin : callable
            Function that makes the next media decodable by this client, and returns the message ``ready``. No chunk is
            sent while ``begin`` runs.
        last_serial : int or None
            Serial number of the last message that a resumed client received. Chunks up to that message count as shown,
            because acknowledgements may have been lost. None for a client that is new to the session: it is sent none
            of the earlier messages, and all of their chunks count as shown.
        buffer : int
            Number of chunks that the viewer collects before playback begins.
        codecs : sequence of Codec
            The codecs that the client has chosen.

        Raises
        ------
        ServeError
            If another socket took over the session meanwhile, or the session has ended.
        """
        with self._lock:
            if connection.end is not None:
                raise connection.end
            self._pace.stop()  # a chunk that was under way without a socket may have started it
            self._pace.buffer = buffer
            ready, lacked = begin(), []
            self.codecs = tuple(codecs)
            if last_serial is None:
                self._acknowledge(self._whole - 1)
            else:
                earlier = [sent.content for sent in self._sent if sent.serial > last_serial]
                lacked = [content for content in earlier if self._playable(content)]
                none_left_out = len(lacked) == len(earlier)
                self._acknowledge(self._last_seen(last_serial) if none_left_out else self._whole - 1)
                if self._reopened and last_serial >= self._serial:
                    self._went_back = True
                    self._serial = last_serial + 1
            self._reopened = False
            connection.outbox.extend([ready, *lacked])
            connection.open = True
        self._notify(connection)

    def leave(self, connection: Connection) -> None:
        """Record that a socket is gone. After `leave` no chunks are made until another socket is attached."""
        with self._lock:
            connection.open = False
            if self._connection is connection:
                self._connection = None
                self.detached_at = time.monotonic()
                self._pace.stop()

    def tell(self, text: str) -> None:
        """Send a JSON message on the socket, if the session has one; the message is not sent again after a
        reconnect."""
        with self._lock:
            self._deliver([text])

    def finish(self, error: ServeError) -> None:
        """End the session: the socket closes with this error. Only the first call of `finish` has an effect."""
        with self._lock:
            self.end = self.end or error
            connection = self._connection
            if connection is not None and connection.end is None:
                connection.end = self.end
        if connection is not None:
            self._notify(connection)
        self.watchers.finish(self.end)

    # -- the clock ---------------------------------------------------------------------------------------------

    def acknowledge(self, chunk: int) -> None:
        """Record that the viewer has shown all chunks up to number ``chunk``."""
        with self._lock:
            self._acknowledge(chunk)

    def stop_clock(self) -> None:
        """Stop the viewer's clock for a pause, or a wait that the viewer caused; no chunk is late by it."""
        with self._lock:
            self._pace.stop()

    def takes(self, chunks: int) -> bool:
        """Return whether chunk number ``chunks`` of the session (counted from 0) may be made for the viewer now."""
        with self._lock:
            attached = self.end is None and self._connection is not None and self._connection.open
            return attached and self._pace.may_run(chunks - self._pace.chunks)

    def due(self, now: float, chunks: int) -> float:
        """Return the time at which chunk number ``chunks`` of the session (counted from 0) must be ready; ``now`` if
        the viewer plays nothing."""
        with self._lock:
            return self._pace.due(now, chunks - self._pace.chunks)

    @property
    def plays(self) -> bool:
        """Whether the viewer's clock runs."""
        with self._lock:
            return self.end is None and self.detached_at is None and self._pace.begun is not None

    def counts(self) -> dict[str, int]:
        """Return the numbers of chunks that were finished, had a due time, and were late."""
        with self._lock:
            return {
                "chunks": self._pace.chunks,
                "due_chunks": self._pace.due_chunks,
                "late_chunks": self._pace.late,
            }

    # -- a chunk, sent by one thread at a time -----------------------------------------------------------------

    def count(self, units: int) -> Timing:
        """Count a finished chunk of ``units`` video frames or samples, and return its place on the viewer's clock."""
        with self._lock:
            first, awaited = self._pace.frames, self._pace.begun is not None
            return Timing(first, self._pace.count_chunk(units, time.monotonic()), awaited)

    def send(self, chunk: int, messages: Iterable[str | Media]) -> None:
        """Send each of a chunk's messages as soon as ``messages`` yields it, and keep all messages until the chunk is
        shown.

        Parameters
        ----------
        chunk : int
            Number of the chunk in the session.
        messages : iterable of str or Media
            JSON messages, and media messages, whose serial numbers are set here. The last message is a JSON message.
        """
        begun = set() if self._went_back else set(Codec)
        self._went_back = False
        for content in messages:
            # The serial of a JSON message is the next one's: a client that has seen all media may still lack it.
            serial = self._serial
            if isinstance(content, Media):
                anew = content.discontinuity or content.codec not in begun
                begun.add(content.codec)
                packed: str | bytes = replace(content, serial=serial, discontinuity=anew).pack()
            else:
                packed = content
            with self._lock:
                self._serial += isinstance(content, Media)
                self._sent.append(_Sent(chunk, serial, packed))
                if self._playable(packed):  # not what was encoded while a client with another codec came
                    self._deliver([packed])
            self.watchers.send(packed, begins=isinstance(content, Media) and content.begins_video)
        with self._lock:
            self._whole = chunk + 1

    # -- a snapshot, taken while no chunk is being encoded -----------------------------------------------------

    def state(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return the viewer's state as a JSON value, and the sent messages that the viewer may not have received,
        oldest first.
        """
        with self._lock:
            sent, pace = list(self._sent), self._pace
            state: dict[str, Any] = {name: getattr(pace, name) for name in _COUNTS}
            state["serial"] = self._serial
        state["sent"] = [[entry.chunk, entry.serial, isinstance(entry.content, str)] for entry in sent]
        return state, [
            entry.content.encode() if isinstance(entry.content, str) else entry.content for entry in sent
        ]

    def load(self, state: Mapping[str, Any], messages: Sequence[bytes]) -> None:
        """Continue from a value that `state` returned; KeyError, TypeError or ValueError if the value is invalid."""
        described = state["sent"]
        if len(described) != len(messages):
            raise ValueError("the messages are not those that the state describes")
        with self._lock:
            self._sent.extend(
                _Sent(int(chunk), int(serial), content.decode() if is_text else content)
                for (chunk, serial, is_text), content in zip(described, messages, strict=True)
            )
            for name in _COUNTS:
                setattr(self._pace, name, int(state[name]))
            self._pace.stop()
            self._whole = self._pace.chunks
            self._serial, self._reopened = int(state["serial"]), True

    # -- with the lock held ------------------------------------------------------------------------------------

    def _acknowledge(self, chunk: int) -> None:
        self._pace.acknowledge(chunk, time.monotonic())
        while self._sent and self._sent[0].chunk < self._pace.shown:
            self._sent.popleft()

    def _last_seen(self, last_serial: int) -> int:
        """Return the last chunk whose media messages all have serial numbers up to this one."""
        lacked = (
            sent.chunk for sent in self._sent if isinstance(sent.content, bytes) and sent.serial > last_serial
        )
        return next(lacked, self._whole) - 1

    def _playable(self, content: str | bytes) -> bool:
        return isinstance(content, str) or codec_of(content) in self.codecs

    def _deliver(self, messages: Iterable[str | bytes]) -> None:
        connection = self._connection
        if connection is not None and connection.open:
            connection.outbox.extend(messages)
            self._notify(connection)

    def _notify(self, connection: Connection) -> None:
        """Wake the task that sends the connection's messages. The caller need not hold the lock."""
        self._loop.call_soon_threadsafe(connection.news.set)

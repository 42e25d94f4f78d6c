"""Those who watch a session beside its viewer: they are sent what the viewer is sent, and change nothing."""

from __future__ import annotations

import asyncio
import threading

from seko_serve.errors import ServeError
from seko_serve.live.connection import Connection

MOST_WATCHERS = 8  # of a session
MOST_BEHIND = 512  # messages that wait for a socket; whoever is further behind must come again


class Watchers:
    """The watchers of one session. Any thread may call the methods; what is sent never waits for a watcher.

    Parameters
    ----------
    loop : asyncio.AbstractEventLoop
        The event loop that sends messages.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._lock = loop, threading.Lock()
        self._began: dict[
            Connection, bool
        ] = {}  # whether each has got the message with which a decoder begins

    @property
    def count(self) -> int:
        """Number of watchers."""
        return len(self._began)

    def enter(self, first: str, *, began: bool) -> Connection:
        """Return the connection of a new watcher, which is sent the message ``first``, and the session's media from
        now on (``began``) or from the next key frame on; ServeError if there are `MOST_WATCHERS` already."""
        connection = Connection()
        connection.outbox.append(first)
        with self._lock:
            if len(self._began) >= MOST_WATCHERS:
                raise ServeError("full", f"{MOST_WATCHERS} others watch this session", retry_after=10.0)
            self._began[connection] = began
        connection.news.set()
        return connection

    def leave(self, connection: Connection) -> None:
        """A watcher's socket is gone."""
        with self._lock:
            self._began.pop(connection, None)

    def send(self, message: str | bytes, *, begins: bool = False, to_all: bool = False) -> None:
        """Send a message to those whose decoder has begun, or to all, where a decoder can begin with it (``begins``) or
        no decoder is needed (``to_all``)."""
        with self._lock:
            reached = [connection for connection, began in self._began.items() if began or begins or to_all]
            for connection in reached:
                self._began[connection] |= begins
                connection.outbox.append(message)
                if len(connection.outbox) > MOST_BEHIND:
                    connection.outbox.clear()
                    connection.end = ServeError(
                        "conflict", "the connection is too slow for this video", retry_after=2.0
                    )
                    del self._began[connection]
        for connection in reached:
            self._loop.call_soon_threadsafe(connection.news.set)

    def finish(self, error: ServeError) -> None:
        """Close all watchers' sockets with this error."""
        with self._lock:
            ended, self._began = list(self._began), {}
            for connection in ended:
                connection.end = error
        for connection in ended:
            self._loop.call_soon_threadsafe(connection.news.set)

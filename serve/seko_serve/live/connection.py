"""The session's side of one socket: the messages to be sent, and the error with which the socket ends."""

from __future__ import annotations

import asyncio
from collections import deque

from seko_serve.errors import ServeError


class Connection:
    """The messages for one socket. The session's lock guards the connection. Only the event loop's thread waits for
    messages.

    Attributes
    ----------
    outbox : deque of (str or bytes)
        Messages that were not sent yet, oldest first.
    end : ServeError or None
        The error with which the socket is closed after the messages of ``outbox``.
    open : bool
        Whether messages may be sent on the socket: True from the message ``ready`` on.
    """

    def __init__(self) -> None:
        self.outbox: deque[str | bytes] = deque()
        self.end: ServeError | None = None
        self.open = False
        self.news = asyncio.Event()

    async def messages(self) -> list[str | bytes]:
        """Wait for messages or the end of the socket, and return all messages that were not sent yet."""
        await self.news.wait()
        self.news.clear()
        waiting = []
        while self.outbox:
            waiting.append(self.outbox.popleft())
        return waiting

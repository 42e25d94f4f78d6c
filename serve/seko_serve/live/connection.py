"""One socket of a session, as the session sees it: what waits to be sent, and why it ends."""

from __future__ import annotations

import asyncio
from collections import deque

from seko_serve.errors import ServeError


class Connection:
    """The messages for one socket. The session guards it by its lock; only the event loop's thread waits.

    Attributes
    ----------
    outbox : deque of (str or bytes)
        Messages that wait.
    end : ServeError or None
        Why the socket is closed behind these.
    open : bool
        Whether it takes messages: from the message ``ready`` on.
    """

    def __init__(self) -> None:
        self.outbox: deque[str | bytes] = deque()
        self.end: ServeError | None = None
        self.open = False
        self.news = asyncio.Event()

    async def messages(self) -> list[str | bytes]:
        """Wait for messages or the end, and return all that wait."""
        await self.news.wait()
        self.news.clear()
        waiting = []
        while self.outbox:
            waiting.append(self.outbox.popleft())
        return waiting

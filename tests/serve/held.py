"""A server that waits in the middle of what it does. No tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from .bounded import LIMIT_S
from .conftest import Running


class Held:
    """An asynchronous function of a server that notes its calls; the first one waits before it goes on."""

    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self.called, self._released, self.ended = threading.Event(), threading.Event(), threading.Event()
        self._function, self.calls = function, 0

    async def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        self.called.set()
        if self.calls > 1:
            return await self._function(*arguments)
        await asyncio.to_thread(self._released.wait)
        try:
            return await self._function(*arguments)
        finally:
            self.ended.set()

    def wait_for_call(self) -> None:
        assert self.called.wait(LIMIT_S)

    def release_soon(self) -> None:
        """Go on after a client had time to act."""
        threading.Timer(0.1, self._released.set).start()

    def finish(self) -> None:
        """Go on after a client had time to act, and wait for the function's end."""
        self.release_soon()
        assert self.ended.wait(LIMIT_S)


def held_opening(server: Running) -> Held:
    """Have a server wait before it makes its next session."""
    held = server.manager.open = Held(server.manager.open)  # type: ignore[method-assign, assignment]
    return held

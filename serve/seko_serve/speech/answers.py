"""Answers with sound that is made while they are sent: a file, or events."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import Any

from prometheus_client import Counter
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from seko_serve.errors import ServeError
from seko_serve.http.line import event


class SoundResponse(StreamingResponse):
    """An answer with sound that is made while the answer is sent; afterwards the maker of the sound is closed.

    Parameters
    ----------
    content : async iterator of bytes
        The answer's body. If the iterator raises a ServeError, the connection is closed before the end of the chunked
        body, so that a client does not take the part for the whole.
    parts : async generator
        The maker of the sound.
    **options
        Status, headers and type of the answer.
    """

    def __init__(self, content: AsyncIterator[bytes], parts: AsyncGenerator[bytes], **options: Any) -> None:
        super().__init__(content, **options)
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        try:
            with suppress(ServeError):  # an answer that is not complete: the connection is closed
                await super().__call__(scope, receive, send)
        finally:
            await self._parts.aclose()


async def whole(first: bytes, parts: AsyncGenerator[bytes], request: Request) -> bytes:
    """Return the whole sound file, or its beginning if the client leaves."""
    content = bytearray(first)
    async with aclosing(parts):
        async for part in parts:
            content += part
            if await request.is_disconnected():
                break
    return bytes(content)


async def sound(first: bytes, parts: AsyncIterator[bytes], refused: Counter) -> AsyncIterator[bytes]:
    """Yield the parts of the sound file. Count a ServeError that ends the sound file too early."""
    yield first
    try:
        async for part in parts:
            yield part
    except ServeError as error:
        refused.labels(error.kind.code).inc()
        raise


async def events(
    first: bytes, parts: AsyncIterator[bytes], refused: Counter, done: Callable[[], dict[str, object]]
) -> AsyncIterator[bytes]:
    """Yield the parts of the sound as server-sent events with OpenAI's field names; an error is the last event.
    ``done`` returns the further fields of the event at the sound's end."""
    try:
        async for part in sound(first, parts, refused):
            yield event({"type": "speech.audio.delta", "audio": base64.b64encode(part).decode()})
        yield event({"type": "speech.audio.done", **done()})
    except ServeError as error:
        yield event({"type": "error", "error": error.body()})

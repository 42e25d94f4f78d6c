"""What tests do with a client that a program does not. No tests."""

from __future__ import annotations

from websockets.asyncio.client import ClientConnection

from seko_serve.client import AsyncClient
from seko_serve.errors import ServeError
from seko_serve.protocol import Media


def session_of(client: AsyncClient) -> str:
    """The id of a client's session."""
    return str(client.ready["session"])


def socket_of(client: AsyncClient) -> ClientConnection:
    """A client's socket, for messages that no client writes."""
    assert client._socket is not None
    return client._socket


def with_tokens_of(client: AsyncClient, again: AsyncClient, resume: str = "") -> AsyncClient:
    """Give another client all that a client knows of its session, as if it were the same one; perhaps with an older
    token."""
    again._stream, again._id, again._hello = client._stream, client._id, client._hello
    again._resume, again._serial = resume or client._resume, client._serial
    return again


async def to_the_end(client: AsyncClient) -> tuple[list[Media], str]:
    """Take what comes until the socket ends; return also the error's code."""
    media: list[Media] = []
    try:
        async for received in client.messages():
            if isinstance(received, Media):
                media.append(received)
    except ServeError as end:
        return media, end.kind.code
    return media, ""

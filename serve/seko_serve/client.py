"""Clients of the server: open a session, yield its messages, send controls, resume after a lost socket; request
speech.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPResponse
from typing import Any, Self, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from seko_serve.errors import KINDS, ServeError
from seko_serve.protocol import (
    JOIN,
    NONE_SEEN,
    QUEUE_HEADER,
    RESUME_PREFIX,
    SUBPROTOCOL,
    TICKET_PREFIX,
    Codec,
    Media,
    message,
)

CLOSE_S = 10.0  # for the server's answer to a close
ResultT = TypeVar("ResultT")
MOST_BYTES = 64 << 20  # of one message: a raw frame may be large


class AsyncClient:
    """One session of a server, used as an asynchronous context.

    Parameters
    ----------
    url : str
        The server's address, such as ``http://localhost:8000``.
    api_key : str, optional
        API key; required if the server has keys.

    Attributes
    ----------
    ready : dict
        The server's first message on the socket: frame size and rate, codecs, and the artifact's inputs.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url, self._key = url.rstrip("/"), api_key
        self._socket: ClientConnection | None = None
        self._id, self._resume, self._serial = "", "", NONE_SEEN
        self._stream_url = ""
        self._codecs: dict[str, list[str]] = {}
        self._controls = 0
        self.ready: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drop()

    async def open(
        self,
        *,
        codecs: Sequence[str] = ("h264", "vp8"),
        audio: Sequence[str] = (),
        buffer: int = 1,
        wait: bool = False,
        **session: object,
    ) -> Self:
        """Open a session and its socket.

        Parameters
        ----------
        codecs : sequence of str
            Video codecs in the order of preference.
        audio : sequence of str
            Sound codecs such as ``pcm``, in the order of preference; none: the session has no sound.
        buffer : int
            Chunks that the viewer collects before it plays.
        wait : bool
            Whether to wait in the server's queue while the server is full.
        **session
            Fields of ``POST /v1/sessions``: prompt, seed, fps, image, voice, inputs.

        Raises
        ------
        ServeError
            If the server refuses the request, with the server's code and message.
        """
        queue = JOIN if wait else ""
        while True:
            try:
                opened = await asyncio.to_thread(self._post, "/v1/sessions", session, queue)
                break
            except ServeError as refused:
                queue = str(refused.facts.get("queue_token", ""))
                if not queue:
                    raise
                await asyncio.sleep(refused.retry_after or 1.0)
        self._id, self._codecs = str(opened["id"]), {"codecs": list(codecs), "audio": list(audio)}
        self._stream_url = str(opened["url"])
        await self._connect(f"{TICKET_PREFIX}{opened['ticket']}", buffer)
        return self

    async def resume(self, *, buffer: int = 1) -> None:
        """Reconnect after the socket was lost; the server sends the missed messages again. A gateway of several
        servers is asked first where the session is, or can go on.
        """
        if self._at_another_server:
            found = await asyncio.to_thread(self._get, f"/v1/sessions/{self._id}")
            self._stream_url = str(found["url"])
        seen = "" if self._serial == NONE_SEEN else self._serial
        await self._connect(f"{RESUME_PREFIX}{self._resume}.{seen}", buffer)

    async def _connect(self, entrance: str, buffer: int) -> None:
        parts = urlsplit(self._url)
        scheme = "wss" if parts.scheme == "https" else "ws"
        own = f"{scheme}://{parts.netloc}{parts.path}/v1/sessions/{self._id}/stream"
        await self.drop()
        self._socket = await connect(
            self._stream_url if self._at_another_server else own,
            subprotocols=[Subprotocol(SUBPROTOCOL), Subprotocol(entrance)],
            max_size=MOST_BYTES,
            compression=None,
        )
        with suppress(ConnectionClosed):  # by a refusal, which is read next
            await self._socket.send(message("hello", **self._codecs, buffer=buffer))
        self.ready = self._parsed(await self._socket.recv())
        self._resume = str(self.ready["resume"])

    async def messages(self) -> AsyncIterator[Media | dict[str, Any]]:
        """Yield media and JSON messages as they arrive, until the socket closes.

        Raises
        ------
        ServeError
            If the server ends the session with an error.
        """
        if self._socket is None:
            raise RuntimeError("open the session first")
        try:
            async for received in self._socket:
                if isinstance(received, bytes):
                    media = Media.parse(received)
                    self._serial = max(self._serial, media.serial)
                    yield media
                else:
                    yield self._parsed(received)
        except ConnectionClosed:
            return

    async def send(self, kind: str, **fields: object) -> str:
        """Send a control; return the control's id, which the server's receipts name."""
        if self._socket is None:
            raise RuntimeError("open the session first")
        self._controls += 1
        name = str(self._controls)
        await self._socket.send(message(kind, id=name, **fields))
        return name

    async def send_audio(self, samples: NDArray[np.int16], *, last: bool = False) -> str:
        """Send the next N samples of the voice, [N] or with several speakers [N, speakers] at 16 kHz; return the
        message's id.
        """
        if self._socket is None:
            raise RuntimeError("open the session first")
        self._controls += 1
        payload = samples.astype("<i2").tobytes()
        await self._socket.send(
            Media(Codec.PCM, self._controls, 0, 0, 0, len(samples), payload, last=last).pack()
        )
        return str(self._controls)

    async def acknowledge(self, chunk: int) -> None:
        """Tell the server that all chunks up to number ``chunk`` were shown, so that the server makes more."""
        if self._socket is not None:
            await self._socket.send(message("ack", chunk=chunk))

    async def drop(self) -> None:
        """Close the socket without ending the session, as a lost network does."""
        if self._socket is not None:
            self._socket.transport.abort()
            await self._socket.wait_closed()

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            with suppress(ConnectionClosed, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._socket.send(message("close"))
                    async for _ in self._socket:  # what is on its way, else the server's close is never read
                        pass
            await self.drop()

    @property
    def _at_another_server(self) -> bool:
        """Whether a gateway opened the session at a server with an address of its own."""
        return self._stream_url.startswith(("ws://", "wss://"))

    def _get(self, path: str) -> dict[str, Any]:
        with _answered(Request(self._url + path), self._key) as answer:
            fields: dict[str, Any] = json.load(answer)
            return fields

    def _post(self, path: str, table: dict[str, object], queue: str) -> dict[str, Any]:
        headers = {QUEUE_HEADER: queue} if queue else {}
        with _posted(self._url + path, table, self._key, headers) as answer:
            fields: dict[str, Any] = json.load(answer)
            return fields

    @staticmethod
    def _parsed(received: str | bytes) -> dict[str, Any]:
        table: dict[str, Any] = json.loads(received)
        if table["type"] == "error":
            raise _error(table)
        return table


class Client:
    """One session of a server, for programs without an event loop: runs an `AsyncClient` in a thread.

    Parameters and methods are those of `AsyncClient`, but the methods block.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._client, self._loop = AsyncClient(url, api_key), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="seko-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._client.drop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def ready(self) -> dict[str, Any]:
        """The server's first message."""
        return self._client.ready

    def open(self, **session: Any) -> Self:
        """Open a session and its socket; see `AsyncClient.open`."""
        self._wait(self._client.open(**session))
        return self

    def resume(self, *, buffer: int = 1) -> None:
        """Reconnect after the socket was lost; see `AsyncClient.resume`."""
        self._wait(self._client.resume(buffer=buffer))

    def messages(self) -> Iterator[Media | dict[str, Any]]:
        """Yield media and JSON messages as they arrive; see `AsyncClient.messages`."""
        coming = self._client.messages()
        with suppress(StopAsyncIteration):
            while True:
                yield self._wait(anext(coming))  # type: ignore[arg-type]

    def send(self, kind: str, **fields: object) -> str:
        """Send a control; return the control's id."""
        return self._wait(self._client.send(kind, **fields))

    def send_audio(self, samples: NDArray[np.int16], *, last: bool = False) -> str:
        """Send samples of the voice; see `AsyncClient.send_audio`."""
        return self._wait(self._client.send_audio(samples, last=last))

    def acknowledge(self, chunk: int) -> None:
        """Tell the server that all chunks up to number ``chunk`` were shown."""
        self._wait(self._client.acknowledge(chunk))

    def close(self) -> None:
        """End the session."""
        self._wait(self._client.close())

    def _wait(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def speech(url: str, text: str, *, api_key: str | None = None, **fields: object) -> Iterator[bytes]:
    """Yield the parts of a sound file with a spoken text, as they arrive.

    Parameters
    ----------
    url, api_key
        The server's address and API key; see `AsyncClient`.
    text : str
        The text.
    **fields
        Fields of ``POST /v1/audio/speech``: response_format, seed, ref_audio, ref_text.

    Raises
    ------
    ServeError
        If the server refuses the request, with the server's code and message.
    """
    with _posted(f"{url.rstrip('/')}/v1/audio/speech", {"input": text, **fields}, api_key, {}) as answer:
        while part := answer.read1():
            yield part


def _posted(
    url: str, table: Mapping[str, object], key: str | None, headers: Mapping[str, str]
) -> HTTPResponse:
    """Return the answer to a JSON body; ServeError if it is a refusal."""
    headers = {"content-type": "application/json", **headers}
    return _answered(Request(url, json.dumps(table).encode(), headers, method="POST"), key)


def _answered(request: Request, key: str | None) -> HTTPResponse:
    """Return the answer to a request; ServeError if it is a refusal."""
    if key is not None:
        request.add_header("authorization", f"Bearer {key}")
    try:
        answer: HTTPResponse = urlopen(request, timeout=30)
        return answer
    except HTTPError as refused:
        raise _error(json.load(refused)["error"]) from None


def _error(table: dict[str, Any]) -> ServeError:
    code = table["code"] if table["code"] in KINDS else "internal"
    facts = {
        name: table[name]
        for name in table
        if name not in ("type", "code", "message", "retryable", "retry_after")
    }
    return ServeError(code, str(table["message"]), retry_after=table.get("retry_after"), facts=facts)

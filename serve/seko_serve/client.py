"""Clients for sessions of the server, asynchronous and blocking: open a session, take its media, send controls, resume
after a lost socket.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, Self, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.typing import Subprotocol

from seko_serve import protocol
from seko_serve.command_line import sentence
from seko_serve.errors import ServeError, UnreachableError
from seko_serve.protocol import Entrance, Media

ANSWER_S, CLOSE_S = 30.0, 10.0  # for the server's answer to a request, and to a close
# A socket ends on which so many seconds in a row bring nothing. They are counted one by one, so that a program that
# blocks its event loop for a while does not take that for the server's silence.
SILENT_TICKS, TICK_S = 6, 1.0
MOST_BYTES = 64 << 20  # of one message: a raw frame may be large
Received = Media | dict[str, Any]
ResultT = TypeVar("ResultT")

__all__ = ["AsyncClient", "Client", "is_address"]


class _Socket(ClientConnection):
    """A socket that notes when bytes arrive, and ends when none do although the server is asked for them."""

    _quiet = 0

    def data_received(self, data: bytes) -> None:
        """Take bytes."""
        self._quiet = 0
        super().data_received(data)

    async def end_if_silent(self) -> None:
        """Wait until the server is silent, then end the connection; an error of the connection ends the wait."""
        while self._quiet < SILENT_TICKS:
            await asyncio.sleep(TICK_S)
            self._quiet += 1
            if self._quiet > 1:
                with suppress(TimeoutError):  # a buffer that is full takes no ping
                    async with asyncio.timeout(TICK_S):
                        await self.ping()
        self.transport.abort()


@contextmanager
def _reached(address: str) -> Iterator[None]:
    """Context manager that turns the errors of a connection, and of answers that no server of Seko gives, into an
    `UnreachableError`."""
    try:
        yield
    except ServeError:
        raise
    except TimeoutError as error:
        raise UnreachableError(address, sentence(error) or "it does not answer") from error
    except InvalidStatus as error:
        status = error.response.status_code
        raise UnreachableError(address, f"a proxy or another server answered {status}") from error
    except (WebSocketException, HTTPException, OSError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, ConnectionClosed | ConnectionResetError | BrokenPipeError):
            raise UnreachableError(address, "the connection ended before the answer") from error
        if isinstance(reason, ConnectionRefusedError):  # asyncio's words for it name the address again
            raise UnreachableError(address, os.strerror(errno.ECONNREFUSED)) from error
        if isinstance(reason, OSError):
            raise UnreachableError(address, sentence(reason)) from error
        raise UnreachableError(address, "a proxy or another server answered without HTTP") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UnreachableError(address, "what answers there is no server of Seko") from error


class AsyncClient:
    """One session of a server, used as an asynchronous context. Leaving the context ends the session.

    A session whose socket was lost, or was closed by `drop`, stays open on the server for the length of the session's
    lease.

    Parameters
    ----------
    url : str
        The server's address, such as ``http://localhost:8000``.
    api_key : str, optional
        API key; required if the server has keys.

    Attributes
    ----------
    ready : dict
        The server's first message on the socket: size and rate of the video frames, codecs, and the inputs that the
        artifact takes.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url, self._key = url.rstrip("/"), api_key
        self._socket: ClientConnection | None = None
        self._watch: asyncio.Task[None] | None = None
        self._id = self._stream = self._resume = ""
        self._serial, self._controls = protocol.NONE_SEEN, 0
        self._hello: dict[str, object] = {}
        self.ready: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

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
        codecs, audio : sequence of str
            Codecs of video, and codecs of sound, in the order of preference; without ``audio`` the session has no
            sound.
        buffer : int
            Number of chunks that the viewer collects before playback begins.
        wait : bool
            Whether to wait in the server's queue while the server is full.
        **session
            Fields of ``POST /v1/sessions``: prompt, seed, fps, image, voice, inputs.

        Raises
        ------
        ServeError
            If the server refuses the request, with the server's code and message. An `UnreachableError`, which is a
            `ServeError` too, if no server of Seko answers at the address within `ANSWER_S`.

        After any error, also a cancellation, the server has no session of this call, unless the server's answer did not
        come within `ANSWER_S`. A session whose answer came too late stays open on the server for the length of its
        lease.
        """
        self._hello = {"codecs": [*codecs], "audio": [*audio], "buffer": buffer}
        self._serial = protocol.NONE_SEEN
        queue, opened = protocol.JOIN if wait else "", None
        try:
            while opened is None:
                asked = asyncio.create_task(self._ask("POST", "/v1/sessions", session, queue))
                try:
                    opened = await asyncio.shield(asked)
                except ServeError as refused:
                    queue = str(refused.facts.get("queue_token", ""))
                    if not queue:
                        raise
                    await asyncio.sleep(refused.retry_after or 1.0)
            with _reached(self._url):
                self._id, stream, ticket = (str(opened[name]) for name in ("id", "url", "ticket"))
            await self._connect(stream, Entrance(ticket=ticket))
        except (
            BaseException
        ):  # also a cancelled request is answered, and may have made a session or got a place
            with suppress(Exception):
                async with asyncio.timeout(ANSWER_S):
                    await self.drop()
                    try:
                        await self._ask("DELETE", f"/v1/sessions/{(await asked)['id']}")
                    except ServeError as refused:
                        if queue := str(refused.facts.get("queue_token", "")):
                            await self._ask("DELETE", "/v1/queue", queue=queue)
            raise
        return self

    async def example(self, model: str | None = None) -> dict[str, object]:
        """Return the prompt, and for a model that needs one the picture, with which an artifact's maker suggests to
        begin, as fields for `open`; those that the artifact brings.

        Parameters
        ----------
        model : str, optional
            Name of the artifact; default: the server's only one, or a gateway's first.

        Raises
        ------
        ServeError
            If the server refuses the request, or has no such model; an `UnreachableError` as in `open`.
        """
        with _reached(self._url):
            models = json.loads(await self._fetched("/v1/models"))["data"]
            chosen = [entry for entry in models if model in (None, entry["id"])]
            if not chosen:
                raise ServeError("not_found", "the server has no such model")
            entry = chosen[0]
            brought, fields = entry.get("viewer", {}), {"model": entry["id"]}
            if prompts := brought.get("prompts"):
                fields["prompt"] = prompts[0]
            pictures = brought.get("pictures")
            if pictures and entry["takes"]["image"] == "required":
                content = await self._fetched(f"/{pictures[0]['url']}")
                fields["image"] = base64.b64encode(content).decode()
        return fields

    async def resume(self) -> None:
        """Reconnect after the socket was lost; the server sends the missed messages again. If the session was opened
        through a gateway of several servers, the client first asks the gateway which server has the session or can
        continue the session.

        Raises
        ------
        ServeError
            As `open` raises it.
        """
        if self._stream.startswith("ws"):  # a gateway gave the whole address, of another server
            session = await self._ask("GET", f"/v1/sessions/{self._id}")
            with _reached(self._url):
                self._stream = str(session["url"])
        await self._connect(self._stream, Entrance(resume=self._resume, last_serial=self._serial))

    async def messages(self) -> AsyncIterator[Received]:
        """Yield media and JSON messages as they arrive, until the socket is lost or closed. A socket counts as lost
        when nothing comes from its server for `SILENT_TICKS` seconds, not even the answer to a ping.

        Raises
        ------
        ServeError
            If the server closed the socket with an error. All messages before the error are yielded first.
        """
        with suppress(ConnectionClosed):
            async for received in self._opened():
                with _reached(self._address):
                    message = self._parsed(received)
                yield message

    async def send(self, kind: str, **fields: object) -> str:
        """Send a message of this type to the server; return its id, which the server's receipts name, or "" for a type
        without id.

        A message ``ack`` with the number of a ``chunk`` that was shown lets the server make more chunks. A message to a
        socket that has closed is lost, and `messages` says why the socket closed.

        Raises
        ------
        ServeError
            If there is no such type of message.
        """
        if protocol.shape_of(kind).takes_id:
            self._controls += 1
            fields["id"] = str(self._controls)
        await self._deliver(protocol.message(kind, **fields))
        return str(fields.get("id", ""))

    async def send_audio(self, samples: NDArray[np.int16], *, last: bool = False) -> str:
        """Send the next N samples of the voice, [N] or with several speakers [N, speakers] at 16 kHz; return the
        message's id.
        """
        self._controls += 1
        pcm16 = samples.astype("<i2").tobytes()
        await self._deliver(protocol.sound_message(pcm16, len(samples), self._controls, last=last))
        return str(self._controls)

    async def send_frame(self, picture: bytes, *, dropped: int = 0) -> str:
        """Send a frame of an input video as a JPEG, PNG or WebP; return the message's id. ``dropped`` is the number of
        frames that were left out since the frame before."""
        self._controls += 1
        await self._deliver(protocol.frame_message(picture, self._controls, dropped=dropped))
        return str(self._controls)

    async def drop(self) -> None:
        """Close the socket without ending the session, as happens when the network is lost."""
        if self._socket is not None:
            self._socket.transport.abort()
            await self._socket.wait_closed()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})

    async def close(self) -> None:
        """End the session on the server, if the socket is open."""
        if self._socket is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self.send("close")
                    await self._socket.wait_closed()
            await self.drop()

    async def _deliver(self, content: str | bytes) -> None:
        with suppress(ConnectionClosed):  # `messages` yields what came before, and says why
            await self._opened().send(content)

    async def _connect(self, url: str, entrance: Entrance) -> None:
        """Open the session's socket at an address, or at a path of this server, with a ticket or resume token."""
        await self.drop()
        self._stream = url
        with _reached(self._address):
            self._socket = socket = await connect(
                self._address,
                subprotocols=[Subprotocol(name) for name in entrance.subprotocols()],
                max_size=MOST_BYTES,
                max_queue=None,  # acknowledgements bound it; a full queue would hide the server's close
                compression=None,
                open_timeout=SILENT_TICKS * TICK_S,
                ping_interval=None,  # `_Socket` asks by itself
                create_connection=_Socket,
            )
            assert isinstance(socket, _Socket)
            self._watch = asyncio.create_task(socket.end_if_silent())
            self._watch.add_done_callback(lambda watch: watch.cancelled() or watch.exception())
            await self.send("hello", **self._hello)
            ready = self._parsed(await socket.recv())
            if not isinstance(ready, dict):
                raise TypeError("media before the message `ready`")
            self.ready, self._resume = ready, str(ready["resume"])

    @property
    def _address(self) -> str:
        """Address of the session's socket."""
        return (
            self._stream
            if self._stream.startswith("ws")
            else f"ws{self._url.removeprefix('http')}{self._stream}"
        )

    def _opened(self) -> ClientConnection:
        if self._socket is None:
            raise RuntimeError("open the session first")
        return self._socket

    def _parsed(self, received: str | bytes) -> Received:
        parsed = protocol.parse_received(received)
        if isinstance(parsed, Media):
            self._serial = max(self._serial, parsed.serial)
        return parsed

    async def _ask(
        self, method: str, path: str, body: Mapping[str, object] | None = None, queue: str = ""
    ) -> dict[str, Any]:
        """Return the answer to a request, as `_answer` does."""
        request = self._request(method, path, body, queue)
        with _reached(self._url):
            return await asyncio.to_thread(_answer, request, self._url)

    async def _fetched(self, path: str) -> bytes:
        """Return the content at a path; errors are those of `_ask`."""
        request = self._request("GET", path)
        with _reached(self._url):
            status, content = await asyncio.to_thread(_received, request)
        if status != HTTPStatus.OK:
            raise ServeError.of_answer(status, content, self._url)
        return content

    def _request(
        self, method: str, path: str, body: Mapping[str, object] | None = None, queue: str = ""
    ) -> Request:
        headers = {"content-type": "application/json", protocol.QUEUE_HEADER: queue}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        content = None if body is None else json.dumps(body).encode()
        if not is_address(self._url):
            raise UnreachableError(self._url, "it is no address of a server, such as http://127.0.0.1:8000")
        return Request(f"{self._url}{path}", content, headers, method=method)


def is_address(url: str) -> bool:
    """Return whether a URL may be the address of a server."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is no number
        return False


def _received(request: Request) -> tuple[int, bytes]:
    """Return the status and the content of the answer to a request."""
    try:
        with urlopen(request, timeout=ANSWER_S) as answer:
            return answer.status, answer.read()
    except HTTPError as refused:
        with refused:
            return refused.code, refused.read()
    except TimeoutError:
        raise TimeoutError(f"the server gave no answer within {ANSWER_S:g} s") from None


def _answer(request: Request, address: str) -> dict[str, Any]:
    """Return the session in the server's answer to a request; an empty dict if the request deleted the session.
    ServeError if the request is refused; the errors that `_reached` takes if a proxy or another server answered, or if
    no answer came.
    """
    status, content = _received(request)
    if status == HTTPStatus.NO_CONTENT:
        return {}
    with suppress(ValueError, KeyError, TypeError):  # the answer is no session
        fields: dict[str, Any] = json.loads(content)
        if fields["object"] == "session":
            return fields
    raise ServeError.of_answer(status, content, address)


class Client:
    """One session of a server, for programs without an event loop: runs an `AsyncClient` in a thread.

    The parameters, attributes and methods are those of `AsyncClient`, but the methods of `Client` block.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._client, self._loop = AsyncClient(url, api_key), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="seko-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    @property
    def ready(self) -> dict[str, Any]:
        """The server's first message on the socket; see `AsyncClient`."""
        return self._client.ready

    def example(self, model: str | None = None) -> dict[str, object]:
        """Return what a session may begin with; see `AsyncClient.example`."""
        return self._wait(self._client.example(model))

    def open(self, **session: Any) -> Self:
        """Open a session and its socket; see `AsyncClient.open`."""
        self._wait(self._client.open(**session))
        return self

    def resume(self) -> None:
        """Reconnect after the socket was lost; see `AsyncClient.resume`."""
        self._wait(self._client.resume())

    def messages(self) -> Iterator[Received]:
        """Yield media and JSON messages as they arrive; see `AsyncClient.messages`."""
        coming = self._client.messages()
        with suppress(StopAsyncIteration):
            while True:
                yield self._wait(anext(coming))

    def send(self, kind: str, **fields: object) -> str:
        """Send a message to the server; see `AsyncClient.send`."""
        return self._wait(self._client.send(kind, **fields))

    def send_audio(self, samples: NDArray[np.int16], *, last: bool = False) -> str:
        """Send audio samples of the voice; see `AsyncClient.send_audio`."""
        return self._wait(self._client.send_audio(samples, last=last))

    def send_frame(self, picture: bytes, *, dropped: int = 0) -> str:
        """Send a frame of an input video; see `AsyncClient.send_frame`."""
        return self._wait(self._client.send_frame(picture, dropped=dropped))

    def drop(self) -> None:
        """Close the socket without ending the session; see `AsyncClient.drop`."""
        self._wait(self._client.drop())

    def close(self) -> None:
        """End the session on the server; see `AsyncClient.close`."""
        self._wait(self._client.close())

    def _wait(self, work: Awaitable[ResultT]) -> ResultT:
        """Return the result of work in the client's thread. After an interrupt, such as Ctrl-C, the work is cancelled,
        and has ended when the interrupt is raised.
        """
        task: futures.Future[asyncio.Task[Any] | None] = futures.Future()

        async def run() -> ResultT:
            task.set_result(asyncio.current_task())
            return await work

        result = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return result.result()
        except BaseException:
            if running := task.result():
                self._loop.call_soon_threadsafe(running.cancel)
            futures.wait([result])
            raise

"""Speech through OpenAI's API: a request has one text, and the sound is sent while the text is spoken."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

import numpy as np
from prometheus_client import Counter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from seko_runtime.errors import UsageError
from seko_runtime.speech.manifest import SpeechManifest
from seko_runtime.speech.texts import spoken_text
from seko_serve.errors import ServeError, check_fields
from seko_serve.http.access import Access
from seko_serve.http.bodies import json_body, link_to
from seko_serve.http.openings import MAX_OPENING_BYTES
from seko_serve.http.workload import WorkloadRoutes
from seko_serve.live.connection import Connection
from seko_serve.live.manager import SessionManager
from seko_serve.live.session import LiveSession
from seko_serve.media.sound_files import FORMS, SoundFile, sound_file
from seko_serve.protocol import Codec, Control, Media
from seko_serve.speech.opening import SpeechOpening, speech_opening_of

PATH = "/v1/audio/speech"
AGAIN_S = 1.0  # seconds after which a refused client asks again
MAX_INPUT_LETTERS = 4096
AHEAD = 8  # patches that are made before they are sent
FIELDS = frozenset(
    {"model", "input", "voice", "response_format", "speed", "stream_format", "ref_audio", "ref_text", "seed"}
)
VOICES = (None, "default")


class SpeechRoutes(WorkloadRoutes):
    """The routes ``/v1/audio/speech``, which speaks a text, and ``/v1/audio/speech/link``.

    Parameters
    ----------
    manager : SessionManager
        The live sessions.
    access : Access
        The object that checks the caller's API key, origin and rate.
    """

    def __init__(self, manager: SessionManager, access: Access) -> None:
        self._manager, self._access = manager, access
        self._closing: set[asyncio.Task[None]] = set()

    def routes(self) -> list[BaseRoute]:
        """Return the routes ``/v1/audio/speech`` and ``/v1/audio/speech/link``."""
        return [
            Route(PATH, self._speak, methods=["POST"]),
            Route(f"{PATH}/link", self._link, methods=["POST"]),
        ]

    async def _link(self, request: Request) -> Response:
        """Return an address that takes one request without a key; ServeError if no row is free for it."""
        tenant = self._access.tenant(request)
        self._speaking()
        self._manager.check_takes()
        if not self._manager.admission.free:
            raise ServeError("full", "no row is free", retry_after=AGAIN_S)
        return link_to(PATH, self._access.links.issue(tenant, PATH))

    def _speaking(self) -> SpeechManifest:
        """Return the artifact's manifest; ServeError if its workload is not speech."""
        manifest = self._manager.device.manifest
        if not isinstance(manifest, SpeechManifest):
            raise ServeError("unsupported", "this artifact makes video and does not speak")
        return manifest

    async def _speak(self, request: Request) -> Response:
        tenant, manifest = self._access.opener(request, PATH), self._speaking()
        table = await json_body(request, MAX_OPENING_BYTES)
        text, form, events = _checked(table)
        rate = manifest.workload.patch.sample_rate
        file = sound_file(form, rate)
        opened = {
            name: table[field]
            for name, field in (
                ("model", "model"), ("seed", "seed"), ("voice", "ref_audio"), ("voice_text", "ref_text"),
            )
            if field in table
        }  # fmt: skip
        await self._check_text(text, SpeechOpening())  # before the sound of a voice is decoded
        opening = await asyncio.to_thread(speech_opening_of, opened, manifest, "ref_audio", "ref_text")
        if opening.voice is not None:
            await self._check_text(text, opening)
        session = await self._manager.open(tenant, opening, resumable=False)
        parts = self._parts(session, text, file)
        first = await anext(parts, b"")  # an error before the first sound is answered with its own status
        refused = self._manager.device.metrics.refused
        if events:
            return SoundResponse(_events(first, parts, refused), parts, media_type="text/event-stream")
        kind: dict[str, Any] = {"media_type": FORMS[form][0], "headers": {"x-sample-rate": str(rate)}}
        if request.scope["http_version"] == "1.0":
            # A body of HTTP/1.0 ends with the connection, also after an error.
            return Response(await _whole(first, parts, request), **kind)
        return SoundResponse(_sound(first, parts, refused), parts, **kind)

    async def _check_text(self, text: str, opening: SpeechOpening) -> None:
        """Raise the ServeError with which a sentence of the text would end the speech."""
        patches = opening.voice_patches(self._speaking())
        of_voice = {"continued" if opening.voice_text else "reference": patches}

        def check(pool: Any) -> None:
            pool.check_text(text, voice_text=opening.voice_text, **of_voice)

        try:
            await self._manager.device.in_background(check)
        except UsageError as error:
            raise ServeError("bad_request", str(error)) from None

    async def _parts(self, session: LiveSession, text: str, file: SoundFile) -> AsyncGenerator[bytes]:
        """Yield the parts of the sound file while the text is spoken, then end the session."""
        try:
            connection = session.viewer.enter()
            session.attach(connection, lambda: "", None, AHEAD, (Codec.PCM,))
            session.control(Control("text", "", {"text": text, "last": True}))
            async for media in _heard(connection):
                part = file.write(np.frombuffer(media.payload, "<i2"))
                if part:
                    yield part
                if media.last:
                    break
                session.control(Control("ack", "", {"chunk": media.chunk}))
            if part := file.close():
                yield part
        finally:  # in a task of its own: a client that leaves cancels this one, at each of its waits
            closing = asyncio.create_task(self._manager.close(session))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            await asyncio.shield(closing)


async def _heard(connection: Connection) -> AsyncIterator[Media]:
    """Yield the sound of a session as soon as the sound is made. If the session ends before its text is spoken, a
    ServeError follows the yielded sound."""
    while connection.end is None or connection.outbox:
        for waiting in await connection.messages():
            if isinstance(waiting, bytes):
                yield Media.parse(waiting)
    raise connection.end


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


async def _whole(first: bytes, parts: AsyncGenerator[bytes], request: Request) -> bytes:
    """Return the whole sound file, or its beginning if the client leaves."""
    content = bytearray(first)
    async with aclosing(parts):
        async for part in parts:
            content += part
            if await request.is_disconnected():
                break
    return bytes(content)


async def _sound(first: bytes, parts: AsyncIterator[bytes], refused: Counter) -> AsyncIterator[bytes]:
    """Yield the parts of the sound file. Count a ServeError that ends the sound file too early."""
    yield first
    try:
        async for part in parts:
            yield part
    except ServeError as error:
        refused.labels(error.kind.code).inc()
        raise


async def _events(first: bytes, parts: AsyncIterator[bytes], refused: Counter) -> AsyncIterator[bytes]:
    """Yield the parts of the sound as server-sent events with OpenAI's field names; an error is the last event."""
    try:
        async for part in _sound(first, parts, refused):
            yield _event({"type": "speech.audio.delta", "audio": base64.b64encode(part).decode()})
        yield _event({"type": "speech.audio.done"})
    except ServeError as error:
        yield _event({"type": "error", "error": error.body()})


def _event(table: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(table)}\n\n".encode()


def _checked(table: dict[str, Any]) -> tuple[str, str, bool]:
    """Return the text, the file's format, and whether events are requested; ServeError if a field of the request is
    invalid."""
    check_fields(table, FIELDS)
    text = table.get("input")
    if not isinstance(text, str):
        raise ServeError("bad_request", "input is missing or no text, expected a text with words")
    try:
        spoken_text(text, "input")
    except UsageError as error:
        raise ServeError("bad_request", str(error)) from None
    if len(text) > MAX_INPUT_LETTERS:
        raise ServeError("too_large", f"input has {len(text)} letters, at most {MAX_INPUT_LETTERS} are taken")
    if table.get("voice") not in VOICES:
        raise ServeError(
            "unsupported",
            "voice is not known, expected default; to speak as in a recording send that as ref_audio",
        )
    if table.get("speed", 1) != 1:
        raise ServeError("unsupported", "the model has one speed: leave speed out, or give 1")
    form, streamed = table.get("response_format", "mp3"), table.get("stream_format", "audio")
    if not isinstance(form, str) or form not in FORMS:
        raise ServeError("unsupported", f"response_format is none of {', '.join(FORMS)}")
    if streamed not in ("audio", "sse"):
        raise ServeError("bad_request", "stream_format is neither audio nor sse")
    return text, form, streamed == "sse"

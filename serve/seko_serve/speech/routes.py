"""Speech through OpenAI's API: a request has one text, and the sound is sent while the text is spoken."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from seko_serve.errors import ServeError
from seko_serve.http.access import Access
from seko_serve.http.bodies import link_to
from seko_serve.http.forms import body_fields
from seko_serve.http.openings import MAX_OPENING_BYTES
from seko_serve.http.workload import WorkloadRoutes
from seko_serve.live.manager import SessionManager
from seko_serve.media.sound_files import FORMS, sound_file
from seko_serve.speech.answers import SoundResponse, events, sound, whole
from seko_serve.speech.content import encoded_in_parts
from seko_serve.speech.fields import FIELDS, VOICE_FIELDS, is_stock_model
from seko_serve.speech.speaking import VOICES_PATH, Speaker, Speech, opening_of, with_words
from seko_serve.speech.voices import KeptVoice

PATH = "/v1/audio/speech"
AGAIN_S = 1.0  # seconds after which a refused client asks again
NOTE = "seko-note"  # header that says what stands for what the client named


class SpeechRoutes(WorkloadRoutes):
    """The routes below ``/v1/audio``: ``speech``, which speaks a text, and ``voices``, which keeps recordings."""

    def __init__(self, manager: SessionManager, access: Access, speaker: Speaker) -> None:
        super().__init__(manager, access)
        self._speaker = speaker

    def routes(self) -> list[BaseRoute]:
        """Return the routes below ``/v1/audio``."""
        return [
            Route(PATH, self._speak, methods=["POST"]),
            Route(f"{PATH}/link", self._link, methods=["POST"]),
            Route(VOICES_PATH, self._list_voices, methods=["GET"]),
            Route(VOICES_PATH, self._keep_voice, methods=["POST"]),
            Route(f"{VOICES_PATH}/{{name}}", self._voice, methods=["GET", "DELETE"]),
        ]

    # -- voices ------------------------------------------------------------------------------------------------

    async def _list_voices(self, request: Request) -> Response:
        voices = await self._speaker.voices.of(self._access.tenant(request))
        return JSONResponse({"object": "list", "data": [voice.facts() for voice in voices]})

    async def _voice(self, request: Request) -> Response:
        tenant = self._access.tenant(request)
        voice = await self._speaker.voices.find(tenant, request.path_params["name"])
        if request.method == "DELETE":
            await self._speaker.voices.remove(tenant, voice)
            return JSONResponse({"id": voice.id, "object": "audio.voice.deleted", "deleted": True})
        return JSONResponse(voice.facts())

    async def _keep_voice(self, request: Request) -> Response:
        tenant, manifest = self._access.opener(request), self._speaker.manifest()
        values = VOICE_FIELDS.read(await body_fields(request, MAX_OPENING_BYTES), manifest)
        if "name" not in values:
            raise ServeError("bad_request", "name is missing", field="name")
        if is_stock_model(values.get("model")):
            del values["model"]
        named = [name for name in ("audio_sample", "ref_audio") if name in values]
        if len(named) != 1:
            raise ServeError("bad_request", "expected one recording, as audio_sample or ref_audio")
        await self._speaker.voices.check_room(tenant, values["name"])
        self._manager.check_takes()
        opening = await opening_of(values, manifest, named[0])
        encoded = await self._manager.call_in_parts(lambda pool: encoded_in_parts(pool, opening))
        voice = KeptVoice(values["name"])
        await self._speaker.voices.keep(tenant, voice, encoded)
        return JSONResponse(voice.facts())

    # -- speech ------------------------------------------------------------------------------------------------

    async def _link(self, request: Request) -> Response:
        """Return an address that takes one request without a key; ServeError if no row is free for it."""
        tenant = self._access.tenant(request)
        self._speaker.manifest()
        self._manager.check_takes()
        if not self._manager.admission.free:
            raise ServeError("full", "no row is free", retry_after=AGAIN_S)
        return link_to(PATH, self._access.links.issue(tenant, PATH))

    async def _speak(self, request: Request) -> Response:
        tenant, manifest = self._access.opener(request, PATH), self._speaker.manifest()
        values = FIELDS.read(await body_fields(request, MAX_OPENING_BYTES), manifest)
        if "input" not in values:
            raise ServeError("bad_request", "input is missing, expected a text with words", field="input")
        kept, notes = await self._speaker.named(values, tenant, manifest)
        in_events, at_once = values.get("stream_format") == "sse", values.get("stream", True)
        if in_events and not at_once:
            raise ServeError(
                "bad_request", "stream is false, and stream_format sse is a stream", field="stream"
            )
        if "normalize" in values:
            values["input"] = await asyncio.to_thread(with_words, values["input"], values["normalize"])
        form, rate = values.get("response_format", "mp3"), manifest.workload.patch.sample_rate
        opening = await self._speaker.opening(values, manifest, kept)
        speech = Speech(values["input"], sound_file(form, rate), manifest, values.get("max_new_tokens"))
        if in_events:
            speech.text_tokens = await self._manager.device.in_background(speech.tokens_in)
        session = await self._speaker.opened(tenant, opening, request.is_disconnected)
        parts = self._speaker.parts(session, speech)
        first = await anext(parts, b"")  # an error before the first sound is answered with its own status
        refused, headers = self._manager.device.metrics.refused, {NOTE: "; ".join(notes)} if notes else {}
        if in_events:
            answer = events(first, parts, refused, speech.told)
            return SoundResponse(answer, parts, media_type="text/event-stream", headers=headers)
        kind: dict[str, Any] = {
            "media_type": FORMS[form][0],
            "headers": {"x-sample-rate": str(rate), **headers},
        }
        if not at_once or request.scope["http_version"] == "1.0":
            # A body of HTTP/1.0 ends with the connection, also after an error.
            return Response(speech.file.completed(await whole(first, parts, request)), **kind)
        return SoundResponse(sound(first, parts, refused), parts, **kind)

"""The workload speech's part of the OpenAPI document."""

from __future__ import annotations

from seko_serve.http.access import TICKET
from seko_serve.http.forms import WITH_FILES
from seko_serve.http.protocol_sockets import link_api
from seko_serve.http.schemas import (
    BINARY,
    NUMBER,
    OPENING,
    SEED,
    TEXT,
    UPLOAD,
    WHOLE,
    Table,
    body,
    json_of,
    list_of,
    named,
    object_of,
    operation,
    parameter,
    path_parameter,
    refused,
)
from seko_serve.http.workload import ApiParts
from seko_serve.media.sound_files import FORMS
from seko_serve.speech.fields import FIELDS, VOICE_FIELDS
from seko_serve.speech.realtime import PATH as REALTIME


def api() -> ApiParts:
    """Return what the workload speech adds to the OpenAPI document."""
    ticket = parameter(TICKET, TEXT, description="Of a link, instead of a key.")
    sounds: Table = {kind: {"schema": BINARY} for kind in sorted({kind for kind, *_ in FORMS.values()})}
    spoken = {**sounds, "text/event-stream": {"schema": TEXT}}
    paths: Table = {
        "/v1/audio/speech": {
            "post": {
                **operation("Speaks a text.", spoken, (*OPENING, "not_installed")),
                "parameters": [ticket],
                "requestBody": body(json_of("SpeechRequest")),
            }
        },
        REALTIME: {
            "get": {
                "summary": "A WebSocket of OpenAI's realtime events, for text in and sound out; docs/clients.md has "
                "more.",
                "parameters": [parameter("model", TEXT), ticket],
                "responses": {
                    "101": {"description": "What is refused is told on the socket."},
                    **refused(("bad_request", "forbidden", "too_large")),
                },
            },
        },
        f"{REALTIME}/link": link_api(),
        "/v1/audio/speech/link": {
            "post": operation(
                "An address that takes one request for speech without a key.",
                json_of("Link"),
                ("unauthorized", "forbidden", "unsupported", "full", "stopping"),
                status=201,
            )
        },
        "/v1/audio/voices": {
            "get": operation("The key's own voices.", json_of("Voices"), ("unauthorized",)),
            "post": {
                **operation("Keeps a recording as a voice.", json_of("Voice"), OPENING),
                "requestBody": body(
                    {**json_of("VoiceRequest"), WITH_FILES: {"schema": named("VoiceRequest")}}
                ),
            },
        },
        "/v1/audio/voices/{name}": {
            "parameters": [path_parameter("name")],
            "get": operation("A voice, by name or id.", json_of("Voice"), ("unauthorized", "not_found")),
            "delete": operation(
                "Removes a voice.", json_of("RemovedVoice"), ("unauthorized", "forbidden", "not_found")
            ),
        },
    }
    voice: Table = {
        "id": TEXT,
        "object": {"const": "audio.voice"},
        "name": TEXT,
        "type": {"const": "audio_sample"},
        "created_at": WHOLE,
    }
    schemas: Table = {
        "SpeechRequest": FIELDS.schema(["input"]),
        "VoiceRequest": VOICE_FIELDS.schema(["name"]),
        "Voice": object_of(voice),
        "Voices": list_of(named("Voice")),
        "RemovedVoice": object_of(
            {"id": TEXT, "object": {"const": "audio.voice.deleted"}, "deleted": {"const": True}}
        ),
    }
    session = {
        "seed": SEED,
        "voice": {"anyOf": [UPLOAD, object_of({"id": TEXT})]},
        "voice_text": TEXT,
        "reference": UPLOAD,
        "guidance": NUMBER,
        "temperature": NUMBER,
    }
    return ApiParts(paths, schemas, session)

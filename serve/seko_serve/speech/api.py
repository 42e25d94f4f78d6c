"""The workload speech's part of the OpenAPI document."""

from __future__ import annotations

from seko_serve.http.access import TICKET
from seko_serve.http.schemas import (
    BINARY,
    NUMBER,
    OPENING,
    SEED,
    TEXT,
    UPLOAD,
    Table,
    body,
    json_of,
    object_of,
    operation,
    parameter,
)
from seko_serve.http.workload import ApiParts
from seko_serve.media.sound_files import FORMS
from seko_serve.speech.routes import MAX_INPUT_LETTERS


def api() -> ApiParts:
    """Return what the workload speech adds to the OpenAPI document."""
    ticket = parameter(TICKET, TEXT, description="Of a link, instead of a key.")
    sounds: Table = {kind: {"schema": BINARY} for kind in sorted({kind for kind, *_ in FORMS.values()})}
    paths: Table = {
        "/v1/audio/speech": {
            "post": {
                **operation("Speaks a text.", {**sounds, "text/event-stream": {"schema": TEXT}}, OPENING),
                "parameters": [ticket],
                "requestBody": body(json_of("SpeechRequest")),
            }
        },
        "/v1/audio/speech/link": {
            "post": operation(
                "An address that takes one request for speech without a key.",
                json_of("Link"),
                ("unauthorized", "forbidden", "unsupported", "full", "stopping"),
                status=201,
            )
        },
    }
    schemas: Table = {
        "SpeechRequest": object_of(
            {"input": {"type": "string", "maxLength": MAX_INPUT_LETTERS}},
            {
                "model": TEXT,
                "voice": {"enum": ["default"]},
                "response_format": {"enum": list(FORMS), "default": "mp3"},
                "speed": {"const": 1},
                "stream_format": {"enum": ["audio", "sse"], "default": "audio"},
                "ref_audio": UPLOAD,
                "ref_text": TEXT,
                "seed": SEED,
            },
        ),
    }
    session = {"seed": SEED, "voice": UPLOAD, "voice_text": TEXT, "guidance": NUMBER, "temperature": NUMBER}
    return ApiParts(paths, schemas, session)

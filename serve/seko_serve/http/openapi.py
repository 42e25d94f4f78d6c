"""The OpenAPI document of the server, which describes each route with its parameters, body and answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

import seko_serve
from seko_runtime.controls.pictures import MAX_LAST_S
from seko_serve.errors import KINDS
from seko_serve.http.access import TICKET
from seko_serve.http.line import EVENTS
from seko_serve.http.openings import LAST_S, LEAST_FPS, MAX_FPS
from seko_serve.http.service import PICTURE_KINDS
from seko_serve.http.speech import MAX_INPUT_LETTERS
from seko_serve.http.videos import MAX_LISTED, MAX_SECONDS
from seko_serve.media.sound_files import FORMS
from seko_serve.protocol import MAX_PROMPT_LETTERS

Table = dict[str, Any]
TEXT: Table = {"type": "string"}
NUMBER: Table = {"type": "number"}
WHOLE: Table = {"type": "integer"}
FLAG: Table = {"type": "boolean"}
BINARY: Table = {"type": "string", "contentMediaType": "application/octet-stream"}
UPLOAD: Table = {"type": "string", "description": "Base64, or a data URL of base64."}
_WHOLE_SEED: Table = {"type": "integer", "minimum": 1 - (1 << 62), "maximum": (1 << 62) - 1}
SEED: Table = {"anyOf": [_WHOLE_SEED, {"type": "string", "pattern": "^-?[0-9]{1,19}$"}], "default": 0}
PROMPT: Table = {"type": "string", "maxLength": MAX_PROMPT_LETTERS}

BODY = (
    "bad_request",
    "unauthorized",
    "forbidden",
    "not_found",
    "timeout",
    "too_large",
    "unsupported",
)  # refusals
OPENING = (*BODY, "too_many_requests", "full", "stopping")
CHANGING = (*BODY, "too_many_requests", "conflict")


def document() -> Table:
    """Return the server's OpenAPI 3.1 document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "seko-serve",
            "version": seko_serve.__version__,
            "summary": "Live video and speech of one artifact.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"key": []}, {}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": _schemas(),
        },
    }


class OpenApiRoutes:
    """The route ``/openapi.json``, which returns the OpenAPI document."""

    def routes(self) -> list[BaseRoute]:
        """Return the route ``/openapi.json``."""
        return [Route("/openapi.json", self._document)]

    async def _document(self, request: Request) -> Response:
        table = document()
        table["servers"] = [{"url": request.scope.get("root_path") or "/"}]
        return JSONResponse(table)


def _paths() -> Table:
    name, limit = (
        _path_parameter("name"),
        {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": 20},
    )
    queue = _parameter("Seko-Queue", TEXT, "header", "`join`, or the token of a place in the queue.")
    ticket = _parameter(TICKET, TEXT, description="Of a link, instead of a key.")
    video_form = {"multipart/form-data": {"schema": _named("VideoRequest")}}
    sounds: Table = {kind: {"schema": BINARY} for kind in sorted({kind for kind, *_ in FORMS.values()})}
    return {
        "/health": {"get": _operation("Whether the process lives.", _json("Health"), ())},
        "/ready": {"get": _operation("Whether sessions are admitted.", _json("Ready"), ("stopping",))},
        "/version": {"get": _operation("The server's version.", _json("Version"), ())},
        "/openapi.json": {
            "get": _operation("This document.", {"application/json": {"schema": {"type": "object"}}}, ())
        },
        "/metrics": {
            "get": _operation(
                "Figures for Prometheus, for this machine or with a key.",
                {"text/plain": {"schema": TEXT}},
                ("unauthorized",),
            )
        },
        "/v1/models": {"get": _operation("The artifact.", _json("Models"), ("unauthorized",))},
        "/v1/models/{name}/pictures/{number}": {
            "parameters": [name, _path_parameter("number")],
            "get": _operation(
                "A picture to begin with, which the artifact brings.",
                {kind: {"schema": BINARY} for kind in PICTURE_KINDS.values()},
                ("unauthorized", "not_found"),
            ),
        },
        "/v1/sessions": {
            "get": _operation("The key's own sessions.", _json("Sessions"), ("unauthorized",)),
            "post": {
                **_operation("Opens a session.", _json("OpenedSession"), OPENING, status=201),
                "parameters": [queue],
                "requestBody": _body(_json("SessionRequest")),
            },
        },
        "/v1/queue": {
            "get": {
                **_operation(
                    "A place in the queue, or with `Accept: text/event-stream` events with the place.",
                    {**_json("Place"), EVENTS: {"schema": TEXT}},
                    ("unauthorized", "not_found", "stopping"),
                ),
                "parameters": [queue],
            },
            "delete": {
                **_operation(
                    "Gives up a place in the queue.", None, ("unauthorized", "forbidden"), status=204
                ),
                "parameters": [queue],
            },
        },
        "/v1/sessions/{name}": {
            "parameters": [name],
            "get": _operation("A session.", _json("Session"), ("unauthorized", "not_found")),
            "patch": {
                **_operation(
                    "Changes the prompt, or pauses.",
                    _json("Session"),
                    CHANGING,
                ),
                "requestBody": _body(_json("SessionChange")),
            },
            "delete": _operation(
                "Ends a session.", None, ("unauthorized", "forbidden", "not_found"), status=204
            ),
        },
        "/v1/sessions/{name}/events": {
            "parameters": [name],
            "get": _operation(
                "What has happened to a session that was opened with `record`, for `seko-run run --events`.",
                {"application/jsonl": {"schema": TEXT}},
                ("unauthorized", "not_found", "conflict", "unsupported"),
            ),
        },
        "/v1/sessions/{name}/stream": {
            "parameters": [name],
            "get": {
                "summary": "The session's WebSocket; docs/serving.md has its subprotocols and messages.",
                "security": [],
                "responses": {
                    "101": {"description": "What is refused is told on the socket, which then closes."},
                    **_refused(("bad_request", "forbidden", "too_large")),
                },
            },
        },
        "/v1/videos": {
            "get": {
                **_operation("The key's own videos.", _json("Videos"), ("bad_request", "unauthorized")),
                "parameters": [
                    _parameter("limit", limit),
                    _parameter("after", TEXT),
                    _parameter("order", {"enum": ["asc", "desc"], "default": "desc"}),
                ],
            },
            "post": {
                **_operation("Queues a video.", _json("Video"), OPENING),
                "requestBody": _body({**_json("VideoRequest"), **video_form}),
            },
        },
        "/v1/videos/{name}": {
            "parameters": [name],
            "get": _operation("A video.", _json("Video"), ("unauthorized", "not_found")),
            "delete": _operation(
                "Removes a video.", _json("RemovedVideo"), ("unauthorized", "forbidden", "not_found")
            ),
        },
        "/v1/videos/{name}/content": {
            "parameters": [name],
            "get": _with_ranges(
                _operation(
                    "The file of a completed video.",
                    {"video/mp4": {"schema": BINARY}},
                    ("unauthorized", "not_found", "conflict", "unsupported"),
                ),
                [_parameter("variant", {"enum": ["video"]}), ticket],
            ),
        },
        "/v1/videos/{name}/content/link": {
            "parameters": [name],
            "post": _operation(
                "An address of the file that takes one request without a key.",
                _json("Link"),
                ("unauthorized", "forbidden", "not_found", "conflict"),
                status=201,
            ),
        },
        "/v1/audio/speech": {
            "post": {
                **_operation("Speaks a text.", {**sounds, "text/event-stream": {"schema": TEXT}}, OPENING),
                "parameters": [ticket],
                "requestBody": _body(_json("SpeechRequest")),
            }
        },
        "/v1/audio/speech/link": {
            "post": _operation(
                "An address that takes one request for speech without a key.",
                _json("Link"),
                ("unauthorized", "forbidden", "unsupported", "full", "stopping"),
                status=201,
            )
        },
    }


CONTROLS: Table = {
    "type": "object",
    "description": "What a person steers a session with, by name; a message `control` on the socket has an event.",
    "additionalProperties": {
        "type": "object",
        "properties": {
            "kind": {"type": "string"},
            "events": {
                "type": "object",
                "description": "JSON schemas of each event's fields, by the event's name.",
            },
            "keys": {"type": "array", "description": "Keys of a key pad: pad, face, label, codes."},
            "sound": {
                "type": "object",
                "description": "Rate and number of speakers of the sound that it takes.",
            },
        },
        "required": ["kind", "events"],
    },
}


def _schemas() -> Table:
    inputs = {
        "type": "object",
        "additionalProperties": _object(
            {"dtype": TEXT, "shape": {"type": "array", "items": WHOLE}, "data": UPLOAD}
        ),
    }
    voice = {"anyOf": [UPLOAD, {"type": "array", "items": UPLOAD}]}
    pictures: Table = {"image": UPLOAD, "last_image": UPLOAD}
    begins: Table = {"prompt": PROMPT, "seed": SEED, **pictures, "voice": voice, "inputs": inputs}
    prompts = {"type": "array", "items": PROMPT, "minItems": 1, "maxItems": 1, "description": "As `prompt`."}
    last_s = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_LAST_S, "default": LAST_S}
    fps = {"type": "number", "minimum": LEAST_FPS, "maximum": MAX_FPS}
    opened: Table = {
        "id": TEXT,
        "object": {"const": "session"},
        "model": TEXT,
        "url": {"type": "string", "description": "Of the socket."},
        "state": {"enum": ["running", "paused", "ended", "saved"]},
        "attached": {"type": "boolean", "description": "Whether it has a socket."},
        "lease_s": NUMBER,
    }
    counts: Table = {"chunks": WHOLE, "due_chunks": WHOLE, "late_chunks": WHOLE}
    seconds = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS}
    guidance = {"guidance": NUMBER, "temperature": NUMBER, "voice_text": TEXT}
    return {
        "Error": _object(
            {
                "error": _object(
                    {"code": {"enum": list(KINDS)}, "message": TEXT, "retryable": FLAG},
                    {
                        "retry_after": NUMBER,
                        "error": {"type": "string", "description": "Number of the log's entry."},
                    },
                    further=True,
                )
            }
        ),
        "Health": _object({"status": {"const": "ok"}}),
        "Ready": _object({"status": {"const": "ready"}, "free": WHOLE, "capacity": WHOLE}),
        "Version": _object({"version": TEXT}),
        "Models": _list_of(
            _object(
                {"id": TEXT, "object": {"const": "model"}, "owned_by": TEXT, "limits": _named("Limits")},
                {"viewer": _named("Viewer"), "controls": CONTROLS},
                further=True,
            )
        ),
        "Viewer": {
            **_object(
                {
                    "help": TEXT,
                    "prompts": {"type": "array", "items": TEXT},
                    "pictures": {"type": "array", "items": _object({"url": TEXT, "caption": TEXT})},
                }
            ),
            "description": "What the artifact brings for the person who meets it; each first one is the default.",
        },
        "SessionRequest": _object(
            {},
            {
                "model": TEXT,
                "fps": fps,
                "record": FLAG,
                "last_s": last_s,
                **begins,
                "prompts": prompts,
                **guidance,
            },
        ),
        "SessionChange": _object({}, {"prompt": PROMPT, "recache": FLAG, "paused": FLAG}),
        "Session": _object(opened, counts),
        "OpenedSession": _object(
            {**opened, **counts, "ticket": TEXT, "ticket_s": NUMBER, "limits": _named("Limits")}
        ),
        "Limits": {
            "type": "object",
            "description": "Largest sizes, numbers and rates that the server takes; docs/serving.md explains each.",
            "additionalProperties": NUMBER,
        },
        "Sessions": _list_of(_named("Session")),
        "Place": _object(
            {"place": WHOLE, "waiting": WHOLE, "wait_s": {"type": ["number", "null"]}, "admitted": FLAG}
        ),
        "Link": _object({"object": {"const": "link"}, "url": TEXT, "ticket_s": NUMBER}),
        "VideoRequest": _object(
            {},
            {
                "model": TEXT,
                **begins,
                "seconds": {"anyOf": [seconds, TEXT], "default": 4},
                "size": {"type": "string", "description": "The artifact's, such as 832x480."},
                "input_reference": {"anyOf": [UPLOAD, _object({"image_url": UPLOAD})]},
            },
        ),
        "Video": _object(
            {
                "id": TEXT,
                "object": {"const": "video"},
                "model": TEXT,
                "status": {"enum": ["queued", "in_progress", "completed", "failed"]},
                "progress": {"type": "integer", "minimum": 0, "maximum": 100},
                "created_at": WHOLE,
                "completed_at": {"type": ["integer", "null"]},
                "expires_at": {"type": ["integer", "null"]},
                "seconds": TEXT,
                "size": TEXT,
                "error": {"anyOf": [_object({"code": TEXT, "message": TEXT}), {"type": "null"}]},
            }
        ),
        "Videos": _list_of(
            _named("Video"),
            {
                "first_id": {"type": ["string", "null"]},
                "last_id": {"type": ["string", "null"]},
                "has_more": FLAG,
            },
        ),
        "RemovedVideo": _object(
            {"id": TEXT, "object": {"const": "video.deleted"}, "deleted": {"const": True}}
        ),
        "SpeechRequest": _object(
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


def _object(
    required: Mapping[str, object], optional: Mapping[str, object] = {}, *, further: bool = False
) -> Table:
    table: Table = {"type": "object", "properties": {**required, **optional}, "additionalProperties": further}
    return {**table, "required": list(required)} if required else table


def _list_of(item: Table, more: Mapping[str, object] = {}) -> Table:
    return _object({"object": {"const": "list"}, "data": {"type": "array", "items": item}, **more})


def _named(schema: str) -> Table:
    return {"$ref": f"#/components/schemas/{schema}"}


def _json(schema: str) -> Table:
    return {"application/json": {"schema": _named(schema)}}


def _body(content: Table) -> Table:
    return {"required": True, "content": content}


def _parameter(name: str, schema: Table, where: str = "query", description: str = "") -> Table:
    table: Table = {"name": name, "in": where, "schema": schema}
    return {**table, "description": description} if description else table


def _path_parameter(name: str) -> Table:
    return {**_parameter(name, TEXT, "path"), "required": True}


def _operation(summary: str, content: Table | None, codes: tuple[str, ...], *, status: int = 200) -> Table:
    """Return the OpenAPI description of a route, with its answer and its errors; several error codes may have one HTTP
    status."""
    answer: Table = {"description": summary}
    if content is not None:
        answer["content"] = content
    # Without keys any request may be refused for its header Host.
    refused = _refused(tuple(dict.fromkeys((*codes, "forbidden", "internal"))))
    table: Table = {"summary": summary, "responses": {str(status): answer, **refused}}
    return table if "unauthorized" in codes else {**table, "security": []}


def _refused(codes: tuple[str, ...]) -> Table:
    """Return the answers with these error codes, by HTTP status."""
    answers: Table = {}
    for code in codes:
        kind = KINDS[code]
        refusal = answers.setdefault(str(kind.status), {"description": "", "content": _json("Error")})
        refusal["description"] = f"{refusal['description']} `{code}`: {kind.meaning}".strip()
    return answers


def _with_ranges(operation: Table, parameters: list[Table]) -> Table:
    """Return the description of a route that also sends parts of a file; errors of the header ``Range`` are no JSON."""
    part: Table = {"video/mp4": {"schema": BINARY}, "multipart/byteranges": {"schema": BINARY}}
    text: Table = {"text/plain": {"schema": TEXT}}
    answers: Table = {
        "206": {"description": "The parts of the file that `Range` names.", "content": part},
        "400": {"description": "`Range` cannot be read.", "content": text},
        "416": {"description": "`Range` lies behind the file's end.", "content": text},
    }
    named = _parameter("Range", TEXT, "header", "Parts of the file, such as `bytes=0-1023`.")
    return {
        **operation,
        "parameters": [*parameters, named],
        "responses": {**operation["responses"], **answers},
    }

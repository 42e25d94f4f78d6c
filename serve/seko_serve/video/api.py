"""The workload video's part of the OpenAPI document."""

from __future__ import annotations

from seko_runtime.controls.pictures import LAST_S, MAX_LAST_S
from seko_serve.http.access import TICKET
from seko_serve.http.forms import OF_TEXTS, WITH_FILES
from seko_serve.http.protocol_sockets import link_api
from seko_serve.http.schemas import (
    BINARY,
    FLAG,
    NUMBER,
    OPENING,
    PROMPT,
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
from seko_serve.video.fields import FIELDS, INPUTS, VOICE
from seko_serve.video.opening import LEAST_FPS, MAX_FPS
from seko_serve.video.pictures import PICTURE_KINDS
from seko_serve.video.realtime import PATH as REALTIME
from seko_serve.video.realtime_messages import FIELDS as REALTIME_FIELDS
from seko_serve.video.routes import MAX_LISTED, REFUSED


def api() -> ApiParts:
    """Return what the workload video adds to the OpenAPI document."""
    pictures: Table = {"image": UPLOAD, "last_image": UPLOAD}
    begins: Table = {"prompt": PROMPT, "seed": SEED, **pictures, "voice": VOICE, "inputs": INPUTS}
    prompts = {"type": "array", "items": PROMPT, "minItems": 1, "maxItems": 1, "description": "As `prompt`."}
    last_s = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_LAST_S, "default": LAST_S}
    masks = {"type": "array", "items": UPLOAD, "description": "For each of several speakers, in order."}
    fps = {"type": "number", "minimum": LEAST_FPS, "maximum": MAX_FPS}
    session: Table = {
        "fps": fps,
        "record": FLAG,
        "last_s": last_s,
        **begins,
        "prompts": prompts,
        "masks": masks,
    }
    return ApiParts(_paths(), _schemas(), session)


def _paths() -> Table:
    name, limit = (
        path_parameter("name"),
        {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": 20},
    )
    ticket = parameter(TICKET, TEXT, description="Of a link, instead of a key.")
    video_form = {kind: {"schema": named("VideoRequest")} for kind in (WITH_FILES, OF_TEXTS)}
    return {
        "/v1/models/{name}/pictures/{number}": {
            "parameters": [name, path_parameter("number")],
            "get": operation(
                "A picture to begin with, which the artifact brings.",
                {kind: {"schema": BINARY} for kind in PICTURE_KINDS.values()},
                ("unauthorized", "not_found"),
            ),
        },
        REALTIME: {
            "get": {
                "summary": "A WebSocket of SGLang's realtime video, whose first message is a `RealtimeInit` with the "
                "`type` `init`, in msgpack; docs/clients.md has more.",
                "parameters": [ticket],
                "responses": {
                    "101": {"description": "What is refused is told on the socket."},
                    **refused(("bad_request", "forbidden", "too_large")),
                },
            },
        },
        f"{REALTIME}/link": link_api(),
        "/v1/videos": {
            "get": {
                **operation(
                    "The key's own videos.", json_of("Videos"), ("bad_request", "unauthorized", "not_found")
                ),
                "parameters": [
                    parameter("limit", limit),
                    parameter("after", TEXT),
                    parameter("order", {"enum": ["asc", "desc"], "default": "desc"}),
                ],
            },
            "post": {
                **operation("Queues a video.", json_of("Video"), OPENING),
                "requestBody": body({**json_of("VideoRequest"), **video_form}),
            },
        },
        **{path: _refused(path) for path in REFUSED},
        "/v1/videos/{name}": {
            "parameters": [name],
            "get": operation("A video.", json_of("Video"), ("unauthorized", "not_found")),
            "delete": operation(
                "Removes a video.", json_of("RemovedVideo"), ("unauthorized", "forbidden", "not_found")
            ),
        },
        "/v1/videos/{name}/content": {
            "parameters": [name],
            "get": _with_ranges(
                operation(
                    "The file of a completed video.",
                    {"video/mp4": {"schema": BINARY}},
                    ("unauthorized", "not_found", "conflict", "unsupported"),
                ),
                [parameter("variant", {"enum": ["video"]}), ticket],
            ),
        },
        "/v1/videos/{name}/content/link": {
            "parameters": [name],
            "post": operation(
                "An address of the file that takes one request without a key.",
                json_of("Link"),
                ("unauthorized", "forbidden", "not_found", "conflict"),
                status=201,
            ),
        },
    }


def _refused(path: str) -> Table:
    """Return the description of a route of OpenAI's API that is refused."""
    refusal = operation(f"Refused: {REFUSED[path]}.", None, ("unauthorized", "unsupported"), status=415)
    item: Table = {
        "post": {**refusal, "responses": refused(("unauthorized", "forbidden", "unsupported", "internal"))}
    }
    return {"parameters": [path_parameter("name")], **item} if "{name}" in path else item


def _schemas() -> Table:
    return {
        "Viewer": {
            **object_of(
                {
                    "help": TEXT,
                    "prompts": {"type": "array", "items": TEXT},
                    "pictures": {"type": "array", "items": object_of({"url": TEXT, "caption": TEXT})},
                }
            ),
            "description": "What the artifact brings for the person who meets it; each first one is the default.",
        },
        "VideoRequest": FIELDS.schema(),
        "RealtimeInit": REALTIME_FIELDS.schema(),
        "Video": object_of(
            {
                "id": TEXT,
                "object": {"const": "video"},
                "model": TEXT,
                "status": {"enum": ["queued", "in_progress", "completed", "failed"]},
                "progress": {"type": "integer", "minimum": 0, "maximum": 100},
                "created_at": WHOLE,
                "completed_at": {"type": ["integer", "null"]},
                "expires_at": {"type": ["integer", "null"]},
                "prompt": {"type": ["string", "null"]},
                "seconds": TEXT,
                "num_frames": WHOLE,
                "fps": NUMBER,
                "size": TEXT,
                "width": WHOLE,
                "height": WHOLE,
                "num_inference_steps": WHOLE,
                "seed": WHOLE,
                "error": {"anyOf": [object_of({"code": TEXT, "message": TEXT}), {"type": "null"}]},
            }
        ),
        "Videos": list_of(
            named("Video"),
            {
                "first_id": {"type": ["string", "null"]},
                "last_id": {"type": ["string", "null"]},
                "has_more": FLAG,
            },
        ),
        "RemovedVideo": object_of(
            {"id": TEXT, "object": {"const": "video.deleted"}, "deleted": {"const": True}}
        ),
    }


def _with_ranges(operation: Table, parameters: list[Table]) -> Table:
    """Return the description of a route that also sends parts of a file; errors of the header ``Range`` are no JSON."""
    part: Table = {"video/mp4": {"schema": BINARY}, "multipart/byteranges": {"schema": BINARY}}
    text: Table = {"text/plain": {"schema": TEXT}}
    answers: Table = {
        "206": {"description": "The parts of the file that `Range` names.", "content": part},
        "400": {"description": "`Range` cannot be read.", "content": text},
        "416": {"description": "`Range` lies behind the file's end.", "content": text},
    }
    named = parameter("Range", TEXT, "header", "Parts of the file, such as `bytes=0-1023`.")
    return {
        **operation,
        "parameters": [*parameters, named],
        "responses": {**operation["responses"], **answers},
    }

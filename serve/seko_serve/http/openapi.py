"""The OpenAPI document of the server, which describes each route with its parameters, body and answers."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

import seko_serve
from seko_serve.errors import KINDS
from seko_serve.http.line import EVENTS
from seko_serve.http.schemas import (
    BODY,
    CHANGING,
    FLAG,
    NUMBER,
    OPENING,
    PROMPT,
    TEXT,
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
from seko_serve.http.workload import RouteFamily, served_workloads

QUEUE_TOKEN = "`join`, or the token of a place in the queue."
_APPENDED = "to be appended to the address and path at which the server is reached; a gateway's is whole"


def document() -> Table:
    """Return the server's OpenAPI 3.1 document."""
    parts = [workload.api() for workload in served_workloads()]
    session: Table = {"model": TEXT}
    for part in parts:
        for name, schema in part.session.items():
            session[name] = _either(session.get(name, schema), schema)
    paths, schemas = _paths(), _schemas(session)
    for part in parts:
        paths |= part.paths
        schemas |= part.schemas
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "seko-serve",
            "version": seko_serve.__version__,
            "summary": "Live sessions of one artifact.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas,
        },
    }


def _either(one: Table, other: Table) -> Table:
    """Return the schema of a field that two workloads describe: what either of them takes."""
    if one == other:
        return one
    taken: list[Table] = []
    for schema in (one, other):
        taken += schema["anyOf"] if set(schema) == {"anyOf"} else [schema]
    return {"anyOf": [schema for number, schema in enumerate(taken) if schema not in taken[:number]]}


class OpenApiRoutes(RouteFamily):
    """The route ``/openapi.json``, which returns the OpenAPI document."""

    def routes(self) -> list[BaseRoute]:
        """Return the route ``/openapi.json``."""
        return [Route("/openapi.json", self._document)]

    async def _document(self, request: Request) -> Response:
        table = document()
        table["servers"] = [{"url": request.scope.get("root_path") or "/"}]
        return JSONResponse(table)


def _paths() -> Table:
    name = path_parameter("name")
    queue = parameter("Seko-Queue", TEXT, "header", QUEUE_TOKEN)
    return {
        "/health": {"get": operation("Whether the process lives.", json_of("Health"), ())},
        "/ready": {"get": operation("Whether sessions are admitted.", json_of("Ready"), ("stopping",))},
        "/version": {"get": operation("The server's version.", json_of("Version"), ())},
        "/openapi.json": {
            "get": operation("This document.", {"application/json": {"schema": {"type": "object"}}}, ())
        },
        "/metrics": {
            "get": operation(
                "Figures for Prometheus, for this machine or with a key.",
                {"text/plain": {"schema": TEXT}},
                ("unauthorized",),
            )
        },
        "/v1/models": {"get": operation("The artifact.", json_of("Models"), ("unauthorized",))},
        "/v1/models/{name}": {
            "parameters": [name],
            "get": operation("The artifact.", json_of("Model"), ("unauthorized", "not_found")),
        },
        "/v1/model_info": {
            "get": operation("The artifact's name and kind.", json_of("ModelInfo"), ("unauthorized",))
        },
        "/v1/sessions": {
            "get": operation("The key's own sessions.", json_of("Sessions"), ("unauthorized",)),
            "post": {
                **operation("Opens a session.", json_of("OpenedSession"), OPENING, status=201),
                "parameters": [queue],
                "requestBody": body(json_of("SessionRequest")),
            },
        },
        "/v1/queue": {
            "get": {
                **operation(
                    "A place in the queue, or with `Accept: text/event-stream` events with the place.",
                    {**json_of("Place"), EVENTS: {"schema": TEXT}},
                    ("unauthorized", "not_found", "stopping"),
                ),
                "parameters": [queue],
            },
            "delete": {
                **operation(
                    "Gives up a place in the queue.", None, ("unauthorized", "forbidden"), status=204
                ),
                "parameters": [queue],
            },
        },
        "/v1/sessions/{name}": {
            "parameters": [name],
            "get": operation("A session.", json_of("Session"), ("unauthorized", "not_found")),
            "patch": {
                **operation(
                    "Changes the prompt, or pauses.",
                    json_of("Session"),
                    CHANGING,
                ),
                "requestBody": body(json_of("SessionChange")),
            },
            "delete": operation(
                "Ends a session.", None, ("unauthorized", "forbidden", "not_found"), status=204
            ),
        },
        "/v1/sessions/{name}/events": {
            "parameters": [name],
            "get": operation(
                "What has happened to a session that was opened with `record`, for `seko-run run --events`.",
                {"application/jsonl": {"schema": TEXT}},
                ("unauthorized", "not_found", "conflict", "unsupported"),
            ),
        },
        "/v1/sessions/{name}/watch": {
            "parameters": [name],
            "post": operation(
                "Gives a token with which others watch the session's socket, and change nothing.",
                json_of("WatchToken"),
                ("unauthorized", "forbidden", "not_found"),
                status=201,
            ),
        },
        **_webrtc("whep", "watch"),
        **_webrtc("whip", "send video to"),
        "/v1/sessions/{name}/stream": {
            "parameters": [name],
            "get": {
                "summary": "The session's WebSocket; docs/clients.md has its subprotocols and messages.",
                "security": [],
                "responses": {
                    "101": {"description": "What is refused is told on the socket, which then closes."},
                    **refused(("bad_request", "forbidden", "too_large")),
                },
            },
        },
    }


def _webrtc(way: str, does: str) -> Table:
    """Return the routes by which WebRTC peers do something with a session."""
    sdp = {"application/sdp": {"schema": TEXT}}
    return {
        f"/v1/{way}": {
            "post": {
                **operation(
                    "Opens a session with the fields of the query, and answers a WebRTC offer "
                    f"({way.upper()}) to {does} it.",
                    sdp,
                    (*OPENING, "not_installed"),
                    status=201,
                ),
                "parameters": [parameter("Seko-Queue", TEXT, "header", QUEUE_TOKEN)],
                "requestBody": body(sdp),
            },
            "options": operation(
                "Names the servers for STUN and TURN in the header `Link`.",
                None,
                ("unauthorized",),
                status=204,
            ),
        },
        f"/v1/sessions/{{name}}/{way}": {
            "parameters": [path_parameter("name")],
            "post": {
                **operation(
                    f"Answers a WebRTC offer ({way.upper()}) to {does} a session.",
                    sdp,
                    (*CHANGING, "not_installed"),
                    status=201,
                ),
                "requestBody": body(sdp),
            },
        },
        f"/v1/sessions/{{name}}/{way}/{{peer}}": {
            "parameters": [path_parameter("name"), path_parameter("peer")],
            "patch": {
                **operation("Adds candidates of trickle ICE.", None, BODY, status=204),
                "requestBody": body({"application/trickle-ice-sdpfrag": {"schema": TEXT}}),
            },
            "delete": operation(
                f"Ends the connection, and a session that was opened at /v1/{way}.",
                None,
                ("unauthorized", "not_found"),
            ),
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
            "pictures": {
                "type": "array",
                "description": "Pictures that a session begins with: field of the request, label, whether it is "
                "required, and for one that is shown later the field of its seconds.",
            },
            "sound": {
                "type": "object",
                "description": "Rate and number of speakers of the sound that it takes, and the field of the request "
                "with which it begins.",
            },
        },
        "required": ["kind", "events"],
    },
}


def _schemas(session: Table) -> Table:
    opened: Table = {
        "id": TEXT,
        "object": {"const": "session"},
        "model": TEXT,
        "url": {"type": "string", "description": f"Of the socket: {_APPENDED}."},
        "state": {"enum": ["running", "paused", "ended", "saved"]},
        "attached": {"type": "boolean", "description": "Whether it has a socket."},
        "lease_s": NUMBER,
    }
    counts: Table = {"chunks": WHOLE, "due_chunks": WHOLE, "late_chunks": WHOLE}
    frames_in = object_of({"frames taken": WHOLE, "dropped": WHOLE, "repeated": WHOLE})
    return {
        "Error": object_of(
            {
                "error": object_of(
                    {"code": {"enum": list(KINDS)}, "message": TEXT, "retryable": FLAG},
                    {
                        "type": TEXT,
                        "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                        "retry_after": NUMBER,
                        "error": {"type": "string", "description": "Number of the log's entry."},
                    },
                    further=True,
                )
            }
        ),
        "Health": object_of({"status": {"const": "ok"}}),
        "Ready": object_of({"status": {"const": "ready"}, "free": WHOLE, "capacity": WHOLE}),
        "Version": object_of({"version": TEXT}),
        "Model": object_of(
            {
                "id": TEXT,
                "object": {"const": "model"},
                "created": WHOLE,
                "owned_by": TEXT,
                "limits": named("Limits"),
            },
            {"viewer": named("Viewer"), "controls": CONTROLS},
            further=True,
        ),
        "Models": list_of(named("Model")),
        "ModelInfo": object_of({"model_path": TEXT, "model_type": TEXT}),
        "SessionRequest": object_of({}, session),
        "SessionChange": object_of({}, {"prompt": PROMPT, "recache": FLAG, "paused": FLAG}),
        "Session": object_of(opened, {**counts, "video_in": frames_in}),
        "OpenedSession": object_of(
            {**opened, **counts, "ticket": TEXT, "ticket_s": NUMBER, "limits": named("Limits")},
            {"video_in": frames_in},
        ),
        "Limits": {
            "type": "object",
            "description": "Largest sizes, numbers and rates that the server takes; docs/clients.md explains each.",
            "additionalProperties": NUMBER,
        },
        "Sessions": list_of(named("Session")),
        "WatchToken": object_of(
            {"object": {"const": "session"}, "model": TEXT, "url": TEXT, "lease_s": NUMBER, "watch": TEXT}
        ),
        "Place": object_of(
            {"place": WHOLE, "waiting": WHOLE, "wait_s": {"type": ["number", "null"]}, "admitted": FLAG}
        ),
        "Link": object_of(
            {
                "object": {"const": "link"},
                "url": {"type": "string", "description": f"For one request: {_APPENDED}."},
                "ticket_s": NUMBER,
            }
        ),
    }

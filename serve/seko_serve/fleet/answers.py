"""Requests and answers between clients and boxes: a gateway forwards the parts of a request that a box needs, and
adapts the box's answer for the client.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from seko_serve import request_ids, tracing
from seko_serve.errors import ServeError
from seko_serve.fleet.boxes import Answer
from seko_serve.fleet.directory import BoxFacts
from seko_serve.http.bodies import json_object
from seko_serve.http.forms import form_fields, is_form

PASSED = ("content-type", "retry-after", "location", "etag", "accept-patch", "link")


def headers_of(request: Request) -> dict[str, str]:
    """Return those headers of a request that a box needs, and the request's id."""
    passed = {
        name: request.headers[name] for name in ("authorization", "content-type") if name in request.headers
    }
    return passed | {request_ids.HEADER: request_ids.header()} | tracing.headers()


def model_of(body: bytes, kind: str = "") -> object:
    """Return the name of the model in a request's body; None if the body names no model.

    Parameters
    ----------
    body : bytes
        The body of a request.
    kind : str
        The request's header ``Content-Type``. A body of a form's type is read as a form, any other body as JSON.

    Raises
    ------
    ServeError
        If the body is a damaged form, or has too many entries.
    """
    if b"model" not in body:
        return None
    if is_form(kind, body):
        return form_fields(kind, body).get("model")
    try:
        return json_object(body).get("model")
    except ServeError as error:
        if error.kind.code == "too_large":
            raise
        return None  # the box says what is wrong


def placed(session: dict[str, Any], box: BoxFacts) -> dict[str, Any]:
    """Return the JSON object of a session with the complete address of its socket."""
    return {**session, "url": box.url + session["url"]} if "url" in session else session


def rewritten(answer: Answer, box: BoxFacts) -> Response:
    """Return a box's answer about a session with two changes: the socket's address is complete, and a queue token
    names the box."""
    table = placed(answer.table, box)
    error = table.get("error")
    if isinstance(error, dict) and error.get("queue_token"):
        table["error"] = {**error, "queue_token": f"{box.name}.{error['queue_token']}"}
    if not table:
        return passed(answer)  # such as one in SDP, whose location is that of the gateway, too
    headers = {name: value for name, value in answer.headers.items() if name == "retry-after"}
    return JSONResponse(table, answer.status, headers)


def sent_to(box: BoxFacts, answer: Answer, query: str = "") -> Response:
    """Return the redirect of a client, with its query, to the link in the box's answer. If the box refused, return its
    answer.
    """
    if answer.status >= 400:
        return passed(answer)
    location = f"{box.web}{answer.table['url']}{query and f'&{query}'}"
    headers = {"location": location, "cache-control": "no-store"}
    return Response(status_code=307, headers=headers)


def link_at(box: BoxFacts, answer: Answer) -> Response:
    """Return the link to an HTTP request in a box's answer, with its complete address. If the box refused, return its
    answer."""
    if answer.status >= 400:
        return passed(answer)
    return JSONResponse({**answer.table, "url": f"{box.web}{answer.table['url']}"}, answer.status)


def passed(answer: Answer) -> Response:
    """Return a box's answer unchanged."""
    headers = {name: value for name, value in answer.headers.items() if name in PASSED}
    return Response(answer.body, answer.status, headers)

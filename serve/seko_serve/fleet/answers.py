"""What passes between a gateway's clients and boxes: the parts of a request that a box needs, and a box's answer as the
client gets it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from seko_serve.fleet.boxes import Answer
from seko_serve.fleet.directory import BoxFacts
from seko_serve.http.videos import form_fields

PASSED = ("content-type", "retry-after")


def headers_of(request: Request) -> dict[str, str]:
    """Return the headers of a request that a box needs."""
    return {
        name: request.headers[name] for name in ("authorization", "content-type") if name in request.headers
    }


def model_of(body: bytes, kind: str = "") -> object:
    """Return the model that a body names; None if it names none.

    Parameters
    ----------
    body : bytes
        The body of a request.
    kind : str
        The request's header ``Content-Type``: a form, or else JSON.

    Raises
    ------
    ServeError
        If the body is a damaged form.
    """
    if b"model" not in body:
        return None
    if kind.lower().startswith("multipart/form-data"):
        return form_fields(kind, body).get("model")
    with suppress(ValueError, RecursionError):
        table = json.loads(body)
        if isinstance(table, dict):
            return table.get("model")
    return None


def placed(session: dict[str, Any], box: BoxFacts) -> dict[str, Any]:
    """Return a session's object with the whole address of its socket."""
    return {**session, "url": box.url + session["url"]} if "url" in session else session


def rewritten(answer: Answer, box: BoxFacts) -> Response:
    """Return a box's answer about a session: its socket's address is whole, and a place in the queue names the box."""
    table = placed(answer.table, box)
    error = table.get("error")
    if isinstance(error, dict) and error.get("queue_token"):
        table["error"] = {**error, "queue_token": f"{box.name}.{error['queue_token']}"}
    if not table:
        return passed(answer)
    headers = {name: value for name, value in answer.headers.items() if name == "retry-after"}
    return JSONResponse(table, answer.status, headers)


def sent_to(box: BoxFacts, answer: Answer, query: str = "") -> Response:
    """Return the answer that sends a client, with its query, to the box's link; the box's refusal if it gave none."""
    if answer.status >= 400:
        return passed(answer)
    location = f"{box.web}{answer.table['url']}{query and f'&{query}'}"
    headers = {"location": location, "cache-control": "no-store"}
    return Response(status_code=307, headers=headers)


def passed(answer: Answer) -> Response:
    """Return a box's answer as it is."""
    headers = {name: value for name, value in answer.headers.items() if name in PASSED}
    return Response(answer.body, answer.status, headers)

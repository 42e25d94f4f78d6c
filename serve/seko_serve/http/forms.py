"""Bodies of requests that are JSON or multipart forms."""

from __future__ import annotations

from base64 import b64encode
from email.message import EmailMessage
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

from starlette.requests import Request

from seko_serve.errors import ServeError
from seko_serve.http.bodies import json_body, raw_body

FORM = "multipart/form-data"


async def body_fields(request: Request, most: int) -> dict[str, Any]:
    """Return the fields of a request's body, which is JSON or a multipart form; ServeError if the body is neither, has
    more than ``most`` bytes or arrives too slowly."""
    kind = request.headers.get("content-type", "")
    if kind.lower().startswith(FORM):
        return form_fields(kind, await raw_body(request, most))
    return await json_body(request, most)


def form_fields(kind: str, body: bytes) -> dict[str, Any]:
    """Return the fields of a multipart form. A file becomes base64 text, and a part ``NAME[KEY]`` the entry KEY of the
    object NAME.

    Parameters
    ----------
    kind : str
        The request's header ``Content-Type``.
    body : bytes
        The request's body, of bounded size.

    Raises
    ------
    ServeError
        If the body is not a multipart form, or a field that is no file is not text.
    """
    head = b"Content-Type: " + kind.encode("latin-1") + b"\r\n\r\n"
    form = BytesParser(EmailMessage, policy=HTTP).parsebytes(head + body)
    if not form.is_multipart() or form.defects:
        raise ServeError("bad_request", "the body is no form")
    fields: dict[str, Any] = {}
    for part in form.iter_parts():
        name = part.get_param("name", header="content-disposition")
        content = part.get_payload(decode=True)
        if not isinstance(name, str) or not isinstance(content, bytes):
            raise ServeError("bad_request", "a part of the form has no name")
        try:
            text = b64encode(content).decode() if part.get_filename() is not None else content.decode()
        except UnicodeDecodeError:
            raise ServeError("bad_request", "a part of the form is neither a text nor a file") from None
        outer, bracket, key = name.partition("[")
        if bracket and key.endswith("]"):
            entries = fields.setdefault(outer, {})
            if not isinstance(entries, dict):
                raise ServeError("bad_request", "a field of the form is both a text and an object")
            entries[key[:-1]] = text
        else:
            fields[name] = text
    return fields

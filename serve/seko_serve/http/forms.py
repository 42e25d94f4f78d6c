"""Bodies of requests that are JSON or forms."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from email.message import EmailMessage
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request

from seko_serve.errors import ServeError
from seko_serve.http.bodies import json_object, raw_body

MAX_FIELDS = 100
WITH_FILES, OF_TEXTS = "multipart/form-data", "application/x-www-form-urlencoded"


async def body_fields(request: Request, most: int) -> dict[str, Any]:
    """Return the fields of a request's body, which is JSON or a form; ServeError if the body is neither, has more than
    ``most`` bytes or arrives too slowly."""
    kind, body = request.headers.get("content-type", ""), await raw_body(request, most)
    return form_fields(kind, body) if is_form(kind, body) else json_object(body)


def is_form(kind: str, body: bytes) -> bool:
    """Return whether a body with the header ``Content-Type`` is a form. JSON may have the type of a form without files,
    which curl and others give to any body."""
    if kind.lower().startswith(OF_TEXTS):
        return body.lstrip()[:1] != b"{"
    return kind.lower().startswith(WITH_FILES)


def form_fields(kind: str, body: bytes) -> dict[str, Any]:
    """Return the fields of a form. A file becomes base64 text, and a part ``NAME[KEY]`` the entry KEY of the object
    NAME.

    Parameters
    ----------
    kind : str
        The request's header ``Content-Type``.
    body : bytes
        The request's body, of bounded size.

    Raises
    ------
    ServeError
        If the body is not a form, or a field that is no file is not text.
    """
    fields: dict[str, Any] = {}
    for name, text in _multipart(kind, body) if kind.lower().startswith(WITH_FILES) else _encoded(body):
        outer, bracket, key = name.partition("[")
        if bracket and key.endswith("]"):
            entries = fields.setdefault(outer, {})
            if not isinstance(entries, dict):
                raise ServeError("bad_request", "a field of the form is both a text and an object")
            entries[key[:-1]] = text
        else:
            fields[name] = text
    return fields


def _encoded(body: bytes) -> list[tuple[str, str]]:
    """Return the names and texts of a form without files."""
    try:
        return parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError:
        raise ServeError("bad_request", "the body is no form") from None


def _multipart(kind: str, body: bytes) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the parts of a form."""
    head = b"Content-Type: " + kind.encode("latin-1") + b"\r\n\r\n"
    form = BytesParser(EmailMessage, policy=HTTP).parsebytes(head + body)
    if not form.is_multipart() or form.defects:
        raise ServeError("bad_request", "the body is no form")
    for part in form.iter_parts():
        name = part.get_param("name", header="content-disposition")
        content = part.get_payload(decode=True)
        if not isinstance(name, str) or not isinstance(content, bytes):
            raise ServeError("bad_request", "a part of the form has no name")
        try:
            yield name, b64encode(content).decode() if part.get_filename() is not None else content.decode()
        except UnicodeDecodeError:
            raise ServeError("bad_request", "a part of the form is neither a text nor a file") from None

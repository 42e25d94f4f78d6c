"""Bodies of requests that are JSON or forms."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from email.message import Message
from email.parser import HeaderParser
from itertools import islice, pairwise
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request

from seko_serve.errors import ServeError
from seko_serve.http.bodies import json_object, raw_body

MAX_FIELDS = 100
MAX_HEAD_BYTES = 8 << 10  # of a part's headers
_BLANK = re.compile(rb"\r?\n\r?\n")  # the line behind them
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
    """Return the fields of a form. A file becomes base64 text, a part ``NAME[KEY]`` the entry KEY of the object NAME,
    and several parts ``NAME`` or ``NAME[]`` a list.

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
        outer, bracket, key = name.removesuffix("[]").partition("[")
        keyed = bool(bracket) and key.endswith("]")
        name = outer if keyed else f"{outer}{bracket}{key}"
        before = fields.get(name)
        if before is not None and isinstance(before, dict) is not keyed:
            raise ServeError("bad_request", "a field of the form is both a text and an object")
        if keyed:
            fields.setdefault(name, {})[key[:-1]] = text
        elif isinstance(before, list):
            before.append(text)
        else:
            fields[name] = text if before is None else [before, text]
    return fields


def _encoded(body: bytes) -> list[tuple[str, str]]:
    """Return the names and texts of a form without files."""
    try:
        return parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError:
        raise ServeError("bad_request", "the body is no form") from None


def _multipart(kind: str, body: bytes) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the parts of a form. Only the headers of a part are parsed: its content may say that
    it has parts itself."""
    typed = Message()
    typed["content-type"] = kind
    boundary = typed.get_param("boundary")
    if not isinstance(boundary, str):
        raise ServeError("bad_request", "the body is no form")
    line = re.compile(rb"\r?\n--" + re.escape(boundary.encode()) + rb"(--)?[ \t]*(?=\r?\n|\Z)")
    content = b"\n" + body
    lines = [*islice(line.finditer(content), MAX_FIELDS + 1)]
    last = next((number for number, found in enumerate(lines) if found[1]), 0)
    if not last:
        raise ServeError("bad_request", f"the body is no form of at most {MAX_FIELDS} parts")
    for before, after in pairwise(lines[: last + 1]):
        yield _part(content[before.end() : after.start()])


def _part(content: bytes) -> tuple[str, str]:
    """Return the name and the text of a part of a form."""
    blank = _BLANK.search(content, 0, MAX_HEAD_BYTES)
    part = HeaderParser().parsestr(
        content[: blank.start()].decode(errors="replace").lstrip() if blank else ""
    )
    name = part.get_param("name", header="content-disposition")
    if blank is None or not isinstance(name, str):
        raise ServeError("bad_request", "a part of the form has no name")
    part.set_payload(content[blank.end() :].decode("ascii", "surrogateescape"))
    try:
        data = part.get_payload(decode=True)
        assert isinstance(data, bytes)  # of a part without parts
        return name, b64encode(data).decode() if part.get_filename() is not None else data.decode()
    except ValueError:
        raise ServeError("bad_request", "a part of the form is neither a text nor a file") from None

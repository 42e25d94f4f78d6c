"""The pieces of which the OpenAPI document is made: schemas of values, descriptions of routes and of refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seko_serve.errors import KINDS
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


def object_of(
    required: Mapping[str, object], optional: Mapping[str, object] = {}, *, further: bool = False
) -> Table:
    """Return the schema of an object; ``further``: it may have further fields."""
    table: Table = {"type": "object", "properties": {**required, **optional}, "additionalProperties": further}
    return {**table, "required": list(required)} if required else table


def list_of(item: Table, more: Mapping[str, object] = {}) -> Table:
    """Return the schema of a list of items, in OpenAI's form."""
    return object_of({"object": {"const": "list"}, "data": {"type": "array", "items": item}, **more})


def named(schema: str) -> Table:
    """Return a reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{schema}"}


def json_of(schema: str) -> Table:
    """Return the content of a body in JSON that has a schema of the document."""
    return {"application/json": {"schema": named(schema)}}


def body(content: Table) -> Table:
    """Return a required body."""
    return {"required": True, "content": content}


def parameter(name: str, schema: Table, where: str = "query", description: str = "") -> Table:
    """Return a parameter."""
    table: Table = {"name": name, "in": where, "schema": schema}
    return {**table, "description": description} if description else table


def path_parameter(name: str) -> Table:
    """Return a parameter in the path."""
    return {**parameter(name, TEXT, "path"), "required": True}


def operation(summary: str, content: Table | None, codes: tuple[str, ...], *, status: int = 200) -> Table:
    """Return the OpenAPI description of a route, with its answer and its errors; several error codes may have one HTTP
    status."""
    answer: Table = {"description": summary}
    if content is not None:
        answer["content"] = content
    # Without keys any request may be refused for its header Host.
    refusals = refused(tuple(dict.fromkeys((*codes, "forbidden", "internal"))))
    table: Table = {"summary": summary, "responses": {str(status): answer, **refusals}}
    return table if "unauthorized" in codes else {**table, "security": []}


def refused(codes: tuple[str, ...]) -> Table:
    """Return the answers with these error codes, by HTTP status."""
    answers: Table = {}
    for code in codes:
        kind = KINDS[code]
        refusal = answers.setdefault(str(kind.status), {"description": "", "content": json_of("Error")})
        refusal["description"] = f"{refusal['description']} `{code}`: {kind.meaning}".strip()
    return answers

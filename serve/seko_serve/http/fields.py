"""The fields of a request's body as a table, from which the body is read and checked, and described in the OpenAPI
document and in docs/clients.md."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seko_serve.errors import MAX_NAME_LETTERS, ServeError, check_fields
from seko_serve.http.schemas import FLAG, NUMBER, TEXT, WHOLE, Table, object_of

Read = Callable[[Any, str], Any]


@dataclass(frozen=True)
class Field:
    """One field of a request's body.

    Parameters
    ----------
    name, meaning : str
        Name of the field, and what it does: a sentence or less for people.
    schema : dict
        JSON schema of its value.
    read : callable
        Function of the value and the field's name that returns the value in the form in which the server uses it, or
        raises a ServeError.
    own : callable, optional
        Function of the artifact's manifest that returns the only value that the artifact has. Another value is refused.
    """

    name: str
    meaning: str
    schema: Table
    read: Read
    own: Callable[[Any], object] | None = None


class Fields(Mapping[str, Field]):
    """The fields of one kind of request, by name."""

    def __init__(self, *fields: Field) -> None:
        self._fields = {field.name: field for field in fields}

    def __getitem__(self, name: str) -> Field:
        return self._fields[name]

    def __iter__(self) -> Any:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def read(self, table: Mapping[str, Any], manifest: object) -> dict[str, Any]:
        """Return the values of a request's fields, without those that are null, and without those of which the artifact
        has one value alone.

        Raises
        ------
        ServeError
            If a field is unknown or its value is invalid, or the artifact has another value.
        """
        given = {name: value for name, value in table.items() if value is not None}
        check_fields(given, self)
        values: dict[str, Any] = {}
        for name, value in given.items():
            field = self._fields[name]
            try:
                found = field.read(value, name)
            except ServeError as error:
                error.field = error.field or name
                raise
            if field.own is None:
                values[name] = found
            elif found != (own := field.own(manifest)):
                raise ServeError(
                    "bad_request",
                    f"{name} is {_shown(found)}, and this artifact has {own} alone: leave {name} out, or give {own}",
                    field=name,
                )
        return values

    def schema(self, required: Sequence[str] = ()) -> Table:
        """Return the JSON schema of the request's body; fields that are not required may be null."""
        properties = {
            name: {
                **(field.schema if name in required else _or_null(field.schema)),
                "description": field.meaning,
            }
            for name, field in self.items()
        }
        return object_of({name: properties.pop(name) for name in required}, properties)

    def table(self) -> str:
        """Return the table of the fields in Markdown, as docs/clients.md has it; fields of one meaning share a row."""
        names: dict[str, list[str]] = {}
        for name, field in self.items():
            names.setdefault(field.meaning, []).append(f"`{name}`")
        rows = [f"| {', '.join(of_row)} | {meaning} |" for meaning, of_row in names.items()]
        return "\n".join(["| field | content |", "|---|---|", *rows]) + "\n"


def text(value: Any, name: str) -> str:
    """Return a text; ServeError for another value."""
    if not isinstance(value, str):
        raise ServeError("bad_request", f"{name} is {_shown(value)}, expected a text")
    return value


def number(value: Any, name: str) -> float:
    """Return a number, which may be written as a text, as forms have it; ServeError for another value."""
    try:
        found = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):  # no number; an integer that no float holds
        found = math.nan
    if isinstance(value, bool) or not math.isfinite(found):
        raise ServeError("bad_request", f"{name} is {_shown(value)}, expected a number")
    return found


def whole(value: Any, name: str) -> int:
    """Return a whole number, which may be written as a text; ServeError for another value."""
    found = number(value, name)
    if found != int(found):
        raise ServeError("bad_request", f"{name} is {_shown(value)}, expected a whole number")
    return int(found)


def flag(value: Any, name: str) -> bool:
    """Return true or false, which may be written as a text; ServeError for another value."""
    found = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        raise ServeError("bad_request", f"{name} is {_shown(value)}, expected true or false")
    return found


def anything(value: Any, _: str) -> Any:
    """Return a value that is checked elsewhere."""
    return value


def structure(value: Any, name: str) -> Any:
    """Return an object or a list, which a form has as a text of JSON; other values are returned unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise ServeError("bad_request", f"{name} is no JSON") from None
    return value


def one_of(*words: str) -> Read:
    """Return the reader of one of these words."""

    def read(value: Any, name: str) -> str:
        if value not in words:
            raise ServeError("bad_request", f"{name} is {_shown(value)}, expected {' or '.join(words)}")
        return str(value)

    return read


def _or_null(schema: Table) -> Table:
    null = {"type": "null"}
    return {**schema, "anyOf": [*schema["anyOf"], null]} if "anyOf" in schema else {"anyOf": [schema, null]}


def _or_text(schema: Table) -> Table:
    return {"anyOf": [schema, TEXT]}


# The schema of a value, and its reader.
A_TEXT: tuple[Table, Read] = (TEXT, text)
A_NUMBER: tuple[Table, Read] = (_or_text(NUMBER), number)
A_WHOLE: tuple[Table, Read] = (_or_text(WHOLE), whole)
A_FLAG: tuple[Table, Read] = (_or_text(FLAG), flag)


def _shown(value: object) -> str:
    return repr(value)[:MAX_NAME_LETTERS]

"""The events of OpenAI's realtime API that the server takes, as tables of fields, and those that it sends."""

from __future__ import annotations

import secrets
from typing import Any

from seko_serve.errors import ServeError, check_fields
from seko_serve.http.fields import A_TEXT, A_WHOLE, Field, Fields, Read, anything, one_of, text, whole
from seko_serve.http.schemas import TEXT, Table

RATE = 24_000  # Hz, of OpenAI's sound
PCM = "audio/pcm"


def _only(wanted: object, why: str) -> Read:
    """Return the reader of a field that may have one value, or is empty."""

    def read(value: Any, name: str) -> None:
        if value not in (wanted, "", [], {}):
            raise ServeError("unsupported", f"{name}: {why}", field=name)

    return read


def _most(value: Any, name: str) -> int | None:
    return None if value == "inf" else whole(value, name)


def _audio(value: Any, name: str) -> dict[str, Any]:
    """Return the voice and the rate of a field ``audio``, as far as it names them."""
    check_fields(object_in(value, name), ("input", "output"), name)
    if _filled(value.get("input") or {}):
        raise ServeError("unsupported", "this socket takes text, and no sound", field="audio.input")
    output = _filled(object_in(value.get("output") or {}, "audio.output"))
    check_fields(output, ("format", "voice", "speed"), "audio.output")
    if output.get("speed", 1) != 1:
        raise ServeError("bad_request", "audio.output.speed is 1, and no other", field="audio.output.speed")
    found = {name: output[name] for name in ("voice",) if name in output}
    if "format" in output:
        form = _filled(object_in(output["format"], "audio.output.format"))
        check_fields(form, ("type", "rate"), "audio.output.format")
        if form.get("type", PCM) != PCM:
            raise ServeError("unsupported", f"sound is {PCM}", field="audio.output.format.type")
        found["rate"] = form.get("rate", RATE)
    return found


def object_in(value: Any, name: str) -> dict[str, Any]:
    """Return a field that is an object; ServeError for another value."""
    if not isinstance(value, dict):
        raise ServeError("bad_request", f"{name} is no object", field=name)
    return value


def _filled(table: Any) -> Any:
    """Return an object without the fields that are null."""
    return (
        {name: value for name, value in table.items() if value is not None}
        if isinstance(table, dict)
        else table
    )


def _texts(items: Any, name: str) -> list[str]:
    if not isinstance(items, list):
        raise ServeError("bad_request", f"{name} is no list of items", field=name)
    return [text_of(item) for item in items]


def text_of(item: Any) -> str:
    """Return the text of a conversation's item; ServeError if it is no message of texts."""
    item = _filled(object_in(item, "item"))
    check_fields(item, ("id", "object", "type", "role", "status", "content"), "item")
    parts = item.get("content")
    if (item.get("type"), item.get("role")) != ("message", "user") or not isinstance(parts, list):
        raise ServeError(
            "unsupported", "an item is a message of the user with a list of texts", field="item.type"
        )
    found = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "input_text":
            raise ServeError("unsupported", "an item's content is input_text", field="item.content")
        found.append(text(part.get("text"), "item.content.text"))
    return "".join(found)


_INSTRUCTIONS = Field(
    "instructions", "empty", TEXT, _only("", "this model takes none; to change how it sounds, keep a voice")
)
_MODALITIES = Field("output_modalities", "sound", {}, _only(["audio"], "this server answers with audio"))
_MOST = Field("max_output_tokens", "patches of a response", A_WHOLE[0], _most)
_AUDIO = Field("audio", "voice and format", {}, _audio)
SESSION = Fields(
    Field("type", "`realtime`", {}, one_of("realtime")), Field("model", "its name", *A_TEXT), _INSTRUCTIONS,
    _MODALITIES, _MOST, _AUDIO,
)  # fmt: skip
RESPONSE = Fields(
    Field("conversation", "`auto` or `none`", {}, one_of("auto", "none")), Field("input", "items", {}, _texts),
    Field("metadata", "any", {}, anything), _INSTRUCTIONS, _MODALITIES, _MOST, _AUDIO,
)  # fmt: skip


def new_id(kind: str) -> str:
    """Return a new id of a thing of this kind, such as ``resp``."""
    return f"{kind}_{secrets.token_hex(10)}"


def event(kind: str, **fields: object) -> Table:
    """Return an event that the server sends."""
    return {"type": kind, "event_id": new_id("event"), **fields}


def error_event(error: ServeError, event_id: object = None) -> Table:
    """Return the event of an error; ``event_id`` is that of the client's event, if it has one."""
    told: Any = error.answer()["error"]
    shown = {name: told[name] for name in ("type", "code", "message", "param")}
    return event("error", error={**shown, "event_id": event_id if isinstance(event_id, str) else None})


def message_item(name: str, role: str, part: Table, status: str = "completed") -> Table:
    """Return a message of the conversation with one part."""
    return {
        "id": name,
        "object": "realtime.item",
        "type": "message",
        "role": role,
        "status": status,
        "content": [part],
    }

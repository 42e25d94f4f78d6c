"""Events as JSON: values that JSON lacks, files of events, and recordings of a session."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from seko_runtime.arguments import shown, whole_number
from seko_runtime.controls.base import Event
from seko_runtime.errors import InputFileError, ManifestError, UsageError
from seko_runtime.format.json_fields import parse_json
from seko_runtime.host.user_files import first_bytes

MAX_EVENT_BYTES = 64 << 20  # of a file of events
_LAST_BYTES = 100  # most of a recording's last line
# What a recording says of its session's beginning, by the arguments of `open_session`.
OPENING = ("seed", "prompt", "text", "image", "conditioning_latents", "reference", "inputs")
CHUNK_INPUTS = "chunk_inputs"  # of an entry: inputs that the next chunk alone was given
# Changes of a session that a recording has beside events, by the names of the session's methods.
CHANGES: Mapping[str, str] = {
    "prompt": "set_prompt",
    "text": "set_text",
    "inputs": "set_inputs",
    "restart": "restart",
    "cut": "cut",
    "rewind": "rewind",
}


def as_json(value: Any) -> Any:
    """Return an event, or a value of one, as JSON values: bytes and arrays become objects with the field
    ``base64``."""
    if isinstance(value, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"dtype": value.dtype.str, "shape": list(value.shape), "base64": data}
    if isinstance(value, bytes | bytearray | memoryview):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(name): as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(item) for item in value]
    return as_json(np.asarray(value)) if hasattr(value, "__array__") else value


def copied(value: Any) -> Any:
    """Return an event, or a value of one, with copies of its arrays on the host, also of tensors on a device; numbers
    in bfloat16, which numpy lacks, become float32."""
    if isinstance(value, Mapping):
        return {name: copied(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if "bfloat16" in str(value.dtype) else value).numpy()
    return np.array(value) if hasattr(value, "__array__") and not isinstance(value, np.generic) else value


def of_json(value: Any) -> Any:
    """Return the value that `as_json` wrote.

    Raises
    ------
    UsageError
        If an object with the field ``base64`` holds no bytes, or another number of bytes than its array takes, or the
        value is nested too deeply.
    """
    try:
        return _of_json(value)
    except RecursionError:
        raise UsageError("an event is nested too deeply") from None


def _of_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_of_json(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "base64" not in value:
        return {name: _of_json(item) for name, item in value.items()}
    try:
        data = base64.b64decode(value["base64"], validate=True)
        if "dtype" not in value:
            return data
        name = str(value["dtype"])
        # numpy divides by what stands between brackets, a part of a unit of time, also by 0: the process would end
        if "[" in name or (dtype := np.dtype(name)).kind not in "biuf":
            raise ValueError(f"dtype is {shown(name)}, expected numbers")
        return np.frombuffer(data, dtype).reshape(value["shape"]).copy()
    except (binascii.Error, ValueError, TypeError, KeyError, OverflowError) as fault:
        raise UsageError(f"an object with base64 holds no array: {fault}") from None


def read_json(path: Path, option: str) -> Any:
    """Read what a JSON file of events holds.

    Raises
    ------
    InputFileError
        If the file cannot be read, or holds no JSON.
    """
    document = first_bytes(path, f"{option} {path}", MAX_EVENT_BYTES + 1)
    try:
        return of_json(parse_json(document, "it", MAX_EVENT_BYTES))
    except (ManifestError, UsageError) as fault:
        raise InputFileError(f"{option} {path} holds no events: {fault}") from None


def read_events(path: Path, option: str) -> list[Event]:
    """Read the events of a file: one as a JSON object, or several as a JSON array.

    Raises
    ------
    InputFileError
        If the file cannot be read, or holds no events.
    """
    table = read_json(path, option)
    events = table if isinstance(table, list) else [table]
    if not events or not all(isinstance(event, Mapping) for event in events):
        raise InputFileError(f"{option} {path} holds no events: expected a JSON object, or an array of them")
    return events


@dataclass(frozen=True)
class Entry:
    """One thing that happened to a session.

    Parameters
    ----------
    chunk : int
        Number of chunks that the session had made since the recording began.
    what : str
        What happened: ``event``, of a control; `CHUNK_INPUTS`; or the name of a change of the session, one of
        `CHANGES`.
    event : mapping
        The event, or the arguments of the change.
    control : str
        Name of the control that took the event; otherwise empty.
    """

    chunk: int
    what: str
    event: Event
    control: str = ""

    @property
    def opening(self) -> dict[str, Any]:
        """Of a recording's first entry: what the session began with, as arguments of the pool's `open_session`."""
        return {name: self.event[name] for name in OPENING if name in self.event}

    @property
    def has_controls(self) -> bool:
        """Of a recording's first entry: whether it has the controls' state, and what follows all inputs of its chunks,
        as a page's timeline has not."""
        return "controls" in self.event


class Recording:
    """What happened to a session from its beginning on. Replayed on a session of the same artifact, opened with
    `Entry.opening`, it gives the same bytes.

    Parameters
    ----------
    begin : mapping
        What the session began with: the arguments of `open_session` and the state of its ``controls``.
    """

    def __init__(self, begin: Mapping[str, Any]) -> None:
        self.chunks = 0  # made since the recording began
        self._lines: list[str] = []
        self._bytes = 0  # of the lines
        self._add(Entry(0, "begin", copied(begin)))

    @property
    def entries(self) -> Sequence[Entry]:
        """What has happened so far, in order; the first entry has what the session began with. UsageError as `text`."""
        self._check_whole()
        return tuple(_entry_of(of_json(json.loads(line))) for line in self._lines)

    def note(self, what: str, event: Event) -> None:
        """Record a change of the session."""
        self._add(Entry(self.chunks, what, copied(event)))

    def heard(self, control: str, event: Event) -> None:
        """Record an event that a control has taken."""
        self._add(Entry(self.chunks, "event", copied(event), control))

    def text(self) -> str:
        """Return the recording as JSON, a line for each entry; `read_recording` reads it.

        Raises
        ------
        UsageError
            If more has happened than `MAX_EVENT_BYTES` hold, such as minutes of an input video. Such a recording keeps
            nothing.
        """
        self._check_whole()
        return "".join((*self._lines, _line_of(Entry(self.chunks, "end", {}))))

    def _add(self, entry: Entry) -> None:
        if self._bytes > MAX_EVENT_BYTES:
            return
        line = _line_of(entry)
        self._bytes += len(line)  # ASCII
        self._lines.append(line)
        if self._bytes > MAX_EVENT_BYTES - _LAST_BYTES:
            self._bytes, self._lines = MAX_EVENT_BYTES + 1, []

    def _check_whole(self) -> None:
        if self._bytes > MAX_EVENT_BYTES:
            raise UsageError(f"more has happened than a recording of {MAX_EVENT_BYTES >> 20} MiB holds")


def _line_of(entry: Entry) -> str:
    table = {"chunk": entry.chunk, entry.what: entry.event}
    if entry.control:
        table["control"] = entry.control
    try:
        return json.dumps(as_json(table), separators=(",", ":"), allow_nan=False) + "\n"
    except (TypeError, ValueError) as fault:
        raise UsageError(f"{entry.what} cannot be recorded as JSON: {fault}") from None


def read_recording(path: Path, option: str) -> list[Entry]:
    """Read the recording of a session: its beginning, what happened, and its end.

    Raises
    ------
    InputFileError
        If the file cannot be read, or a line is no entry of a recording.
    """
    document = first_bytes(path, f"{option} {path}", MAX_EVENT_BYTES + 1)
    if len(document) > MAX_EVENT_BYTES:
        raise InputFileError(f"{option} {path} has more than {MAX_EVENT_BYTES} bytes")
    entries: list[Entry] = []
    for number, line in enumerate(document.splitlines(), 1):
        try:
            entry = _entry_of(of_json(parse_json(line, "it", MAX_EVENT_BYTES)))
            if not entries and entry.what != "begin":
                raise UsageError("it is not the beginning of a recording")
            if entries and (entry.what == "begin" or entry.chunk < entries[-1].chunk):
                raise UsageError("it does not follow the line before it")
        except (ManifestError, UsageError) as fault:
            raise InputFileError(
                f"{option} {path}: line {number} is no entry of a recording: {fault}"
            ) from None
        entries.append(entry)
    if not entries or entries[-1].what != "end":
        raise InputFileError(f"{option} {path} ends before the recording's end")
    return entries


def _entry_of(table: object) -> Entry:
    if not isinstance(table, Mapping):
        raise UsageError(f"found {shown(table)}, expected an object")
    what = next((name for name in ("begin", "event", CHUNK_INPUTS, *CHANGES, "end") if name in table), None)
    control = table.get("control", "")
    if what is None or set(table) - {"chunk", "control", what} or (what == "event") != bool(control):
        raise UsageError(
            f"found the fields {shown(sorted(map(str, table)))}, expected chunk, and event with control, or one of "
            f"begin, {CHUNK_INPUTS}, {', '.join(CHANGES)}, end"
        )
    if not isinstance(table[what], Mapping) or not isinstance(control, str):
        raise UsageError(f"{what} is {shown(table[what])}, expected an object")
    return Entry(whole_number(table.get("chunk"), "chunk", 0), what, table[what], control)

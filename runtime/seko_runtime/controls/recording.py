"""Events as JSON: values that JSON lacks, files of events, and recordings of a session."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from seko_runtime.arguments import shown
from seko_runtime.controls.base import Event
from seko_runtime.errors import InputFileError, ManifestError, UsageError
from seko_runtime.format.json_fields import parse_json
from seko_runtime.host.faults import fault_text

MAX_EVENT_BYTES = 64 << 20  # of a file of events
_DTYPES = ("uint8", "int16", "int32", "int64", "float32", "float64", "bool")


def as_json(value: Any) -> Any:
    """Return an event, or a value of one, as JSON values: bytes and arrays become objects with the field
    ``base64``."""
    if isinstance(value, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"dtype": str(value.dtype), "shape": list(value.shape), "base64": data}
    if isinstance(value, bytes | bytearray | memoryview):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(name): as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(item) for item in value]
    return value


def of_json(value: Any) -> Any:
    """Return the value that `as_json` wrote.

    Raises
    ------
    UsageError
        If an object with the field ``base64`` holds no bytes, or another number of bytes than its array takes.
    """
    if isinstance(value, list):
        return [of_json(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "base64" not in value:
        return {name: of_json(item) for name, item in value.items()}
    try:
        data = base64.b64decode(value["base64"], validate=True)
        if "dtype" not in value:
            return data
        if value["dtype"] not in _DTYPES:
            raise ValueError(f"dtype is {shown(value['dtype'])}, expected one of {', '.join(_DTYPES)}")
        return np.frombuffer(data, value["dtype"]).reshape(value["shape"]).copy()
    except (binascii.Error, ValueError, TypeError, KeyError, OverflowError) as fault:
        raise UsageError(f"an object with base64 holds no array: {fault}") from None


def read_json(path: Path, option: str) -> Any:
    """Read what a JSON file of events holds.

    Raises
    ------
    InputFileError
        If the file cannot be read, or holds no JSON.
    """
    try:
        with path.open("rb") as file:
            document = file.read(MAX_EVENT_BYTES + 1)
        return of_json(parse_json(document, "it", MAX_EVENT_BYTES))
    except OSError as fault:
        raise InputFileError(f"{option} {path} cannot be read: {fault_text(fault)}") from None
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


def line_of(entry: Mapping[str, Any]) -> str:
    """Return an entry of a recording as a line of JSON, without its end."""
    return json.dumps(as_json(entry), separators=(",", ":"), allow_nan=False)

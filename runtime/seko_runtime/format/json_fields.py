"""Typed reading of untrusted JSON; every fault raises a ManifestError. The reader contains no names of fields."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from itertools import chain
from typing import TypeVar

from seko_runtime.errors import ManifestError
from seko_runtime.format.budgets import Budget

MAX_JSON_BYTES = 16 << 20  # most bytes of a document; the largest known manifest has 1.0 MB
# most values, counted by commas and brackets, including those in strings; the largest known manifest has 50,000
MAX_JSON_VALUES = 5 << 17
# most arrays and objects, which take the most memory; the largest known manifest has 14,000
MAX_JSON_TABLES = 1 << 18
MAX_JSON_DEPTH = 64  # deepest nesting; the largest known manifest has 6
MAX_KEY_LETTERS = 1024  # most letters of a name: the longest path
MAX_TEXT_LETTERS = 1 << 20  # most letters of a text: a sentence
MAX_INTEGER = 1 << 62  # largest integer, so that sums and products of a few integers fit numpy's int64
NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\ud800-\udfff]")

T = TypeVar("T")


class Fields:
    """One JSON object that is read field by field; error messages name the object's place in the document.

    Parameters
    ----------
    value : object
        A value from `json.loads`.
    where : str
        Path of ``value`` in the document, such as ``engines[2]``.

    Raises
    ------
    ManifestError
        If ``value`` is not an object. Each method also raises this error for a field that is missing or has the wrong
        type.
    """

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise ManifestError(f"{where} is {_kind(value)}, expected an object; rebuild the artifact")
        self._table: dict[str, object] = value
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self._table

    def names(self) -> list[str]:
        """Return the keys of the JSON object as they are written."""
        return list(self._table)

    def value(self, key: str) -> object:
        """Return the value of a required field, of any type."""
        if key not in self._table:
            raise ManifestError(f"{self.where} has no field {key!r}, which is required; rebuild the artifact")
        return self._table[key]

    def text(self, key: str) -> str:
        """Return the value of a required string field."""
        return as_text(self.value(key), f"{self.where}.{key}")

    def integer(self, key: str, minimum: int = 0, maximum: int = MAX_INTEGER) -> int:
        """Return the value of a required integer field, which must be within bounds."""
        return as_integer(self.value(key), f"{self.where}.{key}", minimum, maximum)

    def flag(self, key: str, default: bool) -> bool:
        """Return the value of an optional true/false field."""
        return as_flag(self._table.get(key, default), f"{self.where}.{key}")

    def items(self, key: str, read: Callable[[object, str], T]) -> tuple[T, ...]:
        """Return the items of a required array, each read by ``read(item, where)``."""
        return as_items(self.value(key), f"{self.where}.{key}", read)

    def entries(self, key: str, read: Callable[[object, str], T]) -> dict[str, T]:
        """Return the entries of a required object, each value read by ``read(value, where)``, if the number of entries
        is within the budget.
        """
        return as_entries(self.value(key), f"{self.where}.{key}", read)


def parse_json(document: bytes, what: str, max_bytes: int = MAX_JSON_BYTES) -> object:
    """Parse strict UTF-8 JSON: duplicate keys, NaN and lone surrogates are refused, and size, number of values and
    nesting are bounded.

    Raises
    ------
    ManifestError
        If the document is invalid JSON; the message has ``what`` and the reason.
    """
    if len(document) > max_bytes:
        raise ManifestError(f"{what} is too long: at most {max_bytes} bytes are read")
    tables = document.count(b"[") + document.count(b"{")
    Budget(MAX_JSON_TABLES, "arrays and objects").take(tables, what)
    Budget(MAX_JSON_VALUES, "values").take(tables + document.count(b","), what)
    try:
        text = document.decode("utf-8")
        value: object = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_float=_finite
        )
    except ManifestError as error:  # raised by hooks, which do not know the document's name
        raise ManifestError(f"{what}: {error}") from None
    except RecursionError:
        raise ManifestError(_TOO_DEEP.format(what)) from None
    except ValueError as error:  # UnicodeDecodeError, JSONDecodeError, an integer of thousands of digits
        raise ManifestError(f"{what} is no UTF-8 JSON: {_short(error)}; copy the artifact again") from None
    _check_depth(value, what)
    return value


_TOO_DEEP = f"{{}} is nested too deeply to be a manifest: at most {MAX_JSON_DEPTH} levels are read"


def _check_depth(value: object, what: str) -> None:
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        tables = [
            container.values() if isinstance(container, dict) else container
            for container in level
            if isinstance(container, dict | list)
        ]
        if not tables:
            return
        level = [*chain.from_iterable(tables)]
    raise ManifestError(_TOO_DEEP.format(what))


def _finite(digits: str) -> float:
    """Refuse numbers like 1e999, which Python would read as infinity."""
    number = float(digits)
    if not math.isfinite(number):
        raise ManifestError(f"holds the number {digits[:20]}, which is too large; copy the artifact again")
    return number


def as_text(value: object, where: str) -> str:
    """Read a string from JSON that can be printed and encoded."""
    if not isinstance(value, str):
        raise ManifestError(f"{where} is {_kind(value)}, expected a string")
    if len(value) > MAX_TEXT_LETTERS:
        raise ManifestError(f"{where} has {len(value)} letters, at most {MAX_TEXT_LETTERS} are read")
    if _UNPRINTABLE.search(value):
        raise ManifestError(f"{where} holds a control character or a lone surrogate")
    return value


def as_flag(value: object, where: str) -> bool:
    """Read true or false from JSON."""
    if not isinstance(value, bool):
        raise ManifestError(f"{where} is {_kind(value)}, expected true or false")
    return value


def as_name(value: object, where: str) -> str:
    """Read an identifier from JSON."""
    text = as_text(value, where)
    if not NAME_PATTERN.fullmatch(text):
        raise ManifestError(f"{where} is {text[:80]!r}, expected a name of letters, digits, '_', '.' and '-'")
    return text


def as_integer(value: object, where: str, minimum: int = 0, maximum: int = MAX_INTEGER) -> int:
    """Read an integer within bounds from JSON; true and false do not count as integers."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ManifestError(f"{where} is {_kind(value)}, expected an integer")
    if not minimum <= value <= maximum:
        raise ManifestError(f"{where} is {str(value)[:40]}, expected {minimum} to {maximum}")
    return value


def as_number(value: object, where: str) -> float:
    """Read a finite number from JSON."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ManifestError(f"{where} is {_kind(value)}, expected a number")
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise ManifestError(f"{where} is out of range")
    if not math.isfinite(value):
        raise ManifestError(f"{where} is {value}, expected a finite number")
    return float(value)


def as_items(
    value: object, where: str, read: Callable[[object, str], T], budget: Budget | None = None
) -> tuple[T, ...]:
    """Read an array from JSON, if the number of its items is within the budget."""
    if not isinstance(value, list):
        raise ManifestError(f"{where} is {_kind(value)}, expected an array")
    if budget is not None:
        budget.take(len(value), where)
    return tuple(read(item, f"{where}[{index}]") for index, item in enumerate(value))


def as_entries(
    value: object, where: str, read: Callable[[object, str], T], budget: Budget | None = None
) -> dict[str, T]:
    """Read an object with keys of any name from JSON, if the number of keys is within the budget."""
    table = Fields(value, where)
    names = table.names()
    if budget is not None:
        budget.take(len(names), where)
    return {name: read(table.value(name), f"{where}[{name!r}]") for name in names}


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ManifestError("an object names a key twice: two readers could see two artifacts; rebuild it")
    if table and max(map(len, table)) > MAX_KEY_LETTERS:
        raise ManifestError(
            f"an object has a key of more than {MAX_KEY_LETTERS} letters; rebuild the artifact"
        )
    return table


def _no_constant(name: str) -> float:
    raise ManifestError(f"{name} is no JSON number; rebuild the artifact")


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:120]

"""The classes whose objects may be part of a message between processes (`Channel`). A message names the class and holds
its fields; only a class that is registered here is ever made from a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

KindT = TypeVar("KindT")
# metadata of a dataclass's field that is no part of a message, such as a tensor on a device: the receiver gets None
STAYS: Mapping[str, bool] = {"seko.stays": True}
_TUPLE = ""  # the name under which a tuple travels


@dataclass(frozen=True)
class _Record:
    """How the objects of one class travel: the class's name in messages, and a function that returns an object's
    fields, which the class takes as arguments."""

    name: str
    kind: type[Any]
    fields_of: Callable[[Any], object]


_BY_KIND: dict[type[Any], _Record] = {tuple: _Record(_TUPLE, tuple, list)}
_BY_NAME: dict[str, _Record] = {}


def record(
    kind: type[KindT], fields_of: Callable[[KindT], Mapping[str, object]] | None = None
) -> type[KindT]:
    """Register a class, so that its objects may be parts of messages; return the class. Use it as a decorator.

    Parameters
    ----------
    kind : type
        A dataclass, or with ``fields_of`` another class. Objects of derived classes do not travel.
    fields_of : callable, optional
        Function that returns the arguments of ``kind`` for an equal object. Default: the dataclass's fields, without
        those whose metadata are `STAYS`.
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    _BY_KIND[kind] = _BY_NAME[name] = _Record(name, kind, fields_of or _fields)
    return kind


def taken_apart(part: object) -> tuple[str, object] | None:
    """Return the name and the fields of an object of a registered class, or of a tuple; None for anything else."""
    known = _BY_KIND.get(type(part))
    return None if known is None else (known.name, known.fields_of(part))


def put_together(name: str, parts: Any) -> object:
    """Return the object that `taken_apart` took apart.

    Raises
    ------
    ValueError
        If this process has not registered the class.
    """
    if name == _TUPLE:
        return tuple(parts)
    if name not in _BY_NAME:
        raise ValueError(f"this process knows no record {name}: import the module that registers it first")
    return _BY_NAME[name].kind(**parts)


def _fields(part: Any) -> Mapping[str, object]:
    return {
        field.name: None if field.metadata == STAYS else getattr(part, field.name) for field in fields(part)
    }

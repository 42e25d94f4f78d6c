"""Reading of frozen dataclasses from untrusted JSON by the types of their fields. The reader contains no names of
dataclasses.

The type of a dataclass field says how the field is read from JSON. The types are ``str``, ``int`` (from 0), ``float``,
``bool``, ``object``, ``tuple[T, ...]``, ``Mapping[str, T]``, ``T | None`` (may be null), another dataclass, or
``Annotated[T, note, ...]``. A note in a field's type is a function that reads the value, a `Limit` or a `Mark`. A field
that has a default in the dataclass may be missing in the JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from seko_runtime.errors import ManifestError
from seko_runtime.format import budgets
from seko_runtime.format.budgets import Budget
from seko_runtime.format.json_fields import (
    Fields,
    as_entries,
    as_flag,
    as_integer,
    as_items,
    as_number,
    as_text,
)

Read = Callable[[object, str], Any]  # takes a value and its place in the document
Check = Callable[[Any, str], None]
T = TypeVar("T")
_PLAIN: Mapping[object, Read] = {
    str: as_text,
    int: as_integer,
    float: as_number,
    bool: as_flag,
    object: lambda value, _: value,  # a value that is kept without being interpreted
}


class Mark(Enum):
    """Constraints of a field that the field's type does not express."""

    REQUIRED = "required, although the dataclass has a default"


@dataclass(frozen=True, eq=False)
class Limit:
    """The largest number of items or entries of a field: a constant of the module `budgets`. Fields that refer to the
    same `Limit` object share one budget."""

    constant: str
    what: str


@dataclass(frozen=True)
class Within:
    """A note of a field's type: reads an integer within bounds."""

    minimum: int
    maximum: int

    def __call__(self, value: object, where: str) -> int:
        """Return the integer if it is within the bounds."""
        return as_integer(value, where, self.minimum, self.maximum)


@dataclass(frozen=True)
class OneOf:
    """A note of a field's type: reads one of several words."""

    words: tuple[str, ...]
    complaint: str = "expected one of {}"

    def __call__(self, value: object, where: str) -> str:
        """Return the word if it is one of the allowed words."""
        text = as_text(value, where)
        if text not in self.words:
            raise ManifestError(f"{where} is {text[:40]!r}, {self.complaint.format(', '.join(self.words))}")
        return text


class Document:
    """Reads the dataclasses of one JSON document, with budgets for this document.

    Parameters
    ----------
    checks : mapping of type to callable
        Functions that check rules that types do not express, by class. A function is called with each object of its
        class or a subclass, and with the object's place in the document.
    """

    def __init__(self, checks: Mapping[type, Check]) -> None:
        self._checks = checks
        self._budgets: dict[Limit, Budget] = {}

    def read(self, kind: type[T], value: object, where: str, *, outermost: bool = False) -> T:
        """Read one dataclass; unknown fields are ignored.

        Parameters
        ----------
        kind : type
            Class of the dataclass.
        value : object
            A value from `json.loads`.
        where : str
            Place of the value in the document, for error messages.
        outermost : bool
            Whether the value is the document itself. Error messages then name the document's required objects without a
            path.

        Raises
        ------
        ManifestError
            If a field is missing or does not match its type; the message names the field's place.
        """
        table, arguments = Fields(value, where), {}
        for field in _plan(kind):  # type: ignore[arg-type]  # a class is hashable
            if field.optional and field.name not in table:
                continue
            item = table.value(field.name)
            if item is None and field.nullable:
                continue
            place = field.name if outermost and field.is_object else f"{where}.{field.name}"
            arguments[field.name] = field.read(self, item, place)
        record = kind(**arguments)
        for base, check in self._checks.items():
            if isinstance(record, base):
                check(record, where)
        return record

    def budget(self, limit: Limit | None) -> Budget | None:
        """Return the number of items that a limit still allows in this document."""
        if limit is None:
            return None
        if limit not in self._budgets:
            self._budgets[limit] = Budget(getattr(budgets, limit.constant), limit.what)
        return self._budgets[limit]


_Reader = Callable[[Document, object, str], Any]


@dataclass(frozen=True)
class _Field:
    name: str
    read: _Reader
    optional: bool
    nullable: bool
    is_object: bool  # a required field


@lru_cache
def _plan(kind: type[Any]) -> tuple[_Field, ...]:
    hints = get_type_hints(kind, include_extras=True)
    plan = []
    for field in fields(kind):
        type_, notes = _noted(hints[field.name])
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        optional = has_default and Mark.REQUIRED not in notes
        plan.append(
            _Field(
                field.name,
                _reader(hints[field.name]),
                optional,
                nullable=NoneType in get_args(type_),
                is_object=not optional and (is_dataclass(type_) or get_args(type_)[1:] == (object,)),
            )
        )
    return tuple(plan)


def _noted(type_: Any) -> tuple[Any, tuple[Any, ...]]:
    """Split an annotated type into the type without notes, and the notes."""
    if get_origin(type_) is not Annotated:
        return type_, ()
    return get_args(type_)[0], type_.__metadata__


def _reader(type_: Any) -> _Reader:
    type_, notes = _noted(type_)
    if get_origin(type_) in (Union, UnionType):
        (type_,) = (argument for argument in get_args(type_) if argument is not NoneType)
        return _reader(type_)
    read = next((note for note in notes if callable(note)), _PLAIN.get(type_))
    if read is not None:
        return lambda _, value, where: read(value, where)
    if isinstance(type_, type) and is_dataclass(type_):
        return lambda document, value, where: document.read(type_, value, where)
    limit = next((note for note in notes if isinstance(note, Limit)), None)
    several, item = (as_items, 0) if get_origin(type_) is tuple else (as_entries, 1)
    inner = _reader(get_args(type_)[item])
    return lambda document, value, where: several(
        value, where, partial(inner, document), document.budget(limit)
    )

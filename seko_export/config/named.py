"""Look-up of an object, such as a model family or a VAE, by a name in a table or by ``MODULE:ATTRIBUTE``."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import TypeVar

from seko_export.errors import UsageError

T = TypeVar("T")


def find_named(what: str, name: str, known: Collection[str], home: str, kind: type[T]) -> T:
    """Return the object that ``name`` refers to, such as a model family.

    Parameters
    ----------
    what : str
        Kind of the named object, for error messages: ``model family``.
    name : str
        The name: one of ``known``, or ``MODULE:ATTRIBUTE`` of the object in Python.
    known : collection of str
        The names in the table.
    home : str
        ``MODULE:ATTRIBUTE`` of the objects in the table, with ``{}`` in place of the name.
    kind : type
        Class that the object must have, which may be abstract.

    Raises
    ------
    UsageError
        If the name is not known, or ``MODULE:ATTRIBUTE`` names no object of class ``kind``.
    """
    if ":" not in name and name not in known:
        raise UsageError(f"{what} {name!r} is not known: expected one of {', '.join(known)}")
    module, _, attribute = (name if ":" in name else home.format(name)).partition(":")
    try:
        value: object = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{what} {name!r} cannot be imported: {error}") from None
    if not isinstance(value, kind):
        raise UsageError(f"{what} {name!r} is a {type(value).__name__}, expected a {kind.__name__}")
    return value

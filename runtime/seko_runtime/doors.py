"""Doors: kinds of objects that these packages have and that other distributions may bring by entry points.

A door knows its own objects by name and finds those of installed distributions in a group of entry points, such as
``seko.families``. An object that is asked for and cannot be had is an error, which names the distribution. Where a
command only lists what there is, one broken distribution must not stop all others: it is left out with a
`BrokenPluginWarning`.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Generic, TypeVar

from seko_runtime.arguments import shown
from seko_runtime.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class BrokenPluginWarning(UserWarning):
    """Warning that an installed distribution brings an object that cannot be loaded."""


@dataclass(frozen=True)
class Door(Generic[T]):
    """One kind of objects, such as model families.

    Parameters
    ----------
    group : str
        Group of the entry points of other distributions. An entry point's name is the object's name.
    what : str
        The kind in error messages: ``model family``.
    kind : type
        Class of the objects, which may be abstract.
    own : mapping of str to str
        The objects of these packages: ``MODULE:ATTRIBUTE`` by name. They are imported when they are asked for.
    named_by : str
        Attribute of an object that must equal its name; empty: none.
    places : bool
        Whether ``MODULE:ATTRIBUTE`` is a name, too: an object of a distribution that is still being written. Never for
        names that come from an artifact, which would then choose what is imported.
    error : type
        Class of the errors.
    """

    group: str
    what: str
    kind: type[T]
    own: Mapping[str, str]
    named_by: str = ""
    places: bool = False
    error: type[Exception] = UsageError

    def names(self) -> tuple[str, ...]:
        """Return the names of all objects: our own in their order, then those of other distributions by name."""
        return (*self.own, *sorted(set(_installed(self.group)) - set(self.own)))

    def find(self, name: str) -> T:
        """Return the object with this name.

        Raises
        ------
        error
            If no object has the name, several distributions bring one, or it cannot be imported or is no ``kind``.
        ModuleNotFoundError
            If a library that one of our own objects imports is not installed.
        """
        if name in self.own:
            return self._load(name, self.own[name], "")
        if self.places and ":" in name:
            return self._load(name, name, "")
        brought = _installed(self.group).get(name, ())
        if not brought:
            raise self.error(
                f"{self.what} {shown(name)} is not known: expected one of {', '.join(self.names())}"
            )
        if len(brought) > 1:
            raise self.error(
                f"{self.what} {name!r} is brought by {' and by '.join(map(_origin, brought))}; uninstall all but one"
            )
        return self._load(name, brought[0].value, f" of {_origin(brought[0])}")

    def every(self, but: Collection[str] = ()) -> Iterator[tuple[str, T]]:
        """Yield the name and object of each of our own, then of each that other distributions bring, except the names
        ``but``. What others bring and cannot be loaded is left out with a `BrokenPluginWarning`."""
        for name in self.names():
            if name in but:
                continue
            try:
                yield name, self.find(name)
            except self.error as error:
                if name in self.own:
                    raise
                warnings.warn(str(error), BrokenPluginWarning, stacklevel=2)

    def _load(self, name: str, place: str, origin: str) -> T:
        module, _, attribute = place.partition(":")
        try:
            value: object = getattr(import_module(module), attribute)
        except Exception as error:  # whatever a distribution of others does when it is imported
            if name in self.own or not (origin or isinstance(error, ImportError | AttributeError)):
                raise  # what our own object lacks is a library that is not installed
            raise self.error(
                f"{self.what} {name!r}{origin} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(value, self.kind):
            raise self.error(
                f"{self.what} {name!r}{origin} is a {type(value).__name__}, expected a {self.kind.__name__}"
            )
        if self.named_by and getattr(value, self.named_by) != name:
            raise self.error(
                f"{self.what} {name!r}{origin} calls itself {getattr(value, self.named_by)!r}; expected one name"
            )
        return value


@cache  # distributions do not come and go while a process runs
def _installed(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    from importlib.metadata import entry_points  # imports a parser of e-mails, which few processes need

    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry_point in entry_points(group=group):
        found[entry_point.name] = (*found.get(entry_point.name, ()), entry_point)
    return found


def _origin(entry_point: EntryPoint) -> str:
    dist = entry_point.dist
    return f"the distribution {dist.name} {dist.version}" if dist else entry_point.value

"""The rows of an artifact of several ranks: the caller's side, a class that is made from an interface of rows, and the
commands that each rank's process answers.

Every rank holds all rows and gets the same commands in the same order, so that the host's state of the rows is equal in
all ranks. Every method and property of the interface is a command; `over_ranks` has what a signature does not show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from seko_runtime.errors import RankLostError, SekoRuntimeError, SessionClosedError
from seko_runtime.format.manifest import Manifest
from seko_runtime.parallel.group import RankGroup
from seko_runtime.parallel.records import record
from seko_runtime.sessions.call_lock import CallLock
from seko_runtime.sessions.over_ranks import Facts, RowMethod, methods_of
from seko_runtime.sessions.row_state import StateForm
from seko_runtime.sessions.rows import CLOSED, Rows

# Seconds until a call counts as lost: a call of a large model on a CPU takes minutes. A process that hangs sends no
# more signs of life and is found earlier.
CALL_S = 600.0
OPEN, STATS = "open rows", "backend stats"  # commands of every rank; those of rows have a method's name


@record
@dataclass(frozen=True)
class Waited:
    """The result of a function without arguments that a method of rows returned. A rank's process calls that function
    at once, because it answers one command at a time."""

    result: Any


def rows_over_ranks(
    interface: type, manifest: Manifest, group: RankGroup, form: StateForm, options: Facts
) -> Rows[Any, Any]:
    """Open the rows of a pool in the processes of all ranks; return an object with the methods of ``interface``. Every
    method may raise a RankLostError, if the process of a rank has ended or does not answer.

    Parameters
    ----------
    interface : type
        The workload's interface of rows: `Rows`, or a protocol derived from it.
    manifest : Manifest
        The artifact's manifest, as these rows use it.
    group : RankGroup
        The processes of the ranks, one for each GPU.
    form : StateForm
        How a row's state is written to files, as the workload defines it.
    options : mapping
        Options of the pool, by name, which are sent to each rank's process.
    """
    return cast(Rows[Any, Any], _ranked(interface)(manifest, group, form, options))


class _RankedRows:
    """Base class of the rows over several ranks: what is the caller's own, and how a method reaches the ranks."""

    manifest: Manifest
    form: StateForm
    call_lock: CallLock
    closed: bool
    properties: Sequence[RowMethod]  # those whose values the ranks have

    def __init__(self, manifest: Manifest, group: RankGroup, form: StateForm, options: Facts) -> None:
        self.manifest, self.form = manifest, form
        self.call_lock, self.closed = CallLock(CLOSED), False
        self._group = group
        self._kept: dict[str, Any] = {}  # by name: fixed results, and the last value of each property
        self._ask(OPEN, {"options": dict(options)}, patient=True)
        self._keep_properties()

    def begin_owner(self, row: int, tenant: str | None) -> None:
        """Set the owner of a row. If a rank was lost, also unnoticed until now, nothing is left to set: sessions can
        still be closed, and the next work raises the error."""
        with suppress(RankLostError):
            self._ask("begin_owner", {"row": row, "tenant": tenant})

    def check_open(self) -> None:
        """Raise a SessionClosedError if `close` was called."""
        if self.closed:
            raise SessionClosedError(CLOSED)

    def close(self) -> None:
        """End the pool and free its memory on all ranks; a second call does nothing. Properties keep their values."""
        if self.closed:
            return
        # If the processes are gone, earlier calls have raised that error.
        with suppress(SekoRuntimeError):
            self._keep_properties()
        with suppress(SekoRuntimeError):
            self._ask("close", patient=True)
        self.closed = True

    def _call(self, method: RowMethod, arguments: Facts) -> Any:
        """Run a method of the rows on the ranks; return the result."""
        how = method.how
        if how.fixed and method.name in self._kept:
            return self._kept[method.name]
        own = None
        if how.split is not None:
            arguments, own = {}, how.split(self, arguments)
        ranks = (0,) if how.first else None
        parts = self._ask(method.name, arguments, own=own, ranks=ranks, patient=how.patient)
        waited = isinstance(parts[0], Waited)
        results = [part.result if waited else part for part in parts]
        result = results[0] if how.join is None else how.join(self, results)
        if how.fixed:
            self._kept[method.name] = result
        return (lambda: result) if waited else result

    def _value(self, method: RowMethod) -> Any:
        """Return the value of a property of the rows."""
        if not self.closed:
            self._kept[method.name] = self._call(method, {})
        return self._kept[method.name]

    def _keep_properties(self) -> None:
        for method in self.properties:
            self._value(method)

    def _ask(self, command: str, facts: Facts | None = None, **how: Any) -> list[Any]:
        """Send a command to the processes of some ranks, by default of all; return their answers in the order of the
        ranks. The parameters and errors are those of `RankGroup.call`."""
        self.check_open()
        results = self._group.call(command, facts, seconds=CALL_S, **how).results
        return [results[rank] for rank in sorted(results)]


@cache
def _ranked(interface: type) -> type[_RankedRows]:
    """Return the class of an interface's rows over several ranks, which has every member of the interface.

    Raises
    ------
    TypeError
        If a member of the interface cannot be reached in another process.
    """
    methods, own = methods_of(interface), vars(_RankedRows) | _RankedRows.__annotations__
    names = {name for base in interface.__mro__ for name in vars(base).get("__annotations__", {})}
    if odd := sorted(name for name in names if not name.startswith("_") and name not in own):
        raise TypeError(f"{interface.__qualname__}.{odd[0]} is an attribute, expected a method or a property")
    if "end" in methods:
        raise TypeError(f"{interface.__qualname__}.end has the name of the command that ends the ranks")
    asked = [method for name, method in methods.items() if name not in own]
    made: dict[str, Any] = {method.name: _member(method) for method in asked}
    made["properties"] = [method for method in asked if method.signature is None]
    return type(f"Ranked{interface.__name__}", (_RankedRows,), made)


def _member(method: RowMethod) -> Any:
    signature = method.signature
    if signature is None:
        return property(lambda rows: rows._value(method))

    def call(self: _RankedRows, *arguments: Any, **named: Any) -> Any:
        return self._call(method, signature.bind(*arguments, **named).arguments)

    call.__name__ = method.name
    return call


class RankCommands:
    """Answers the commands of rows over several ranks in the process of one rank.

    Parameters
    ----------
    rank : int
        Number of the rank, from 0.
    interface : type
        The workload's interface of rows; no other member of the rows can be reached.
    open_rows : callable
        Function that takes options and returns this rank's part of the rows, ready to run.
    stats : callable
        Function that returns the counters of the backend.
    """

    def __init__(
        self,
        rank: int,
        interface: type,
        open_rows: Callable[[Facts], Rows[Any, Any]],
        stats: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._rank, self._methods, self._open_rows = rank, methods_of(interface), open_rows
        self._rows: Rows[Any, Any] | None = None
        self._stats = stats

    def __call__(self, command: str, facts: Facts) -> object:
        """Run one command and return its answer."""
        if command == OPEN:
            self._rows = self._open_rows(facts["options"])
            return None
        return dict(self._stats()) if command == STATS else self._answer(self._methods[command], facts)

    def close(self) -> None:
        """Close the rows, if they have been opened."""
        if self._rows is not None:
            self._rows.close()
        self._rows = None

    def _answer(self, method: RowMethod, arguments: Facts) -> object:
        """Run a method of the rows; ranks other than 0 send of the result only what is joined."""
        if self._rows is None:
            raise SessionClosedError(CLOSED)
        result = getattr(self._rows, method.name)
        if method.signature is not None:
            result = result(**arguments)
        waits = callable(result)
        if waits:
            result = result()
        if self._rank:
            result = None if method.how.join is None else method.how.share(self._rows, result)
        return Waited(result) if waits else result

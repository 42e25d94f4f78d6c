"""The rows of an artifact of several ranks: the caller's side, and the commands that each rank's process answers.

Every rank holds all rows and gets the same commands in the same order, so that the host's state of the rows is equal in
all ranks. Results of engine calls are read from rank 0. Tensors that are split across ranks (`split_axes`) are read
from every rank and joined.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from math import prod
from typing import Any, Generic, Protocol

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import HostBytes
from seko_runtime.errors import RankLostError, SekoRuntimeError, SessionClosedError
from seko_runtime.format.json_fields import Fields
from seko_runtime.format.manifest import Manifest, TensorSpec
from seko_runtime.sessions.call_lock import CallLock
from seko_runtime.sessions.loaded import ManifestT
from seko_runtime.sessions.row_state import RowLayout, RowState, StateForm
from seko_runtime.sessions.rows import CLOSED, Rows

# Seconds until a call counts as lost: a call of a large model on a CPU takes minutes. A process that hangs sends no
# more signs of life and is found earlier.
CALL_S = 600.0
Facts = Mapping[str, Any]
Command = Callable[[Any, Facts], object]  # takes a rank's rows and the command's facts; returns the answer


class Group(Protocol):
    """The interface of a group of rank processes, as far as ranked rows use it."""

    def call(
        self,
        command: str,
        facts: Facts | None = None,
        *,
        own: Sequence[Facts] | None = None,
        ranks: Sequence[int] | None = None,
        seconds: float,
        patient: bool = False,
    ) -> Any:
        """Send a command to ranks and wait for their answers; see `RankGroup.call`."""


class RankedRows(Generic[ManifestT]):
    """Base class of `Rows` over several ranks. Every method may raise a RankLostError, if the process of a rank has
    ended or does not answer.

    Parameters
    ----------
    manifest : Manifest
        The artifact's manifest.
    group : Group
        The processes of the ranks, one for each GPU.
    form : StateForm
        How a row's state is written to files and messages, as the workload defines it.
    options : mapping
        Options of the pool, by name, which are sent to each rank's process.
    """

    def __init__(self, manifest: ManifestT, group: Group, form: StateForm, options: Facts) -> None:
        self.manifest, self.form = manifest, form
        self._group: Group | None = group
        self.call_lock = CallLock(CLOSED)
        self._layout: RowLayout | None = None
        self.ask_ranks("open", {"options": dict(options)}, patient=True)

    def begin_owner(self, row: int, tenant: str | None) -> None:
        """Set the owner of a row. If a rank was lost, also unnoticed until now, nothing is left to set: sessions can
        still be closed, and the next work raises the error."""
        with suppress(RankLostError):
            self.ask_ranks("begin_owner", {"row": row, "tenant": tenant})

    def reserve(self, row: int) -> None:
        """Allocate the host memory that a row needs."""
        self.ask_ranks("reserve", {"row": row})

    def forget(self, row: int) -> None:
        """Queue zeros into all tensors of a row of the pool, on each rank."""
        self.ask_ranks("forget", {"row": row})

    def free_bytes(self) -> int:
        """Return the free memory of rank 0's device in bytes."""
        return int(self.ask_ranks("free_bytes")[0])

    def layout(self) -> RowLayout:
        """Return the name, shape and dtype of each tensor of a row's state, joined over all ranks."""
        if self._layout is None:
            layout, axes = self.ask_ranks("layout")[0], split_axes(self.manifest)
            parts: dict[str, dict[str, TensorSpec]] = {"tensors": {}, "arrays": {}}
            for part, specs in parts.items():
                for spec in layout[part]:
                    shape = list(spec["shape"])
                    if spec["name"] in axes:
                        shape[axes[spec["name"]]] *= self.manifest.ranks
                    specs[spec["name"]] = TensorSpec(spec["name"], tuple(shape), spec["dtype"])
            self._layout = RowLayout(parts["tensors"], parts["arrays"])
        return self._layout

    def store(self, row: int) -> RowState:
        """Copy the state of a row to the host, with the parts of all ranks joined."""
        layout = self.layout()
        parts = self.ask_ranks("store", {"row": row}, patient=True)
        whole = parts[0]
        for name, axis in split_axes(self.manifest).items():
            before = prod(layout.tensors[name].shape[:axis])
            shares = [part["tensors"][name].reshape(before, -1) for part in parts]
            whole["tensors"][name] = np.concatenate(shares, 1).reshape(-1)
        return state_of_message(whole, {}, self.form)

    def load(self, row: int, state: RowState) -> None:
        """Copy a stored state into a row; each rank gets its part of the tensors that are split across ranks."""
        layout, split = self.layout(), split_axes(self.manifest)
        tensors = state.tensors.arrays()
        own: list[dict[str, Any]] = [{"shares": {}} for _ in range(self.manifest.ranks)]
        for name, axis in split.items():
            before = prod(layout.tensors[name].shape[:axis])
            shares = tensors[name].reshape(before, self.manifest.ranks, -1)
            for rank, facts in enumerate(own):
                facts["shares"][name] = shares[:, rank].reshape(-1)
        same = state_to_message(state, [name for name in tensors if name not in split])
        self.ask_ranks("load", {"row": row, "state": same}, own=own, patient=True)

    def check(self, rows: Sequence[int], inputs: Sequence[Any]) -> None:
        """Raise the error that `run` would raise for these rows before it queues work; otherwise do nothing."""
        self.ask_ranks("check", {"rows": rows, "inputs": inputs}, ranks=(0,))

    def variants(self, rows: Sequence[int]) -> list[Hashable]:
        """Return the launch variant of each row's next call; only rows of one variant share a launch."""
        answers = self.ask_ranks("variants", {"rows": rows}, ranks=(0,))[0]
        return [
            tuple(variant) if isinstance(variant, list) else variant for variant in answers
        ]  # JSON has no tuples

    def calls_done(self) -> Callable[[], None]:
        """Wait for the engine calls queued so far, because each rank's process answers one command at a time; return a
        function that does nothing.
        """
        self.ask_ranks("finish")
        return lambda: None

    def check_open(self) -> None:
        """Raise a SessionClosedError if `close` was called."""
        self._open_group()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._group is None

    def close(self) -> None:
        """End the pool and free its memory on all ranks; a second call does nothing."""
        if self._group is None:
            return
        with suppress(SekoRuntimeError):  # the processes are gone, and earlier calls have raised that error
            self.ask_ranks("close", patient=True)
        self._group = None

    def ask_ranks(
        self,
        command: str,
        facts: Facts | None = None,
        *,
        own: Sequence[Facts] | None = None,
        ranks: Sequence[int] | None = None,
        patient: bool = False,
    ) -> list[Any]:
        """Send a command to the processes of some ranks, by default of all; return their answers in the order of the
        ranks. The parameters and errors are those of `RankGroup.call`."""
        answers = self._open_group().call(
            command, facts, own=own, ranks=ranks, seconds=CALL_S, patient=patient
        )
        return [answers.results[rank] for rank in sorted(answers.results)]

    def _open_group(self) -> Group:
        if self._group is None:
            raise SessionClosedError(CLOSED)
        return self._group


def _layout(rows: Rows[Any, Any], facts: Facts) -> object:
    del facts
    layout = rows.layout()
    return {
        "tensors": [asdict(spec) for spec in layout.tensors.values()],
        "arrays": [asdict(spec) for spec in layout.arrays.values()],
    }


COMMANDS: Mapping[str, Command] = {
    "begin_owner": lambda rows, facts: rows.begin_owner(**facts),
    "reserve": lambda rows, facts: rows.reserve(**facts),
    "forget": lambda rows, facts: rows.forget(**facts),
    "check": lambda rows, facts: rows.check(**facts),
    "variants": lambda rows, facts: rows.variants(**facts),
    "finish": lambda rows, _: rows.calls_done()(),
    "free_bytes": lambda rows, _: rows.free_bytes(),
    "layout": _layout,
}


class RankCommands:
    """Answers the commands of `RankedRows` in the process of one rank.

    Parameters
    ----------
    rank : int
        Number of the rank, from 0.
    manifest : Manifest
        The artifact's manifest.
    open_rows : callable
        Function that takes options and returns this rank's part of the rows, ready to run.
    commands : mapping of str to callable
        Functions for the workload's own commands, by name, in addition to `COMMANDS`.
    stats : callable
        Function that returns the counters of the backend.
    """

    def __init__(
        self,
        rank: int,
        manifest: Manifest,
        open_rows: Callable[[Facts], Rows[Any, Any]],
        commands: Mapping[str, Command],
        stats: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._rank, self._manifest, self._open_rows = rank, manifest, open_rows
        self._rows: Rows[Any, Any] | None = None
        self._of_rows = {**COMMANDS, **commands}
        self._own: Mapping[str, Callable[[Facts], object]] = {
            "open": self._open,
            "store": self._store,
            "load": self._load,
            "close": lambda _: self.close(),
            "backend_stats": lambda _: dict(stats()),
        }

    def __call__(self, command: str, facts: Facts) -> object:
        """Run one command and return its answer."""
        if command in self._own:
            return self._own[command](facts)
        return self._of_rows[command](self._opened, facts)

    def close(self) -> None:
        """Close the rows, if they have been opened."""
        if self._rows is not None:
            self._rows.close()
        self._rows = None

    @property
    def _opened(self) -> Rows[Any, Any]:
        if self._rows is None:
            raise SessionClosedError(CLOSED)
        return self._rows

    def _open(self, facts: Facts) -> None:
        self._rows = self._open_rows(facts["options"])

    def _store(self, facts: Facts) -> object:
        state = self._opened.store(**facts)
        names = split_axes(self._manifest) if self._rank else None
        return state_to_message(state, names)

    def _load(self, facts: Facts) -> None:
        form = self._opened.form
        self._opened.load(facts["row"], state_of_message(facts["state"], facts["shares"], form))


def split_axes(manifest: Manifest) -> dict[str, int]:
    """Return the axis along which a tensor of a row is split across ranks, by the tensor's name."""
    shared = [buffer for buffer in manifest.buffers if buffer.rank_axis]
    return {buffer.name: buffer.rank_axis - (buffer.role == "lane") for buffer in shared}


def state_to_message(state: RowState, names: Collection[str] | None = None) -> dict[str, Any]:
    """Return a row's state as a message to another process, with some or all of its tensors."""
    tensors = state.tensors.arrays()
    chosen = {name: array for name, array in tensors.items() if names is None or name in names}
    return {"numbers": asdict(state.numbers), "tensors": chosen, "arrays": dict(state.arrays)}


def state_of_message(message: Facts, further: Mapping[str, NDArray[np.uint8]], form: StateForm) -> RowState:
    """Return the state of a row from a message that `state_to_message` made. The state also gets the tensors
    ``further``."""
    numbers = form.read_numbers(Fields(message["numbers"], "numbers"))
    return RowState(numbers, HostBytes({**message["tensors"], **further}), message["arrays"])

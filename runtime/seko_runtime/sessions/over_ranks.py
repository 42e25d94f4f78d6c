"""What a method of `Rows` does when the artifact has several ranks: a mark on the method in the interface, and the
functions that split and join a row's tensors.

A method without a mark runs on every rank, and rank 0's result is the result. `ranked_rows` reads the marks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import FunctionType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import HostBytes
from seko_runtime.format.manifest import Manifest, TensorSpec
from seko_runtime.sessions.row_state import RowLayout, RowState

Facts = Mapping[str, Any]
MethodT = TypeVar("MethodT", bound=Callable[..., Any])
_MARK = "_seko_over_ranks"
_PASSED_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class OverRanks:
    """A mark, used as a decorator: what a method of rows over several ranks does that its signature does not show. The
    mark of a property stands below ``@property``.

    Parameters
    ----------
    first : bool
        Whether rank 0 alone runs the method, which must change nothing.
    patient : bool
        Whether a process may be idle for a while in the method, for example while it waits for a disk.
    fixed : bool
        Whether the result never changes while the rows are open, so that the ranks are asked once.
    join : callable, optional
        Function that takes the caller's rows and the results of all ranks, and returns the whole result. Default: rank
        0's result.
    share : callable, optional
        Function that takes a rank's rows and its result, and returns what ranks other than 0 send for ``join``.
        Default: the result.
    split : callable, optional
        Function that takes the caller's rows and the method's arguments by name, and returns the arguments of each
        rank. Default: every rank gets the same arguments.
    """

    first: bool = False
    patient: bool = False
    fixed: bool = False
    join: Callable[[Any, Sequence[Any]], Any] | None = None
    share: Callable[[Any, Any], Any] = lambda _, result: result
    split: Callable[[Any, Facts], Sequence[Facts]] | None = None

    def __call__(self, method: MethodT) -> MethodT:
        """Mark a method of an interface; return the method."""
        setattr(method, _MARK, self)
        return method


@dataclass(frozen=True)
class RowMethod:
    """A method or property of an interface of rows.

    Parameters
    ----------
    name : str
        Its name, which is also the name of the command to the ranks.
    signature : inspect.Signature or None
        The parameters behind ``self``; None for a property.
    how : OverRanks
        Its mark.
    """

    name: str
    signature: inspect.Signature | None
    how: OverRanks


def methods_of(interface: type) -> dict[str, RowMethod]:
    """Return the public methods and properties of an interface of rows, by name.

    Raises
    ------
    TypeError
        If a public member is neither a method nor a property, or a parameter cannot be passed by name.
    """
    found: dict[str, RowMethod] = {}
    for base in reversed(interface.__mro__[:-1]):
        for name, member in vars(base).items():
            if name.startswith("_"):
                continue
            function = member.fget if isinstance(member, property) else member
            where = f"{base.__qualname__}.{name}"
            if not isinstance(function, FunctionType):
                raise TypeError(f"{where} is a {type(member).__name__}, expected a method or a property")
            signature = inspect.signature(function)
            parameters = list(signature.parameters.values())[1:]
            if odd := [each.name for each in parameters if each.kind not in _PASSED_BY_NAME]:
                raise TypeError(f"{where} has the parameter {odd[0]}, expected parameters that have a name")
            inherited = found[name].how if name in found else OverRanks()
            how = getattr(function, _MARK, inherited)
            if how.fixed and parameters:
                raise TypeError(f"{where} has parameters, so its result cannot be `fixed`")
            behind_self = None if isinstance(member, property) else signature.replace(parameters=parameters)
            found[name] = RowMethod(name, behind_self, how)
    return found


def split_axes(manifest: Manifest) -> dict[str, int]:
    """Return the axis along which a tensor of a row is split across ranks, by the tensor's name."""
    shared = [buffer for buffer in manifest.buffers if buffer.rank_axis]
    return {buffer.name: buffer.rank_axis - (buffer.role == "lane") for buffer in shared}


def split_tensors(rows: Any, state: RowState) -> RowState:
    """Return a rank's state of a row with only the tensors that are split across ranks."""
    tensors, split = state.tensors.arrays(), split_axes(rows.manifest)
    return RowState(None, HostBytes({name: tensors[name] for name in split}))


def joined_state(rows: Any, parts: Sequence[RowState]) -> RowState:
    """Return the state of a row with the parts of all ranks joined."""
    layout, tensors = rows.layout(), [part.tensors.arrays() for part in parts]
    whole = dict(tensors[0])
    for name, axis in split_axes(rows.manifest).items():
        before = prod(layout.tensors[name].shape[:axis])
        whole[name] = np.concatenate([part[name].reshape(before, -1) for part in tensors], 1).reshape(-1)
    return replace(parts[0], tensors=HostBytes(whole))


def state_of_each(rows: Any, arguments: Facts) -> list[Facts]:
    """Return the arguments of ``load`` for each rank, which gets its part of the tensors that are split."""
    layout, ranks, state = rows.layout(), rows.manifest.ranks, arguments["state"]
    whole = dict(state.tensors.arrays())
    shares: dict[str, NDArray[np.uint8]] = {}
    for name, axis in split_axes(rows.manifest).items():
        before = prod(layout.tensors[name].shape[:axis])
        shares[name] = whole.pop(name).reshape(before, ranks, -1)
    own = [{name: share[:, rank].reshape(-1) for name, share in shares.items()} for rank in range(ranks)]
    return [{**arguments, "state": replace(state, tensors=HostBytes({**whole, **part}))} for part in own]


def joined_layout(rows: Any, parts: Sequence[RowLayout]) -> RowLayout:
    """Return the layout of a row's whole state."""
    tensors = dict(parts[0].tensors)
    for name, axis in split_axes(rows.manifest).items():
        shape = list(tensors[name].shape)
        shape[axis] *= rows.manifest.ranks
        tensors[name] = TensorSpec(name, tuple(shape), tensors[name].dtype)
    return replace(parts[0], tensors=tensors)


def joined_arrays(rows: Any, parts: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Return arrays by the names of a row's tensors, those of split tensors joined over all ranks."""
    whole = dict(parts[0])
    for name, axis in split_axes(rows.manifest).items():
        if name in whole:
            whole[name] = np.concatenate([part[name] for part in parts], axis)
    return whole

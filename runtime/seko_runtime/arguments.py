"""Arguments of public calls that are numbers, flags, paths or lists: checked, and told in a message whatever they are.

Arrays are checked where their shapes are known; see `video.inputs`.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat, cast

from seko_runtime.errors import UsageError

SHOWN_LETTERS = 40


def shown(value: object) -> str:
    """Return a value in few letters, for a message. Python writes no number of more than 4300 digits."""
    try:
        words = repr(value)
    except ValueError:
        words = f"a huge {type(value).__name__}"
    return words if len(words) <= SHOWN_LETTERS else f"{words[: SHOWN_LETTERS - 3]}..."


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number of Python or numpy; True and a length of time are none."""
    try:
        return not isinstance(value, bool) and operator.index(cast(Any, value)) is not None
    except TypeError:
        return False


def whole_number(value: object, name: str, least: int, most: int | None = None) -> int:
    """Return a whole number of Python or numpy from ``least`` to ``most``.

    Raises
    ------
    UsageError
        If it is none; ``name`` is the argument's in the message.
    """
    number = operator.index(cast(Any, value)) if is_whole(value) else None
    if number is None or number < least or (most is not None and number > most):
        span = f"at least {least}" if most is None else f"{least} to {most}"
        kind = "a whole number, " if number is None else ""
        raise UsageError(f"{name} is {shown(value)}, expected {kind}{span}")
    return number


def real_number(value: object, name: str, expected: str = "a finite number") -> float:
    """Return a finite number of Python or numpy as a float.

    Raises
    ------
    UsageError
        If it is none; ``name`` is the argument's in the message, ``expected`` what the caller wants.
    """
    number = isinstance(value, SupportsFloat) and not isinstance(value, bool) and not hasattr(value, "shape")
    # A scalar of numpy has a shape, too: that of one number.
    scalar = (
        getattr(value, "shape", None) == () and getattr(getattr(value, "dtype", None), "kind", "") in "iuf"
    )
    try:
        result = float(cast(Any, value)) if number or scalar else math.nan
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise UsageError(f"{name} is {shown(value)}, expected {expected}")
    return result


def flag(value: object, name: str) -> bool:
    """Return True or False; UsageError for anything else, of which Python would take most for True."""
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):  # the second is numpy's
        return bool(value)
    raise UsageError(f"{name} is {shown(value)}, expected True or False")


def path_of(value: object, name: str) -> Path:
    """Return a path; UsageError for what is none, or what the system takes for no name."""
    try:
        path = Path(cast(Any, value))
        if b"\0" not in os.fsencode(path):
            return path
    except (TypeError, ValueError):  # a lone surrogate is the second
        pass
    raise UsageError(f"{name} is {shown(value)}, expected a path")


def mapping_of(value: object, name: str) -> Mapping[str, Any]:
    """Return a mapping, empty for None; UsageError for anything else."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return value
    raise UsageError(f"{name} are a {type(value).__name__}, expected a mapping of names to arrays")


def iterates(value: object) -> bool:
    """Return whether a value can be iterated; numpy's array of no dimension has the method for it and cannot."""
    return isinstance(value, Iterable) and getattr(value, "shape", None) != ()


def items_of(value: object, refusal: str) -> list[Any]:
    """Return the items of a list, tuple or array, in order.

    Raises
    ------
    UsageError
        With the words of ``refusal``, for all that could be iterated too and would be taken for something else: a
        mapping gives its keys, bytes give numbers, a text its letters, a set no order, a generator possibly no end.
    """
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)
    shape = getattr(value, "shape", None)
    if listed or (isinstance(shape, tuple) and shape and isinstance(value, Collection)):
        return [*cast(Any, value)]
    raise UsageError(refusal)

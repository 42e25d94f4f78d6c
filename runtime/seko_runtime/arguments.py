"""Checks of arguments that are numbers, flags, paths, lists or arrays; an error message shows the argument, whatever
its type. Shapes of arrays are checked where they are known.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat, cast

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import UsageError

SHOWN_LETTERS = 40
# Largest magnitude of an input's numbers; real inputs are far smaller. The square of 1e20 overflows float32; a norm
# turns the overflow into NaN, which a picture shows as black without an error.
LARGEST = 1e6


def shown(value: object) -> str:
    """Return a short text of a value for an error message, also for a number of more than 4300 digits, which Python
    refuses to print."""
    try:
        words = repr(value)
    except ValueError:
        words = f"a huge {type(value).__name__}"
    return words if len(words) <= SHOWN_LETTERS else f"{words[: SHOWN_LETTERS - 3]}..."


def is_whole(value: object) -> bool:
    """Return whether a value is an integer of Python or numpy; bool and timedelta64 do not count."""
    try:
        return not isinstance(value, bool) and operator.index(cast(Any, value)) is not None
    except TypeError:
        return False


def whole_number(value: object, name: str, least: int, most: int | None = None) -> int:
    """Return a whole number of Python or numpy from ``least`` to ``most``.

    Raises
    ------
    UsageError
        If the value is not a whole number in this range; ``name`` is the argument's name in the message.
    """
    number = operator.index(cast(Any, value)) if is_whole(value) else None
    if number is None or number < least or (most is not None and number > most):
        span = f"at least {least}" if most is None else f"{least} to {most}"
        kind = "a whole number, " if number is None else ""
        raise UsageError(f"{name} is {shown(value)}, expected {kind}{span}")
    return number


def real_number(
    value: object, name: str, expected: str = "a finite number", *, most: float | None = None
) -> float:
    """Return a finite number of Python or numpy as a float; with ``most``, a number from 0 to ``most``.

    Raises
    ------
    UsageError
        If the value is not such a number; ``name`` is the argument's name in the message, ``expected`` describes the
        expected value there.
    """
    if most is not None:
        expected = f"a number from 0 to {most:g}"
    elif type(value) is float and math.isfinite(value):  # most values, without a look at their methods
        return value
    number = isinstance(value, SupportsFloat) and not isinstance(value, bool) and not hasattr(value, "shape")
    # A numpy scalar has a shape, too, which is empty.
    scalar = (
        getattr(value, "shape", None) == () and getattr(getattr(value, "dtype", None), "kind", "") in "iuf"
    )
    try:
        result = float(cast(Any, value)) if number or scalar else math.nan
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not math.isfinite(result) or (most is not None and not 0 <= result <= most):
        raise UsageError(f"{name} is {shown(value)}, expected {expected}")
    return result


def flag(value: object, name: str) -> bool:
    """Return a value that must be a bool; UsageError for any other type, because Python would treat even the text
    "False" as True."""
    # the second class is numpy's bool
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise UsageError(f"{name} is {shown(value)}, expected True or False")


def path_of(value: object, name: str) -> Path:
    """Return a value as a Path; UsageError if it is not a path, or not a valid file name for the system."""
    try:
        path = Path(cast(Any, value))
        if b"\0" not in os.fsencode(path):
            return path
    except (TypeError, ValueError):  # UnicodeEncodeError is raised for a lone surrogate
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
    """Return whether a value can be iterated. A numpy array without dimensions cannot, although it has the method
    `__iter__`."""
    return isinstance(value, Iterable) and getattr(value, "shape", None) != ()


def items_of(value: object, refusal: str) -> list[Any]:
    """Return the items of a list, tuple or array, in order.

    Raises
    ------
    UsageError
        For other types, even if they can be iterated, with the message ``refusal``. A mapping would yield its keys,
        bytes would yield numbers and a string its letters; a set has no order, and a generator may not end.
    """
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)
    shape = getattr(value, "shape", None)
    if listed or (isinstance(shape, tuple) and shape and isinstance(value, Collection)):
        return [*cast(Any, value)]
    raise UsageError(refusal)


def as_array(value: object, what: str) -> NDArray[Any]:
    """Return a value as a numpy array; UsageError if that is impossible, as for a ragged list or a tensor on a
    device."""
    try:
        array: NDArray[Any] = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as fault:
        raise UsageError(f"{what} is no array: {fault}") from None
    return array


def check_magnitude(array: Any, what: str) -> None:
    """Raise a UsageError unless all numbers of an array are finite and at most `LARGEST` in magnitude.

    Parameters
    ----------
    array : array or tensor
        Real numbers of any shape, on the host.
    what : str
        Name of the array in the message.
    """
    if not math.prod(array.shape):
        return
    largest = max(float(array.max()), -float(array.min()))  # numpy's min and max are NaN if any number is
    if not math.isfinite(largest):
        raise UsageError(f"{what} holds a number that is not finite")
    if largest > LARGEST:
        raise UsageError(
            f"{what} holds a number of magnitude {largest:.3g}, expected at most {LARGEST:g}: a model computes no "
            "video of such numbers, only NaN"
        )


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown word: the known word that is most like it; empty if none
    is."""
    import difflib

    near = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {near[0]}?" if near else ""

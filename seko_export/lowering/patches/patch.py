"""The class of patches of torch or triton, and a context manager that applies several patches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from inspect import getattr_static

import torch


@dataclass(frozen=True)
class Patch:
    """A temporary change of a library's private code.

    Parameters
    ----------
    apply : callable
        Function that returns a context manager, inside which the library is changed.
    mended_in : tuple of int or None
        The first torch release without the fault; None if all supported releases have the fault.
    """

    apply: Callable[[], AbstractContextManager[None]]
    mended_in: tuple[int, int] | None = None

    def is_needed(self, version: str = torch.__version__) -> bool:
        """Return whether a version of torch has the fault that this patch fixes."""
        release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        return self.mended_in is None or release < self.mended_in


@contextmanager
def replaced(owner: object, **values: object) -> Iterator[None]:
    """Context manager in which attributes of a module or class have other values."""
    known = {name: getattr_static(owner, name) for name in values}  # a class method as it is stored
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in known.items():
            setattr(owner, name, value)


@contextmanager
def applied(*patches: Patch) -> Iterator[None]:
    """Context manager in which the patches that the installed torch needs are applied, in the order of the argument."""
    with ExitStack() as stack:
        for patch in patches:
            if patch.is_needed():
                stack.enter_context(patch.apply())
        yield

"""Patches of torch or triton, and a context that applies several."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Patch:
    """A change of a library's private part for the duration of a block.

    Parameters
    ----------
    apply : callable
        Returns a context manager: inside, the library is changed; behind it, it is as before.
    mended_in : tuple of int or None
        The first release of torch without the fault; None while every supported one has it.
    """

    apply: Callable[[], AbstractContextManager[None]]
    mended_in: tuple[int, int] | None = None

    def is_needed(self, version: str = torch.__version__) -> bool:
        """Return whether this version of torch has the fault."""
        release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        return self.mended_in is None or release < self.mended_in


@contextmanager
def applied(*patches: Patch) -> Iterator[None]:
    """Context in which the patches that the installed torch needs are applied, in their order."""
    with ExitStack() as stack:
        for patch in patches:
            if patch.is_needed():
                stack.enter_context(patch.apply())
        yield

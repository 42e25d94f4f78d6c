"""Progress callbacks. Rendering belongs to the CLI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """Progress callbacks of a build."""

    def __call__(self, step: str, done: int, total: int, beside: Callable[[], str] | None = None) -> None:
        """Take note of a step.

        Parameters
        ----------
        step : str
            What is being done from now on.
        done, total : int
            How much of it is done, out of how much.
        beside : callable, optional
            Of work that goes on beside this step and the next ones: says how far it is whenever it is asked, from any
            thread; an empty string once it is done.
        """
        ...


def silent(step: str, done: int, total: int, beside: Callable[[], str] | None = None) -> None:
    """Ignore progress."""

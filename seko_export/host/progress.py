"""Callbacks that report the progress of a build. The command line displays the progress that these callbacks report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """Progress callbacks of a build."""

    def __call__(
        self, step: str, done: int, total: int, in_background: Callable[[], str] | None = None
    ) -> None:
        """Report a step of the build.

        Parameters
        ----------
        step : str
            Name of the step that begins.
        done, total : int
            Amount of the step that is done, and its total.
        in_background : callable, optional
            Function that reports on work that continues beside this step and later steps. Any thread may call the
            function. It returns a sentence on the progress of the work, or an empty string once the work is done.
        """


def silent(step: str, done: int, total: int, in_background: Callable[[], str] | None = None) -> None:
    """Ignore the reported progress of a build."""

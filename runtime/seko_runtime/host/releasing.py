"""Release of several things of which each may fail, for example on a device that was lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress


def release_all(*steps: Callable[[], object] | None) -> None:
    """Run all steps in order, also those after a step that failed; then raise the first error, or an interrupt.

    A step that is None stands for something that was never acquired.
    """
    raised: BaseException | None = None
    for step in filter(None, steps):
        try:
            step()
        except BaseException as error:
            if raised is None or not isinstance(error, Exception):
                raised = error
    if raised is not None:
        raise raised


def release_after_error(*steps: Callable[[], object] | None) -> None:
    """Run all steps as `release_all` does, but raise none of their errors: the caller raises the error before them."""
    with suppress(Exception):
        release_all(*steps)

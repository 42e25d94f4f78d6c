"""Release of several resources, such as tensors and graphs. Each release may fail, for example on a device that was
lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress


def release_all(*steps: Callable[[], object] | None) -> None:
    """Run all steps in order, also the steps after a step that failed. Then raise the first error or, if one step was
    interrupted, the interrupt.

    A step that is None stands for a resource that was never acquired.
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
    """Run all steps as `release_all` does, but raise no error of a step: the caller raises the error that came before
    the release."""
    with suppress(Exception):
        release_all(*steps)

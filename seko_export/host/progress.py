"""Progress callbacks. Rendering belongs to the CLI."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, out of how much


def silent(step: str, done: int, total: int) -> None:
    """Ignore progress."""

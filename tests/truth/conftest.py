"""Collects the worst error that each truth saw and prints it after the run: the margin below the bar."""

from __future__ import annotations

from collections.abc import Callable

import pytest

_worst: dict[str, float] = {}


@pytest.fixture
def worst() -> Callable[[str, float], None]:
    """Return a function that remembers the largest error of a name."""

    def remember(name: str, error: float) -> None:
        _worst[name] = max(error, _worst.get(name, 0.0))

    return remember


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line a truth."""
    for name, error in sorted(_worst.items()):
        terminalreporter.write_line(f"worst relative error, {name}: {error:.2e}")

"""Distributions with entry points that a test installs. No tests."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from seko_runtime import doors

Install = Callable[..., None]


@contextmanager
def installing(folder: Path, monkeypatch: pytest.MonkeyPatch, group: str) -> Iterator[Install]:
    """Context manager with a function that installs a distribution by its name and the places of its entry points of a
    group, by name. What was found before is forgotten."""
    monkeypatch.syspath_prepend(str(folder))

    def install(dist: str, **points: str) -> None:
        info = folder / f"{dist}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        lines = [f"{name} = {place}" for name, place in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        importlib.invalidate_caches()
        doors._installed.cache_clear()  # a test installs while the process runs

    yield install
    doors._installed.cache_clear()

"""The share of each room's statements that a run of tests reached, a line a room: `scripts/test.sh --coverage`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(
    ROOT / name
    for name in ("seko_export", "runtime/seko_runtime", "kernels/seko_kernels", "serve/seko_serve")
)


class RoomsReached:
    """The pytest plugin: what pytest-cov measured, in the process that tells.

    Processes that a test starts itself, such as a server or a build, are not measured.
    """

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        measured = terminalreporter.config.pluginmanager.getplugin("_cov").cov_controller.cov
        terminalreporter.section("statements reached: share, statements, room")
        for line in table(_files(measured)):
            terminalreporter.write_line(line)


def table(files: Iterable[tuple[Path, int, int]]) -> list[str]:
    """Return a line a room, by name, and one for all.

    Parameters
    ----------
    files : iterable
        Path, number of statements and number of reached ones, of each file.
    """
    rooms: dict[str, tuple[int, int]] = {}
    for file, statements, reached in files:
        for name in (_room(file), "all"):
            had = rooms.get(name, (0, 0))
            rooms[name] = had[0] + statements, had[1] + reached
    whole = rooms.pop("all")
    return [
        f"{100 * reached / (statements or 1):4.0f} %{statements:8}  {name}"
        for name, (statements, reached) in (*sorted(rooms.items()), ("all", whole))
    ]


def _room(file: Path) -> str:
    """Return the folder right below a package in which a file lies, or the package itself."""
    (package,) = (package for package in PACKAGES if file.is_relative_to(package))
    folders = file.relative_to(package).parts[:-1]
    return "/".join([package.name, *folders[:1]])


def _files(measured: Any) -> Iterable[tuple[Path, int, int]]:
    """Yield what `table` takes, of every file of the packages, also of those that nothing imported."""
    for package in PACKAGES:
        for file in sorted(package.rglob("*.py")):
            _, statements, _, missing, _ = measured.analysis2(str(file))
            yield file, len(statements), len(statements) - len(missing)

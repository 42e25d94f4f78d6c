"""Where a run's time goes: minutes and processor seconds of the tests by folder, and by file where asked for."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import PurePosixPath

import pytest

LONGEST = 15
PROCESSOR_S = "processor seconds"


def processor_s() -> float:
    """Seconds of a processor that this process has used, and the ended processes that it started."""
    return sum(os.times()[:4])


class Minutes:
    """The pytest plugin: each report of a test (setup, call, teardown) carries its seconds to the process that tells.

    A fixture that is shared counts for the test that asked for it first. Processes of multiprocessing's fork server do
    not count: this process does not see their end.
    """

    def __init__(self) -> None:
        self.seen = processor_s()
        self.clock: dict[str, float] = defaultdict(float)
        self.processor: dict[str, float] = defaultdict(float)

    def pytest_collection_finish(self) -> None:
        """Leave out what importing the tests took."""
        self.seen = processor_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note the processor's seconds since the report before; in the process that runs the test."""
        report = yield
        before, self.seen = self.seen, processor_s()
        report.user_properties.append((PROCESSOR_S, self.seen - before))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a report up; in the process that tells."""
        file = report.nodeid.partition("::")[0]
        self.clock[file] += report.duration
        self.processor[file] += sum(
            float(str(s)) for name, s in report.user_properties if name == PROCESSOR_S
        )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a line a folder, and one for each of the longest files."""
        every = terminalreporter.config.getoption("--minutes-by-file")
        folders: dict[str, list[str]] = defaultdict(list)
        for file in self.clock:
            folders[str(PurePosixPath(file).parent)].append(file)
        lines = [(folder, *self._summed(files)) for folder, files in folders.items()]
        files = [(file, *self._summed([file])) for file in self.clock]
        terminalreporter.section("minutes (processor seconds) by folder")
        _show(terminalreporter, lines)
        _show(terminalreporter, [("in all", *self._summed(self.clock))])
        terminalreporter.section("the longest files")
        _show(terminalreporter, files, None if every else LONGEST)

    def _summed(self, files: Iterable[str]) -> tuple[float, float]:
        """Return minutes and processor seconds of files."""
        names = list(files)
        return sum(self.clock[name] for name in names) / 60, sum(self.processor[name] for name in names)


def _show(
    reporter: pytest.TerminalReporter, lines: list[tuple[str, float, float]], most: int | None = None
) -> None:
    for name, minutes, seconds in sorted(lines, key=lambda line: -line[1])[:most]:
        reporter.write_line(f"{minutes:6.1f} ({seconds:6.0f})  {name}")

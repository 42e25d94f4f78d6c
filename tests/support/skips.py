"""Skipped tests: one table of reasons behind a run; in CI, what can be installed and is missing fails the test."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import pytest

FILE_VARIABLE = "SEKO_SKIPS"  # the file that takes the rows of several runs, for one table
# Reasons that also hold where all is installed: hardware, rights, versions, files that only their owners have.
NOT_TO_INSTALL = re.compile(
    r"CUDA|GPU|Hopper|sm_\d+|no fp8 matrix|this machine has a driver|tensorrt-lean-cu13"
    r"|root|cannot be mounted|no closed box|not a git checkout"
    r"|SEKO_FASTVIDEO_WHEEL|SEKO_IMAGES|skimage|prompts that change"
    r"|torch 2\.11|oneDNN|Pillow shrinks|Python's reader agreed"
    r"|the compiler's own caches|cudagraph trees|as two other tests see"
)


Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


class Skips:
    """The pytest plugin."""

    def __init__(self) -> None:
        self.tests: list[tuple[str, str]] = []  # reason, folder
        self.files: set[tuple[str, str, str]] = (
            set()
        )  # reason, folder, file: each process of a run collects all

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Judge a skipped test; in the process that runs it."""
        return _judged((yield))

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Judge a skipped file."""
        return _judged((yield))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a skipped test; in the process that tells."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self.tests.append((_reason(report), _folder(report)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a skipped file."""
        if report.skipped:
            self.files.add((_reason(report), _folder(report), report.nodeid))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand the skipped files to the process that tells: pytest-xdist hands it those alone that failed."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["skipped files"] = [list(row) for row in self.files]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the skipped files of another process; pytest-xdist's."""
        self.files |= {tuple(row) for row in getattr(node, "workeroutput", {}).get("skipped files", [])}

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        """Print the table, or leave its rows for the table of several runs; in the process that tells."""
        if hasattr(config, "workerinput"):
            return
        rows = self.tests + [row[:2] for row in self.files]
        if file := os.environ.get(FILE_VARIABLE):
            with open(file, "a", encoding="utf-8") as kept:
                kept.writelines(f"{folder}\t{reason}\n" for reason, folder in rows)
        elif rows:
            terminalreporter.section("skipped")
            for line in table(rows):
                terminalreporter.write_line(line)


def table(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each reason, the most frequent first: how many tests, why, and in which folders."""
    folders: dict[str, Counter[str]] = defaultdict(Counter)
    for reason, folder in rows:
        folders[reason][folder] += 1
    return [
        f"{counts.total():5}  {reason}  ({', '.join(sorted(counts))})"
        for reason, counts in sorted(folders.items(), key=lambda entry: -entry[1].total())
    ]


def _judged(report: Report) -> Report:
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI") == "true":
        reason = _reason(report)
        if not NOT_TO_INSTALL.search(reason):
            report.outcome = "failed"
            report.longrepr = f"skipped in CI, where everything is to be installed: {reason}"
    return report


def _folder(report: pytest.TestReport | pytest.CollectReport) -> str:
    return str(PurePosixPath(report.nodeid.partition("::")[0]).parent)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    place = report.longrepr
    words = place[2] if isinstance(place, tuple) else str(place)
    return " ".join(words.removeprefix("Skipped: ").split())


if __name__ == "__main__":
    read = [line.split("\t", 1) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    print(
        "=== skipped: tests, reason, folders", *table((reason, folder) for folder, reason in read), sep="\n"
    )

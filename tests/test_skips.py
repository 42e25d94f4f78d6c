"""Skipped tests in CI, where a missing program is a failure and missing hardware is not; and their table."""

from __future__ import annotations

import pytest

from tests.support.skips import FILE_VARIABLE, Skips, table

pytest_plugins = ("pytester",)

CHROMIUM, GPU = "needs Chromium: chromium-headless-shell", "needs a CUDA device"


@pytest.mark.parametrize(
    ("reason", "ci", "failed", "whole_file"),
    [
        (CHROMIUM, "true", 1, False),
        (CHROMIUM, "", 0, False),
        (GPU, "true", 0, False),
        (GPU, "true", 0, True),
        ("could not import 'av'", "true", 1, True),
    ],
)
def test_in_ci_what_can_be_installed_is_there(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    ci: str,
    failed: int,
    whole_file: bool,
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    skip = f"pytest.skip({reason!r}, allow_module_level=True)"
    inner = f"{skip}\ndef test_it(): pass" if whole_file else f"def test_it(): {skip}"
    pytester.makepyfile(f"import pytest\n{inner}\n")
    run = pytester.inline_run("-p", "no:cacheprovider", plugins=[Skips()])
    reports = run.getreports("pytest_collectreport pytest_runtest_logreport")
    assert sum(report.failed for report in reports) == failed
    assert sum(report.skipped for report in reports) == 1 - failed


def test_the_table_counts_by_reason() -> None:
    rows = [(GPU, "tests/export"), (CHROMIUM, "tests/serve"), (GPU, "tests/kernels"), (GPU, "tests/export")]
    assert table(rows) == [
        f"    3  {GPU}  (tests/export, tests/kernels)",
        f"    1  {CHROMIUM}  (tests/serve)",
    ]

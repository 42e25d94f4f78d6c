"""The runner of the benchmarks, and the cases that no other test here tries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench import __main__ as runner
from scripts.bench.cases import CASES


def test_every_case_has_a_module_that_runs_it() -> None:
    for name, case in CASES.items():
        if case.module == "serve_full":
            pytest.importorskip("av", reason="needs seko-serve")
        assert callable(runner.module_of(case).run), name
        assert {*(case.trial or {})} <= {*case.options}, name


def test_cases_that_fail_are_counted_and_the_others_make_their_rows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    arguments = ["fit", "import", "--trial", "--work", str(tmp_path), "--rows", str(rows)]
    assert runner.main(arguments) == 1
    said = capfd.readouterr()
    assert "fit needs a GPU" in said.err
    assert said.out.splitlines()[-1] == "failed: fit"
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["figure"] for row in written] == ["first_line_ms"] * 5 + ["import_ms"] * 2


def test_a_part_that_a_case_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no part nix: it has reuse"):
        runner.main(["loops", "--trial", "--work", str(tmp_path), "--part", "nix"])


def test_what_cannot_be_prepared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="import builds nothing ahead"):
        runner.main(["import", "--prepare", "--work", str(tmp_path)])

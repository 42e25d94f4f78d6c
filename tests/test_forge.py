"""What tools of others say of files that no test runs: Dockerfiles, scripts, workflows, forms, compose files."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[1]
SCRIPTS = [ROOT / ".ci/run", *sorted((ROOT / "scripts").rglob("*.sh"))]
SCHEMAS = {
    "github-workflows": ".github/workflows/*.yml",
    "github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "dependabot": ".github/dependabot.yml",
    "compose-spec": "serve/examples/compose*.yaml",
}


def said(program: str, *arguments: object) -> str:
    """Return what a program of the extra dev finds; empty: nothing."""
    path = Path(sysconfig.get_path("scripts"), program)
    if not path.exists():
        pytest.skip(f"needs {program}, of the extra dev")
    done = subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, check=False, cwd=ROOT)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def said_of_schema(schema: str, *files: Path) -> str:
    """Return what check-jsonschema finds, in this process: it takes longer to start than to read."""
    checker = pytest.importorskip("check_jsonschema", reason="needs check-jsonschema, of the extra dev")
    done = CliRunner().invoke(checker.main, ["--builtin-schema", f"vendor.{schema}", *map(str, files)])
    return "" if done.exit_code == 0 else done.output


def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    assert said("hadolint", *sorted((ROOT / "scripts/container").glob("Dockerfile.*"))) == ""
    (tmp_path / "Dockerfile").write_text("FROM python:latest\nRUN pip install torch\n")
    assert "DL3007" in said("hadolint", tmp_path / "Dockerfile")


def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    assert said("shellcheck", *SCRIPTS) == ""
    (tmp_path / "some.sh").write_text("#!/bin/sh\ncd $1\n")
    assert "SC2086" in said("shellcheck", tmp_path / "some.sh")


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_are_of_their_schema(schema: str) -> None:
    files = sorted(ROOT.glob(SCHEMAS[schema]))
    assert files
    assert said_of_schema(schema, *files) == ""


def test_a_workflow_that_is_none_is_found(tmp_path: Path) -> None:
    (tmp_path / "wrong.yml").write_text("on: push\njobs: {one: {steps: []}}\n")
    assert "runs-on" in said_of_schema("github-workflows", tmp_path / "wrong.yml")

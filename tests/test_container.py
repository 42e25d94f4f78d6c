"""What can be known of the containers without building them, and what the script that measures packages does.

Read here is the text of the Dockerfiles: sources, versions, users. tests/test_images.py builds one and uses it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from seko_runtime.cli.parser import SUMMARIES, parse
from seko_serve.cli import parser, settings
from tests.support.loaded import load_script

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "scripts" / "container"
DOCKERFILES = sorted(FOLDER.glob("Dockerfile.*"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """Instructions with their arguments, comments left out, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


PINNED = {
    Requirement(line).name: Requirement(line).specifier
    for line in (ROOT / "scripts/constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
}
PROJECT = tomllib.loads((ROOT / "runtime/pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_bases_and_packages_are_ours(path):
    """Else hadolint and tests/test_installs.py judge them: here is that a version is one that we test."""
    steps = instructions(path)
    bases = re.findall(r"^FROM python:(\S+)-slim", path.read_text(), re.MULTILINE)
    assert bases
    assert {version in SpecifierSet(PROJECT["requires-python"]) for version in bases} == {True}
    arguments = dict(rest.split("=") for name, rest in steps if name == "ARG")
    installs = " ".join(rest for name, rest in steps if name == "RUN")
    installs = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], installs)
    versions = dict(re.findall(r"([\w-]+)==([\w.]+)", installs))
    assert {"torch", "numpy", "cryptography"} <= {*versions}
    for name, version in versions.items():
        assert version in PINNED[name]
    for name, rest in steps:
        if name == "COPY" and "--from" not in rest:
            assert all((ROOT / source).exists() for source in rest.split()[:-1])
            assert {f"!{source}" for source in rest.split()[:-1]} <= {
                *(ROOT / ".dockerignore").read_text().split()
            }


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_last_stage_runs_our_commands_and_verifies(path):
    steps = instructions(path)
    last = steps[max(number for number, (name, _) in enumerate(steps) if name == "FROM") :]
    assert "RUN" not in dict(last)
    commands = [json.loads(rest[rest.index("[") :]) for name, rest in last if name in ("HEALTHCHECK", "CMD")]
    assert any("verify" in command for command in commands)
    for command in commands:
        begin = command.index("seko_runtime") + 1 if "seko_runtime" in command else 0
        parse(command[begin:], dict.fromkeys(SUMMARIES, print))  # UsageError on what is no command of ours


@pytest.fixture
def sizes() -> ModuleType:
    return load_script(FOLDER / "sizes.py")


def test_a_hidden_package_cannot_be_imported_and_comes_back(sizes, tmp_path):
    """Also after an error; and what a killed run left hidden is found again."""
    files = [tmp_path / "odd_package.py", tmp_path / "libodd.so"]
    for path in files:
        path.write_text("found = True\n")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import odd_package"]

    def importable() -> bool:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def fail_while_hidden() -> None:
        with sizes.hidden(files):
            assert not importable()
            raise KeyError

    assert importable()
    with pytest.raises(KeyError):
        fail_while_hidden()
    assert importable()
    files[0].rename(sizes._away(files[0]))
    sizes.restore([files])
    assert importable()


def test_the_sizes_are_those_of_the_files(sizes):
    installed = sizes.installed()
    assert {"torch", "numpy"} <= set(installed)
    files = sizes.files_of(installed["numpy"])
    assert sum(path.stat().st_size for path in files) > 1_000_000
    assert all(path.is_file() for path in files)


def test_hiding_must_be_asked_for():
    done = subprocess.run(
        [sys.executable, FOLDER / "sizes.py", "--artifact", "x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "belong together" in done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_server_s_stage_starts_it_as_a_user_whose_key_is_asked_for(path):
    steps = instructions(path)
    begin = next(
        number for number, (name, rest) in enumerate(steps) if name == "FROM" and rest.endswith(" AS serve")
    )
    end = next(number for number in range(begin + 1, len(steps)) if steps[number][0] == "FROM")
    stage = dict(steps[begin:end])
    assert stage["USER"] == "1000:1000"
    program, *options = json.loads(stage["ENTRYPOINT"])
    assert program in tomllib.loads((ROOT / "serve/pyproject.toml").read_text())["project"]["scripts"]
    with pytest.raises(ValueError, match="SEKO_SERVE_API_KEY"):
        settings(parser().parse_args(options))

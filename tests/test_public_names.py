"""What docs/versions.md promises to keep: one version, and the public names of each distribution."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECTS = {folder: tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
            for folder in (".", "runtime", "kernels", "serve")}  # fmt: skip
VERSION = PROJECTS["."]["project"]["version"]
LIST = Path(__file__).parent / "public_names.txt"
MODULES = ("seko_export", "seko_kernels", "seko_runtime", "seko_runtime.controls", "seko_serve.client")


def test_one_version_stands_in_every_project_and_pin() -> None:
    versions = {project["project"]["version"] for project in PROJECTS.values()}
    pins = {line.split("==")[1] for project in PROJECTS.values()
            for line in project["project"]["dependencies"] if line.startswith("seko-")}  # fmt: skip
    assert versions | pins == {VERSION, PROJECTS["."]["tool"]["bumpversion"]["current_version"]}
    assert len(versions | pins) == 1


@pytest.mark.parametrize(
    ("module", "name"),
    [("seko_export", "seko-export"), ("seko_runtime", "seko-runtime"), ("seko_serve", "seko-serve")],
)
def test_every_command_says_it(module: str, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True
    )
    assert name in done.stdout
    assert done.stdout.split()[-1] == VERSION


def test_a_checkout_in_the_module_path_alone_says_it() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import seko_runtime; print(seko_runtime.__version__)"
    lone = [sys.executable, "-I", "-S", "-c", code, str(ROOT / "runtime")]
    assert subprocess.run(lone, capture_output=True, text=True, check=True).stdout.strip() == VERSION


def test_public_names_are_those_of_the_list() -> None:
    """A name that goes, or comes, is written down here and in the changelog; see docs/versions.md."""
    found = [f"{module}.{name}" for module in MODULES for name in sorted(import_module(module).__all__)]
    assert found == LIST.read_text().split()
    for path in found:
        module, _, name = path.rpartition(".")
        getattr(import_module(module), name)

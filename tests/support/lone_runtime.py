"""Fixtures: the runtime's wheel, and a Python that has it, torch and numpy, and nothing else. No tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.shared import made_once

ROOT = Path(__file__).parents[2]
# What the three distributions require, and triton, which torch's CPU build does not.
LINKED = ("torch", "numpy", "triton", "safetensors", "click", "rich", "tokenizers")

BUILT_AT = "1700000000"  # the time that archives give their files


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runtime's wheel."""
    return wheel_once(tmp_path_factory, "runtime")


@pytest.fixture(scope="session")
def lone_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a fresh venv that holds the runtime's wheel, torch, and what torch itself requires; no more.

    torch and its requirements are links to this environment's: the same files as a download of 200 MB and more
    would bring. Triton, which a CUDA build of torch requires, is left out: an artifact needs none.
    """
    return made_once(tmp_path_factory, "lone", lambda folder: make_venv(folder, wheel)) / "bin/python"


def wheel_once(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """Return what `build_wheel` makes of a name, made by the first process of this run that asks."""
    folder = made_once(tmp_path_factory, f"wheel-{name}", lambda folder: build_wheel(name, folder))
    return next(folder.glob("*.whl"))


def build_wheel(name: str, folder: Path) -> Path:
    """Build the wheel of ``runtime``, ``kernels``, ``serve`` or ``seko_export`` in a folder, from a copy of its
    project, so that the build leaves nothing in the tree."""
    unbuilt = shutil.ignore_patterns("*.egg-info", "__pycache__", "build")
    project = folder / f"{name}-project"
    if name == "seko_export":
        shutil.copytree(ROOT / name, project / name, ignore=unbuilt)
        for file in ("pyproject.toml", "LICENSE", "docs/exporter-wheel.md"):
            (project / file).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / file, project / file)
    else:
        shutil.copytree(ROOT / name, project, ignore=unbuilt)
    return build_project(project, folder)


def build_project(project: Path, folder: Path) -> Path:
    """Build the wheel of a project in a folder, as scripts/wheels.sh does; the project's own folder is written to."""
    before = {*folder.glob("*.whl")}
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-q"]
    environment = os.environ | {"SOURCE_DATE_EPOCH": BUILT_AT}
    subprocess.run([*pip, "-w", folder, project], check=True, env=environment)
    (wheel,) = {*folder.glob("*.whl")} - before
    return wheel


def make_venv(folder: Path, *wheels: Path, linked: Sequence[str] = ("torch", "numpy")) -> None:
    """Make a venv of some wheels, and of links to distributions that are installed here."""
    venv.create(folder, with_pip=False)
    install_into(folder, *wheels, linked=linked)


def install_into(folder: Path, *wheels: Path, linked: Sequence[str]) -> None:
    """Install wheels into a venv, and links to distributions that are installed here."""
    python = folder / "bin/python"
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(
        subprocess.run([python, "-c", query], capture_output=True, text=True, check=True).stdout.strip()
    )
    for name in linked:
        link_distribution(name, site)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "-q"]
    # With a path to this tree, pip would find the distributions installed.
    subprocess.run([*pip, *wheels], check=True, env=outside_environment())


def outside_environment() -> dict[str, str]:
    """Return this process's environment without the path to this tree."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def link_distribution(name: str, folder: Path) -> None:
    """Put links to an installed distribution and all that it requires into a folder."""
    for entry in _files_of(name, set()):
        if not (folder / entry.name).exists():
            (folder / entry.name).symlink_to(entry)


def _files_of(distribution: str, seen: set[str]) -> set[Path]:
    """Return the top-level entries in site-packages of a distribution and of all that it requires."""
    seen.add(distribution)
    installed = metadata.distribution(distribution)
    names = {Path(str(file)).parts[0] for file in installed.files or ()} - {"..", "__pycache__"}
    entries = {Path(str(installed.locate_file(name))) for name in names}
    for requirement in installed.requires or ():
        name = re.match(r"[\w.-]+", requirement)
        if name and name[0] not in seen | {"triton"} and _is_needed(requirement):
            entries |= _files_of(name[0], seen)
    return entries


def _is_needed(requirement: str) -> bool:
    """Whether a requirement without extras holds here: its distribution is installed."""
    if "extra ==" in requirement:
        return False
    try:
        metadata.distribution(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])
    except metadata.PackageNotFoundError:
        return False
    return True

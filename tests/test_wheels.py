"""The three wheels: what they say of themselves."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def build_wheel(name: str, folder: Path) -> Path:
    """Build the wheel of ``kernels`` or ``seko_export`` from a copy of its project."""
    unbuilt = shutil.ignore_patterns("*.egg-info", "__pycache__", "build")
    source = folder / f"{name}-project"
    if name == "seko_export":
        shutil.copytree(ROOT / name, source / name, ignore=unbuilt)
        for file in ("pyproject.toml", "LICENSE"):
            shutil.copy(ROOT / file, source)
    else:
        shutil.copytree(ROOT / name, source, ignore=unbuilt)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-q"]
    subprocess.run([*pip, "-w", folder / name, source], check=True)
    (made,) = (folder / name).iterdir()
    return made


@pytest.fixture(scope="module")
def wheels(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("wheels")
    return [wheel, *(build_wheel(name, folder) for name in ("kernels", "seko_export"))]


def test_every_wheel_brings_its_license_and_says_what_it_is(wheels):
    """Links within the text would lead nowhere on another machine, so there are none."""
    for path in wheels:
        with zipfile.ZipFile(path) as opened:
            (license_file,) = [name for name in opened.namelist() if name.endswith("/licenses/LICENSE")]
            assert opened.read(license_file) == (ROOT / "LICENSE").read_bytes()
            (told,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
            metadata = email.message_from_bytes(opened.read(told))
        assert metadata["License-Expression"] == "Apache-2.0"
        assert metadata["Keywords"]
        assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier")
        text = metadata.get_payload()
        assert text.startswith(f"# {metadata['Name']}\n")
        assert "CPU index" in text
        assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []

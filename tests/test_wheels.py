"""The three wheels: what they say of themselves, and that two builds are equal. tests/outside/ uses them."""

from __future__ import annotations

import re
import time
import zipfile
from pathlib import Path

import pytest

from scripts.sbom import wheel_metadata
from tests.support.lone_runtime import build_wheel

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


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
        metadata = wheel_metadata(path)
        assert metadata["License-Expression"] == "Apache-2.0"
        assert metadata["Keywords"]
        assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier")
        text = metadata.get_payload()
        assert text.startswith(f"# {metadata['Name']}\n")
        assert "CPU index" in text
        assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []


def test_two_builds_of_a_wheel_are_equal(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "SOURCE_DATE_EPOCH", "1700000000"
    )  # as scripts/wheels.sh sets it, to the commit's time
    made = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        made.append(build_wheel("kernels", folder).read_bytes())
        time.sleep(2.1)  # a zip's times are of two seconds
    assert made[0] == made[1]

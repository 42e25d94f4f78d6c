"""The three wheels: what they say of themselves, and that two builds are equal. tests/outside/ uses them."""

from __future__ import annotations

import re
import time
import zipfile
from pathlib import Path

import pytest

from scripts.sbom import wheel_metadata
from tests.support.lone_runtime import build_wheel, wheel_once

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def test_every_wheel_brings_its_license_and_says_what_it_is(tmp_path_factory):
    """Links within the text would lead nowhere on another machine, so there are none."""
    for path in (wheel_once(tmp_path_factory, name) for name in ("runtime", "kernels", "seko_export")):
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


def test_two_builds_of_a_wheel_are_equal(tmp_path, tmp_path_factory):
    first = wheel_once(tmp_path_factory, "kernels")
    time.sleep(2.1)  # a zip's times are of two seconds
    assert build_wheel("kernels", tmp_path).read_bytes() == first.read_bytes()

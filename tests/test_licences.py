"""Licences of what Seko needs, the SBOM of a wheel, and the signature of a release's checksums."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import zipfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from scripts.sbom import DISTRIBUTIONS, PAGE, closure, direct, licence, licence_table, sbom

ROOT = Path(__file__).parents[1]
# Licences that ask of a user of Seko no more than to keep their text; MPL-2.0 asks for changes of its own files.
FREE = {
    *(
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "0BSD",
        "ISC",
        "MIT",
        "MIT-CMU",
        "MIT-0",
        "Zlib",
    ),
    *("CC0-1.0", "PSF-2.0", "Python-2.0", "Unlicense", "MPL-2.0", "Apache-2.0 WITH LLVM-exception"),
}
TIME = datetime(2026, 1, 1, tzinfo=UTC)


def terms(text: str) -> set[str]:
    """Return the licences of an SPDX expression."""
    return {term.strip(" ()") for term in re.split(r"\bAND\b|\bOR\b", text)}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_what_is_always_installed_is_free(distribution: str) -> None:
    found = {name: terms(licence(metadata.metadata(name))) for name in closure(distribution)}
    assert {name: said - FREE for name, said in found.items() if said - FREE} == {}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_what_is_not_free_is_an_extra_of_tensorrt(distribution: str) -> None:
    for found in direct(distribution):
        try:
            said = terms(licence(metadata.metadata(found.name)))
        except metadata.PackageNotFoundError:
            assert "tensorrt" in found.name
            continue
        assert said <= FREE or found.extra.startswith("tensorrt"), (found, said)


def test_the_page_lists_them() -> None:
    rows = PAGE.read_text(encoding="utf-8").rpartition("|---|---|---|\n")[2].splitlines()
    # Not every machine has TensorRT's packages.
    missing = [row for row in licence_table().splitlines() if row not in rows]
    assert not missing, "python -m scripts.sbom licences"
    assert all("tensorrt" in row for row in rows if row not in licence_table().splitlines())


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A file that says of itself what the server's wheel says."""
    said = metadata.metadata("seko-serve")
    path = tmp_path / f"seko_serve-{said['Version']}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("seko_serve.dist-info/METADATA", f"Name: seko-serve\nVersion: {said['Version']}\n")
    return path


def test_an_sbom_is_valid_and_the_same_twice(wheel: Path) -> None:
    text = sbom(wheel, TIME)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    assert sbom(wheel, TIME) == text
    said = json.loads(text)
    names = {part["name"] for part in said["components"]}
    assert {"seko-runtime", "numpy", "starlette", "av", "pillow"} <= names
    requires = {entry["ref"].partition("==")[0]: entry.get("dependsOn", []) for entry in said["dependencies"]}
    assert any(ref.startswith("starlette==") for ref in requires["seko-serve"])
    assert any(ref.startswith("anyio==") for ref in requires["starlette"])


def test_checksums_are_signed(tmp_path: Path) -> None:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen")
    key, sums = tmp_path / "key", tmp_path / "SHA256SUMS"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    sums.write_text("00  some.whl\n")
    (tmp_path / "allowed_signers").write_text("releases " + key.with_suffix(".pub").read_text())
    sign = next(
        line.strip()
        for line in (ROOT / "scripts/wheels.sh").read_text().splitlines()
        if "ssh-keygen -Y sign" in line
    )
    subprocess.run(
        ["bash", "-c", sign], check=True, cwd=tmp_path, env={**os.environ, "SEKO_SIGN_KEY": str(key)}
    )
    verify = next(line for line in PAGE.read_text().splitlines() if line.startswith("ssh-keygen -Y verify"))

    def verified() -> bool:
        return subprocess.run(["bash", "-c", verify], check=False, cwd=tmp_path).returncode == 0

    assert verified()
    sums.write_text("01  some.whl\n")
    assert not verified()

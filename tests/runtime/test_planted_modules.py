"""A folder from which Python would import something is no artifact. The commands' guard: test_light_install."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from seko_export.artifact.packing import pack_artifact
from seko_runtime import errors
from seko_runtime.format.tar_format import END, member_header, padding
from seko_runtime.format.unpacking import unpack_artifact
from seko_runtime.opening.artifact import check_artifact, open_artifact, read_manifest

from . import toy_whole
from .eager_backend import write_whole


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An artifact to plant something in."""
    return write_whole(tmp_path / "whole", toy_whole.whole_manifest())


@pytest.mark.parametrize(
    "name",
    ["numpy.py", "sitecustomize.pyc", "torch.so", "_x.cpython-311-x86_64-linux-gnu.so", "a.pth", "json/__init__.py",
     "json/__init__.abi3.so"],
)  # fmt: skip
def test_a_folder_with_a_module_of_pythons_is_no_artifact(folder, tmp_path, name):
    """Whether the manifest lists it or not, and in a tar."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"raise SystemExit('imported')")
    top = "/" not in name
    for call in (open_artifact, read_manifest) if top else (open_artifact,):
        with pytest.raises(
            errors.ArtifactError, match="Python would import" if top else "not in the manifest"
        ):
            call(folder)
    table = json.loads((folder / "manifest.json").read_bytes())
    content = (folder / name).read_bytes()
    table["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    (folder / "manifest.json").write_text(json.dumps(table))
    for call in (
        open_artifact,
        read_manifest,
        check_artifact,
        lambda it: pack_artifact(it, tmp_path / "a.tar"),
        lambda it: unpack_artifact(tar_of(it, tmp_path / "b.tar"), tmp_path / "again"),
    ):
        with pytest.raises(errors.ArtifactError, match=re.escape(repr(name))) as caught:
            call(folder)
        assert caught.value.exit_code == 4
    assert not (tmp_path / "again").exists()


def test_a_module_of_pythons_further_down_is_a_file_like_any_other(folder):
    content = b"raise SystemExit('imported')"
    table = json.loads((folder / "manifest.json").read_bytes())
    for name in ("engines/numpy.py", "engines/numpy/__init__.py", "note.pyx", "so"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        table["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    (folder / "manifest.json").write_text(json.dumps(table))
    assert check_artifact(folder, fits_here=False)


def tar_of(folder: Path, goal: Path) -> Path:
    """Pack by hand, as `pack` would, what it refuses."""
    document = (folder / "manifest.json").read_bytes()
    with goal.open("wb") as file:
        for name in ("manifest.json", *sorted(json.loads(document)["files"])):
            content = (folder / name).read_bytes()
            file.write(member_header(name, len(content)) + content + padding(len(content)))
        file.write(END)
    return goal

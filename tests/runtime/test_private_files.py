"""Cache files of one user: what others may have put in a file's place is neither read nor written through."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from seko_runtime.format.private_files import read_private, write_private


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "new" / "cache"
    assert read_private(file) == b""
    assert write_private(file, b"first")
    assert write_private(file, b"second")
    assert read_private(file) == b"second"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["link", "endless", "pipe", "folder"])
def test_what_is_no_file_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    file, others = tmp_path / "cache", tmp_path / "others"
    others.write_bytes(b"theirs")
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(others if kind == "link" else "/dev/zero")
    assert read_private(file) == b""
    assert not write_private(file, b"ours")
    assert others.read_bytes() == b"theirs"


@pytest.mark.parametrize("writable", ["file", "folder"])
def test_what_others_may_write_is_not_read(writable: str, tmp_path: Path) -> None:
    file = tmp_path / "own" / "cache"
    assert write_private(file, b"content")
    (file if writable == "file" else file.parent).chmod(0o777)
    assert read_private(file) == b""

"""Byte code that is made before tests are collected is what pytest looks for, and no test is run for it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.byte_code import compile_files


def test_pytest_takes_the_byte_code_that_was_made_before(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "test_it.py"
    file.write_text("import sys\nsys.was_run = True\nassert sys.was_run\n")
    compile_files(request.config, [file])
    assert not hasattr(sys, "was_run")
    (compiled,) = (tmp_path / "__pycache__").iterdir()
    assert b"@pytest_ar" in compiled.read_bytes()  # the asserts are rewritten
    before = compiled.stat()
    monkeypatch.setattr(sys, "was_run", False, raising=False)
    spec = importlib.util.spec_from_file_location(
        "test_it", file, loader=request.config.pluginmanager.rewrite_hook
    )
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert sys.was_run  # type: ignore[attr-defined]
    after = compiled.stat()  # another inode where pytest wrote it anew
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_modules_are_compiled_as_python_does(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "module.py"
    file.write_text("x = 1\n")
    compile_files(request.config, [file])
    assert Path(importlib.util.cache_from_source(file)).is_file()

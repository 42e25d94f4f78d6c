"""Byte code of all tests and of what they import, made before several processes collect the tests. No tests.

All processes come to a file at the same time, so where there is no byte code each would rewrite every file's asserts.
"""

from __future__ import annotations

import compileall
import contextlib
import os
import sys
from collections.abc import Iterable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
IMPORTED = ("seko_export", "runtime", "kernels", "serve", "scripts")


def make_byte_code(config: pytest.Config) -> None:
    """Make what is missing, in a process for each processor; nothing where byte code is not to be written."""
    if sys.dont_write_bytecode:
        return
    files = [file for folder in ("tests", *IMPORTED) for file in sorted((ROOT / folder).rglob("*.py"))]
    count = len(os.sched_getaffinity(0))
    makers = [
        get_context("fork").Process(target=compile_files, args=(config, files[number::count]))
        for number in range(count)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()


def compile_files(config: pytest.Config, files: Iterable[Path]) -> None:
    """Compile files that have no byte code; of tests as pytest does, with their asserts rewritten."""
    loader: Any = config.pluginmanager.rewrite_hook
    for file in files:
        if not (file.name.startswith("test_") or file.name == "conftest.py"):
            compileall.compile_file(file, quiet=2)
        elif isinstance(loader, Loader):  # it is none with --assert=plain
            with contextlib.suppress(_Compiled):
                loader.exec_module(_NotRun(file))  # type: ignore[arg-type]


class _Compiled(BaseException):
    """The loader has the byte code, and would run it."""


class _NotRun:
    """Stands for a module whose code is compiled and not run."""

    def __init__(self, file: Path) -> None:
        self.__name__ = file.stem
        self.__spec__ = ModuleSpec(file.stem, None, origin=str(file))

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        raise _Compiled

"""Precompiled headers are in the cache that was chosen, and the last ones used stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch._inductor.config
from torch._inductor import codecache

from seko_export.host.compiler_cache import CACHE_VARIABLE
from seko_export.lowering.patches.precompiled_headers import HEADERS_KEPT, PATCH, remove_old_headers


def test_this_torch_keeps_them_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    elsewhere = codecache._HEADER_DIR
    assert PATCH.is_needed() == (not Path(elsewhere).is_relative_to(tmp_path))
    with PATCH.apply():
        assert Path(codecache._HEADER_DIR).is_relative_to(tmp_path)
        assert Path(codecache._HEADER_LOCK_DIR).is_relative_to(tmp_path)
    assert elsewhere == codecache._HEADER_DIR


def test_a_torch_that_names_their_folder_otherwise_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(codecache, "_HEADER_DIR")
    before = torch._inductor.config.aot_inductor.precompile_headers
    with PATCH.apply():
        assert not torch._inductor.config.aot_inductor.precompile_headers
    assert torch._inductor.config.aot_inductor.precompile_headers == before


def test_of_precompiled_headers_those_used_last_stay(tmp_path: Path) -> None:
    """Torch keeps every one; their sources stay, which a compiler reads where it finds no precompiled one."""
    for number in range(HEADERS_KEPT + 3):
        compiled = tmp_path / f"{number}.h.{'pch' if number % 2 else 'gch'}"
        compiled.touch()
        os.utime(compiled, (1000.0 + number * 7 % 11, 1.0))  # used in another order than made
        (tmp_path / f"{number}.h").touch()
    remove_old_headers(tmp_path)
    numbers = {int(path.name.partition(".")[0]) for path in tmp_path.glob("*.?ch")}
    assert {number * 7 % 11 for number in numbers} == {*range(3, 11)}
    assert len([*tmp_path.glob("*.h")]) == HEADERS_KEPT + 3
    remove_old_headers(tmp_path / "none")

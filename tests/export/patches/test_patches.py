"""What holds for every patch of torch: it is applied, a supported torch needs it, and nothing of it stays."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

from seko_export.lowering import patches
from seko_export.lowering.patches.patch import Patch, applied

ROOT = Path(__file__).parents[3]
MODULES = sorted({module.name for module in iter_modules(patches.__path__)} - {"patch"})


def oldest_torch() -> str:
    """Return the oldest torch that the exporter takes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = [line for line in project["dependencies"] if line.startswith("torch>=")]
    return str(needed.removeprefix("torch>=").partition(",")[0])


@pytest.mark.parametrize("name", MODULES)
def test_each_is_applied_and_the_oldest_torch_needs_it(name: str) -> None:
    patch: Patch = import_module(f"{patches.__name__}.{name}").PATCH
    assert patch in (*patches.AOTI, *patches.CACHE, *patches.IMPORTS)
    assert patch.is_needed(oldest_torch())


@pytest.mark.parametrize(
    ("version", "needed"), [("2.11.0+cu130", True), ("2.12.1", True), ("2.13.0a0", False)]
)
def test_a_patch_is_for_the_torch_before_the_one_that_has_it_right(version: str, needed: bool) -> None:
    assert Patch(pytest.fail, mended_in=(2, 13)).is_needed(version) == needed
    assert Patch(pytest.fail).is_needed(version)


def test_those_that_are_not_needed_are_not_applied() -> None:
    with applied(Patch(lambda: pytest.fail("it was applied"), mended_in=(0, 0))):
        pass

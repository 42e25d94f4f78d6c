"""The house keeps its rooms: few entries at the top, and no distribution touches another's private names."""

from __future__ import annotations

import ast
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOMES = {
    "seko_export": ROOT / "seko_export",
    "seko_runtime": ROOT / "runtime" / "seko_runtime",
    "seko_kernels": ROOT / "kernels" / "seko_kernels",
}
MOST_ENTRIES = {"seko_export": 20, "seko_runtime": 12}


@pytest.mark.parametrize("package", MOST_ENTRIES)
def test_few_entries_lie_directly_in_a_package(package: str) -> None:
    entries = [path.name for path in HOMES[package].iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MOST_ENTRIES[package], sorted(entries)


@pytest.mark.parametrize("project", ["pyproject.toml", "runtime/pyproject.toml"])
def test_console_scripts_name_functions_that_exist(project: str) -> None:
    """An installed script is only made once: a stale one hides that its function moved."""
    scripts = tomllib.loads((ROOT / project).read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts
    for name, target in scripts.items():
        assert callable(EntryPoint(name, target, "console_scripts").load()), name


def private_names(home: Path) -> set[str]:
    """Return the attributes with a leading underscore that a distribution's own classes and modules define."""
    names = set()
    for path in home.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def foreign_uses(home: Path, private: set[str]) -> list[str]:
    """Return where a distribution reads a private name that only another one defines, on something not its own."""
    found = []
    for path in home.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in private and not _is_own(node.value):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    return found


def _is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


@pytest.mark.parametrize("package", HOMES)
def test_no_distribution_touches_anothers_private_names(package: str) -> None:
    own = private_names(HOMES[package])
    others = set().union(*(private_names(home) for name, home in HOMES.items() if name != package)) - own
    assert others, "the search would find nothing"
    assert foreign_uses(HOMES[package], others) == []


def test_the_search_finds_a_planted_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text("def f(artifact):\n    return artifact._engines\n", encoding="utf-8")
    monkeypatch.setattr("tests.test_rooms.ROOT", tmp_path)
    assert "_engines" in private_names(HOMES["seko_runtime"])
    assert foreign_uses(tmp_path, {"_engines"}) == ["planted.py:2: artifact._engines"]

"""Rules of the house that imports do not show: private names, names of backends and of engines."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import seko_export.backends
import seko_runtime.backends

ROOT = Path(__file__).parents[1]
HOMES = {
    "seko_export": ROOT / "seko_export",
    "seko_runtime": ROOT / "runtime" / "seko_runtime",
    "seko_kernels": ROOT / "kernels" / "seko_kernels",
}


@pytest.mark.parametrize("project", ["pyproject.toml", "runtime/pyproject.toml"])
def test_console_scripts_name_functions_that_exist(project: str) -> None:
    """An installed script is only made once: a stale one hides that its function moved."""
    scripts = tomllib.loads((ROOT / project).read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts
    for name, target in scripts.items():
        assert callable(EntryPoint(name, target, "console_scripts").load()), name


@cache
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
    uses = []
    for path in home.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in private and not _is_own(node.value):
                uses.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    return uses


def _is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


@pytest.mark.parametrize("package", HOMES)
def test_no_distribution_touches_anothers_private_names(package: str) -> None:
    own = private_names(HOMES[package])
    others = set().union(*(private_names(home) for name, home in HOMES.items() if name != package)) - own
    assert others, "the search would find nothing"
    assert foreign_uses(HOMES[package], others) == []


def test_the_search_finds_a_planted_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text(
        "def f(artifact):\n    return artifact._call_lock\n", encoding="utf-8"
    )
    monkeypatch.setattr("tests.test_rooms.ROOT", tmp_path)
    assert "_call_lock" in private_names(HOMES["seko_runtime"])
    assert foreign_uses(tmp_path, {"_call_lock"}) == ["planted.py:2: artifact._call_lock"]


def found_in(
    homes: list[Path], wanted: Callable[[ast.AST], bool], *, but: str = "no such folder"
) -> list[str]:
    """Return where the code of these folders has a node that is wanted; folders of the name ``but`` are left out."""
    return [
        f"{path.relative_to(home)}:{node.lineno}: {ast.unparse(node)}"
        for home in homes
        for path in sorted(home.rglob("*.py"))
        if but not in path.relative_to(home).parts[:-1]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.expr | ast.pattern) and wanted(node)
    ]


def names_a_backend(node: ast.AST) -> bool:
    """Whether code compares with a backend's name, or lists several of them: what a capability would say."""
    names = {backend.name for backend in seko_runtime.backends.BACKENDS} | {"eager"}
    if isinstance(node, ast.Compare | ast.MatchValue):
        return any(isinstance(child, ast.Constant) and child.value in names for child in ast.walk(node))
    if isinstance(node, ast.Tuple | ast.Set | ast.List):
        return sum(isinstance(elt, ast.Constant) and elt.value in names for elt in node.elts) > 1
    if isinstance(node, ast.Dict):
        return sum(isinstance(key, ast.Constant) and key.value in names for key in node.keys) > 1
    return False


def parses_an_engines_name(node: ast.AST) -> bool:
    """Whether code takes the name of an engine or a piece apart; its `EngineKey` says what it is."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in PARSING
        and (
            ENGINE_NAME.search(ast.unparse(node.func.value)) is not None
            or (ast.unparse(node.func.value) == "re" and ENGINE_NAME.search(ast.unparse(node)) is not None)
        )
    )


PARSING = (
    *("startswith", "endswith", "removeprefix", "removesuffix", "split", "rsplit", "partition", "rpartition"),
    *("match", "fullmatch", "search", "find", "index"),
)
ENGINE_NAME = re.compile(r"\b(engine|piece|engine_name|piece_name|(spec|key|engine|piece)\.(name|file))$")


def test_both_sides_have_the_same_backends() -> None:
    assert (
        tuple(backend.name for backend in seko_runtime.backends.BACKENDS)
        == seko_export.backends.BACKENDS.names()
    )


def test_nothing_outside_their_rooms_compares_with_the_name_of_a_backend() -> None:
    assert found_in([*HOMES.values()], names_a_backend, but="backends") == []


def compares_a_kernels_choice(node: ast.AST) -> bool:
    """Whether code compares the name of a cache format or attention; a capability or record says what it takes."""
    return (
        isinstance(node, ast.Compare)
        and re.search(r"\b(kv(_scheme)?|attention)$", ast.unparse(node.left)) is not None
        and any(isinstance(child, ast.Constant) and isinstance(child.value, str) for child in ast.walk(node))
    )


def test_schemes_and_attentions_are_compared_where_builds_are_asked_for_alone(tmp_path: Path) -> None:
    """Options, and the estimate of what else could be asked."""
    places = found_in([*HOMES.values()], compares_a_kernels_choice)
    assert {where.partition("/")[0] for where in places} == {"options"}
    for planted in ("config.kv_scheme == 'fp4'", "config.attention != 'fp8'"):
        (tmp_path / "planted.py").write_text(f"{planted}\n", encoding="utf-8")
        assert found_in([tmp_path], compares_a_kernels_choice) == [f"planted.py:1: {planted}"]


def test_no_name_of_an_engine_is_parsed() -> None:
    assert found_in([*HOMES.values()], parses_an_engines_name) == []


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("manifest.backend == 'aoti'", names_a_backend),
        ("name not in ('onnx', 'tensorrt')", names_a_backend),
        ("PORTABLE = frozenset({'onnx', 'aoti'})", names_a_backend),
        ("HOSTS = {'compile': 1, 'onnx': 2}", names_a_backend),
        ("engine.name.startswith('block')", parses_an_engines_name),
        ("call.engine.partition('.')[0]", parses_an_engines_name),
        ("[engine for engine in engines if engine.file.endswith('.pt2')]", parses_an_engines_name),
    ],
)
def test_the_search_finds_what_is_planted(
    tmp_path: Path, line: str, wanted: Callable[[ast.AST], bool]
) -> None:
    (tmp_path / "backends").mkdir()
    for name in ("planted.py", "backends/planted.py"):
        (tmp_path / name).write_text(f"{line}\n", encoding="utf-8")
    places = found_in([tmp_path], wanted, but="backends")
    assert {where.partition(":")[0] for where in places} == {"planted.py"}

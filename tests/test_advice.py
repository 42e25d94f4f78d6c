"""What errors, help and pages tell a reader to do can be done: commands, options and packages that they name exist."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from seko_export.cli import main as export_command
from seko_runtime.cli.commands import main as runtime_main
from seko_runtime.cli.parser import SUMMARIES, parse, parsers
from seko_runtime.errors import UsageError
from seko_serve.cli import parser as serve_parser
from seko_serve.fleet.command import parser as fleet_parser
from seko_serve.load import parser as load_parser
from seko_serve.simulation.command import parser as simulation_parser

ROOT = Path(__file__).parents[1]
FOLDERS = ("runtime/seko_runtime", "seko_export", "kernels/seko_kernels")
# The change log tells what was so; a decision tells what was decided then.
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "docs/start").glob("*.md"))
# But the page whose commands have options of another distribution: tests/outside runs them.
PAGES = [page for page in PAGES if page.name != "extending.md"]
DISTRIBUTIONS = {"./runtime": "runtime", "./kernels": "kernels", ".": ".", "./serve": "serve"}
# Options of docker, rsync, pip, uv, mike, hf, strip, the linker, other servers' benchmarks; and one that stands for how
# they are spelled.
FOREIGN = {
    "--build-arg",
    "--suite",
    "--gpus",
    "--include",
    "--inplace",
    "--like-this",
    "--local-dir",
    "--no-as-needed",
    "--no-deps",
    "--omni",
    "--push",
    "--python",
    "--read-only",
    "--remove-section",
    "--strip-unneeded",
    "--task",
    "--tmpfs",
    "--torch-backend",
    "--upgrade",
    "--warmup-inference-steps",
}
PUBLISHED = {"kernel-lens"}  # named for the headers in it; nothing of ours depends on it
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
SPOKEN = re.compile(r"`((?:seko-run|seko-export)(?: [^`]*)?)`")
INSTALL = re.compile(
    r"pip install ((?:'[^']+'|[^\s`'\",;)&]+)(?: (?:'[^']+'|-e|[\w./=<>\[\]-]*[./=\[-][\w./=<>\[\],-]*))*)"
)


@cache
def texts() -> tuple[tuple[str, str], ...]:
    """Where and what: every string of the distributions' code, joined as a reader sees it, and every page."""
    places_and_texts = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            place = str(path.relative_to(ROOT))
            places_and_texts += [(place, text) for text in strings_of(path)]
    places_and_texts += [(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")) for page in PAGES]
    return tuple(places_and_texts)


def strings_of(path: Path) -> Iterator[str]:
    """Strings of a file; what is filled into one at run time is ``{}``."""
    tree = ast.parse(path.read_bytes())
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


@cache
def options() -> dict[str, dict[str, set[str]]]:
    """Spelled options of each command of each program."""
    _, commands = parsers(dict.fromkeys(SUMMARIES, print))
    runtime = {
        name: {spelled for action in command._actions for spelled in action.option_strings}
        for name, command in commands.items()
    }
    export = {
        name: {spelled for param in command.params for spelled in (*param.opts, *param.secondary_opts)}
        | {"--help"}
        for name, command in export_command.commands.items()
    }
    return {"seko-run": runtime, "seko-export": export}


def of_scripts() -> set[str]:
    """Options that the repository's own scripts and tests declare."""
    places = [
        path
        for folder in ("scripts", "tests", "seko_export", "runtime", "serve")
        for path in (ROOT / folder).rglob("*.py")
    ]
    declared = re.compile(r"(?:add_argument|option|addoption)\(\s*\"(--[a-z][a-z0-9-]*)")
    named = {option for path in places for option in declared.findall(path.read_text(encoding="utf-8"))}
    for path in (ROOT / "scripts").glob("*.sh"):  # what an argument is compared with
        script = path.read_text(encoding="utf-8")
        named |= set(re.findall(r" = (--[a-z][a-z0-9-]*)", script))
        for case in re.findall(r"^(--[a-z-]+(?: \| --[a-z-]+)*)\)", script, re.MULTILINE):
            named |= set(case.split(" | "))
    return named


def of_server() -> set[str]:
    """Options of ``seko-serve`` and ``seko-serve simulate``, most of which are named after fields."""
    actions = (*serve_parser()._actions, *simulation_parser()._actions)
    return {option for action in actions for option in action.option_strings}


def test_every_command_in_backticks_exists_with_its_options() -> None:
    """And every one at the beginning of a line of code."""
    wrong, seen = [], set()
    for place, text in texts():
        spoken = [" ".join(command.split()) for command in SPOKEN.findall(text)]
        if place.endswith(".md"):
            spoken += re.findall(r"^ {4}((?:seko-run|seko-export) [^|>&#\n]*)", text, re.MULTILINE)
        for command in spoken:
            program, _, rest = command.partition(" ")
            name = rest.split(" ")[0]
            if not re.fullmatch(r"[a-z]+", name):  # the program alone, or a name filled in
                named = set(OPTION.findall(rest)) - {"--help", "--version"}
                known = set().union(*options()[program].values())
            else:
                seen.add((program, name))
                named = set(OPTION.findall(rest))
                known = options()[program].get(name, set())
                if name not in options()[program]:
                    wrong.append(f"{place}: `{command}`: there is no command {name}")
            wrong += [f"{place}: `{command}`: no option {option}" for option in sorted(named - known)]
    assert wrong == []
    assert {("seko-run", "unpack"), ("seko-export", "sign"), ("seko-export", "pack")} <= seen


def test_every_option_that_is_named_exists() -> None:
    known = {option for commands in options().values() for each in commands.values() for option in each}
    known |= of_scripts() | FOREIGN | of_server() | {"--version"}
    wrong = {
        f"{place}: {option}"
        for place, text in texts()
        for option in OPTION.findall(text)
        if option not in known
    }
    assert sorted(wrong) == []


def test_what_is_to_be_installed_can_be() -> None:
    """A folder of the clone and its extras, or a published package that we depend on; none of ours by name."""
    wrong, seen = [], set()
    for place, text in texts():
        for listed in INSTALL.findall(text):
            for word in shlex.split(listed):
                if word in ("-e", "torch==VERSION", "{}") or word in FOREIGN or word.rstrip(",") in PUBLISHED:
                    continue
                seen.add(word)
                if not installable(word):
                    wrong.append(f"{place}: pip install {word}")
    assert wrong == []
    assert {"av", "tokenizers", "cryptography", "./runtime[aoti]", ".[onnx]"} <= seen


def installable(word: str) -> bool:
    name, _, extras = word.partition("[")
    if name in DISTRIBUTIONS:
        project = tomllib.loads((ROOT / DISTRIBUTIONS[name] / "pyproject.toml").read_text())["project"]
        asked = {extra for extra in extras.rstrip("]").split(",") if extra}
        return asked <= {*project.get("optional-dependencies", {}), "{}"}
    return re.split(r"[=<>]", name)[0] in published()


@cache
def published() -> set[str]:
    """Names of the packages that the distributions depend on, those of this repository apart."""
    names = set(PUBLISHED)
    for folder in DISTRIBUTIONS.values():
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {}).values()
        for needed in [
            *project.get("dependencies", []),
            *(requirement for extra in extras for requirement in extra),
        ]:
            names.add(re.split(r"[=<>\[ ]", needed)[0])
    return {name for name in names if not name.startswith("seko")}


def test_a_package_of_ours_is_not_installable_by_name() -> None:
    for word, right in (
        ("seko-runtime[video]", False),
        ("./runtime[none]", False),
        ("./runtime[text]", True),
    ):
        assert installable(word) is right


def lines_of_code() -> list[str]:
    """Command lines of the pages that have no placeholder but for what a reader chooses."""
    commands = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for line in re.findall(r"^(?: {4})?((?:seko-run|seko-export) [a-z]+ [^\n]*)$", text, re.MULTILINE):
            commands.append(re.split(r" (?:[|>#]|&&) ", line)[0])
    return list(dict.fromkeys(commands))


@pytest.mark.parametrize("line", lines_of_code())
def test_command_lines_of_the_pages_are_understood(line: str) -> None:
    """As far as that goes without a checkpoint or an artifact: names, values, and what is required."""
    program, name, *arguments = shlex.split(line.replace("VERSION", "2"))
    if program == "seko-run":
        assert parse([name, *arguments], dict.fromkeys(SUMMARIES, print)).command is print
        return
    command = export_command.commands[name]
    with click.Context(export_command) as parent:
        assert command.make_context(name, arguments, parent=parent).command is command


SERVE_PARSERS = {"": serve_parser, "load": load_parser, "fleet": fleet_parser, "simulate": simulation_parser}


def lines_of(pattern: str) -> list[str]:
    """Lines of the pages' code that match, without what stands behind them."""
    found = [
        re.split(r" +[|>#] ?| && ", line)[0].rstrip("\\ ")
        for page in PAGES
        for line in re.findall(
            rf"^(?: {{4}})?({pattern}[^\n]*)$", page.read_text(encoding="utf-8"), re.MULTILINE
        )
    ]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("line", lines_of("seko-serve "))
def test_command_lines_of_the_server_are_understood(line: str) -> None:
    _, *words = shlex.split(line)
    name = words.pop(0) if words[0] in SERVE_PARSERS else ""
    SERVE_PARSERS[name]().parse_args(words)


@pytest.mark.parametrize("line", lines_of("(?:bash|python|python -m) scripts[/.]"))
def test_scripts_that_pages_run_are_there(line: str) -> None:
    words = shlex.split(line)
    script = words[2].replace(".", "/") if words[1] == "-m" else words[1]
    assert any((ROOT / f"{script}{suffix}").is_file() for suffix in ("", ".py", "/__main__.py"))


@pytest.mark.parametrize("name", SUMMARIES)
def test_every_command_of_the_runtime_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        runtime_main([name, "--help"])
    assert ended.value.code == 0
    assert SUMMARIES[name] in " ".join(capsys.readouterr().out.split())


def test_a_planted_mistake_is_found() -> None:
    with pytest.raises(UsageError, match="no option --nothing"):
        parse(["run", "a", "--nothing"], dict.fromkeys(SUMMARIES, print))
    assert SPOKEN.findall("take `seko-export pak A -o B` or `seko-run`") == [
        "seko-export pak A -o B",
        "seko-run",
    ]
    assert INSTALL.findall("in Seko's folder, pip install -e '.[onnx]', or not") == ["-e '.[onnx]'"]
    assert INSTALL.findall("or pip install av") == ["av"]


def test_python_on_pages_can_be_parsed() -> None:
    blocks = [
        (place, block)
        for place, text in texts()
        if place.endswith(".md")
        for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]
    assert len(blocks) > 10
    wrong = []
    for place, block in blocks:
        try:
            ast.parse(block)
        except SyntaxError as fault:
            wrong.append(f"{place}: {fault}")
    assert wrong == []

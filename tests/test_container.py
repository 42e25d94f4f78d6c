"""What can be known of the containers without building them, and what the script that measures packages does.

Read here is the text of the Dockerfiles: sources, versions, users. That they build, nobody has tried here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from seko_runtime.cli.parser import SUMMARIES, parse
from seko_serve.cli import parser, settings
from tests.support.loaded import load_script

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "scripts" / "container"
DOCKERFILES = sorted(FOLDER.glob("Dockerfile.*"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """Instructions with their arguments, comments left out, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def faults(path: Path) -> list[str]:
    """Everything that a reader of the file can object to."""
    objections: list[str] = []
    steps = instructions(path)
    images = [rest for name, rest in steps if name == "FROM"]
    stages = [image.split(" AS ")[1] for image in images if " AS " in image]
    images = [image for image in images if image.split(" AS ")[0] not in stages]
    pinned = {
        Requirement(line).name: Requirement(line).specifier
        for line in (ROOT / "scripts/constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    python = SpecifierSet(
        tomllib.loads((ROOT / "runtime/pyproject.toml").read_text())["project"]["requires-python"]
    )
    objections += ["one stage only"] * (len(images) < 2)
    for image in images:
        version = re.match(r"python:(\d+\.\d+\.\d+)-slim-\w+(?: AS \w+)?$", image)
        if version is None or version[1] not in python:
            objections.append(f"image {image} is not pinned, or no Python of ours")
    arguments = dict(rest.split("=") for name, rest in steps if name == "ARG")
    for name, rest in steps:
        if name in ("COPY", "ADD"):
            sources = [source for source in rest.split()[:-1] if not source.startswith("--")]
            stage = re.search(r"--from=(\S+)", rest)
            objections += [f"{name} of an unknown stage"] * (stage is not None and stage[1] not in stages)
            missing = [source for source in sources if stage is None and not (ROOT / source).exists()]
            objections += [f"{source} is not there" for source in missing]
        if name == "RUN":
            objections += _install_faults(rest, arguments, pinned)
    last = max(number for number, (name, _) in enumerate(steps) if name == "FROM")
    users = [rest for name, rest in steps[last:] if name == "USER"]
    if not users or users[-1].split(":")[0] in ("0", "root"):
        objections.append("runs as root")
    for name, rest in steps[last:]:
        if name == "RUN":
            objections.append("the last stage installs something")
        if name in ("HEALTHCHECK", "CMD"):
            command = json.loads(rest[rest.index("[") :])
            begin = command.index("seko_runtime") + 1 if "seko_runtime" in command else 0
            parse(
                command[begin:], dict.fromkeys(SUMMARIES, print)
            )  # UsageError on what is no command of ours
    health = [rest for name, rest in steps[last:] if name == "HEALTHCHECK"]
    objections += ["no health check that verifies"] * (len(health) != 1 or '"verify"' not in health[0])
    return objections


def _install_faults(run: str, arguments: dict[str, str], pinned: dict[str, SpecifierSet]) -> list[str]:
    objections = []
    for install in re.findall(r"pip install ([^&]*)", run):
        words = install.replace('"', "").split()
        ours = [word for word in words if word.startswith("/build/") and not word.endswith(".txt")]
        objections += [f"{word} without what it requires" for word in ours if "--no-deps" in words]
        paths = {re.split(r"[\[$]", word)[0].removeprefix("/build/") for word in ours}
        wanted = [requirement for path in paths for requirement in requirements(path)]
        # Nobody here owns these names on an index: each comes by its path, or was installed by it.
        objections += [
            f"{needed} by its name"
            for needed in wanted
            if needed.startswith("seko-") and needed.removeprefix("seko-") not in paths
        ]
        skipped = {words[i + 1] for i, word in enumerate(words) if word == "--index-url"}
        for word in words:
            if word.startswith(("--", "/build/")) or word in skipped:
                continue
            name, _, version = re.sub(r"\$\{(\w+)\}", lambda m: arguments[m[1]], word).partition("==")
            if not version:
                objections.append(f"{word} is not pinned")
            elif name not in pinned or version not in pinned[name]:
                objections.append(f"{name} {version} is not what scripts/constraints.txt says")
    return objections


def requirements(folder: str) -> list[str]:
    """Names that a distribution of this repository requires without its extras."""
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    return [Requirement(line).name for line in project["dependencies"]]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_reader_has_no_objection(path):
    assert faults(path) == []


def test_both_kinds_are_there():
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


@pytest.mark.parametrize(
    ("was", "becomes", "objection"),
    [
        ("USER 1000:1000", "USER root", "runs as root"),
        ("USER 1000:1000\n", "", "runs as root"),
        ("python:3.12.3-slim-bookworm AS build", "python:latest AS build", "is not pinned"),
        ("python:3.12.3-slim-bookworm AS build", "python:3.13.0-slim-bookworm AS build", "no Python of ours"),
        ("COPY runtime", "COPY runtimes", "runtimes is not there"),
        ("--from=build", "--from=builder", "unknown stage"),
        ("TORCH=2.13.0", "TORCH=2.10.0", "torch 2.10.0 is not what"),
        ("cryptography==50.0.2", "cryptography", "cryptography is not pinned"),
        ("numpy==2.3.5", "numpy==2.4.0", "numpy 2.4.0 is not what"),
        ("USER 1000:1000", "RUN apt-get update\nUSER 1000:1000", "installs something"),
        ("install --no-cache-dir --constraint", "install --no-deps --constraint", "without what it requires"),
        ("/build/runtime /build/serve", "/build/serve", "seko-runtime by its name"),
        ('HEALTHCHECK --interval=10m', '# HEALTHCHECK --interval=10m', "no health check"),
    ],
)  # fmt: skip
def test_what_a_reader_would_object_to(tmp_path, was, becomes, objection):
    text = (FOLDER / "Dockerfile.cpu").read_text()
    assert was in text
    (tmp_path / "Dockerfile").write_text(text.replace(was, becomes))
    try:
        objections = faults(tmp_path / "Dockerfile")
    except ValueError:  # a health check that was cut leaves its second line behind
        assert objection == "no health check"
        return
    assert any(objection in text for text in objections), objections


@pytest.fixture
def sizes() -> ModuleType:
    return load_script(FOLDER / "sizes.py")


def test_a_hidden_package_cannot_be_imported_and_comes_back(sizes, tmp_path):
    """Also after an error; and what a killed run left hidden is found again."""
    files = [tmp_path / "odd_package.py", tmp_path / "libodd.so"]
    for path in files:
        path.write_text("found = True\n")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import odd_package"]

    def importable() -> bool:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def fail_while_hidden() -> None:
        with sizes.hidden(files):
            assert not importable()
            raise KeyError

    assert importable()
    with pytest.raises(KeyError):
        fail_while_hidden()
    assert importable()
    files[0].rename(sizes._away(files[0]))
    sizes.restore([files])
    assert importable()


def test_the_sizes_are_those_of_the_files(sizes):
    installed = sizes.installed()
    assert {"torch", "numpy"} <= set(installed)
    files = sizes.files_of(installed["numpy"])
    assert sum(path.stat().st_size for path in files) > 1_000_000
    assert all(path.is_file() for path in files)


def test_hiding_must_be_asked_for():
    done = subprocess.run(
        [sys.executable, FOLDER / "sizes.py", "--artifact", "x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "belong together" in done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_server_s_stage_starts_it_as_a_user_whose_key_is_asked_for(path):
    steps = instructions(path)
    begin = next(
        number for number, (name, rest) in enumerate(steps) if name == "FROM" and rest.endswith(" AS serve")
    )
    end = next(number for number in range(begin + 1, len(steps)) if steps[number][0] == "FROM")
    stage = dict(steps[begin:end])
    assert stage["USER"] == "1000:1000"
    program, *options = json.loads(stage["ENTRYPOINT"])
    assert program in tomllib.loads((ROOT / "serve/pyproject.toml").read_text())["project"]["scripts"]
    with pytest.raises(ValueError, match="SEKO_SERVE_API_KEY"):
        settings(parser().parse_args(options))

"""What scripts, images and examples install: packages of this repository by their path, with all that they require, and
others' packages under names that this repository depends on."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECTS = {name: tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]
            for name in (".", "runtime", "kernels", "serve")}  # fmt: skip
OURS = {project["name"] for project in PROJECTS.values()}
FILES = [
    *sorted((ROOT / "scripts").rglob("*.sh")),
    *sorted((ROOT / "scripts" / "container").glob("Dockerfile.*")),
    *sorted((ROOT / "serve" / "examples").rglob("*.yaml")),
    ROOT / "scripts" / "tensorrt_stubs.py",
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/start").glob("*.md")),
]
FILES = [path for path in FILES if path.name != "CHANGELOG.md"]
# Installed with --no-deps, and what each then lacks: it serves what is not called.
LEFT_OUT = {
    "voxcpm": {"addict", "argbind", "datasets", "funasr", "gradio", "inflect", "librosa", "modelscope",
               "simplejson", "soundfile", "spaces", "torchaudio", "torchcodec", "wetext"},
    "peft": {"psutil"},
    "accelerate": {"psutil"},
    "flashdreams": {"loguru", "nvidia-ml-py", "tyro"},
    "tensorrt-cu13-bindings": set(),
    "tensorrt-lean-cu13-bindings": set(),
    "tensorrt-lean-cu13-libs": set(),
    "tensorrt-lean-cu13": {"tensorrt-lean-cu13-bindings", "tensorrt-lean-cu13-libs"},
}  # fmt: skip
VALUED = {"--constraint", "-c", "--index-url", "--extra-index-url", "--target", "-d", "-w", "--python-version",
          "--only-binary", "--retries", "-r"}  # fmt: skip
OF_PIP = re.compile(r"pip['\"]? (?:install|download|wheel) ([^&|`#;()]*)|\"\$\{install\[@\]\}\" ([^|&#]*)")


def installs(text: str) -> list[list[str]]:
    """The words of each command of pip, and of the one that scripts/venv.sh keeps in a variable."""
    joined = re.sub(r"\\\n\s*", "", text)
    found = []
    for match in OF_PIP.finditer(joined):
        for line in (match[1] or match[2]).splitlines()[:1]:
            try:
                found.append(shlex.split(line.replace("\\", "").rstrip(".,")))
            except ValueError:  # a sentence that goes on behind the command
                found.append(shlex.split(line.replace("'", "").replace('"', "")))
    return found


def packages(words: list[str]) -> list[str]:
    """What a command of pip installs: no options and their values, and no variables of a shell."""
    values = {index + 1 for index, word in enumerate(words) if word in VALUED}
    return [
        word
        for index, word in enumerate(words)
        if index not in values and not word.startswith(("-", "$")) and "$" not in word.split("==")[0]
    ]


def pinned() -> dict[str, SpecifierSet]:
    """What scripts/constraints.txt says of each package."""
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {pin.name: pin.specifier for pin in pins}


def known_names() -> set[str]:
    """Names that this repository depends on or pins, its own apart."""
    lines = [
        line
        for project in PROJECTS.values()
        for line in (
            *project["dependencies"],
            *(line for extra in project.get("optional-dependencies", {}).values() for line in extra),
        )
    ]
    return {*(Requirement(line).name for line in lines), *pinned()} - OURS


def is_path(word: str) -> bool:
    return word.startswith(("/", ".")) or word.endswith(".whl")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_of_ours_is_installed_by_name_or_without_its_requirements(path: Path) -> None:
    """Nobody here owns the names on an index: who registers one would run code on every machine that installs it."""
    known, wrong = known_names(), []
    for words in installs(path.read_text(encoding="utf-8")):
        for word in packages(words):
            folder = word.partition("[")[0]
            if is_path(word):
                ours = folder in (".", "./runtime", "./kernels", "./serve") or folder.startswith("/build/")
                wrong += [f"{word} with --no-deps"] * (ours and "--no-deps" in words)
                continue
            name, _, version = word.partition("==")
            name = re.split(r"[<>\[]", name)[0]
            if version[:1].isdecimal() and version not in pinned().get(name, SpecifierSet()):
                wrong.append(f"{word} is not what scripts/constraints.txt says")
            if name in OURS:
                wrong.append(f"{word} by its name")
            elif name not in known and name not in LEFT_OUT:
                wrong.append(f"{word}, on which nothing here depends")
            elif "--no-deps" in words and name not in LEFT_OUT:
                wrong.append(f"{word} with --no-deps and no list of what it then lacks")
    assert wrong == []


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_no_deps_leaves_out_is_known(name: str) -> None:
    """A new version of a package that requires more fails here, before a test that calls it does."""
    try:
        required = [Requirement(line) for line in metadata.requires(name) or ()]
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    lacking = set()
    for requirement in required:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            lacking.add(requirement.name)
            continue
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement}, have {version}"
    assert lacking <= LEFT_OUT[name]


def test_every_no_deps_of_a_script_is_read() -> None:
    """The words above see each of them."""
    seen = sum("--no-deps" in words for path in FILES for words in installs(path.read_text()))
    there = sum(path.read_text().count("--no-deps") for path in FILES)
    assert seen == there > 0


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("setup:\n  - /opt/bin/pip install --quiet 'seko-serve[ray,s3]'\n", "seko-serve[ray,s3] by its name"),
        ("RUN pip install --no-cache-dir --no-deps /build/serve \\\n && x", "/build/serve with --no-deps"),
        ("pip install left-pad", "left-pad, on which nothing here depends"),
        ("pip install torch==2.1.0", "torch==2.1.0 is not what scripts/constraints.txt says"),
        ("pip install --no-deps ftfy==6.3.1", "ftfy==6.3.1 with --no-deps and no list"),
    ],
)
def test_a_planted_mistake_is_found(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(AssertionError, match=re.escape(word)):
        test_nothing_of_ours_is_installed_by_name_or_without_its_requirements(tmp_path / "file")


def test_the_smoke_tier_imports_what_it_installs() -> None:
    """It leaves the server out."""
    files = [line for line in (ROOT / "tests/smoke.txt").read_text().splitlines() if line.endswith(".py")]
    assert files
    assert [
        file for file in files if re.search(r"^\s*(from|import) seko_serve", (ROOT / file).read_text(), re.M)
    ] == []


def test_the_lock_is_of_the_tested_set() -> None:
    """Each pinned version, and each package that the four distributions and their tests require."""

    def pins(name: str) -> dict[str, str]:
        lines = (ROOT / "scripts" / name).read_text().splitlines()
        split = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
        return {canonicalize_name(package): version.partition(" ")[0] for package, _, version in split}

    locked = pins("lock.txt")
    assert {name: locked.get(name, version) for name, version in pins("constraints.txt").items()} == pins(
        "constraints.txt"
    )
    for project in PROJECTS.values():
        for line in project["dependencies"] + project.get("optional-dependencies", {}).get("dev", []):
            requirement = Requirement(line)
            if requirement.name not in OURS:
                assert locked[canonicalize_name(requirement.name)] in requirement.specifier, (
                    "bash scripts/lock.sh"
                )

"""The rooms' walls: the runtime alone in a fresh venv, what imports bring in, import rules kept and broken."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WHEEL_BYTES = 150_000
NOT_AT_IMPORT = ("torch", "triton", "click", "transformers", "rich", "safetensors")
NOT_AT_REPLAY = (
    *("triton", "click", "transformers", "rich", "safetensors", "torch._inductor", "torch._dynamo"),
    *("seko_export", "seko_kernels"),
)
REPLAY = """
import json, sys
from seko_runtime.__main__ import main
code = main(["run", sys.argv[1], "--chunks", "4", "-o", sys.argv[2], "--device", "cpu", "--json"])
print(json.dumps({"code": code, "modules": sorted(sys.modules)}))
"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runtime's wheel, built from a copy, so that the build leaves nothing in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    unbuilt = shutil.ignore_patterns("*.egg-info", "__pycache__", "build")
    shutil.copytree(ROOT / "runtime", folder / "runtime", ignore=unbuilt)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-q"]
    subprocess.run([*pip, "-w", folder, folder / "runtime"], check=True)
    return next(folder.glob("seko_runtime-*.whl"))


@pytest.fixture(scope="session")
def lone_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a fresh venv that holds the runtime's wheel, torch, and what torch itself requires; no more.

    torch and its requirements are links to this environment's: the same files as a download of 200 MB and more
    would bring. Triton, which a CUDA build of torch requires, is left out: an artifact needs none.
    """
    folder = tmp_path_factory.mktemp("lone")
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(
        subprocess.run([python, "-c", query], capture_output=True, text=True, check=True).stdout.strip()
    )
    for entry in _files_of("torch", set()) | _files_of("numpy", set()):
        (site / entry.name).symlink_to(entry)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "-q"]
    subprocess.run([*pip, wheel], check=True)
    return python


def test_the_wheel_is_small_and_holds_the_runtime_alone(wheel):
    assert wheel.stat().st_size < WHEEL_BYTES
    listing = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", wheel], capture_output=True, text=True, check=True
    )
    files = [line.split()[0] for line in listing.stdout.splitlines()[1:]]
    assert {file.split("/")[0].split("-")[0] for file in files} == {"seko_runtime"}
    assert "seko_runtime/py.typed" in files


def test_importing_the_runtime_is_light(lone_python):
    """numpy and the standard library, though torch is there."""
    modules = _run(lone_python, "import json, sys, seko_runtime.artifact, seko_runtime.session\n"
                   "print(json.dumps(sorted(sys.modules)))")  # fmt: skip
    assert "numpy" in modules
    assert not _brought_in(modules, NOT_AT_IMPORT)


def test_the_runtime_alone_replays_an_artifact(lone_python, fp4, tmp_path):
    """Opens it, runs chunks, writes a video, agrees with the goldens; and neither compiler nor exporter is there."""
    video = tmp_path / "out.y4m"
    done = _run(lone_python, REPLAY, str(fp4.folder), str(video))
    assert done["code"] == 0
    assert not _brought_in(done["modules"], NOT_AT_REPLAY)
    assert "torch" in done["modules"]
    assert video.read_bytes().startswith(b"YUV4MPEG2 ")
    assert [path.name for path in tmp_path.iterdir()] == ["out.y4m"]


def test_the_runtime_alone_verifies_an_artifact(lone_python, fp4):
    command = [lone_python, "-I", "-m", "seko_runtime", "verify", fp4.folder, "--device", "cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["ok"], report["digest"]) == (True, fp4.report["digest"])


def test_the_exporter_is_really_absent_there(lone_python):
    """The check above can fail: what it forbids cannot be imported in that venv, and can in this one."""
    for module in ("seko_export", "seko_kernels", "triton", "click", "safetensors"):
        done = subprocess.run([lone_python, "-I", "-c", f"import {module}"], capture_output=True, check=False)
        assert done.returncode == 1, module


def test_help_and_version_of_the_exporter_are_light():
    """The command answers without torch."""
    script = (
        "import json, sys\n"
        "from seko_export.cli import main\n"
        "main(['build', '--help'], standalone_mode=False)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    assert not _brought_in(_run(Path(sys.executable), script), ("torch", "triton", "transformers"))


def test_import_rules_hold(workspace):
    done = _lint_imports(workspace)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("runtime/seko_runtime/ring.py", "import seko_kernels.formats"),
        ("runtime/seko_runtime/ring.py", "from seko_export import config"),
        ("runtime/seko_runtime/ring.py", "import triton"),
        ("runtime/seko_runtime/video.py", "import click"),
        ("kernels/seko_kernels/formats.py", "import seko_runtime.ring"),
        ("kernels/seko_kernels/formats.py", "from seko_export.config import PRESETS"),
    ],
)
def test_a_planted_import_breaks_the_rules(workspace, file, line):
    path = workspace / file
    assert path.exists()
    path.write_text(path.read_text() + f"\n\n{line}\n")
    done = _lint_imports(workspace)
    assert done.returncode == 1, done.stdout
    assert re.search(r"[1-9] broken", done.stdout)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A copy of the three distributions and their rules, to be broken."""
    unneeded = shutil.ignore_patterns("*.egg-info", "__pycache__", "build")
    for folder in ("seko_export", "runtime", "kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=unneeded)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def _lint_imports(workspace: Path) -> subprocess.CompletedProcess[str]:
    folders = [workspace, workspace / "runtime", workspace / "kernels"]
    return subprocess.run(
        [Path(sysconfig.get_path("scripts"), "lint-imports"), "--no-cache"],
        cwd=workspace,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        check=False,
    )


def _run(python: Path, script: str, *arguments: str):
    """Run a script and return the JSON of its last line."""
    isolated = ["-I"] if python != Path(sys.executable) else []
    command = [python, *isolated, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _brought_in(modules: list[str], forbidden: tuple[str, ...]) -> list[str]:
    return [m for m in modules if any(m == name or m.startswith(f"{name}.") for name in forbidden)]


def _files_of(distribution: str, seen: set[str]) -> set[Path]:
    """Return the top-level entries in site-packages of a distribution and of all that it requires."""
    seen.add(distribution)
    found = metadata.distribution(distribution)
    names = {Path(str(file)).parts[0] for file in found.files or ()} - {"..", "__pycache__"}
    entries = {Path(str(found.locate_file(name))) for name in names}
    for requirement in found.requires or ():
        name = re.match(r"[\w.-]+", requirement)
        if name and name[0] not in seen | {"triton"} and _is_needed(requirement):
            entries |= _files_of(name[0], seen)
    return entries


def _is_needed(requirement: str) -> bool:
    """Whether a requirement without extras holds here: its distribution is installed."""
    if "extra ==" in requirement:
        return False
    try:
        metadata.distribution(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])
    except metadata.PackageNotFoundError:
        return False
    return True

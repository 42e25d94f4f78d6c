"""The rooms' walls: the runtime alone in a fresh venv, what imports bring in, import rules kept and broken."""

from __future__ import annotations

import ast
import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from seko_runtime.backends.tensorrt_libraries import LEAN, RTX
from seko_runtime.cli.console import LIBRARIES
from tests.support.lone_runtime import outside_environment

ROOT = Path(__file__).parents[1]
NOT_AT_IMPORT = ("torch", "triton", "click", "transformers", "rich", "safetensors")
NOT_AT_REPLAY = (
    *("triton", "click", "transformers", "rich", "safetensors", "torch._inductor", "torch._dynamo"),
    *("seko_export", "seko_kernels"),
)
NEW_MODULES = """
import json, sys
before = set(sys.modules)
import {}
print(json.dumps([sorted(set(sys.modules) - before), sorted(sys.stdlib_module_names)]))
"""
HEAVY_OF_NUMPY = tuple(
    f"numpy.{part}"
    for part in ("random", "fft", "ma", "polynomial", "testing", "f2py", "ctypeslib", "rec", "char")
)
HEAVY_OF_THE_LIBRARY = (
    *("asyncio", "multiprocessing", "unittest", "http", "urllib.request", "ssl", "socket", "sqlite3", "xml"),
    *("email", "tarfile", "zipfile", "argparse", "subprocess", "resource"),
)
REPLAY = """
import contextlib, io, json, sys
from seko_runtime.cli.commands import main
artifact, video = sys.argv[1:]
with contextlib.redirect_stdout(io.StringIO()) as said:
    verified = main(["verify", artifact, "--device", "cpu", "--json"])
ran = main(["run", artifact, "--chunks", "4", "-o", video, "--device", "cpu", "--json"])
report = json.loads(said.getvalue().splitlines()[-1])
print(json.dumps({"codes": [verified, ran], "report": report, "modules": sorted(sys.modules)}))
"""


def test_the_wheel_holds_the_runtime_alone(wheel):
    listing = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", wheel], capture_output=True, text=True, check=True
    )
    files = [line.split()[0] for line in listing.stdout.splitlines()[1:]]
    assert {file.split("/")[0].split("-")[0] for file in files} == {"seko_runtime"}
    assert {
        "seko_runtime/py.typed",
        "seko_runtime/video/manifest.schema.json",
        "seko_runtime/speech/manifest.schema.json",
    } <= {*files}


def test_importing_the_runtime_is_light(lone_python):
    """numpy and the standard library, though torch is there."""
    modules = _run(lone_python, "import json, sys, seko_runtime.opening.artifact, seko_runtime.video.session\n"
                   "print(json.dumps(sorted(sys.modules)))")  # fmt: skip
    assert "numpy" in modules
    assert not _brought_in(modules, NOT_AT_IMPORT)


def test_the_face_of_the_package_imports_nothing_but_itself(lone_python):
    """`import seko_runtime` is free: its names are looked up when they are used."""
    modules, library = _run(lone_python, NEW_MODULES.format("seko_runtime"))
    assert [name for name in modules if name.split(".")[0] not in library] == ["seko_runtime"]


def test_what_opening_imports_is_the_runtime_numpy_and_light_parts_of_the_library(lone_python):
    """The causes of a slow import, by name: a second library, numpy's large parts, a network or process library."""
    modules, library = _run(lone_python, NEW_MODULES.format("seko_runtime.opening.artifact"))
    assert {name.split(".")[0] for name in modules} - set(library) == {"seko_runtime", "numpy"}
    assert not _brought_in(modules, HEAVY_OF_NUMPY)
    assert not _brought_in(modules, HEAVY_OF_THE_LIBRARY)


def test_the_wheel_requires_numpy_alone(wheel):
    """Everything else is an extra: of a backend, or of something that a box may want."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [member for member in archive.namelist() if member.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert required == ["numpy>=1.26"]


def test_the_runtime_alone_verifies_and_replays_an_artifact(lone_python, fp4, tmp_path):
    """Opens it, agrees with the goldens, runs chunks, writes a video; and neither compiler nor exporter is there."""
    video = tmp_path / "out.y4m"
    done = _run(lone_python, REPLAY, str(fp4.folder), str(video))
    assert done["codes"] == [0, 0]
    assert (done["report"]["ok"], done["report"]["digest"]) == (True, fp4.report["digest"])
    assert not _brought_in(done["modules"], NOT_AT_REPLAY)
    assert "torch" in done["modules"]
    assert video.read_bytes().startswith(b"YUV4MPEG2 ")
    assert [path.name for path in tmp_path.iterdir()] == ["out.y4m"]


def test_the_exporter_is_really_absent_there(lone_python):
    """The check above can fail: what it forbids cannot be imported in that venv, and can in this one."""
    for module in ("seko_export", "seko_kernels", "triton", "click", "safetensors"):
        done = subprocess.run([lone_python, "-I", "-c", f"import {module}"], capture_output=True, check=False)
        assert done.returncode == 1, module


def plant(folder: Path, *names: str) -> Path:
    """Write modules that would leave a file ``planted`` in the folder if anybody imported them; return that path."""
    mark = folder / "planted"
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(mark)!r}, 'a').write({name!r})\n")
    return mark


PLANTED = (
    "numpy.py",
    "json.py",
    "argparse.py",
    "__future__.py",
    "typing.py",
    "numpy/__init__.py",
    "torch.pyc",
)


def asked(
    python: Path, folder: Path, *options: str, artifact: str = ".", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Start `info` in a folder, by Python with these options, without options by `seko-run`."""
    command = [python, *options] if options else [python.parent / "seko-run"]
    environment = outside_environment() | variables
    return subprocess.run(
        [*command, "info", artifact], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", PLANTED)
def test_as_a_module_it_refuses_to_start_beside_a_planted_module(lone_python, tmp_path, name):
    mark = plant(tmp_path, name)
    done = asked(lone_python, tmp_path, "-m", "seko_runtime")
    assert not mark.exists()
    assert done.returncode == 2
    assert re.fullmatch(
        r"error: the current directory holds '[^']+'.* seko-run, or python -P .*\n", done.stderr
    )


def test_no_module_of_the_library_is_taken_from_the_current_directory_before_the_guard(lone_python, tmp_path):
    """But what `python -m` imports before it comes to us (docs/artifact-checks.md); by `seko-run` none."""
    modules = _run(
        lone_python, "import runpy, sys; seen = list(sys.modules); import json; print(json.dumps(seen))"
    )
    assert {"contextlib", "importlib"} <= set(modules)
    mark = plant(tmp_path, *(f"{name}.py" for name in sys.stdlib_module_names - set(modules)))
    done = asked(lone_python, tmp_path, "-m", "seko_runtime")
    assert (done.returncode, mark.exists()) == (2, False), done.stderr
    plant(tmp_path, *(f"{name}.py" for name in modules if "." not in name))
    done = asked(lone_python, tmp_path)
    assert (done.returncode, mark.exists()) == (4, False), done.stderr


def test_as_a_module_it_refuses_to_start_in_an_artifact(lone_python, tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    done = asked(lone_python, tmp_path, "-m", "seko_runtime")
    assert (done.returncode, "holds a manifest.json" in done.stderr) == (2, True)


def started_elsewhere(python: Path, folder: Path, *options: str, **variables: str) -> tuple[int, str]:
    """Start where a library that is not installed lies as a folder without a face; ask for what needs the library."""
    work, artifact, trust = folder / "work", folder / "artifact", folder / "trust"
    mark = plant(work, "cryptography/exceptions.py", "notes.py", "code/readme.py")
    artifact.mkdir()
    (artifact / "manifest.json").write_text("{}")
    trust.write_text("ed25519 " + "0" * 64)
    done = asked(python, work, *options, artifact="../artifact", SEKO_TRUST=str(trust), **variables)
    assert not mark.exists()
    return done.returncode, done.stderr


@pytest.mark.parametrize("options", [("-m", "seko_runtime"), ()])
@pytest.mark.parametrize("path", ["", "/nowhere"])
def test_elsewhere_the_current_directory_is_left_out_without_a_word(lone_python, tmp_path, options, path):
    code, said = started_elsewhere(lone_python, tmp_path, *options, PYTHONPATH=path)
    assert (code, "library cryptography is not installed" in said) == (5, True)


@pytest.mark.parametrize("path", [".", ":/nowhere", "/nowhere:"])
def test_an_entry_of_the_variable_that_means_the_current_directory_is_left_out(lone_python, tmp_path, path):
    code, said = started_elsewhere(lone_python, tmp_path, PYTHONPATH=path)
    assert (code, "library cryptography is not installed" in said) == (5, True)


def test_with_safe_path_or_as_a_script_it_starts_anywhere(lone_python, tmp_path):
    mark = plant(tmp_path, *PLANTED)
    for options, variables in (
        (("-P", "-m", "seko_runtime"), {}),
        (("-m", "seko_runtime"), {"PYTHONSAFEPATH": "1"}),
        ((), {}),
    ):
        done = asked(lone_python, tmp_path, *options, **variables)
        assert (done.returncode, "which Python would import" in done.stderr) == (4, True)
    assert not mark.exists()


def test_the_guard_knows_every_library_that_the_runtime_imports():
    """A library that is missing there is dropped from the path all the same; its name is for the refusal."""
    named = {LEAN.module, RTX.module}  # imported by name
    for path in (ROOT / "runtime/seko_runtime").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                named |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                named.add(node.module.split(".")[0])
    assert named - sys.stdlib_module_names - {"seko_runtime"} == set(LIBRARIES)


def test_help_and_version_of_the_exporter_are_light():
    """The command answers without torch."""
    script = (
        "import json, sys\n"
        "from seko_export.cli import main\n"
        "main(['build', '--help'], standalone_mode=False)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    assert not _brought_in(_run(Path(sys.executable), script), ("torch", "triton", "transformers"))


def test_planted_imports_break_the_rules(workspace):
    """Each is told, all at once: reading the imports of all files takes seconds."""
    planted = (
        ("runtime", "seko_runtime.video.ring", "import seko_kernels.formats"),
        ("runtime", "seko_runtime.video.ring", "import seko_export.config"),
        ("runtime", "seko_runtime.video.ring", "import triton"),
        ("runtime", "seko_runtime.video.files", "import click"),
        ("serve", "seko_serve.live.pace", "import seko_export"),
        ("serve", "seko_serve.protocol", "import seko_serve.live.pace"),
        ("kernels", "seko_kernels.formats", "import seko_runtime.video.ring"),
        ("kernels", "seko_kernels.formats", "import seko_export.families.wan.presets"),
    )
    for folder, module, line in planted:
        path = workspace / folder / f"{module.replace('.', '/')}.py"
        path.write_text(path.read_text() + f"\n\n{line}\n")
    done = _lint_imports(workspace)
    assert done.returncode == 1, done.stdout
    for _, module, line in planted:
        assert f"{module} -> {line.removeprefix('import ')} (l." in done.stdout, (module, line)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A copy of the four distributions and their rules, to be broken."""
    unneeded = shutil.ignore_patterns("*.egg-info", "__pycache__", "build")
    for folder in ("seko_export", "runtime", "kernels", "serve"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=unneeded)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def _lint_imports(workspace: Path) -> subprocess.CompletedProcess[str]:
    folders = [workspace, *(workspace / name for name in ("runtime", "kernels", "serve"))]
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

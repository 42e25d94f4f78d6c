"""The inference box as it should be: read-only, no network, root, home or compiler; and an artifact replays in it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from seko_export.artifact.packing import pack_artifact
from seko_runtime import read_manifest
from tests.support import closed_box

LIBRARIES = [Path("/lib"), Path("/lib64"), Path("/usr/lib")]  # no /bin, no /etc, no /sys, no /dev
PROBE = """
import errno, json, os, shutil, socket, sys
from pathlib import Path

def refusal(act):
    try:
        act()
    except OSError as fault:
        return errno.errorcode[fault.errno]

def connect():
    with socket.socket() as connection:
        connection.settimeout(5)
        connection.connect(("192.0.2.1", 80))

artifact, archive = Path(sys.argv[1]), Path(sys.argv[2])
report = {
    "uid": os.getuid(),
    "variables": sorted(os.environ),
    "network": refusal(connect),
    "root": refusal(lambda: os.mkdir("/new")),
    "artifact": refusal(lambda: (artifact / "new").touch()),
    "manifest": refusal(lambda: (artifact / "manifest.json").open("r+")),
    "python": refusal(lambda: Path(sys.prefix, "new").touch()),
    "compilers": [name for name in ("g++", "gcc", "cc", "c++", "clang", "ld", "nvcc") if shutil.which(name)],
    "home": os.path.isdir(os.path.expanduser("~")),
}
from seko_runtime.cli.commands import main
report["unpack"] = main(["unpack", str(archive), "-o", "/tmp/unpacked"])
report["verify"] = main(["verify", "/tmp/unpacked", "--device", "cpu"])
report["run"] = main(["run", str(artifact), "--chunks", "4", "-o", "/tmp/out.y4m", "--device", "cpu"])
report["written"] = sorted(os.listdir("/tmp"))
report["modules"] = sorted({name.split(".")[0] for name in sys.modules})
print(json.dumps(report))
"""


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """An empty folder in which a box can be made."""
    root = tmp_path / "box"
    root.mkdir()
    reason = closed_box.why_not(root)
    if reason:
        pytest.skip(f"no closed box can be made here: {reason}")
    return root


@pytest.fixture
def with_python(lone_python: Path) -> list[Path]:
    """What a box needs to start the lone Python: its folder, libraries, and what its links lead to.

    Of the interpreter's own bin that file alone: a system's Python lies beside compilers.
    """
    lone, interpreters = lone_python.parents[1], [lone_python]
    while interpreters[-1].is_symlink():
        interpreters.append(interpreters[-1].parent / interpreters[-1].readlink())
    site = next(lone.glob("lib/python*/site-packages"))
    linked = {entry.resolve().parent for entry in site.iterdir() if entry.is_symlink()}
    libraries = dict.fromkeys([*LIBRARIES, Path(sys.base_prefix, "lib")])
    return [*libraries, *interpreters[1:], *sorted(linked), lone]


def test_an_artifact_replays_in_a_closed_box(box, with_python, lone_python, fp4, tmp_path):
    shared = tmp_path / "given"
    shared.mkdir()
    shutil.copytree(fp4.folder, shared / "artifact")
    pack_artifact(fp4.folder, shared / "artifact.tar")
    command = [str(lone_python), "-I", "-c", PROBE, str(shared / "artifact"), str(shared / "artifact.tar")]
    done = closed_box.run(box, command, [*with_python, shared], {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["uid"] == closed_box.USER
    assert "HOME" not in report["variables"]
    assert "PATH" not in report["variables"]
    assert report["network"] == "ENETUNREACH"
    places = ("root", "artifact", "manifest", "python")
    assert {name: report[name] for name in places} == dict.fromkeys(places, "EROFS")
    assert (report["compilers"], report["home"]) == ([], False)
    assert (report["unpack"], report["verify"], report["run"]) == (0, 0, 0), done.stderr
    assert not {"triton", "click", "seko_export", "seko_kernels"} & set(report["modules"])
    mounts = {folder.parts[2] for folder in [*with_python, shared] if folder.parts[1] == "tmp"}
    written = set(report["written"]) - mounts
    engines = {name for name in written if name.startswith("aotinductor_")}  # torch's, until the process ends
    assert written - engines == {"out.y4m", "unpacked"}
    assert len(engines) == len(read_manifest(fp4.folder)[0].engines)


def test_the_box_holds_what_it_is_given_and_no_more(box):
    folders = [*LIBRARIES, Path(sys.base_prefix), Path(sys.prefix)]
    script = "import json, os; print(json.dumps([os.listdir('/'), os.listdir('/dev'), os.listdir('/tmp')]))"
    done = closed_box.run(box, [sys.executable, "-c", script], folders, {})
    assert done.returncode == 0, done.stderr
    root, devices, temporary = json.loads(done.stdout)
    mounted = {folder.parts[1] for folder in folders if folder.exists()}
    assert set(root) == mounted | {"tmp", "proc", "old", "dev"}
    assert set(devices) == {"null", "urandom"}
    assert temporary == sorted({folder.parts[2] for folder in folders if folder.parts[1] == "tmp"})

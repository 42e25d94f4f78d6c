"""What a machine can build: compilers that are missing or broken, targets, and the doctor's report."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from seko_export.errors import MachineError
from seko_export.host import environment
from seko_export.host.environment import Finding, Target, probing_compiler, resolve_target

SUBJECTS = ["python", "torch", "GPU", "C++ compiler", "strip", "triton"]


def fake_compiler(folder: Path, body: str) -> str:
    """Return the path of a script that stands for a compiler; `$OUT` is the file that it is asked for."""
    script = folder / "fake-c++"
    script.write_text(f"#!/bin/sh\nfor OUT; do :; done\n{body}\n")
    script.chmod(0o755)
    return str(script)


def probe() -> None:
    with probing_compiler() as probed:
        probed()


def test_this_machines_compiler_passes(monkeypatch, tmp_path):
    if shutil.which(environment.compiler_command()) is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    probe()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["/nonexistent/c++", "no-such-compiler"])
def test_no_compiler(monkeypatch, command):
    monkeypatch.setenv("CXX", command)
    with pytest.raises(MachineError, match=f"{command}.*was not found; install g"):
        probe()
    assert "not found" in environment.compiler_version()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("exit 1", r"cannot build a shared library \(no message\)"),
        ("echo 'disk on fire' >&2; exit 3", r"cannot build a shared library \(disk on fire\)"),
        ("exit 0", "cannot run inside a torch process"),
        ("echo rubbish > $OUT", "cannot run inside a torch process"),
    ],
)
def test_a_compiler_that_does_not_serve(monkeypatch, tmp_path, body, words):
    """It fails, says nothing, makes nothing, or makes what cannot be loaded: found before any engine is built."""
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, body))
    with pytest.raises(MachineError, match=words) as caught:
        probe()
    assert "set CXX to a compiler" in str(caught.value)
    assert caught.value.exit_code == 5


def test_a_library_that_answers_wrongly(monkeypatch, tmp_path):
    """It loads, and is not what was compiled."""
    real = shutil.which("g++")
    if real is None:
        pytest.skip("no C++ compiler")
    other = tmp_path / "other.cpp"
    other.write_text('extern "C" int seko_probe() { return 7; }')
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, f"{real} -shared -fPIC {other} -o $OUT"))
    with pytest.raises(MachineError, match="exit code 7, expected 42"):
        probe()


def test_a_file_that_is_no_program(monkeypatch, tmp_path):
    script = tmp_path / "c++"
    script.write_bytes(b"\0\0\0\0")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(MachineError, match=r"cannot be run \(.+\)"):
        probe()
    assert environment.compiler_version().startswith(str(script))


def test_a_compiler_whose_result_is_not_asked_for_is_ended(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, f"echo $$ > {tmp_path}/number; exec sleep 600"))
    number = tmp_path / "number"
    with probing_compiler():
        while not (number.exists() and number.read_text()):
            time.sleep(0.01)
    state = Path(f"/proc/{number.read_text().strip()}/stat")
    while state.exists() and state.read_text().split()[2] != "Z":  # until then it is being killed
        time.sleep(0.01)


def test_targets(monkeypatch):
    """auto takes what is here; another GPU's arch is refused with both names."""
    monkeypatch.setattr(environment, "local_gpu_arch", lambda: "sm_89")
    assert resolve_target("auto") == resolve_target("sm_89") == Target("cuda", "sm_89")
    with pytest.raises(
        MachineError, match=r"--target sm_90 .* a GPU of sm_89.*build on a machine with sm_90"
    ):
        resolve_target("sm_90")
    monkeypatch.setattr(environment, "local_gpu_arch", lambda: None)
    assert resolve_target("auto") == resolve_target("cpu")
    assert resolve_target("cpu").device == "cpu"
    with pytest.raises(MachineError, match="no CUDA device"):
        resolve_target("sm_90")


def test_producer_holds_versions_and_no_places(monkeypatch):
    """Two calls agree, and the compiler's folder is not told."""
    first, second = environment.producer(), environment.producer()
    assert first == second
    assert {"python", "torch", "triton", "numpy", "compiler", "seko-export"} <= set(first)
    assert not any("/" in value for value in first.values())
    monkeypatch.setenv("CXX", shutil.which("g++") or "g++")
    assert not any("/" in value for value in environment.producer().values())


def test_doctor_says_what_to_do_about_all_that_is_missing(monkeypatch, tmp_path):
    """On a machine with no compiler, no strip, no GPU: each such line has advice, and nothing can be built."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(environment, "local_gpu_arch", lambda: None)
    findings = [*environment.examine()]
    assert [f.subject for f in findings][: len(SUBJECTS)] == SUBJECTS
    missing = {f.subject for f in findings if not f.ok}
    assert {"C++ compiler", "strip", "GPU"} <= missing
    assert all(f.advice for f in findings if not f.ok)
    assert not any(f.advice for f in findings if f.ok)
    report = environment.report(findings)
    assert (report["build_cpu"], report["build_cuda"], report["gpu"]) == (False, False, None)
    assert json.loads(json.dumps(report)) == report


@pytest.mark.parametrize("lacking", [None, *SUBJECTS])
def test_what_can_be_built_follows_from_what_is_there(lacking):
    report = environment.report([Finding(subject, subject != lacking, "") for subject in SUBJECTS])
    assert report["build_cpu"] == (lacking in (None, "GPU", "triton"))
    assert report["build_cuda"] == (lacking is None)


def test_cpu_flags_are_this_processors():
    flags = environment.cpu_flags()
    assert list(flags) == sorted(set(flags))
    if os.path.exists("/proc/cpuinfo"):
        assert set(flags) <= set(Path("/proc/cpuinfo").read_text().split())


@pytest.mark.parametrize(
    ("names", "reached", "ok", "finding"),
    [
        (["a"], True, None, ""),
        (["a", "a", "a"], True, True, "3, each reaches the memory of the others"),
        (["a", "a"], False, True, "2, but cuda:0 does not reach the memory of cuda:1"),
        (["a", "b"], True, False, "2, of 2 kinds"),
    ],
)
def test_several_gpus_are_told_of_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch, names: list[str], reached: bool, ok: bool | None, finding: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: reached and device != peer)
    checks = environment.several_gpus()
    assert [(check.ok, check.found) for check in checks] == ([] if ok is None else [(ok, finding)])
    assert all(bool(check.advice) == (not check.ok or "not" in check.found) for check in checks)

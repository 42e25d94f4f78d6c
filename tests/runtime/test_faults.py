"""Faults: processes killed half-way, files swapped under an open, two processes at once, hundreds of opens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seko_runtime.backends import aoti
from seko_runtime.opening import artifact as artifact_module
from seko_runtime.opening.artifact import open_artifact

# Checks an artifact, then again in children that are killed at the first, the middle and the last opening of a file,
# folder or library; says how they ended.
KILLED = """
import json, os, signal, sys
from pathlib import Path
import seko_runtime.opening.artifact
seen, last = 0, -1
def hook(event, arguments):
    global seen
    if event in ("open", "os.scandir", "ctypes.dlopen"):
        seen += 1
        if seen == last:
            os.kill(os.getpid(), signal.SIGKILL)
seko_runtime.opening.artifact.check_artifact(Path(sys.argv[1]))  # which imports what it needs
sys.addaudithook(hook)
seko_runtime.opening.artifact.check_artifact(Path(sys.argv[1]))
steps, codes = seen, []
for step in (1, steps // 2, steps):
    child = os.fork()
    if not child:
        seen, last = 0, step
        seko_runtime.opening.artifact.check_artifact(Path(sys.argv[1]))
        os._exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""
OPENS = """
import gc, json, os, sys, threading
from pathlib import Path
from seko_runtime import open_artifact

folder, device, opens = sys.argv[1], sys.argv[2], int(sys.argv[3])

def state():
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    usage = {"files": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
             "python threads": threading.active_count(), "temporary": len(os.listdir(os.environ["TMPDIR"])),
             "maps": sum("aotinductor" in line for line in open("/proc/self/maps")),
             "bytes": pages * os.sysconf("SC_PAGE_SIZE"), "gpu": 0}
    if device == "cuda":
        import torch
        torch.cuda.synchronize()
        usage["gpu"] = torch.cuda.memory_allocated()
    return usage

def use():
    with open_artifact(folder, device) as artifact, artifact.open_session() as session:
        session.run_chunk().to_host()

for _ in range(20):
    use()
before = state()
for _ in range(opens):
    use()
print(json.dumps([before, state()]))
"""
GROWTH_BYTES_AN_OPEN = 16 << 10  # one engine of the toy that stays is more


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_process_killed_while_it_opens_leaves_the_artifact_as_it_was(whole):
    before = content_of(whole)
    command = [sys.executable, "-c", KILLED, str(whole)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [-signal.SIGKILL] * 3
    assert content_of(whole) == before
    artifact_module.check_artifact(whole)


def overwrite(path: Path) -> None:
    """The same file with other bytes, as somebody would who holds it open for writing."""
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def swap(path: Path) -> None:
    """Another file of the same name."""
    path.with_suffix(".new").write_bytes(bytes(path.stat().st_size))
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize(
    ("pattern", "change"),
    [
        ("engines/*", overwrite),
        ("engines/*", swap),
        ("engines/*", Path.unlink),
        ("golden/*", overwrite),
        ("weights/*", swap),
        ("weights/*", Path.unlink),
    ],
)
def test_the_file_that_was_checked_is_the_file_that_is_loaded(artifact, monkeypatch, pattern, change):
    """Changed after the hashes, before the engines are loaded: the goldens are met all the same.

    Weights that are overwritten in place are left out: they are mapped, and docs/deploy.md says so.
    """
    load = artifact_module._loaded

    def change_then_load(*arguments):
        changed = list(artifact.glob(pattern))
        assert changed
        for path in changed:
            change(path)
        return load(*arguments)

    monkeypatch.setattr(aoti, "_idle", {})  # no engine of an earlier open may stand in for what lies there
    monkeypatch.setattr(artifact_module, "_loaded", change_then_load)
    with open_artifact(artifact) as opened:
        assert all(error.within for error in opened.verify())


def test_two_processes_open_one_artifact(built_toy):
    command = [sys.executable, "-m", "seko_runtime", "verify", str(built_toy), "--json"]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for process in running:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert json.loads(out.splitlines()[-1])["ok"] is True


def opens(folder: Path, device: str, times: int, tmp_path: Path) -> tuple[dict[str, int], dict[str, int]]:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", OPENS, str(folder), device, str(times)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout.splitlines()[-1])
    return before, after


def check_nothing_stays(folder: Path, device: str, tmp_path: Path) -> None:
    before, after = opens(folder, device, 200, tmp_path)
    for kind in ("files", "threads", "python threads", "temporary", "maps", "gpu"):
        assert after[kind] == before[kind], kind
    assert list(tmp_path.iterdir()) == []  # once the process has ended
    assert after["bytes"] - before["bytes"] < 200 * GROWTH_BYTES_AN_OPEN


@pytest.mark.slow
def test_two_hundred_opens_leave_no_file_no_thread_and_no_memory(built_toy, tmp_path):
    check_nothing_stays(built_toy, "cpu", tmp_path)


def test_two_artifacts_open_at_once_have_engines_of_their_own(built_toy):
    """A loader serves one open at a time; the next open of the same bytes takes over what is done."""
    with open_artifact(built_toy) as first, open_artifact(built_toy) as second:
        ones, twos = (
            [id(loader) for _, loader in opened.engines.backend._loaders] for opened in (first, second)
        )
        assert len(set(ones + twos)) == len(ones) + len(twos)
    with open_artifact(built_toy) as three:
        assert {id(loader) for _, loader in three.engines.backend._loaders} <= {*ones, *twos}


@pytest.mark.gpu
def test_two_hundred_opens_on_a_gpu_leave_no_byte_of_it(built_cuda_toy, tmp_path):
    if json.loads((built_cuda_toy / "manifest.json").read_bytes())["backend"] != "aoti":
        pytest.skip("the compiler's own caches grow with the first opens of backend compile")
    check_nothing_stays(built_cuda_toy, "cuda", tmp_path)

"""Who holds the weights' bytes: a map of their files, the process's own copy, or the device alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seko_runtime.cli.commands import main
from seko_runtime.errors import ArtifactError, EnvironmentLacksError
from seko_runtime.format import artifact_files
from seko_runtime.opening import checked_artifact
from seko_runtime.opening.artifact import open_artifact
from seko_runtime.opening.checked_artifact import check_artifact, read_manifest
from seko_runtime.video.lockstep import Lockstep
from tests.support.stacked import open_stacked

from . import toy_whole
from .eager_backend import EagerBackend
from .uploaded import DeviceMemory

ROOT = Path(__file__).parents[2]
# Replays three chunks, truncates the weights, replays in a new session, and says whether the bytes are equal; then
# the same in a child that maps the weights of another folder, and how that one ended.
TRUNCATE = """
import os, sys
from pathlib import Path
import seko_runtime.opening.artifact
from seko_runtime import open_artifact
from tests.runtime.eager_backend import EagerBackend
seko_runtime.opening.artifact.open_backend = lambda *_: EagerBackend()

def replayed(artifact):
    with artifact.open_session(5) as session:
        return [session.run_chunk().to_host().tobytes() for _ in range(3)]

def stays(folder, copied):
    with open_artifact(folder, copy_weights=copied) as artifact:
        before = replayed(artifact)
        for path in Path(folder, "weights").iterdir():
            path.open("r+b").truncate(0)
        return replayed(artifact) == before

equal, child = stays(sys.argv[1], True), os.fork()
if not child:
    stays(sys.argv[2], False)
    os._exit(0)
print(equal, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def mapped_weights(folder: Path) -> list[str]:
    """Return the weight files of an artifact that this process has maps of."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in lines if str(folder / "weights") in line})


def test_truncated_weights_end_a_process_that_maps_them_and_no_other(whole_folder: Path) -> None:
    """As docs/deploy.md says."""
    mapped = shutil.copytree(whole_folder, whole_folder.with_name("mapped"))
    done = subprocess.run(
        [sys.executable, "-c", TRUNCATE, str(whole_folder), str(mapped)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"True {-signal.SIGBUS}\n"


def test_a_copy_gives_the_same_bytes(whole_folder: Path) -> None:
    with open_artifact(whole_folder) as artifact, open_stacked(artifact) as session:
        wanted = [session.run_chunk().to_host().tobytes() for _ in range(3)]
        assert mapped_weights(whole_folder) != []
    with open_artifact(whole_folder, copy_weights=True) as artifact, open_stacked(artifact) as session:
        assert mapped_weights(whole_folder) == []
        assert [session.run_chunk().to_host().tobytes() for _ in range(3)] == wanted


@pytest.mark.parametrize("command", ["run", "verify"])
@pytest.mark.parametrize("copied", [False, True])
def test_the_option_of_the_command_line(
    whole_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, copied: bool
) -> None:
    seen = []
    run_chunk = Lockstep.run_chunk

    def watched(session: Lockstep, *arguments: object) -> object:
        seen.append(bool(mapped_weights(whole_folder)))
        return run_chunk(session, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Lockstep, "run_chunk", watched)
    options = ["-o", str(tmp_path / "out.npy")] if command == "run" else []
    assert main([command, str(whole_folder), *options, *(["--copy-weights"] if copied else [])]) == 0
    assert set(seen) == {not copied}


def test_a_device_that_has_the_weights_needs_no_map(
    whole_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for a GPU: its memory copies the weights. Nothing else of an open artifact keeps the files mapped."""

    class DeviceBackend(EagerBackend):
        def memory(self) -> DeviceMemory:
            return DeviceMemory()

    monkeypatch.setattr("seko_runtime.opening.artifact.open_backend", lambda *_: DeviceBackend())
    with open_artifact(whole_folder) as artifact:
        assert mapped_weights(whole_folder) == []
        for path in (whole_folder / "weights").iterdir():
            os.truncate(path, 0)
        assert all(error.within for error in artifact.verify())


def test_a_copy_that_does_not_fit_is_refused_before_it_is_made(
    whole_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {path: entry.size for path, entry in read_manifest(whole_folder)[0].files.items()}
    needed = sum(sizes.values())  # it has no file that is neither a weight nor read in any case
    monkeypatch.setattr(checked_artifact, "free_host_bytes", lambda: needed - 1)
    with pytest.raises(EnvironmentLacksError, match=rf"take {needed} bytes .* {needed - 1} are free"):
        open_artifact(whole_folder, copy_weights=True)
    open_artifact(whole_folder).close()
    host_bytes = sum(size for path, size in sizes.items() if not path.startswith("weights/"))
    monkeypatch.setattr(checked_artifact, "free_host_bytes", lambda: host_bytes - 1)
    with pytest.raises(
        EnvironmentLacksError, match=rf"take {host_bytes} bytes .* {host_bytes - 1} are free: free some$"
    ):
        open_artifact(whole_folder)
    monkeypatch.setattr(checked_artifact, "free_host_bytes", lambda: needed)
    open_artifact(whole_folder, copy_weights=True).close()


def test_a_file_that_shrinks_while_it_is_read_is_an_error(
    whole_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def shrinking(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.parent.name == "weights" and offset == 0:
            os.truncate(path, path.stat().st_size // 2)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(artifact_files.os, "preadv", shrinking)
    with pytest.raises(ArtifactError, match=r"weights/.* had \d+ bytes when it was opened and \d+ when"):
        open_artifact(whole_folder, copy_weights=True)


def test_a_file_is_read_once_into_memory_of_its_announced_size(
    whole_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts are not joined afterwards, which would take twice the memory for a moment."""
    monkeypatch.setattr(artifact_files, "READ_BYTES", 7)
    checked = check_artifact(whole_folder, copy_weights=True)
    for path, content in checked.files.items():
        assert bytes(content) == (whole_folder / path).read_bytes()
        assert len(content.obj) == checked.manifest.files[path].size
    assert toy_whole.TOKENIZER in checked.files

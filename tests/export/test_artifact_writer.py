"""The artifact's folder: whole under its name, or nothing at all; and the words for a disk that refuses."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from seko_export import artifact_writer
from seko_export.artifact_writer import artifact_folder, check_goal, disk_faults, hash_files, write_weights
from seko_export.errors import MachineError, UsageError

SMALL_DISK = 2**20  # bytes


class StoppedError(Exception):
    """Whatever ends a build half-way."""


def fill(folder: Path, content: str = "{}") -> None:
    """Write the least that is an artifact."""
    (folder / "engines").mkdir()
    (folder / "engines/block.pt2").write_text("code")
    (folder / "manifest.json").write_text(content)


def build(
    goal: Path,
    content: str = "{}",
    *,
    replace: bool = False,
    ending: type[BaseException] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Fill and name an artifact; raise ``ending`` half-way, or let something happen ``meanwhile``."""
    with artifact_folder(goal, replace=replace) as folder:
        fill(folder, content)
        meanwhile()
        if ending is not None:
            raise ending


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where this process may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "none", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_the_folder_gets_its_name_when_it_is_whole(tmp_path):
    goal = tmp_path / "new" / "parents" / "artifact"
    with artifact_folder(goal, replace=False) as folder:
        fill(folder)
        assert not goal.exists()
        assert folder.parent == goal.parent
    assert names(goal) == ["engines", "manifest.json"]
    assert names(goal.parent) == ["artifact"]


@pytest.mark.parametrize("ending", [StoppedError, KeyboardInterrupt, SystemExit])
def test_an_ending_half_way_leaves_nothing(tmp_path, ending):
    """Not even the parents that were made for it."""
    with pytest.raises(ending):
        build(tmp_path / "a" / "b" / "artifact", ending=ending)
    assert names(tmp_path) == []


def test_parents_that_were_there_stay(tmp_path):
    (tmp_path / "kept").mkdir()
    with pytest.raises(StoppedError), artifact_folder(tmp_path / "kept/artifact", replace=False):
        raise StoppedError
    assert names(tmp_path) == ["kept"]


def test_replacing_is_whole_or_not_at_all(tmp_path):
    goal = tmp_path / "artifact"
    build(goal, "first")
    with pytest.raises(StoppedError):
        build(goal, "second", replace=True, ending=StoppedError)
    assert (goal / "manifest.json").read_text() == "first"
    build(goal, "third", replace=True)
    assert (goal / "manifest.json").read_text() == "third"
    assert names(tmp_path) == ["artifact"]


def test_the_old_artifact_comes_back_if_the_new_one_cannot_take_its_name(tmp_path, monkeypatch):
    goal = tmp_path / "artifact"
    build(goal, "first")
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if ".building-" in self.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="Input/output"):
        build(goal, "second", replace=True)
    assert (goal / "manifest.json").read_text() == "first"
    assert names(tmp_path) == ["artifact"]


def test_a_name_taken_while_building_is_not_overwritten(tmp_path):
    goal = tmp_path / "artifact"
    with pytest.raises(UsageError, match="exists already"):
        build(goal, "mine", meanwhile=lambda: (goal.mkdir(), fill(goal, "theirs")))
    assert (goal / "manifest.json").read_text() == "theirs"
    assert names(tmp_path) == ["artifact"]


@pytest.mark.parametrize("replace", [False, True])
def test_what_is_no_artifact_is_never_replaced(tmp_path, replace):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    (tmp_path / "artifact").mkdir()
    fill(tmp_path / "artifact")
    (tmp_path / "link").symlink_to("artifact")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("folder", "file", "link", "dangling"):
        with pytest.raises(UsageError, match="is no artifact; choose another -o"):
            check_goal(tmp_path / name, replace=replace)
    assert (tmp_path / "folder/thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("parent", ["/proc/nowhere", "/proc", "FILE", "FILE/deeper", "/dev/null"])
def test_a_place_that_takes_no_folder(tmp_path, parent):
    """Root may write almost everywhere; not below a file, and not in /proc."""
    (tmp_path / "file").write_text("x")
    goal = Path(parent.replace("FILE", str(tmp_path / "file")), "artifact")
    with (
        pytest.raises(MachineError, match=r"cannot be written \(.+\): choose another -o"),
        artifact_folder(goal, replace=False),
    ):
        raise StoppedError
    assert names(tmp_path) == ["file"]


def test_a_full_disk(small_disk):
    """The engine's writer and the weights' each have their own error; both become one sentence."""
    goal = small_disk / "artifact"
    too_much = torch.zeros(SMALL_DISK, dtype=torch.uint8)
    with pytest.raises(MachineError, match="no space left for"), artifact_folder(goal, replace=False) as f:
        write_weights(f, [("weight", too_much)])
    assert names(small_disk) == []
    with pytest.raises(MachineError, match="no space left for"), artifact_folder(goal, replace=False) as f:
        (f / "engine").write_bytes(bytes(2 * SMALL_DISK))
    assert names(small_disk) == []


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EDQUOT, "no space left"),
        (errno.EROFS, "cannot be written"),
        (errno.EACCES, "cannot be written"),
    ],
)
def test_words_for_what_the_system_says(number, words):
    with pytest.raises(MachineError, match=words) as caught, disk_faults(Path("goal")):
        raise OSError(number, os.strerror(number))
    assert "goal" in str(caught.value)
    assert "-o" in str(caught.value)


def test_a_fault_that_is_none_of_the_disks_stays_what_it_is():
    with pytest.raises(FileNotFoundError), disk_faults(Path("goal")):
        raise FileNotFoundError(errno.ENOENT, "gone")


def test_readers_get_what_the_umask_gives(tmp_path):
    """safetensors writes for the owner alone; an artifact is copied and served by others."""
    for umask, folders, files in ((0o022, 0o755, 0o644), (0o077, 0o700, 0o600), (0o002, 0o775, 0o664)):
        goal = tmp_path / f"{umask:o}"
        before = os.umask(umask)
        try:
            with artifact_folder(goal, replace=False) as folder:
                fill(folder)
                write_weights(folder, [("weight", torch.zeros(1))])
        finally:
            os.umask(before)
        assert stat.S_IMODE(goal.stat().st_mode) == folders
        for path in goal.rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) == (folders if path.is_dir() else files), path


def test_weights_are_sharded_and_come_back(tmp_path, monkeypatch):
    """Every tensor in the table's file, with its bytes; no shard beyond the bound unless one tensor is."""
    monkeypatch.setattr(artifact_writer, "SHARD_BYTES", 1000)
    sizes = (100, 200, 10, 300, 1, 249)
    tensors = {
        f"w{i}": torch.randn(n, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(sizes)
    }
    table = write_weights(tmp_path, tensors.items())
    assert [weight.name for weight in table] == list(tensors)
    for weight in table:
        assert weight.shape == tuple(tensors[weight.name].shape)
        assert weight.dtype == "float32"
        assert torch.equal(load_file(tmp_path / weight.file)[weight.name], tensors[weight.name])
    shards = {weight.file for weight in table}
    assert shards == {f"weights/{path.name}" for path in (tmp_path / "weights").iterdir()}
    for file in shards:
        held = [t for name, t in tensors.items() if any(w.name == name and w.file == file for w in table)]
        assert len(held) == 1 or sum(t.nbytes for t in held) <= 1000


def test_every_file_but_the_manifest_is_hashed(tmp_path):
    fill(tmp_path)
    entries = hash_files(tmp_path)
    assert list(entries) == ["engines/block.pt2"]
    assert entries["engines/block.pt2"].size == 4
    assert (
        entries["engines/block.pt2"].sha256
        == "5694d08a2e53ffcae0c3103e5ad6f6076abd960eb1f8a56577040bc1028f702b"
    )

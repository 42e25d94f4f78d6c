"""The writers: sizes, order and labels of what they write, bounded memory, nothing left of a failed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from seko_runtime.errors import DiskError, UsageError, VideoWriterError
from seko_runtime.host.end_signals import ENDING, until_ended
from seko_runtime.video.files import ChunkWriter
from seko_runtime.video.manifest import Stream, Video
from seko_runtime.video.preview import preview_frames

STREAM = Stream(3, 0, 6, 24, (16, 8, 12), 64, 96, 4, 16)


def chunk(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 16, 3, 8, 12), dtype=np.float32)


def test_npy_holds_every_chunk_bit_for_bit(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "a.npy", STREAM, 3, rows=2) as writer:
        for seed in range(3):
            writer.write(chunk(seed))
    assert np.array_equal(np.load(tmp_path / "a.npy"), np.stack([chunk(seed) for seed in range(3)]))


def test_y4m_has_a_frame_for_every_video_frame_and_says_what_it_is(tmp_path: Path) -> None:
    for name in ("a.y4m", "b.y4m"):
        with ChunkWriter(tmp_path / name, STREAM, 2, rows=2) as writer:
            writer.write(chunk(0))
            writer.write(chunk(1))
    content = (tmp_path / "a.y4m").read_bytes()
    header, _, frames = content.partition(b"\n")
    assert header.startswith(b"YUV4MPEG2 W192 H64 F16:1 ")
    assert header.endswith(b"XSEKO=LATENT_PREVIEW")
    size = len(b"FRAME\n") + 3 * 64 * 192
    assert len(frames) == 2 * 3 * 4 * size
    assert all(frames[place : place + 6] == b"FRAME\n" for place in range(0, len(frames), size))
    assert (tmp_path / "b.y4m").read_bytes() == content


def test_decoded_frames_are_written_as_they_are_rows_beside_each_other(tmp_path: Path) -> None:
    grey = (
        np.arange(2 * 5 * 6 * 4, dtype=np.uint8).reshape(2, 5, 6, 4, 1).repeat(3, -1)
    )  # grey survives YCbCr
    with ChunkWriter(tmp_path / "a.y4m", STREAM, 2, Video(5, 12, 6, 4), rows=2) as writer:
        assert writer.takes_frames
        assert not writer.is_preview
        writer.write(grey)
        writer.write(grey[:, :1])
    header, _, content = (tmp_path / "a.y4m").read_bytes().partition(b"\n")
    assert header == b"YUV4MPEG2 W8 H6 F16:1 Ip A1:1 C444 XCOLORRANGE=FULL"
    size = len(b"FRAME\n") + 3 * 6 * 8
    assert len(content) == 6 * size
    for number, frame in enumerate([*range(5), 0]):
        planes = np.frombuffer(content[number * size + 6 : (number + 1) * size], np.uint8).reshape(3, 6, 8)
        assert np.array_equal(
            planes[0], np.concatenate([grey[0, frame, :, :, 0], grey[1, frame, :, :, 0]], 1)
        )
        assert (planes[1:] == 128).all()


def test_npy_takes_latents_also_where_video_is_made(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "a.npy", STREAM, 1, Video(9, 12, 64, 96), rows=2) as writer:
        assert not writer.takes_frames
        writer.write(chunk(0))
    assert np.array_equal(np.load(tmp_path / "a.npy")[0], chunk(0))


def test_mp4_can_be_read_back(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    with ChunkWriter(tmp_path / "a.mp4", STREAM, 1, rows=2) as writer:
        writer.write(chunk(0))
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert container.metadata["comment"] == "LATENT PREVIEW"
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert [picture.shape for picture in pictures] == [(64, 192, 3)] * 12


def test_a_preview_pixel_depends_on_its_own_cell_alone() -> None:
    latents = chunk(0)
    other = latents.copy()
    other[1, 0, 2, 7, 11] += 3.0
    before, after = list(preview_frames(latents, STREAM)), list(preview_frames(other, STREAM))
    changed = [
        (index, np.argwhere((a != b).any(-1))) for index, (a, b) in enumerate(zip(before, after, strict=True))
    ]
    assert [index for index, places in changed if len(places)] == [8, 9, 10, 11]
    for _, places in changed[8:]:
        assert places.min(0).tolist() == [56, 184]
        assert places.max(0).tolist() == [63, 191]
    dark = next(preview_frames(latents * 0, STREAM))
    assert (dark == 128).all()


def test_nan_is_pictured_and_not_a_warning() -> None:
    assert len(list(preview_frames(np.full((2, 16, 3, 8, 12), np.nan, np.float32), STREAM))) == 12


@pytest.mark.parametrize("suffix", [".npy", ".y4m", ".mp4"])
def test_a_failed_run_leaves_no_file(tmp_path: Path, suffix: str) -> None:
    if suffix == ".mp4":
        pytest.importorskip("av")

    def fail() -> None:
        with ChunkWriter(tmp_path / f"a{suffix}", STREAM, 2, rows=2) as writer:
            writer.write(chunk(0))
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail()
    assert list(tmp_path.iterdir()) == []


def write(path: Path, chunks: int = 2) -> None:
    with ChunkWriter(path, STREAM, chunks, rows=2) as writer:
        for seed in range(chunks):
            writer.write(chunk(seed))


@pytest.mark.parametrize("change", [{"height": 7, "width": 5}, {"fps": 1 << 31}], ids=str)
def test_sizes_and_rates_that_the_encoder_refuses_are_told(tmp_path: Path, change: dict[str, int]) -> None:
    pytest.importorskip("av")
    stream = replace(STREAM, **change)

    def write() -> None:
        with ChunkWriter(tmp_path / "a.mp4", stream, 1) as writer:
            writer.write(chunk(0)[:1])

    with pytest.raises(VideoWriterError, match=r"refuses pictures of \d+x\d+ at \d+ fps: .* write a .y4m"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"-o .*a\.gif has the suffix \.gif"):
        write(tmp_path / "a.gif")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DiskError, match="cannot be written"):
        write(tmp_path / "file" / "a.npy")
    with pytest.raises(DiskError, match="cannot be written"):
        write(tmp_path / "file" / "folder" / "a.npy")
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(UsageError, match="is no regular file"):
        write(tmp_path / "folder.npy")
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(VideoWriterError, match=r"write a .y4m, or pip install av"):
        write(tmp_path / "a.mp4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.npy"]


def test_a_file_that_is_there_gives_way_when_the_new_one_is_whole(tmp_path: Path) -> None:
    goal = tmp_path / "a.npy"
    goal.write_bytes(b"old")
    with ChunkWriter(goal, STREAM, 1, rows=2) as writer:
        writer.write(chunk(0))
        assert goal.read_bytes() == b"old"
    assert np.array_equal(np.load(goal)[0], chunk(0))
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]


@pytest.mark.parametrize("chunks", [[0], [0, 1, 2], [0, None]])
def test_npy_takes_the_chunks_that_its_header_announces(tmp_path: Path, chunks: list[int | None]) -> None:
    def write_other() -> None:
        with ChunkWriter(tmp_path / "a.npy", STREAM, 2, rows=2) as writer:
            for seed in chunks:
                writer.write(chunk(0)[:1] if seed is None else chunk(seed))

    with pytest.raises(UsageError, match="chunk"):
        write_other()
    assert list(tmp_path.iterdir()) == []


# -- full disks ------------------------------------------------------------------------------------------------

WRITE = """
import resource, sys
from pathlib import Path
import numpy as np
from seko_runtime.errors import SekoRuntimeError
from seko_runtime.video.manifest import Stream
from seko_runtime.video.files import ChunkWriter
goal, limit = Path(sys.argv[1]), int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    with ChunkWriter(goal, Stream(3, 0, 6, 24, (16, 8, 12), 64, 96, 4, 16), 9, rows=2) as writer:
        for seed in range(9):
            writer.write(np.random.default_rng(seed).standard_normal((2, 16, 3, 8, 12), dtype=np.float32))
except SekoRuntimeError as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(error.exit_code)
"""


def assert_told_as_full(goal: Path, limit: int) -> None:
    command = [sys.executable, "-c", WRITE, str(goal), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == DiskError.exit_code, done.stderr
    assert done.stdout.startswith(f"DiskError: no space left for {goal}")
    assert done.stderr == ""
    assert list(goal.parent.iterdir()) == []


@pytest.mark.parametrize("suffix", [".npy", ".y4m", ".mp4"])
@pytest.mark.parametrize("limit", [64, 20_000])
def test_a_file_that_may_not_grow_is_told_and_not_left(tmp_path: Path, suffix: str, limit: int) -> None:
    if suffix == ".mp4":
        pytest.importorskip("av")
    assert_told_as_full(tmp_path / f"a{suffix}", limit)


@pytest.mark.parametrize("suffix", [".npy", ".y4m", ".mp4"])
def test_a_full_disk_is_told_and_does_not_kill_the_process(tmp_path: Path, suffix: str) -> None:
    """On a file system of its own that fills up: to write into a map of a file there is a SIGBUS."""
    if suffix == ".mp4":
        pytest.importorskip("av")
    mount = ["mount", "-t", "tmpfs", "-o", "size=20k", "none", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        assert_told_as_full(tmp_path / f"a{suffix}", 0)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("suffix", [".npy", ".y4m"])
def test_no_output_is_mapped_while_it_is_written(tmp_path: Path, suffix: str) -> None:
    with ChunkWriter(tmp_path / f"a{suffix}", STREAM, 1, rows=2) as writer:
        writer.write(chunk(0))
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()


# -- signals ---------------------------------------------------------------------------------------------------


def test_a_signal_at_any_line_leaves_the_finished_chunks_or_nothing(tmp_path: Path) -> None:
    """At each line that runs from before the file is there until after it has its name."""
    goal = tmp_path / "a.npy"
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDING}
    try:
        codes, chunk_counts = [], set()
        while not codes or codes[-1]:
            struck = _Strike(len(codes) + 1)
            sys.settrace(struck.trace)
            try:
                codes.append(until_ended(lambda: write(goal) or 0, lambda _: None))
            finally:
                sys.settrace(None)
            left = [path.name for path in tmp_path.iterdir()]
            assert left in ([], ["a.npy"]), (left, struck.place)
            if left:
                latents = np.load(goal)
                chunk_counts.add(len(latents))
                assert np.array_equal(latents, np.stack([chunk(seed) for seed in range(len(latents))]))
                goal.unlink()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert len(codes) > 100
    assert chunk_counts == {1, 2}
    assert set(codes[:-1]) == {128 + signal.SIGTERM}


class _Strike:
    """A trace function that raises SIGTERM at the ``number``-th line of the code that writes files."""

    FILES = ("video/files.py", "sinks.py", "whole_files.py", "own_folders.py", "renames.py", "contextlib.py")

    def __init__(self, number: int) -> None:
        self._left = number
        self.place = ""

    def trace(self, frame: FrameType, event: str, _: object) -> object:
        heard = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        if heard and event == "line" and frame.f_code.co_filename.endswith(self.FILES):
            self._left -= 1
            if self._left == 0:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGTERM)
        return self.trace

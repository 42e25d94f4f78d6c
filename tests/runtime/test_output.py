"""Output as it comes: stdout and named pipes, fragments that play while a file grows, and progress on stderr."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seko_runtime.cli.commands import main
from seko_runtime.cli.progress import Progress
from seko_runtime.errors import UsageError
from seko_runtime.format.pipes import Pipe
from seko_runtime.media_files.sound_writer import sound_form
from seko_runtime.video.files import ChunkWriter, output_form
from seko_runtime.video.manifest import Stream, Video
from tests.support.tiers import first_is_fast

from .test_end_signals import PATIENCE_S, started
from .toy_whole import CHUNK_VIDEO, FIRST_FRAMES, HEIGHT, WIDTH

Said = pytest.CaptureFixture[str]
STREAM = Stream(3, 0, 6, 24, (16, 8, 12), 64, 96, 4, 16)
VIDEO = Video(9, 12, 64, 96)
FRAME = len(b"FRAME\n") + 3 * HEIGHT * WIDTH


def pictures(number: int, frames: int = 12) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (1, frames, 64, 96, 3), np.uint8)


def begun(folder: Path) -> subprocess.Popen[str]:
    """A run into stdout without an end, of which one byte was read."""
    process = started(0, "never", "run", folder, "--chunks", 1_000_000, "-o", "-")
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 1) == b"Y"
    return process


def last_words(process: subprocess.Popen[str]) -> str:
    """What a process says at its end on stderr, while nobody reads its stdout."""
    assert process.stderr is not None
    assert process.stdout is not None
    process.stdout.close()
    with process.stderr:
        return process.stderr.read().splitlines()[-1]


# -- stdout ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["y4m", "raw", "npy"])
def test_stdout_is_the_bytes_of_the_file_and_nothing_else(
    whole_folder: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], form: str
) -> None:
    asked = ["run", str(whole_folder), "--chunks", "2", "--format", form, "-o"]
    assert main([*asked, str(tmp_path / "file")]) == 0
    assert capfdbinary.readouterr().out.startswith(b"wrote    ")
    assert main([*asked, "-"]) == 0
    said = capfdbinary.readouterr()
    assert said.out == (tmp_path / "file").read_bytes()
    assert said.err.startswith(b"wrote    - (")
    assert b"check    chunk 0: golden 0 " in said.err


def test_stdout_is_y4m_unless_another_format_is_asked_for(
    whole_folder: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["run", str(whole_folder), "--chunks", "2", "-o", "-"]) == 0
    header, _, frames = capfdbinary.readouterr().out.partition(b"\n")
    assert header.startswith(b"YUV4MPEG2 ")
    assert len(frames) == (FIRST_FRAMES + CHUNK_VIDEO) * FRAME


def test_what_others_write_to_stdout_goes_to_stderr(
    whole_folder: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Python's and of native code's."""
    from seko_runtime.video.lockstep import Lockstep

    run_chunk = Lockstep.run_chunk

    def loud(session: Lockstep, *arguments: object) -> object:
        print("said by Python")
        os.write(1, b"said by a library\n")
        return run_chunk(session, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Lockstep, "run_chunk", loud)
    assert main(["run", str(whole_folder), "--chunks", "2", "-o", "-"]) == 0
    said = capfdbinary.readouterr()
    assert b"said by" not in said.out
    assert said.err.count(b"said by Python\n") == said.err.count(b"said by a library\n") == 2


def test_stdout_is_one_thing_at_a_time(
    whole_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    assert main(["run", str(whole_folder), "-o", "-", "--json"]) == 2
    assert "-o - and --json both write to stdout" in capsys.readouterr().err
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["run", str(whole_folder), "-o", "-"]) == 2
    assert "is a terminal" in capsys.readouterr().err
    assert main(["run", str(whole_folder), "-o", "a.y4m", "--format", "gif"]) == 2
    assert "the format is 'gif', expected one of npy, y4m, mp4, raw" in capsys.readouterr().err


def test_a_reader_that_stops_ends_the_run(whole: Path) -> None:
    process = begun(whole)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(PATIENCE_S) == 1
    assert last_words(process) == "error: whoever read the output stopped reading"


@pytest.mark.parametrize("number", first_is_fast([signal.SIGINT, signal.SIGTERM]))
def test_a_signal_ends_a_run_into_a_pipe(whole: Path, number: int) -> None:
    """Also while it waits for a reader that does not read."""
    process = begun(whole)
    time.sleep(0.5)
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == 128 + number
    assert re.fullmatch(r"error: interrupted; wrote \d+ of 1000000 chunks to stdout", last_words(process))


# -- pipes and devices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.y4m", "a"])
def test_a_named_pipe_is_written_to_and_stays(
    whole_folder: Path, tmp_path: Path, name: str, capsys: Said
) -> None:
    pipe = tmp_path / name
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    assert main(["run", str(whole_folder), "--chunks", "2", "-o", str(pipe)]) == 0
    reader.join()
    assert pipe.is_fifo()
    assert f"writing to the pipe {pipe}" in capsys.readouterr().err
    assert main(["run", str(whole_folder), "--chunks", "2", "-o", str(tmp_path / "b.y4m")]) == 0
    assert read == [(tmp_path / "b.y4m").read_bytes()]


def test_a_name_that_is_no_text_is_written_and_told(whole_folder: Path, tmp_path: Path, capsys: Said) -> None:
    path = tmp_path / os.fsdecode(b"a\xff.npy")
    assert main(["run", str(whole_folder), "--chunks", "1", "-o", str(path)]) == 0
    assert path.exists()
    assert "a\\udcff.npy" in capsys.readouterr().out


def test_devices_are_written_to(whole_folder: Path, capsys: Said) -> None:
    asked = ["run", str(whole_folder), "--chunks", "1", "-o"]
    assert main([*asked, "/dev/null"]) == 0
    capsys.readouterr()
    assert main([*asked, "/dev/full"]) == 5
    assert capsys.readouterr().err == (
        "error: /dev/full cannot be written (No space left on device): choose another -o\n"
    )


@pytest.mark.parametrize("form", ["npy", "y4m", "mp4", "raw"])
def test_every_format_goes_through_a_pipe(tmp_path: Path, form: str) -> None:
    if form == "mp4":
        pytest.importorskip("av")
    taken: list[bytes] = []
    ends = os.pipe()

    def take() -> None:
        with os.fdopen(ends[0], "rb") as file:
            taken.append(file.read())

    reader = threading.Thread(target=take)
    reader.start()
    chunks = [np.full((1, 16, 3, 8, 12), n, np.float32) for n in (1, 2)] if form == "npy" else [
        pictures(0, 9), pictures(1)
    ]  # fmt: skip
    for goal, descriptor in ((Path("-"), ends[1]), (tmp_path / "file", None)):
        with ChunkWriter(goal, STREAM, 2, VIDEO, form=form, descriptor=descriptor) as writer:
            for chunk in chunks:
                writer.write(chunk)
    os.close(ends[1])
    reader.join()
    assert taken == [(tmp_path / "file").read_bytes()]
    if form == "raw":
        assert taken[0] == np.concatenate(chunks, axis=1).tobytes()


def test_a_pipe_that_nobody_reads_is_given_up_soon_once_it_has_to_hurry() -> None:
    read, write = os.pipe()
    pipe = Pipe(write)
    pipe.hurry(0.05)
    with pytest.raises(TimeoutError):
        pipe.write(bytes(1 << 20))
    pipe.close()
    pipe.close()
    os.close(read)


def test_the_format_follows_from_the_output(tmp_path: Path) -> None:
    assert output_form(Path("-")) == output_form(Path("/dev/null")) == output_form(Path("a.y4m")) == "y4m"
    assert output_form(Path("a.y4m"), "raw") == "raw"
    assert output_form(Path("a.npy")) == "npy"
    with pytest.raises(
        UsageError, match=r"-o a has no suffix: expected one of \.npy, .*--format, one of npy"
    ):
        output_form(Path("a"))
    for form_of in (output_form, sound_form):
        with pytest.raises(UsageError, match=f"-o {tmp_path} is a folder: name a file in it, such as "):
            form_of(tmp_path)


# -- mp4 -------------------------------------------------------------------------------------------------------


def test_an_mp4_plays_while_it_grows(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    with ChunkWriter(tmp_path / "a.mp4", STREAM, 40, VIDEO) as writer:
        for number in range(40):
            writer.write(pictures(number))
        (growing,) = tmp_path.glob(".a.mp4.seko-*/new")
        with av.open(io.BytesIO(growing.read_bytes())) as container:
            early = sum(1 for _ in container.decode(video=0))
    assert 0 < early < 40 * 12
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert sum(1 for _ in container.decode(video=0)) == 40 * 12


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("fps", [16, 25])
def test_an_mp4_begins_at_0_and_its_sound_with_it(tmp_path: Path, fps: int, chunks: int, heard: bool) -> None:
    """The encoder reorders pictures: its first timestamp is late, and the header says by how much."""
    av = pytest.importorskip("av")
    path, flash = tmp_path / "a.mp4", 12 * chunks - 5
    stream, size = replace(STREAM, fps=fps), (64, 96, 3)
    frames = np.array([np.full(size, 255 * (n == flash), np.uint8) for n in range(12 * chunks)])
    sound = np.zeros(12 * chunks * 16_000 // fps, np.float32)
    sound[(click := flash * 16_000 // fps) :][:80] = 0.9
    with ChunkWriter(path, stream, 1, VIDEO, sound=sound if heard else None) as writer:
        for first in range(0, len(frames), 12):
            writer.write(frames[None, first : first + 12])
    with av.open(str(path)) as container:
        assert container.start_time == 0
        times = {
            round(frame.time * fps): frame.to_ndarray(format="gray").mean()
            for frame in container.decode(video=0)
        }
    assert (list(times), max(times, key=lambda number: times[number])) == (list(range(12 * chunks)), flash)
    if heard:
        with av.open(str(path)) as container:
            parts = [(frame.time, frame.to_ndarray()[0]) for frame in container.decode(audio=0)]
        loudest, at = max(
            (np.abs(part).max(), begin + np.abs(part).argmax() / 16_000) for begin, part in parts
        )
        assert loudest > 0.5
        assert abs(at - click / 16_000) < 0.5 / fps
    if shutil.which("ffprobe"):
        asked = ["-show_entries", "stream=start_time", "-select_streams", "v", "-of", "csv=p=0"]
        told = subprocess.run(
            ["ffprobe", "-v", "error", *asked, path], capture_output=True, text=True, check=True
        )
        assert float(told.stdout) == 0


# -- progress --------------------------------------------------------------------------------------------------


def test_a_log_gets_a_line_from_time_to_time(capsys: Said) -> None:
    with Progress("opening toy", 16, 4, every_s=0.01) as progress:
        said = waited_for(capsys, r"opening toy: \d+ s\n")
        progress.opened()
        said += waited_for(capsys, r"making chunk 1 of 4: \d+ s\n")
        progress.show(24, 2)
        said += waited_for(capsys, r" x real time  chunk 2 of 4\n")
    assert "24 frames  " in said
    assert "\r" not in said


def waited_for(capsys: Said, pattern: str) -> str:
    said, deadline = "", time.monotonic() + PATIENCE_S
    while not re.search(pattern, said):
        assert time.monotonic() < deadline, said
        said += capsys.readouterr().err
        time.sleep(0.01)
    return said


def test_a_short_run_says_nothing_of_its_progress(whole_folder: Path, tmp_path: Path, capsys: Said) -> None:
    assert main(["run", str(whole_folder), "--chunks", "2", "-o", str(tmp_path / "a.y4m")]) == 0
    assert "frames  " not in capsys.readouterr().err


def test_a_terminal_gets_one_line_that_is_written_over(monkeypatch: pytest.MonkeyPatch, capsys: Said) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress("opening toy", 16, 4) as progress:
        progress.opened()
        progress.show(12, 1)
        progress.show(24, 2)
    lines = capsys.readouterr().err.split("\r")
    assert lines[0] == "opening toy\n"
    assert [line.split("  ")[0] for line in lines[1:]] == ["12 frames", "24 frames"]
    assert lines[-1].endswith("chunk 2 of 4 \n")

"""The control of an input video: which frames a chunk gets, what is counted, and films of every kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from seko_runtime.controls.recording import as_json, of_json
from seko_runtime.controls.strengths import VideoInParameters
from seko_runtime.controls.video_in import (
    DROPPED,
    HELD_CHUNKS,
    REPEATED,
    TAKEN,
    VideoInControl,
)
from seko_runtime.errors import DecodingError, InputFileError, UsageError
from seko_runtime.format.manifest import InputSpec
from seko_runtime.media_files.films import Film

FIRST, LATER, FPS = 5, 8, 16  # frames of a chunk of two latent frames
HEIGHT, WIDTH = 16, 24


def control(strength: float = 0.6, **motion: float) -> VideoInControl:
    parameters = VideoInParameters(HEIGHT, WIDTH, FPS, FIRST, strength, **motion)
    spec = VideoInControl.declared("video", "strength", "time_scale", parameters)
    inputs = {
        "frames": InputSpec("video", (LATER, HEIGHT, WIDTH, 3), "uint8", "video_in.frames", "chunk"),
        "strength": InputSpec("strength", (1,), "float32", "input.strength", "chunk"),
        "times": InputSpec("time_scale", (2,), "float32", "input.time_scale", "chunk"),
    }
    return VideoInControl(spec, inputs)


def level(value: int, height: int = HEIGHT, width: int = WIDTH) -> NDArray[np.uint8]:
    return np.full((height, width, 3), value, np.uint8)


def counted(taken: int, dropped: int, repeated: int) -> dict[str, int]:
    return {TAKEN: taken, DROPPED: dropped, REPEATED: repeated}


def shown(video: VideoInControl) -> list[int]:
    """Make a chunk, and return the levels of its frames."""
    count = LATER if video._chunks else FIRST  # a control does not say how many chunks it has given
    frames = video.next_chunk()["video"]
    again = video.next_chunk()["video"]
    assert np.array_equal(frames, again)  # asking moves nothing
    video.advance()
    assert frames.shape == (LATER, HEIGHT, WIDTH, 3)
    return frames[-count:, 0, 0, 0].tolist()


def came(video: VideoInControl, levels: Sequence[int]) -> None:
    for value in levels:
        video.take({"frame": level(value)})


def test_as_many_frames_as_a_chunk_takes_are_used_each_once() -> None:
    video = control()
    came(video, range(1, 6))
    assert shown(video) == [1, 2, 3, 4, 5]
    came(video, range(6, 14))
    assert shown(video) == [*range(6, 14)]
    assert video.counts == counted(13, 0, 0)


def test_the_first_chunk_has_the_strength_that_was_said_before_it() -> None:
    """And not a part of the artifact's, as of a chunk before it; after a restart, too."""
    video, levels = control(0.8, least=0.4, first_time=700.0), []
    for said in (0.6, 0.6, 0.7):
        video.take({"strength": said})
        came(video, [7] * FIRST)
        levels.append(float(video.next_chunk()["strength"][0]))
        video.advance()
        video.reset()
    assert levels == pytest.approx([0.6, 0.6, 0.7])


def test_fewer_frames_are_repeated_and_more_are_thinned_to_the_newest() -> None:
    video = control()
    came(video, [1, 2])
    assert shown(video) == [1, 1, 2, 2, 2]
    came(video, range(10, 26))
    assert shown(video) == [11, 13, 15, 17, 19, 21, 23, 25]
    assert video.counts == counted(18, 8, 3)
    assert shown(video) == [25] * 8  # a video that stalls
    assert video.counts[REPEATED] == 3 + 8


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8))
def test_nothing_grows_and_every_frame_is_counted(bursts: list[int]) -> None:
    """However many frames come between two chunks: newest wins, and taken = used + dropped + waiting."""
    video, used, newest = control(), 0, None
    for number, burst in enumerate(bursts):
        came(video, [(number + at) % 256 for at in range(burst)])
        newest = (number + burst - 1) % 256 if burst else newest
        assert len(video._came) <= HELD_CHUNKS * LATER
        if not video.active:
            continue
        frames = shown(video)
        assert frames[-1] == newest
        used += len(frames)
    counts = video.counts
    assert counts[TAKEN] == sum(bursts)
    assert used == counts[TAKEN] - counts[DROPPED] + counts[REPEATED]


@pytest.mark.parametrize(("rate", "dropped", "repeated"), [(16.0, 0, 0), (120.0, 78, 0), (8.0, 0, 6)])
def test_a_clip_is_resampled_by_time(rate: float, dropped: int, repeated: int) -> None:
    clip = np.stack([level(number) for number in range(256)])
    video = control()
    video.take({"clip": clip, "fps": rate})
    frames = shown(video) + shown(video)
    assert frames == [int(number / FPS * rate) for number in range(FIRST + LATER)]
    assert (video.counts[DROPPED], video.counts[REPEATED]) == (dropped, repeated)
    assert video.chunks == -(-(int(256 / rate * FPS) - FIRST) // LATER) + 1


def test_a_clip_that_ends_stays_and_a_restart_begins_it_again() -> None:
    video = control()
    video.take({"clip": np.stack([level(number) for number in range(7)])})
    assert shown(video) == [0, 1, 2, 3, 4]
    assert shown(video) == [5, 6, 6, 6, 6, 6, 6, 6]
    assert shown(video) == [6] * LATER
    video.take({"strength": 0.25})
    video.reset()
    assert shown(video) == [0, 1, 2, 3, 4]
    assert video.strength == 0.25


def test_frames_of_other_sizes_are_cut_and_resized() -> None:
    video = control()
    video.take({"frame": level(9, 480, 640)})
    video.take({"frame": level(7, 3, 5)})
    video.take({"frame": np.stack([level(5)] * 3)})
    assert shown(video) == [9, 7, 5, 5, 5]


@pytest.mark.parametrize("strength", [0, 0.25, 1])
def test_the_strength_is_the_share_of_noise_and_the_factor_of_times(strength: float) -> None:
    video = control()
    video.take({"frame": level(1)})
    video.take({"strength": strength})
    given_inputs = video.next_chunk()
    for name, count in (("strength", 1), ("time_scale", 2)):
        assert given_inputs[name].dtype == np.float32
        assert given_inputs[name].tolist() == [strength] * count


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"frame": np.zeros((4, 4, 4), np.uint8)}, "expected uint8 .rows, columns, 3."),
        ({"frame": np.zeros((4, 4, 3), np.float32)}, "float32"),
        ({"frame": np.zeros((0, 4, 3), np.uint8)}, "expected uint8"),
        ({"frame": level(1), "strength": 0.5}, "fields"),
        ({"strength": 1.01}, "from 0 to 1"),
        ({"strength": float("nan")}, "from 0 to 1"),
        ({"strength": True}, "from 0 to 1"),
        ({"clip": np.zeros((2, 4, 4, 3), np.uint8), "fps": 0}, "positive"),
        ({"clip": np.zeros((2, 4, 4, 3), np.uint8), "fps": 1e-310}, "from 1e-06 on"),
        ({"clip": "film.mp4"}, "does not hold the frames"),
        ({"end": False}, "expected True"),
        ({"else": 1}, "expected one of"),
    ],
)
def test_wrong_events_are_refused_and_change_nothing(event: dict[str, Any], words: str) -> None:
    video = control()
    came(video, [3])
    before = as_json(video.state())
    with pytest.raises(UsageError, match=words):
        video.take(event)
    assert as_json(video.state()) == before


def test_without_a_frame_there_is_no_chunk() -> None:
    video = control()
    assert not video.ready()
    assert not video.active
    with pytest.raises(UsageError, match="no frame of the input video has come"):
        video.next_chunk()
    video.take({"strength": 0.1})
    assert not video.active


def test_a_state_goes_on_with_the_same_frames() -> None:
    video, other = control(), control()
    came(video, range(1, 6))
    shown(video)
    came(video, [20, 21, 22])
    video.take({"strength": 0.9})
    other.load(of_json(as_json(video.state())))
    assert shown(other) == shown(video)
    assert other.next_chunk()["strength"].tolist() == [np.float32(0.9)]
    assert other.counts == video.counts
    array = np.zeros(3)  # as a file of events may hold one in any place
    for odd in ({"strength": 2}, array, {**video.state(), "counts": array}):
        with pytest.raises(UsageError, match="no state of an input video"):
            other.load(odd)


def test_events_are_recorded_and_a_film_by_its_name(tmp_path: Path) -> None:
    video, heard = control(), []
    video.heard = lambda name, event: heard.append((name, event))
    came(video, [3])
    video.take({"strength": 0.5})
    video.take({"clip": Film(film(tmp_path / "a.mp4", [level(1)]))})
    assert [name for name, _ in heard] == ["video_in"] * 3
    assert heard[0][1]["frame"].shape == (1, HEIGHT, WIDTH, 3)
    assert heard[1][1] == {"strength": 0.5}
    assert heard[2][1] == {"clip": str(tmp_path / "a.mp4")}


def test_an_event_that_comes_while_another_waits_for_the_lock_is_recorded_too() -> None:
    video, heard, meanwhile = control(), [], [{"strength": 0.3}]

    @contextmanager
    def lock() -> Iterator[None]:
        if meanwhile:
            video.take(meanwhile.pop())
        yield

    video.lock, video.heard = lock, lambda _, event: heard.append(event)
    video.take({"strength": 0.5})
    assert heard == [{"strength": 0.3}, {"strength": 0.5}]


# -- films --------------------------------------------------------------------------------------------------------


def film(
    path: Path,
    frames: Sequence[NDArray[np.uint8]],
    rate: int = FPS,
    codec: str = "mpeg4",
    pixels: str = "yuv420p",
) -> Path:
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixels
        for frame in frames:
            form = "rgb24" if frame.shape[2] == 3 else "rgba"
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format=form)))
        container.mux(stream.encode())
    return path


def grey(count: int, height: int = 32, width: int = 48) -> list[NDArray[np.uint8]]:
    return [np.full((height, width, 3), 16 + 4 * number, np.uint8) for number in range(count)]


def levels(video: VideoInControl, chunks: int) -> NDArray[np.int64]:
    return np.array([value for _ in range(chunks) for value in shown(video)])


@pytest.mark.parametrize("rate", [8, 16, 25, 120])
def test_a_film_is_played_at_its_own_rate(tmp_path: Path, rate: int) -> None:
    video = control()
    video.take({"clip": Film(film(tmp_path / "a.mkv", grey(50), rate, "ffv1", "bgr0"))})
    wanted = [16 + 4 * min(49, int(number * rate / FPS + 1e-6)) for number in range(FIRST + LATER)]
    assert levels(video, 2).tolist() == wanted
    assert video.chunks == max(1, 1 + -(-(round(50 / rate * FPS) - FIRST) // LATER))
    read = video.counts
    assert read[TAKEN] - read[DROPPED] + read[REPEATED] == FIRST + LATER


def test_a_still_picture_is_a_film_that_stands_still(tmp_path: Path) -> None:
    video = control()
    video.take({"clip": Film(film(tmp_path / "a.png", grey(1), 1, "png", "rgb24"))})
    assert set(levels(video, 3)) == {16}
    assert video.counts[REPEATED] == FIRST + 2 * LATER - 1


def test_transparent_pixels_are_laid_over_white(tmp_path: Path) -> None:
    frame = np.zeros((HEIGHT, WIDTH, 4), np.uint8)
    frame[:, : WIDTH // 2, 3] = 255
    video = control()
    video.take({"clip": Film(film(tmp_path / "a.mov", [frame], codec="qtrle", pixels="argb"))})
    picture = video.next_chunk()["video"][-1]
    assert (picture[0, 0, 0], picture[0, -1, 0]) == (0, 255)


def test_a_film_that_breaks_off_goes_on_with_its_last_frame(tmp_path: Path) -> None:
    whole = film(tmp_path / "a.mkv", grey(40), codec="ffv1", pixels="bgr0")
    broken = tmp_path / "b.mkv"
    broken.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    video = control()
    video.take({"clip": Film(broken)})
    seen = levels(video, 8)
    assert seen[0] == 16
    assert 16 < seen[-1] < 16 + 4 * 39
    assert len(set(seen[-LATER:])) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"no film at all", "is no film"),
        (b"RIFF\x00\x00\x00\x00WAVEfmt ", "holds sound and no video"),
    ],
)
def test_other_files_are_refused_by_a_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with pytest.raises(InputFileError, match=words):
        Film(path)
    with pytest.raises(InputFileError, match="was not found"):
        Film(tmp_path / "none")


def test_sound_in_a_film_without_pictures_is_refused(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=48000, layout="mono")
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 48000
        container.mux(stream.encode(sound))
        container.mux(stream.encode(None))
    with pytest.raises(InputFileError, match="holds sound and no video"):
        Film(path)


def test_hdr_films_are_refused(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=FPS)
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p10le"
        stream.codec_context.color_trc = 16  # PQ
        frame = av.VideoFrame.from_ndarray(level(90), format="rgb24").reformat(format="yuv420p10le")
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises((InputFileError, DecodingError), match="HDR"):
        Film(path)

"""A recording of what happened to a session gives the same bytes again, in Python and by `seko-run run --events`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seko_runtime import Pool, Session, open_artifact
from seko_runtime.cli.commands import main
from seko_runtime.controls.recording import Recording, as_json, of_json, read_recording
from seko_runtime.errors import InputFileError, UsageError
from tests.serve.toys import talk_opener, world_opener

PROMPT = "a b c"
Change = Callable[[Session], None]


def steer(event: dict[str, Any], control: str = "camera") -> Change:
    return lambda session: session.controls[control].take(event)


def speak(samples: int, **more: Any) -> Change:
    sound = np.random.default_rng(samples).uniform(-1, 1, samples).astype(np.float32)
    return steer({"samples": sound, **more}, "voice")


# What is done before each chunk of a stream.
STORIES: dict[str, tuple[Callable[[], Any], list[list[Change]]]] = {
    "keys, a prompt and a new beginning": (
        world_opener,
        [
            [steer({"held": ["KeyW"]})],
            [steer({"held": ["KeyW", "KeyL"]}), lambda session: session.set_prompt("b c")],
            [steer({"poses": [np.eye(4)] * 3})],
            [lambda session: session.restart(seed=9), steer({"keys": "a-3,none-2"})],
            [],
        ],
    ),
    "a voice in pieces": (
        talk_opener,
        [
            [speak(9000)],
            [speak(9000), steer({"pcm16": b"\1\2" * 9000}, "voice")],
            [speak(5, at=26_000, last=True)],
            [speak(4000)],
            [steer({"end": True}, "voice")],
        ],
    ),
}


def played(pool: Pool, story: list[list[Change]]) -> tuple[Recording, list[np.ndarray]]:
    with pool.open_session(seed=3, prompt=PROMPT) as session:
        recording, frames = session.record(seed=3, prompt=PROMPT), []
        for changes in story:
            for change in changes:
                change(session)
            frames.append(session.run_chunk().video()[0].copy())
    return recording, frames


@pytest.mark.parametrize("name", STORIES)
def test_a_recording_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    opener, story = STORIES[name]
    with opener() as pool:
        recording, wanted = played(pool, story)
        (tmp_path / "events.jsonl").write_text(recording.text(), encoding="utf-8")
        entries = read_recording(tmp_path / "events.jsonl", "--events")
        assert (entries[0].what, entries[-1].what, entries[-1].chunk) == ("begin", "end", len(story))
        begin = entries[0].event
        with pool.open_session(seed=begin["seed"], prompt=begin["prompt"]) as session:
            frames = []
            for number in range(len(story)):
                for entry in entries:
                    if entry.chunk == number:
                        session.replay(entry)
                frames.append(session.run_chunk().video()[0].copy())
    for got, want in zip(frames, wanted, strict=True):
        assert np.array_equal(got, want)


def test_a_session_is_recorded_from_its_beginning() -> None:
    with world_opener() as pool, pool.open_session(seed=3, prompt=PROMPT) as session:
        session.controls["camera"].take({"held": ["KeyW"]})
        recording = session.record()
        assert recording.entries[0].event["controls"]["camera"]["held"] == ["ahead"]
        session.run_chunk()
        with pytest.raises(UsageError, match="has made chunks: record it before its first one"):
            session.record()
        with pytest.raises(UsageError, match="a recording's restart has other arguments"):
            session.replay(read_line({"chunk": 0, "restart": {"sed": 3}}))


def read_line(table: dict[str, Any]) -> Any:
    from seko_runtime.controls.recording import _entry_of

    return _entry_of(table)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "ends before the recording's end"),
        (['{"chunk": 0, "begin": {}}'], "ends before the recording's end"),
        (['{"chunk": 0, "end": {}}'], "line 1 is no entry of a recording: it is not the beginning"),
        (
            ['{"chunk": 0, "begin": {}}', '{"chunk": 0, "fog": {}}'],
            "line 2 .*expected chunk, and event with control",
        ),
        (
            ['{"chunk": 0, "begin": {}}', '{"chunk": 0, "event": {}}'],
            "line 2 .*expected chunk, and event with",
        ),
        (
            ['{"chunk": 2, "begin": {}}', '{"chunk": 1, "end": {}}'],
            "line 2 .*does not follow the line before it",
        ),
        (['{"chunk": -1, "begin": {}}'], "line 1 .*chunk is -1"),
        (["[]"], "line 1 .*expected an object"),
        (['{"chunk": 0, "begin": {"x": {"base64": "!"}}}'], "line 1 .*holds no array"),
        (["{"], "line 1"),
    ],
)
def test_what_is_no_recording(lines: list[str], words: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(InputFileError, match=words):
        read_recording(path, "--events")
    with pytest.raises(InputFileError, match="cannot be read"):
        read_recording(tmp_path / "none", "--events")


def test_values_that_json_lacks_come_back_as_they_were() -> None:
    event = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": b"\0\xff",
        "c": [1, "x", None],
        "d": np.int64(3),
    }
    back = of_json(json.loads(json.dumps(as_json(event))))
    assert np.array_equal(back["a"], event["a"])
    assert back["a"].dtype == np.float32
    assert (back["b"], back["c"], back["d"]) == (event["b"], event["c"], 3)
    for odd in (
        {"base64": "AA==", "dtype": "object", "shape": [1]},
        {"base64": "AA==", "dtype": "float32", "shape": [1]},
    ):
        with pytest.raises(UsageError, match="holds no array"):
            of_json(odd)


def test_the_command_line_replays_prompts_and_new_beginnings(whole_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with (
        open_artifact(whole_folder) as artifact,
        artifact.open_session(seed=5, prompt="a red disc") as session,
    ):
        recording, wanted = session.record(seed=5, prompt="a red disc"), []
        for number in range(4):
            if number == 2:
                session.set_prompt("a red ring", recache=True)
            if number == 3:
                session.restart(seed=8)
            wanted.append(session.run_chunk().to_host())
    path, out = tmp_path / "events.jsonl", tmp_path / "out.npy"
    path.write_text(recording.text(), encoding="utf-8")
    asked = ["run", str(whole_folder), "--events", str(path), "-o", str(out)]
    assert main([*asked, "--format", "npy"]) == 0
    assert np.array_equal(np.load(out), np.stack(wanted))
    for option, value in (("--prompt", "x"), ("--keys", "w-3")):
        assert main([*asked, option, value]) == 2

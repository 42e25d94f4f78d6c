"""A recording of what happened to a session gives the same bytes again, in Python and by `seko-run run --events`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from seko_export.families.seko_talk.family import FAMILY as TALK_FAMILY
from seko_export.video.recording import golden_text
from seko_runtime import Pool, Session, open_artifact
from seko_runtime.cli.commands import main
from seko_runtime.cli.video.controls import fed_controls
from seko_runtime.controls import controls_of
from seko_runtime.controls.camera import CameraControl
from seko_runtime.controls.recording import Entry, Recording, as_json, copied, of_json, read_recording
from seko_runtime.errors import InputFileError, UsageError
from seko_runtime.format.manifest import Buffer
from tests.matrix_game import test_stream as games
from tests.matrix_game.streams import game_config
from tests.seko_talk import streams as talks
from tests.serve.toys import VOICE, film_opener, talk_opener, world_opener
from tests.support.voices import voice_control

from . import toy, toy_inputs, toy_pool, toy_whole
from .eager_backend import EagerBackend, write_whole

PROMPT = "a b c"
Change = Callable[[Session], None]


def steer(event: dict[str, Any], control: str = "camera") -> Change:
    return lambda session: session.controls[control].take(event)


def speak(samples: int, **more: Any) -> Change:
    sound = np.random.default_rng(samples).uniform(-1, 1, samples).astype(np.float32)
    return steer({"samples": sound, **more}, "voice")


def random(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def picture(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (40, 120, 3), np.uint8)


def fed(pool: Pool, control: str, event: dict[str, Any]) -> dict[str, Any]:
    """Opening a session with controls that have taken an event."""
    controls = controls_of(pool.manifest)
    controls[control].take(event)
    return {"controls": controls}


def fitted(pool: Pool) -> np.ndarray:
    image: np.ndarray = fed(pool, "pictures", {"start": picture()})["controls"].opening()["image"]
    return image


@dataclass(frozen=True)
class Story:
    """A session: the arguments that open it, what is done before each chunk, and before it is recorded."""

    opener: Callable[[], Any]
    changes: list[list[Change]]
    opening: Callable[[Pool], Mapping[str, Any]] = lambda _: {"prompt": PROMPT}
    chunk_inputs: Mapping[str, Any] | None = None
    before: list[Change] = field(default_factory=list)


TALK = talks.talk_config(model={"speakers": 2})
TALK_INPUTS = {name: value[0].numpy() for name, value in TALK_FAMILY.golden_inputs(TALK, None).items()}
VOICES = {name: value[0].numpy() for name, value in TALK_FAMILY.golden_inputs(TALK, 0).items()}
LEFT = np.zeros((64, 96, 3), np.uint8)
LEFT[:, :48] = 255

STORIES = {
    "keys, a prompt and a new beginning": Story(
        world_opener,
        [
            [steer({"held": ["KeyW"]})],
            [steer({"held": ["KeyW", "KeyL"]}), lambda session: session.set_prompt("b c")],
            [steer({"poses": [np.eye(4)] * 3})],
            [lambda session: session.restart(seed=9), steer({"keys": "a-3,none-2"})],
            [],
        ],
    ),
    "a start picture, kept in a new beginning": Story(
        toy_pool.open_pool,
        [[], [lambda session: session.restart(seed=9)], []],
        lambda pool: {"prompt": PROMPT, **fed(pool, "pictures", {"start": picture()})},
    ),
    "a start picture as an argument": Story(
        toy_pool.open_pool,
        [[], [lambda session: session.restart()], []],
        lambda pool: {"prompt": PROMPT, "image": fitted(pool)},
    ),
    "what changed before it was recorded": Story(
        world_opener,
        [[], [lambda session: session.restart()]],
        before=[
            lambda session: session.restart(seed=5, image=np.full(toy_shape(session), 9, np.uint8)),
            lambda session: session.set_prompt("c"),
            steer({"held": ["KeyW"]}),
        ],
    ),
    "latents to begin with": Story(
        toy_pool.open_pool,
        [[], []],
        lambda _: {
            "prompt": PROMPT,
            "conditioning_latents": random(toy.CHANNELS, 1, toy.ROWS, toy.COLUMNS),
        },
    ),
    "inputs of a session": Story(
        toy_inputs.open_pool,
        [[], [lambda session: session.set_inputs({"place": random(toy.CHANNELS, seed=2)})], []],
        lambda _: {"prompt": PROMPT, "inputs": {"place": random(toy.CHANNELS)}},
        {"camera": random(toy.CHANNELS, seed=3)},
        [lambda session: session.set_inputs({"place": random(toy.CHANNELS, seed=4)})],
    ),
    "a portrait and masks, with text as an array": Story(
        lambda: talks.opened(TALK),
        [[], [lambda session: session.restart(seed=4)], []],
        lambda pool: {
            "text": golden_text(TALK),
            "reference": talks.random_reference(TALK)[0],
            "inputs": {name: value for name, value in TALK_INPUTS.items() if name != "speaker_masks"},
            **fed(pool, "speaker_masks", {"masks": [LEFT, 255 - LEFT]}),
        },
        VOICES,
    ),
    "actions and arrays of a picture": Story(
        lambda: games.opened(game_config()),
        [
            [steer({"held": ["KeyW"]}, "actions")],
            [steer({"moved": {"yaw": 0.7}}, "actions")],
            [steer({"keys": "wd-30"}, "actions")],
        ],
        lambda _: {"inputs": games.opening_of()},
    ),
    "a clip that came before it was recorded": Story(
        film_opener,
        [[], [], [lambda session: session.restart()], [], [steer({"strength": 0.2}, "video_in")]],
        before=[steer({"clip": np.stack([picture(seed) for seed in range(20)]), "fps": 12.0}, "video_in")],
    ),
    "a voice in pieces": Story(
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


def toy_shape(session: Session) -> tuple[int, ...]:
    return next(buffer.shape for buffer in session.manifest.buffers if buffer.name == "image")


def played(pool: Pool, story: Story) -> tuple[Recording, list[np.ndarray]]:
    with pool.open_session(seed=3, **story.opening(pool)) as session:
        for change in story.before:
            change(session)
        recording, chunks = session.record(), []
        for changes in story.changes:
            for change in changes:
                change(session)
            chunks.append(session.run_chunk(story.chunk_inputs).to_host().copy())
    return recording, chunks


def again(pool: Pool, story: Story, entries: Sequence[Entry], opening: Mapping[str, Any]) -> list[np.ndarray]:
    """The chunks of a session that is opened so, and does what a recording says."""
    chunks = []
    with pool.open_session(**opening) as session:
        for number in range(len(story.changes)):
            for entry in entries:
                if entry.chunk == number:
                    session.replay(entry)
            chunks.append(session.run_chunk().to_host().copy())
    return chunks


@pytest.mark.parametrize("name", STORIES)
def test_a_recording_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    story = STORIES[name]
    with story.opener() as pool:
        recording, wanted = played(pool, story)
        (tmp_path / "events.jsonl").write_text(recording.text(), encoding="utf-8")
        entries = read_recording(tmp_path / "events.jsonl", "--events")
        assert (entries[0].what, entries[-1].what, entries[-1].chunk) == ("begin", "end", len(wanted))
        chunks = again(pool, story, entries, entries[0].opening)
        other = again(pool, story, entries, entries[0].opening | {"seed": 77})
    assert not np.array_equal(other[0], wanted[0])
    for got, want in zip(chunks, wanted, strict=True):
        assert np.array_equal(got, want)


def test_a_recording_has_the_inputs_of_the_last_request() -> None:
    """A second request replaces the first one's inputs; a chunk without any has no entry."""
    first, second = ({"camera": random(toy.CHANNELS, seed=seed)} for seed in (5, 6))
    with toy_inputs.open_pool() as pool:
        inputs = {"place": random(toy.CHANNELS)}
        with pool.open_session(seed=3, prompt=PROMPT, inputs=inputs) as session:
            recording = session.record()
            session.request_chunk(due=1.0, inputs=first)
            session.request_chunk(due=1.0, inputs=second)
            pool.serve_next()
    (given,) = [entry for entry in recording.entries if entry.what == "chunk_inputs"]
    assert (given.chunk, list(given.event)) == (0, ["camera"])
    assert np.array_equal(given.event["camera"], second["camera"])


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
        with pytest.raises(UsageError, match="entry is of the kind 'dance', which no recording has"):
            session.replay(Entry(0, "dance", {}))


@pytest.mark.parametrize("fact", [float("nan"), object()])
def test_facts_that_json_lacks_are_not_recorded(fact: object) -> None:
    with (
        world_opener() as pool,
        pool.open_session(seed=3, prompt=PROMPT) as session,
        pytest.raises(UsageError, match="begin cannot be recorded as JSON"),
    ):
        session.record(fact=fact)


@pytest.mark.parametrize("numbers", [0, 10, 400, 900, 1200, 4000])
def test_a_recording_is_never_longer_than_can_be_read(
    numbers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seko_runtime.controls.recording.MAX_EVENT_BYTES", 3000)
    recording, file = Recording({"seed": 3}), tmp_path / "events.jsonl"
    for _ in range(2):
        recording.heard("voice", {"samples": np.zeros(numbers, np.uint8)})
        recording.chunks += 1
    if numbers > 1000:
        for whole in (recording.text, lambda: recording.entries):
            with pytest.raises(UsageError, match="more has happened than a recording"):
                whole()
    else:
        file.write_text(recording.text())
        assert len(read_recording(file, "--events")) == 4


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
    with pytest.raises(InputFileError, match="was not found"):
        read_recording(tmp_path / "none", "--events")


def test_values_that_json_lacks_come_back_as_they_were() -> None:
    event: dict[str, Any] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": b"\0\xff",
        "c": [1, "x", None],
        "d": np.int64(3),
    }
    back = of_json(json.loads(json.dumps(as_json(event))))
    assert np.array_equal(back["a"], event["a"])
    assert back["a"].dtype == np.float32
    assert (back["b"], back["c"], back["d"]) == (event["b"], event["c"], 3)
    kept = copied(event | {"e": torch.tensor([1.5], dtype=torch.bfloat16), "f": bytearray(b"x")})
    event["a"][:] = 0
    assert np.array_equal(kept["a"], back["a"])
    assert (kept["e"].tolist(), kept["f"]) == ([1.5], b"x")
    for odd in (
        {"base64": "AA==", "dtype": "object", "shape": [1]},
        {"base64": "AA==", "dtype": "float32", "shape": [1]},
        {"base64": "AA==", "dtype": "m8[s/0]", "shape": [1]},  # numpy divides by 0, which ends the process
    ):
        with pytest.raises(UsageError, match="holds no array"):
            of_json(odd)


def test_a_run_replays_what_comes_after_the_beginning() -> None:
    """A voice that had not come when the session began, and a camera whose first path is shorter than the recording."""
    voice, camera = voice_control(), CameraControl.without_artifact(4, 6, 1)
    camera.take({"path": [np.eye(4)] * 5, "intrinsics": [500, 500, 416, 240]})
    inputs = (*voice.inputs.values(), *camera.inputs.values())
    manifest: Any = SimpleNamespace(
        caller_inputs=inputs, control_specs=(voice.spec, camera.spec), call_rows=1, pool=None
    )
    begun = {"controls": {"voice": voice.state(), "camera": camera.state()}}
    options, end = argparse.Namespace(chunks=9), Entry(9, "end", {})
    (controls,) = fed_controls(options, manifest, ({}, {}), (), [Entry(0, "begin", begun), end])
    assert (controls["camera"].chunks, controls["voice"].active) == (2, False)
    with pytest.raises(UsageError, match="needs a voice"):  # a page's timeline brings none
        fed_controls(options, manifest, ({}, {}), (), [Entry(0, "begin", {}), end])


def test_a_new_stream_drops_what_a_recording_gave_the_chunk_before_it() -> None:
    """Inputs that fit no artifact, too: they would be refused with each chunk."""
    with toy_pool.open_pool() as pool, pool.open_session(seed=3, prompt=PROMPT) as session:
        wanted = session.run_chunk().to_host()
        session.replay(Entry(1, "chunk_inputs", {"absent": np.zeros(1)}))
        with pytest.raises(UsageError, match="'absent'"):
            session.run_chunk()
        session.restart()
        assert np.array_equal(session.run_chunk().to_host(), wanted)


def test_an_artifacts_own_session_takes_controls_that_have_taken_events(whole_folder: Path) -> None:
    """As a session of `open_pool` does: the picture is the stream's, and the session is steered by these controls."""
    pytest.importorskip("tokenizers")
    start, chunks = picture(), []
    with open_artifact(whole_folder) as artifact:
        controls = controls_of(artifact.manifest)
        controls["pictures"].take({"start": start})
        image = controls.opening()["image"]
        for begun in ({"controls": controls}, {"image": image}):
            with artifact.open_session(seed=5, prompt="a red disc", **begun) as session:
                assert (session.controls is controls) == ("controls" in begun)
                chunks.append(session.run_chunk().to_host())
        with pytest.raises(UsageError, match="pictures as arguments and as events"):
            artifact.open_session(prompt="a red disc", controls=controls, image=image)
    assert np.array_equal(*chunks)


def test_the_command_line_replays_prompts_and_new_beginnings(whole_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    start = np.random.default_rng(1).integers(0, 256, (toy_whole.HEIGHT, toy_whole.WIDTH, 3), np.uint8)
    with (
        open_artifact(whole_folder) as artifact,
        artifact.open_session(seed=5, prompt="a red disc", image=start) as session,
    ):
        recording, wanted = session.record(), []
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
    for option, value in (("--prompt", "x"), ("--keys", "w-3"), ("--seed", "7")):
        assert main([*asked, option, value]) == 2
    path.write_text(recording.text().replace('"seed":8', '"seed":{"base64":""}'), encoding="utf-8")
    assert main(asked) == 2  # and no TypeError


def test_the_command_line_replays_one_session_where_calls_carry_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setattr("seko_runtime.opening.artifact.open_backend", lambda *_: EagerBackend())
    folder = write_whole(tmp_path / "pool", toy.changed(toy_pool.pool_manifest(), golden=None))
    with open_artifact(folder) as artifact, artifact.open_session(seed=5, prompt="a red disc") as session:
        recording, wanted = session.record(), []
        for number in range(3):
            if number == 2:
                session.restart(seed=8)
            wanted.append(session.run_chunk().to_host())
    path, out = tmp_path / "events.jsonl", tmp_path / "out.npy"
    path.write_text(recording.text(), encoding="utf-8")
    assert main(["run", str(folder), "--events", str(path), "-o", str(out)]) == 0
    assert np.array_equal(np.load(out), np.stack(wanted))


def test_an_mp4_has_the_sound_of_a_voice_that_came_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its chunks as they were heard, also after a new beginning, which begins the voice anew."""
    av = pytest.importorskip("av")
    pytest.importorskip("tokenizers")
    monkeypatch.setattr("seko_runtime.opening.artifact.open_backend", lambda *_: EagerBackend())
    base = toy_whole.whole_manifest()
    heard = Buffer(VOICE.buffer, (1, *VOICE.shape), VOICE.dtype, "host")
    folder = write_whole(
        tmp_path / "talk", toy.changed(base, inputs=(VOICE,), buffers=(*base.buffers, heard))
    )
    voice, played = np.sin(np.arange(80_000) * np.linspace(0.02, 0.2, 80_000)).astype(np.float32) / 2, []
    with open_artifact(folder) as artifact, artifact.open_session(seed=5, prompt="a red disc") as session:
        control, recording, at = session.controls["voice"], session.record(), 0
        for number in range(4):
            if number == 2:
                session.restart(seed=8)
            count = control.needed[1] - control.end
            control.take({"samples": voice[at : at + count]})
            at += count
            chunk = session.run_chunk()
            played.append(control.sound(int(chunk.frames[0, 0])))
    path, out = tmp_path / "events.jsonl", tmp_path / "out.mp4"
    path.write_text(recording.text(), encoding="utf-8")
    assert main(["run", str(folder), "--events", str(path), "-o", str(out)]) == 0
    with av.open(str(out)) as container:
        sound = np.concatenate([frame.to_ndarray()[0] for frame in container.decode(audio=0)])
    wanted = np.concatenate(played)
    assert np.corrcoef(sound[: len(wanted)], wanted)[0, 1] > 0.99

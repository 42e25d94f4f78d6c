"""Camera, voice and uploads of a session: the stream is that of the runtime alone, given the same."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest

from seko_runtime.controls.fitting import cover_pictures
from seko_runtime.controls.poses import framewise
from seko_runtime.controls.recording import as_json, read_recording
from seko_serve.protocol import Codec, Control, Media
from seko_serve.video.content import VideoContent
from seko_serve.video.opening import Opening, opening_of
from tests.runtime import toy_pool, toy_whole
from tests.support.cameras import camera_of, chunk_of
from tests.support.stacked import push

from .conftest import NewClient, Running, Starter
from .test_server import PROMPT, http, pictures, watch
from .test_uploads import coded
from .toys import talk_opener, world_opener

RATE, FRAME = 16_000, 1_000  # samples a second, and to a video frame
PICTURE = np.random.default_rng(1).integers(0, 256, (40, 120, 3), np.uint8)
PICTURE_URL = f"data:image/png;base64,{base64.b64encode(coded(PICTURE, 'png')).decode()}"


def noise(samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-20_000, 20_000, samples).astype(np.int16)


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(rate)
        written.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


def split(media: list[Media]) -> tuple[list[Media], list[Media]]:
    """The frames, and the sound."""
    frames = [packet for packet in media if packet.codec < Codec.PCM]
    return frames, [packet for packet in media if packet.codec >= Codec.PCM]


def samples_of(sound: list[Media]) -> np.ndarray:
    return np.frombuffer(b"".join(packet.payload for packet in sound), "<i2")


def talked(chunks: int, feed: Callable[[Any, int], None]) -> np.ndarray:
    """Frames of the runtime alone; ``feed`` pushes audio before each chunk."""
    with talk_opener() as pool, pool.open_session(seed=3, prompt=PROMPT) as session:
        frames = []
        for number in range(chunks):
            feed(session, number)
            frames.append(session.run_chunk().video()[0])
        return np.concatenate(frames)


async def test_an_uploaded_voice_moves_the_video_and_is_heard_with_it(
    start: Starter, new_client: NewClient
) -> None:
    server, voice = start(talk_opener), noise(30_000)
    client = await new_client(server).open(
        codecs=["rgb24"],
        audio=["pcm"],
        prompt=PROMPT,
        seed=3,
        voice=base64.b64encode(wav(voice)).decode(),
    )
    assert client.ready["audio"] == {"codec": "pcm", "rate": RATE, "delay": 0, "channels": 1}
    media, _ = await watch(client, 5)
    await client.close()
    frames, sound = split(media)

    def feed(session: Any, number: int) -> None:
        if not number:
            push(session, voice, last=True)

    assert np.array_equal(pictures(frames), talked(5, feed))
    heard = samples_of(sound)
    assert len(heard) == FRAME * len(frames)
    expected = np.zeros(len(heard), np.int16)
    expected[: len(voice)] = voice[: len(heard)]
    assert np.abs(heard.astype(int) - expected).max() <= 1
    assert [packet.first for packet in sound] == np.cumsum([0, *(packet.count for packet in sound)])[
        :-1
    ].tolist()
    assert [packet.serial for packet in media] == list(range(len(media)))


async def test_a_spoken_voice_makes_chunks_as_it_comes_and_its_pieces_have_receipts(
    start: Starter, new_client: NewClient
) -> None:
    server, voice = start(talk_opener), noise(80_000)
    client = await new_client(server).open(codecs=["rgb24"], audio=["pcm"], prompt=PROMPT, seed=3)
    media, _ = await watch(client, 2)
    name = await client.send_audio(voice[:2_000])
    for at in range(2_000, 40_000, 1_900):
        await client.send_audio(voice[at : at + 1_900])
    await client.send("audio_end")
    more, messages = await watch(client, 6)
    receipts = [message for message in messages if message.get("id") == name]
    assert [receipt["type"] for receipt in receipts] == ["received", "applied"]
    begun = receipts[-1]["chunk"]  # chunks before it were silent
    await client.close()
    frames, sound = split(media + more)
    heard = samples_of(sound)
    assert len(heard) == FRAME * len(frames)
    first = int(np.flatnonzero(heard)[0])
    assert first == FRAME * sum(packet.chunk < begun for packet in frames)
    assert np.abs(heard[first : first + 40_000].astype(int) - voice[:40_000][: len(heard) - first]).max() <= 1
    assert not heard[first + 40_000 :].any()

    def feed(session: Any, number: int) -> None:
        if not number:
            push(session, np.concatenate((np.zeros(first, np.int16), voice[:40_000])), last=True)

    assert np.array_equal(pictures(frames), talked(8, feed))


async def test_keys_and_poses_steer_as_the_runtime_does(start: Starter, new_client: NewClient) -> None:
    server = start(world_opener)
    angle = np.radians(3.0)
    turn = np.array([[np.cos(angle), 0, np.sin(angle)], [0, 1, 0], [-np.sin(angle), 0, np.cos(angle)]])
    poses = []
    for number in range(6):
        pose = np.eye(4)
        pose[:3, :3] = np.linalg.matrix_power(turn, number)
        pose[:3, 3] = (0.1 * number, 0, 0.5 * number)
        poses.append(pose)
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media, _ = await watch(client, 2)
    keys = await client.send("keys", held=["KeyW", "ArrowRight", "Space"])
    more, messages = await watch(client, 3)
    (pressed,) = [
        message["chunk"] for message in messages if message["type"] == "applied" and message["id"] == keys
    ]
    path = await client.send("poses", poses=[pose.ravel().tolist() for pose in poses])
    last, messages = await watch(client, 4)
    (followed,) = [
        message["chunk"] for message in messages if message["type"] == "applied" and message["id"] == path
    ]
    await client.close()
    with world_opener() as pool, pool.open_session(seed=3, prompt=PROMPT) as session:
        s = session.manifest.workload.stream
        camera, frames = camera_of(session.manifest), []
        wanted = framewise(np.stack(poses))
        for number in range(9):
            if number == pressed:
                camera.take({"held": ["w", "l"]})
            inputs = chunk_of(camera)
            at = (number - followed) * s.chunk_frames
            if 0 <= at < len(poses):
                inputs["camera"] = wanted[at : at + s.chunk_frames].astype(np.float32)
            frames.append(session.run_chunk(inputs).video()[0])
    assert np.array_equal(pictures(media + more + last), np.concatenate(frames))


async def test_controls_without_a_place_and_wrong_ones_are_rejected_with_a_word(
    start: Starter, new_client: NewClient
) -> None:
    server = start(world_opener)
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT)
    names = {
        await client.send_audio(noise(10)): "hears no audio",
        await client.send("audio_end"): "hears no audio",
        await client.send("text", text="hello"): "speaks no text",
        await client.send("poses", poses=[[2.0] * 16]): "not a rotation",
    }
    _, messages = await watch(client, 3)
    rejected = {message["id"]: message["message"] for message in messages if message["type"] == "rejected"}
    assert set(rejected) == set(names)
    assert all(word in rejected[name] for name, word in names.items())
    await client.close()


@pytest.mark.parametrize("codec", ["aac", "opus"])
async def test_coded_sound_is_as_long_as_the_video_within_a_packet(
    start: Starter, codec: str, new_client: NewClient
) -> None:
    server = start(talk_opener)
    client = await new_client(server).open(codecs=["h264"], audio=["mp3", codec], prompt=PROMPT)
    media, _ = await watch(client, 6)
    await client.close()
    frames, sound = split(media)
    audio = client.ready["audio"]
    assert audio["codec"] == codec
    assert {packet.codec for packet in sound} == {Codec[codec.upper()]}
    length = sum(packet.count for packet in sound) / audio["rate"]
    video = len(frames) / client.ready["fps"]
    assert video - 0.2 < length <= video
    assert [packet.pts_us for packet in sound] == [
        packet.first * 1_000_000 // audio["rate"] for packet in sound
    ]


@pytest.mark.parametrize(
    ("table", "status", "words"),
    [
        ({"voice": 1}, 400, "base64"),
        ({"voice": "!"}, 400, "base64"),
        ({"voice": base64.b64encode(b"nothing").decode()}, 400, "no sound"),
        ({"voice": ["", ""]}, 400, "2 sounds"),
        ({"fps": 8}, 415, "at 16 fps"),
        ({"image": "data:image/png,x"}, 400, "without base64"),
        ({"image": base64.b64encode(b"nothing").decode()}, 400, "no picture"),
        ({"inputs": []}, 400, "object of arrays"),
        ({"inputs": {"place": {"dtype": "float32", "shape": [2], "data": ""}}}, 400, "needs 8"),
    ],
)
def test_uploads_that_do_not_fit_are_refused(start: Starter, table: Any, status: int, words: str) -> None:
    server = start(talk_opener)
    code, answer = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT, **table})
    assert (code, words in answer["error"]["message"]) == (status, True), answer
    assert http(f"{server.url}/ready")[1]["free"] == server.manager.capacity


def test_the_model_says_what_it_takes(start: Starter) -> None:
    (model,) = http(f"{start(talk_opener).url}/v1/models")[1]["data"]
    takes = {
        "prompt": True,
        "keys": False,
        "image": "may",
        "last_image": False,
        "voice": 1,
        "video": False,
    }
    assert model["takes"] == takes
    (model,) = http(f"{start(world_opener).url}/v1/models")[1]["data"]
    assert model["takes"] == {**takes, "keys": True, "voice": 0}


async def test_a_picture_begins_the_stream_as_the_runtime_has_it(
    server: Running, new_client: NewClient
) -> None:
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3, image=PICTURE_URL)
    media, _ = await watch(client, 3)
    await client.close()
    fitted, _ = cover_pictures(PICTURE, toy_whole.HEIGHT, toy_whole.WIDTH)
    with toy_pool.open_pool() as pool, pool.open_session(seed=3, prompt=PROMPT, image=fitted) as session:
        wanted = np.concatenate([session.run_chunk().video()[0] for _ in range(3)])
    assert np.array_equal(pictures(media), wanted)


async def test_a_recorded_session_is_played_again_to_the_same_bytes(
    start: Starter, tmp_path: Path, new_client: NewClient
) -> None:
    server = start(world_opener)
    client = await new_client(server).open(
        codecs=["rgb24"], prompt=PROMPT, seed=3, image=PICTURE_URL, record=True
    )
    assert [control["kind"] for control in client.ready["controls"].values()] == ["camera", "pictures"]
    media, _ = await watch(client, 2)
    await client.send("control", name="camera", event={"held": ["KeyW"]})
    media += (await watch(client, 2))[0]
    await client.send("keys", held=["KeyL"])
    await client.send("prompt", text="b c")
    media += (await watch(client, 2))[0]
    await client.send("restart", seed=8)
    media += (await watch(client, 3))[0]
    refused = {
        await client.send("control", name=name, event=event): words
        for name, event, words in (
            ("fog", {}, "no control 'fog': it has camera, pictures"),
            ("camera", {"held": ["q"]}, "'q' is not known"),
            ("camera", {"pcm16": ""}, "expected one of held"),
        )
    }
    _, messages = await watch(client, 3)
    told = {message["id"]: message["message"] for message in messages if message["type"] == "rejected"}
    assert set(told) == set(refused)
    assert all(words in told[name] for name, words in refused.items())
    url = f"{server.url}/v1/sessions/{client.ready['session']}/events"
    with await asyncio.to_thread(urlopen, url) as answer:
        (tmp_path / "events.jsonl").write_bytes(answer.read())
    await client.close()
    entries, frames = read_recording(tmp_path / "events.jsonl", "--events"), []
    with world_opener() as pool, pool.open_session(**entries[0].opening) as session:
        for number in range(9):
            for entry in entries:
                if entry.chunk == number:
                    session.replay(entry)
            frames.append(session.run_chunk().video()[0])
    assert np.array_equal(pictures(media), np.concatenate(frames)[: len(pictures(media))])


@pytest.mark.parametrize("record", [False, True], ids=["not asked for", "too long"])
async def test_a_session_that_is_not_recorded_says_so(
    record: bool, start: Starter, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    monkeypatch.setattr("seko_runtime.controls.recording.MAX_EVENT_BYTES", 10)
    server = start(world_opener)
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, record=record)
    with pytest.raises(HTTPError, match="409"):
        await asyncio.to_thread(urlopen, f"{server.url}/v1/sessions/{client.ready['session']}/events")
    await client.close()


@pytest.mark.parametrize("begun_again", [("restart", {}), ("seed", {"value": 4})])
def test_a_key_that_is_held_stays_held_when_the_stream_begins_again(begun_again: tuple[str, Any]) -> None:
    """Until it is released, whatever the client tells meanwhile; one that was released leaves no step behind."""
    with world_opener() as pool:
        content = VideoContent(pool.manifest, opening_of({"prompt": PROMPT}, pool.manifest))
        with content.open(pool, "one", "tenant") as row:
            content.apply(row, Control("keys", "1", {"held": ["KeyW"]}))
            row.run_chunk()
            content.apply(row, Control(begun_again[0], "2", begun_again[1]))
            walk = camera_of(pool.manifest)
            walk.take({"held": ["KeyW"]})
            for _ in range(2):
                moved = row.controls["camera"].next_chunk()["camera"]
                assert np.array_equal(moved, chunk_of(walk)["camera"])
                row.run_chunk()
            content.apply(row, Control("keys", "3", {"held": []}))
            content.apply(row, Control(begun_again[0], "4", begun_again[1]))
            assert not row.controls["camera"].next_chunk()["camera"][:, :, 3].any()


def test_a_session_that_goes_on_begins_again_with_its_picture() -> None:
    with toy_pool.open_pool() as pool:
        begun = VideoContent(
            pool.manifest, opening_of({"prompt": PROMPT, "image": PICTURE_URL}, pool.manifest)
        )
        with begun.open(pool, "one", "tenant") as row, pool.open_session(prompt=PROMPT) as plain:
            first = row.run_chunk().to_host().copy()
            assert not np.array_equal(first, plain.run_chunk().to_host())
            state = json.loads(json.dumps(as_json(begun.state())))
            following = VideoContent(pool.manifest, Opening.of_state(state["opening"]))
            following.load(row, state)
            following.apply(row, Control("restart", "1", {}))
            assert np.array_equal(row.run_chunk().to_host(), first)

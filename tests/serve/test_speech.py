"""Speech over HTTP and over the socket: what is heard is what the model says, sentence by sentence."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
import socket
import subprocess
import sys
import time
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import av
import numpy as np
import pytest

import seko_serve.http.connections
from seko_runtime.errors import EngineRunError
from seko_runtime.sessions.call_times import CallTimes
from seko_runtime.speech import normaliser
from seko_runtime.speech.contract import VOICE_PROGRAM
from seko_runtime.speech.local_rows import PREFILL
from seko_runtime.speech.manifest import SpeechManifest
from seko_runtime.speech.pool import SpeechPool
from seko_runtime.speech.prompts import assemble
from seko_runtime.speech.voice import NO_VOICE, Voice
from seko_serve.client import AsyncClient, Client
from seko_serve.errors import ServeError
from seko_serve.http.connections import HttpConnection
from seko_serve.live.device import pool_of
from seko_serve.live.pace import CREDIT
from seko_serve.media.sound_files import FORMS, sound_file
from seko_serve.protocol import MAX_PROMPT_LETTERS, Media
from seko_serve.speech import voices
from seko_serve.speech.content import MAX_LETTERS_AHEAD
from tests.speech.texts import said_in_turn
from tests.speech.toy_speech import (
    MARKS,
    PATCH,
    PLACES,
    SESSIONS,
    VOICE,
    C,
    P,
    Tokens,
    ToyBackend,
    all_alone,
    alone,
    manifest,
    open_pool,
    write_artifact,
)

from .bounded import LIMIT_S, comes, until
from .conftest import NewClient, Running, Starter
from .test_controls import noise, wav
from .test_server import http
from .test_watching import figures


@contextmanager
def opener() -> Iterator[SpeechPool]:
    with open_pool() as pool:
        yield pool


def said_alone(text: str, voice: Voice = NO_VOICE, **settings: Any) -> list[np.ndarray]:
    """What a session with an equal share of the places says."""
    ids = Tokens().ids(voice.text + text)
    prompt = assemble(ids, (P, C), reference=voice.reference, continued=voice.continued, marks=MARKS)
    limit = manifest().workload.limits.patches(len(text))
    return alone(prompt, min(limit, (PLACES - 1) // SESSIONS - len(prompt.ids)), **settings)


def levels(patches: list[np.ndarray]) -> np.ndarray:
    """Samples as whole numbers of 16 bits."""
    return np.rint(np.clip(np.concatenate(patches), -1, 1) * 32767).astype(np.int16)


def coded(recording: np.ndarray) -> str:
    """A recording as it is sent."""
    return base64.b64encode(wav(recording, VOICE.sample_rate)).decode()


def check_refusal(
    server: Running, table: object, status: int, words: str, path: str = "audio/speech"
) -> None:
    """Check that a request is refused with a status and a sentence that holds these words."""
    code, answer = http(f"{server.url}/v1/{path}", "POST", table)
    assert (code, words in answer["error"]["message"]) == (status, True), answer


def spoken(url: str, **table: object) -> tuple[bytes, Any]:
    request = Request(
        f"{url}/v1/audio/speech", json.dumps(table).encode(), {"content-type": "application/json"}
    )
    with urlopen(request, timeout=30) as answer:
        return answer.read(), answer.headers


def ask_by(connection: socket.socket, url: str, **table: object) -> None:
    """Ask for speech by a connection, of which the answer is still to be read."""
    parts, body = urlsplit(url), json.dumps(table).encode()
    connection.settimeout(20)
    connection.connect((parts.hostname, parts.port))
    head = f"POST /v1/audio/speech HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)


def events_of(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in content.decode().split("\n\n") if line]


@pytest.mark.shows("live-speech")
def test_a_text_is_spoken_as_the_model_says_it_and_its_row_is_free_again(start: Starter) -> None:
    server = start(opener)
    content, headers = spoken(server.url, input="hallo.\nzzzz", seed=3, response_format="pcm")
    wanted = levels([*said_alone("hallo.", seed=3), *said_alone("zzzz", seed=3)])
    assert np.array_equal(np.frombuffer(content, "<i2"), wanted)
    assert headers["content-type"] == "audio/pcm"
    assert headers["x-sample-rate"] == str(PATCH.sample_rate)
    assert http(f"{server.url}/v1/sessions")[1]["data"] == []
    content, _ = spoken(server.url, input="hallo", seed=3, response_format="wav")
    assert content[:4] == b"RIFF"
    assert np.array_equal(np.frombuffer(content[44:], "<i2"), levels(said_alone("hallo", seed=3)))


def test_events_carry_the_same_file(start: Starter) -> None:
    server = start(opener)
    plain, _ = spoken(server.url, input="abc", response_format="pcm")
    content, headers = spoken(server.url, input="abc", response_format="pcm", stream_format="sse")
    assert headers["content-type"].startswith("text/event-stream")
    events = events_of(content)
    patches = len(said_alone("abc"))
    usage = {"input_tokens": 3, "output_tokens": patches, "total_tokens": 3 + patches}
    done = events.pop()
    assert (done["type"], done["usage"]) == ("speech.audio.done", usage)
    assert {event["type"] for event in events} == {"speech.audio.delta"}
    assert b"".join(base64.b64decode(event["audio"]) for event in events) == plain


def test_names_of_openai_stand_for_the_model_and_its_voice_and_the_answer_says_so(start: Starter) -> None:
    server = start(opener)
    plain, headers = spoken(
        server.url, input="abc", response_format="pcm", model=None, voice=None, ref_text=None
    )
    assert "seko-note" not in headers
    table = {
        "model": "tts-1",
        "voice": "alloy",
        "language": "English",
        "instructions": "",
        "speed": 1.0,
        "stream": True,
    }
    content, headers = spoken(server.url, input="abc", response_format="pcm", **table)
    assert content == plain
    assert (
        headers["seko-note"] == "model tts-1 is toy-speech; voice alloy is default; language follows the text"
    )


def test_a_long_name_of_a_model_is_read_once() -> None:
    """In a process of its own, as an expression that tries each part of the name would not end."""
    code = """
from seko_serve.speech.fields import is_stock_model
assert is_stock_model("gpt-4o-mini-realtime-preview-2024-12-17")
assert not is_stock_model("gpt-4o-mini")
assert not is_stock_model("gpt-" + "realtime" * (1 << 20) + "!")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)


def test_guidance_and_temperature_are_those_of_the_request(start: Starter) -> None:
    server = start(opener)
    every: list[dict[str, Any]] = [
        {"guidance": 1.5},
        {"temperature": 0.5},
        {"guidance": 3.0, "temperature": 0.0},
    ]
    for settings in every:
        content, _ = spoken(server.url, input="abc", seed=3, response_format="pcm", **settings)
        wanted = levels(said_alone("abc", seed=3, **settings))
        assert np.array_equal(np.frombuffer(content, "<i2"), wanted)


def test_numbers_are_spoken_as_words_if_a_request_asks_for_it(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wetext", reason="needs seko-runtime[normalize]")
    server = start(opener)
    table: dict[str, Any] = {"seed": 3, "response_format": "pcm"}
    content, _ = spoken(server.url, input="I see 5", normalize="en", **table)
    assert content == spoken(server.url, input="I see five", **table)[0]
    assert content != spoken(server.url, input="I see 5", **table)[0]
    sent = {"input": "5", "normalize": "de"}
    code, answer = http(f"{server.url}/v1/audio/speech", "POST", sent)
    assert (code, answer["error"]["param"]) == (400, "normalize")
    monkeypatch.setitem(sys.modules, "wetext", None)
    normaliser._library.cache_clear()
    code, answer = http(f"{server.url}/v1/audio/speech", "POST", {"input": "5", "normalize": "en"})
    assert (code, answer["error"]["code"]) == (501, "not_installed")


def test_words_that_are_too_many_are_refused_before_a_row_is_taken(start: Starter) -> None:
    pytest.importorskip("wetext", reason="needs seko-runtime[normalize]")
    server = start(opener)
    sent = {"input": "777,777 777,777. " * 240, "normalize": "en"}
    code, answer = http(f"{server.url}/v1/audio/speech", "POST", sent)
    assert (code, answer["error"]["param"]) == (413, "input")


def test_a_text_that_its_session_refuses_is_answered(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(opener)
    monkeypatch.setattr("seko_serve.speech.content.MAX_LETTERS_AHEAD", 5)
    code, answer = http(f"{server.url}/v1/audio/speech", "POST", {"input": "hallo there"})
    assert (code, answer["error"]["code"]) == (413, "too_large")
    until(lambda: http(f"{server.url}/v1/sessions")[1]["data"] == [])


def test_a_file_that_is_not_streamed_comes_as_a_whole(start: Starter) -> None:
    server = start(opener)
    plain, _ = spoken(server.url, input="abc", response_format="pcm")
    content, headers = spoken(server.url, input="abc", response_format="pcm", stream=False)
    assert (content, headers["content-length"]) == (plain, str(len(plain)))


def test_a_wav_that_comes_as_a_whole_says_its_length(start: Starter) -> None:
    server = start(opener)
    content, _ = spoken(server.url, input="abc", response_format="wav", stream=False)
    assert int.from_bytes(content[4:8], "little") == len(content) - 8
    with wave.open(io.BytesIO(content)) as file:
        said = levels(said_alone("abc"))
        assert (file.getnframes(), file.readframes(len(said) + 1)) == (len(said), said.tobytes())


def test_a_speech_ends_at_its_largest_number_of_patches_and_says_so(start: Starter) -> None:
    server = start(opener)
    whole, _ = spoken(server.url, input="hallo.\nzzzz", seed=3, response_format="pcm")
    for most in (1, 3, 100):
        table = {"input": "hallo.\nzzzz", "seed": 3, "response_format": "pcm", "max_new_tokens": most}
        content, _ = spoken(server.url, **table)
        assert content == whole[: most * 2 * PATCH.samples]
        done = events_of(spoken(server.url, **table, stream_format="sse")[0])[-1]
        assert done["usage"]["output_tokens"] == len(content) // 2 // PATCH.samples
        if len(content) < len(whole):
            assert done["cut"]
    until(lambda: not server.manager.sessions)


def test_a_sentence_that_its_limit_ends_is_told(start: Starter) -> None:
    """Of texts that the toy ends itself, and of those that it does not."""
    server, found = start(opener), set()
    for seed in range(40):
        prompt = assemble(Tokens().ids("zz"), (P, C), marks=MARKS)
        limit = min(manifest().workload.limits.patches(2), (PLACES - 1) // SESSIONS - len(prompt.ids))
        ended = all_alone(prompt, limit, seed=seed)[1]
        if ended in found:
            continue
        found.add(ended)
        content, _ = spoken(server.url, input="zz", seed=seed, response_format="pcm", stream_format="sse")
        assert events_of(content)[-1]["cut"] is not ended
    assert found == {True, False}


def test_a_request_waits_for_a_row_in_the_queue(start: Starter) -> None:
    server = start(opener, max_sessions=1, queue=1)
    with Client(server.url) as client:
        client.open(audio=["pcm"])
        with ThreadPoolExecutor(2) as threads:
            waiting = threads.submit(spoken, server.url, input="abc", seed=2, response_format="pcm")
            until(lambda: server.manager.admission.waiting)
            code, answer = http(f"{server.url}/v1/audio/speech", "POST", {"input": "abc"})
            assert (code, answer["error"]["code"]) == (503, "full")
            assert not waiting.done()
            client.close()
            content, _ = waiting.result(30)
    assert np.array_equal(np.frombuffer(content, "<i2"), levels(said_alone("abc", seed=2)))
    assert not server.manager.admission.waiting


def test_a_request_that_leaves_the_queue_frees_its_place(start: Starter) -> None:
    server = start(opener, max_sessions=1)
    with Client(server.url) as client:
        client.open(audio=["pcm"])
        with socket.socket() as listener:
            ask_by(listener, server.url, input="abc")
            until(lambda: server.manager.admission.waiting)
        until(lambda: not server.manager.admission.waiting)


def test_a_request_that_waits_while_the_server_stops_is_told_so(start: Starter) -> None:
    server = start(opener, max_sessions=1)
    with Client(server.url) as client, ThreadPoolExecutor(1) as threads:
        client.open(audio=["pcm"])
        waiting = threads.submit(http, f"{server.url}/v1/audio/speech", "POST", {"input": "abc"})
        until(lambda: server.manager.admission.waiting)
        server.stop()
        status, answer = waiting.result()
        assert (status, answer["error"]["code"]) == (503, "stopping")


KEY, OTHER = "a-key-of-the-first-tenant", "a-key-of-the-second-tenant"


def test_a_request_whose_place_another_key_gets_may_come_again(start: Starter) -> None:
    server = start(opener, max_sessions=1, queue=2, keys=(KEY, OTHER))

    def speak(key: str) -> tuple[int, Any]:
        return http(f"{server.url}/v1/audio/speech", "POST", {"input": "abc", "response_format": "pcm"}, key)

    with Client(server.url, KEY) as client, ThreadPoolExecutor(3) as threads:
        client.open(audio=["pcm"])
        own = [threads.submit(speak, KEY) for _ in range(2)]
        until(lambda: server.manager.admission.waiting == 2)
        other = threads.submit(speak, OTHER)
        (refused,), (waiting,) = wait(own, return_when=FIRST_COMPLETED)
        status, answer = refused.result()
        assert (status, answer["error"]["code"], answer["error"]["retryable"]) == (503, "full", True)
        client.close()
        assert (waiting.result()[0], other.result()[0]) == (200, 200)


@pytest.mark.parametrize("words", [None, "yes", "yes, beside a reference"])
def test_a_kept_voice_is_encoded_once_and_speaks_as_the_recording_would(
    start: Starter, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, recording = start(opener), noise(4 * VOICE.samples)
    sound = {"ref_audio": coded(recording)}
    sound |= {} if words is None else {"ref_text": words[:3]}
    if words is not None and words[3:]:
        sound["ref_audio"] = coded(recording[VOICE.samples :])
        sound["reference"] = coded(recording[: VOICE.samples])
    wanted, _ = spoken(server.url, input="abc", seed=2, response_format="pcm", **sound)
    status, voice = http(
        f"{server.url}/v1/audio/voices", "POST", {"name": "alloy", "consent": "mine", **sound}
    )
    assert (status, voice["object"], voice["name"], voice["type"]) == (
        200,
        "audio.voice",
        "alloy",
        "audio_sample",
    )

    def encoded(*_: object, **__: object) -> None:
        raise AssertionError("the voice is encoded again")

    monkeypatch.setattr(SpeechPool, "encode_voice_in_parts", encoded)
    for name in ("alloy", voice["id"], {"id": voice["id"]}):
        content, headers = spoken(server.url, input="abc", seed=2, response_format="pcm", voice=name)
        assert (content, "seko-note" in headers) == (wanted, False)
    code, answer = http(f"{server.url}/v1/audio/speech", "POST", {"input": "a", "voice": "alloy", **sound})
    assert (code, answer["error"]["param"]) == (400, "voice")


@pytest.mark.parametrize("name", ["a/b", ".", ".."])
def test_a_voice_whose_name_no_path_takes_is_refused(start: Starter, name: str) -> None:
    """It could not be removed by its name."""
    sound = coded(noise(VOICE.samples))
    url = f"{start(opener).url}/v1/audio/voices"
    status, answer = http(url, "POST", {"name": name, "ref_audio": sound})
    assert (status, answer["error"]["param"]) == (400, "name")


async def test_a_session_speaks_with_a_kept_voice_also_in_the_next_process(
    start: Starter, tmp_path: Path, new_client: NewClient
) -> None:
    store, recording = tmp_path / "store", noise(VOICE.samples)
    first = start(opener, snapshots=str(store), snapshot_every=1)
    sound = {"ref_audio": coded(recording), "ref_text": "yes"}
    http(f"{first.url}/v1/audio/voices", "POST", {"name": "ada", **sound})
    for table, status in (
        ({"voice": {"id": "eve"}}, 404),
        ({"voice": {"id": "ada"}, "voice_text": "a"}, 400),
    ):
        assert http(f"{first.url}/v1/sessions", "POST", table)[0] == status
    client = await new_client(first).open(audio=["pcm"], seed=3, voice={"id": "ada"})
    await client.send("text", text="hallo.\n")
    said = await heard(client, 2)
    await client.drop()
    await asyncio.to_thread(first.stop)
    client._url = start(opener, snapshots=str(store)).url  # which keeps no voice
    await client.resume()
    while not said[-1].last:
        said += await heard(client)
    with open_pool() as pool:
        samples = recording.astype(np.float32) / 32768
        wanted = said_alone("hallo.", pool.encode_voice(continued=samples, text="yes"), seed=3)
    content = {media.first: media.payload for media in said}
    assert b"".join(content[first] for first in sorted(content)) == levels(wanted).tobytes()


def test_voices_are_kept_for_their_key_alone(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voices, "MAX_VOICES", 2)
    server, recording = start(opener, keys=(KEY, OTHER)), noise(VOICE.samples)
    url = f"{server.url}/v1/audio/voices"
    sound = {"audio_sample": coded(recording)}

    def kept(name: str, key: str = KEY) -> Any:
        return http(url, "POST", {"name": name, **sound}, key)

    first = kept("a")[1]
    assert [kept(name)[0] for name in ("b", "c", "a")] == [200, 503, 200]
    assert kept("c", OTHER)[0] == 200
    assert [voice["name"] for voice in http(url, key=KEY)[1]["data"]] == ["b", "a"]
    assert http(f"{url}/{first['id']}", key=KEY)[0] == 404  # it was replaced
    for method in ("GET", "DELETE"):
        assert http(f"{url}/a", method, key=OTHER)[0] == 404
        assert http(f"{url}/a", method)[0] == 401
    code, _ = http(f"{server.url}/v1/audio/speech", "POST", {"input": "a", "voice": "a"}, OTHER)
    assert code == 404
    gone = http(f"{url}/a", "DELETE", key=KEY)[1]
    assert (gone["object"], gone["deleted"]) == ("audio.voice.deleted", True)
    assert http(f"{url}/a", key=KEY)[0] == 404


@pytest.mark.parametrize(
    ("table", "status", "words"),
    [
        ({"audio_sample": "AAAA"}, 400, "name is missing"),
        ({"name": "a"}, 400, "expected one recording"),
        ({"name": " "}, 400, "name is no name"),
        ({"name": "default", "audio_sample": "AAAA"}, 400, "the model's own voice"),
        ({"name": "a", "audio_sample": "AAAA"}, 400, "audio_sample is no sound"),
        ({"name": "a", "audio_sample": "AAAA", "ref_audio": "AAAA"}, 400, "expected one recording"),
        ({"name": "a", "prompt": "deep", "type": "prompt"}, 400, "unknown field 'prompt'"),
    ],
)
def test_what_is_no_voice_is_refused(
    start: Starter, table: dict[str, object], status: int, words: str
) -> None:
    server = start(opener)
    check_refusal(server, table, status, words, "audio/voices")
    assert http(f"{server.url}/v1/audio/voices")[1]["data"] == []


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("rate", [16_000, 48_000])
def test_each_file_is_written_in_parts_and_has_the_tone_that_went_in(form: str, rate: int) -> None:
    tone = (12_000 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)).astype(np.int16)
    file = sound_file(form, rate)
    parts = [file.write(tone[at : at + 1_777]) for at in range(0, rate, 1_777)]
    assert sum(map(len, parts[: len(parts) // 2])) > 0  # it does not wait for the end
    content = b"".join([*parts, file.close()])
    if form == "pcm":
        samples, sample_rate = np.frombuffer(content, "<i2") / 32768, rate
    else:
        names = {"opus": "ogg"}
        with av.open(io.BytesIO(content), format=names.get(form, form)) as container:
            frames = list(container.decode(audio=0))
            sample_rate = frames[0].sample_rate
            samples = np.concatenate([frame.to_ndarray()[0] for frame in frames]).astype(np.float64)
            samples /= 32768 if frames[0].format.name.startswith("s16") else 1
    assert 1.0 - 1e-3 <= len(samples) / sample_rate < 1.2
    middle = samples[sample_rate // 4 : sample_rate // 2]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert abs(np.argmax(spectrum) * sample_rate / len(middle) - 440) < 5


@pytest.mark.parametrize("form", ["mp3", "aac"])
def test_a_file_that_has_no_such_rate_is_refused_before_anything_is_spoken(form: str) -> None:
    with pytest.raises(ServeError) as refused:
        sound_file(form, 40_000)
    assert refused.value.kind.code == "unsupported"


async def test_pieces_of_a_text_are_spoken_as_they_are_written(start: Starter, new_client: NewClient) -> None:
    server = start(opener)
    client = await new_client(server).open(audio=["pcm"], buffer=8, seed=5)
    assert client.ready["audio"]["rate"] == PATCH.sample_rate
    heard: list[bytes] = []

    async def listen(until: int) -> None:
        """Take sound until so many texts have ended."""
        async for received in client.messages():
            if isinstance(received, Media):
                heard.append(received.payload)
                until -= received.last
                if not until:
                    return
            elif received["type"] == "chunk":
                await client.send("ack", chunk=received["chunk"])

    for piece in ("ha", "ll"):
        await client.send("text", text=piece)
    await client.send("text", text="o.\n")
    await listen(1)
    assert np.array_equal(
        np.frombuffer(b"".join(heard), "<i2"), levels(said_alone("hallo.", seed=5))
    )  # before the rest is written
    await client.send("text", text="zzzz!\naa", last=True)
    heard.clear()
    await listen(1)
    wanted = levels([*said_alone("zzzz!", seed=5), *said_alone("aa", seed=5)])
    assert np.array_equal(np.frombuffer(b"".join(heard), "<i2"), wanted)
    await client.close()


async def heard(client: AsyncClient, chunks: int = 0) -> list[Media]:
    """The sound of so many chunks, or up to the text's end; each chunk is acknowledged."""
    sound: list[Media] = []
    async for received in client.messages():
        if isinstance(received, Media):
            sound.append(received)
        elif received["type"] == "chunk":
            await client.send("ack", chunk=received["chunk"])
            chunks -= 1
            if not chunks or (sound and sound[-1].last):  # the chunk before a lost socket may be told again
                break
    return sound


async def test_texts_that_come_during_a_pause_count_among_those_that_wait(
    start: Starter, new_client: NewClient
) -> None:
    server = start(opener)
    part = "hallo.\n" * (MAX_PROMPT_LETTERS // len("hallo.\n"))
    fit = MAX_LETTERS_AHEAD // len(part)
    client = await new_client(server).open(audio=["pcm"], seed=3)
    await client.send("pause")
    ids = [await client.send("text", text=part) for _ in range(fit + 1)]
    await client.send("restart")  # drops them
    await client.send("text", text="abc", last=True)
    await client.send("play")
    sound, rejected = [], []
    async for received in client.messages():
        if isinstance(received, Media):
            sound.append(received.payload)
            if received.last:
                break
        elif received["type"] == "rejected":
            rejected.append((received["id"], received["code"]))
        elif received["type"] == "chunk":
            await client.send("ack", chunk=received["chunk"])
    assert rejected == [(ids[-1], "too_large")]
    assert b"".join(sound) == levels(said_alone("abc", seed=3)).tobytes()


@pytest.mark.parametrize("killed", [False, True])
async def test_a_text_is_spoken_on_by_the_next_process(
    start: Starter, tmp_path: Path, killed: bool, new_client: NewClient
) -> None:
    """Its end was not spoken, a piece of it was no sentence yet, and its voice is a recording."""
    store, recording = tmp_path / "store", noise(2 * VOICE.samples)
    first = start(opener, snapshots=str(store), snapshot_every=2)
    texts = ("hallo.", "zzzz.", "ab")
    voice = coded(recording)
    client = await new_client(first).open(audio=["pcm"], seed=3, voice=voice, voice_text="yes")
    await client.send("text", text="hallo.\nzzzz.\na")
    sound = await heard(client, 3)
    if killed:
        (session,) = first.manager.sessions.values()
        await comes(lambda: session.made_chunks == 3 + CREDIT and session.settled)
        shutil.copytree(store, tmp_path / "left")  # as a process that is killed leaves it
    else:
        await client.drop()
        await asyncio.to_thread(first.stop)
    client._url = start(opener, snapshots=str(tmp_path / "left" if killed else store)).url
    await client.resume()
    await client.send("text", text="b", last=True)
    while not sound[-1].last:
        sound += await heard(client)
    samples = recording.astype(np.float32) / 32768
    with open_pool() as pool:
        said_with = pool.encode_voice(continued=samples, text="yes")
    wanted = levels([patch for text in texts for patch in said_alone(text, said_with, seed=3)])
    for media in sound:  # by a killed process some is sent again
        part = wanted[media.first : media.first + media.count]
        assert np.array_equal(np.frombuffer(media.payload, "<i2"), part)
    places = {place for media in sound for place in range(media.first, media.first + media.count)}
    assert places == set(range(len(wanted)))


async def test_a_sentence_goes_on_in_the_voice_of_the_one_before_also_in_the_next_process(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    """Over the socket, across a snapshot within the first sentence, and over HTTP: the same bytes."""
    monkeypatch.setattr(SpeechManifest, "session_positions", 32)
    texts, store = ("abcd!", "zzzz!"), str(tmp_path / "store")
    seed = next(
        seed
        for seed in range(20)
        if len(said_alone(texts[0], seed=seed)) > 4
        and levels(said_in_turn(texts, positions=32, seed=seed)).tobytes()
        != levels(
            [patch for text in texts for patch in said_in_turn([text], positions=32, seed=seed)]
        ).tobytes()
    )
    wanted = levels(said_in_turn(texts, positions=32, seed=seed))
    first = start(opener, snapshots=store)
    client = await new_client(first).open(audio=["pcm"], seed=seed)
    await client.send("text", text=" ".join(texts), last=True)
    sound = await heard(client, 2)
    await client.drop()
    await asyncio.to_thread(first.stop)
    client._url = start(opener, snapshots=store).url
    await client.resume()
    while not sound[-1].last:
        sound += await heard(client)
    for media in sound:
        part = wanted[media.first : media.first + media.count]
        assert np.array_equal(np.frombuffer(media.payload, "<i2"), part)
    assert sound[-1].first + sound[-1].count == len(wanted)
    await client.close()
    content, _ = spoken(start(opener).url, input=" ".join(texts), seed=seed, response_format="pcm")
    assert np.array_equal(np.frombuffer(content, "<i2"), wanted)


def test_an_answer_to_whom_nobody_comes_back_is_not_saved(start: Starter, tmp_path: Path) -> None:
    server = start(opener, snapshots=str(tmp_path / "store"), snapshot_every=1)
    spoken(server.url, input="hallo.\nzzzz", response_format="pcm")
    assert figures(server.url)["seko_serve_snapshots_total result=written"] == 0
    assert list((tmp_path / "store").iterdir()) == []


def test_a_listener_that_leaves_frees_its_row(start: Starter) -> None:
    server = start(opener)
    with socket.socket() as listener:
        ask_by(listener, server.url, input="hallo.\n" * 580, response_format="pcm")
        assert listener.recv(100)[:12] == b"HTTP/1.1 200"
        (session,) = server.manager.sessions.values()
    until(lambda: not server.manager.sessions)
    assert session.facts()["chunks"] < 580 * len(said_alone("hallo."))


def test_a_listener_that_takes_nothing_frees_its_row(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy's sound fits into the kernel's usual buffers, so they are made small here."""
    made = HttpConnection.connection_made

    def with_small_buffers(connection: HttpConnection, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        transport.set_write_buffer_limits(1024)
        made(connection, transport)

    monkeypatch.setattr(HttpConnection, "connection_made", with_small_buffers)
    monkeypatch.setattr(seko_serve.http.connections, "STALL_S", 1.0)
    server = start(opener)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        ask_by(listener, server.url, input="hallo.\n" * 580, response_format="pcm")
        until(lambda: server.manager.sessions)
        (session,) = server.manager.sessions.values()
        until(lambda: not server.manager.sessions)
    assert session.facts()["chunks"] < 580 * len(said_alone("hallo."))


async def test_several_listeners_share_calls_and_hear_their_own(start: Starter) -> None:
    server = start(opener)
    texts = ("abc", "zzzz", "hallo")
    asked = [
        asyncio.to_thread(spoken, server.url, input=text, seed=number, response_format="pcm")
        for number, text in enumerate(texts)
    ]
    for number, (content, _headers) in enumerate(await asyncio.gather(*asked)):
        wanted = levels(said_alone(texts[number], seed=number))
        assert np.array_equal(np.frombuffer(content, "<i2"), wanted)


@pytest.mark.parametrize("form", ["reference", "continued", "both"])
def test_a_voice_is_a_recording_that_is_sent(start: Starter, form: str) -> None:
    server, recording = start(opener), noise(4 * VOICE.samples)
    first, last = recording[: VOICE.samples], recording[VOICE.samples :]
    of_runtime: dict[str, Any] = {"reference": first} if form != "continued" else {}
    of_runtime |= {"continued": last, "text": "yes"} if form != "reference" else {}
    table = {
        "ref_audio": first if form == "reference" else last,
        "reference": first if form == "both" else None,
    }
    sent: dict[str, object] = {name: coded(sound) for name, sound in table.items() if sound is not None}
    if "text" in of_runtime:
        sent["ref_text"] = "yes"
    content, _ = spoken(server.url, input="abc", seed=2, response_format="pcm", **sent)
    with open_pool() as pool:
        samples = {
            name: value if name == "text" else value.astype(np.float32) / 32768
            for name, value in of_runtime.items()
        }
        voice = pool.encode_voice(**samples)
    assert np.array_equal(np.frombuffer(content, "<i2"), levels(said_alone("abc", voice, seed=2)))
    assert content != spoken(server.url, input="abc", seed=2, response_format="pcm")[0]


async def test_streams_go_on_while_the_voice_of_another_session_is_encoded(start: Starter) -> None:
    """As many calls of the encoder as the session has room for, and calls of the other session between them."""
    called: list[str] = []

    def logged(name: str, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(tensors: Any) -> Any:
            called.append(name)
            if name == VOICE_PROGRAM:
                time.sleep(0.02)  # in which the listener takes what was sent
            return run(tensors)

        return call

    @contextmanager
    def logging_opener() -> Iterator[SpeechPool]:
        with open_pool(wrap=logged) as pool:
            yield pool

    server, recording = start(logging_opener), noise(10 * VOICE.patch_samples)
    voice = coded(recording)
    text = "hallo.\n" * 500
    streamed = asyncio.create_task(asyncio.to_thread(spoken, server.url, input=text, response_format="pcm"))
    await comes(lambda: server.manager.sessions)
    called.clear()
    await asyncio.to_thread(spoken, server.url, input="abc", response_format="pcm", ref_audio=voice)
    (session,) = server.manager.sessions.values()  # the first one still speaks
    await server_call(server, session.finish, ServeError("conflict", "enough"))
    with pytest.raises(IncompleteRead):
        await streamed
    calls = [place for place, name in enumerate(called) if name == VOICE_PROGRAM]
    assert len(calls) == 5
    assert all(after - before > 1 for before, after in pairwise(calls))


async def server_call(server: Running, function: Callable[..., None], *arguments: object) -> None:
    """Call a function in the server's event loop."""
    server.manager._loop.call_soon_threadsafe(function, *arguments)


def test_a_voice_that_leaves_no_room_is_refused_before_it_is_encoded(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(opener)

    def encoded(*_: object, **__: object) -> None:
        raise AssertionError("a voice was encoded for a request that is refused")

    monkeypatch.setattr(SpeechPool, "encode_voice_in_parts", encoded)
    recording = noise(200 * VOICE.patch_samples)
    table = {"input": "abc", "ref_audio": coded(recording)}
    check_refusal(server, table, 400, "ref_audio is longer than")


@pytest.mark.parametrize(
    ("table", "status", "words"),
    [
        ({}, 400, "input is missing"),
        ({"input": " ... "}, 400, "with words"),
        ({"input": "😄"}, 400, "input has nothing to say"),
        ({"input": "a" * 5_000}, 413, "5000 letters"),
        ({"input": "a", "voice": "mine"}, 404, "ref_audio"),
        ({"input": "a", "voice": ["alloy"]}, 400, "voice is "),
        ({"input": "a", "speed": 2}, 400, "leave speed out"),
        ({"input": "a", "response_format": "ape"}, 400, "mp3"),
        ({"input": "a", "instructions": "be glad"}, 415, "leave instructions out"),
        ({"input": "a", "max_new_tokens": 0}, 400, "max_new_tokens is 0"),
        ({"input": "a", "guidance": 1e9}, 400, "guidance"),
        ({"input": "a", "temperature": "hot"}, 400, "temperature is 'hot'"),
        ({"input": "a", "task_type": "Base"}, 400, "task_type"),
        ({"input": "a", "task_type": "VoiceDesign"}, 400, "task_type"),
        ({"input": "a", "stream": False, "stream_format": "sse"}, 400, "stream is false"),
        ({"input": "a", "stream": "maybe"}, 400, "stream is 'maybe'"),
        ({"input": "a", "stream_format": "x"}, 400, "sse"),
        ({"input": "a", "model": "other"}, 404, "toy-speech"),
        ({"input": "a", "model": "gpt-4o-mini-tts-2025-12-15\r\na: b"}, 404, "toy-speech"),
        ({"input": "a", "seed": -1}, 400, "expected 0 or more"),
        ({"input": "a", "ref_text": "b"}, 400, "ref_audio is missing"),
        (
            {"input": "a", "ref_audio": "AAAA", "reference": "AAAA"},
            400,
            "stands beside ref_audio with ref_text",
        ),
        ({"input": "a", "ref_text": 1, "ref_audio": "AAAA"}, 400, "ref_text is no text"),
        ({"input": "a", "ref_audio": 1}, 400, "ref_audio is of type int"),
        ({"input": "a", "ref_audio": "AAAA"}, 400, "ref_audio is no sound"),
        ({"input": "a", "response_format": []}, 400, "response_format"),
        ({"input": "a", "more": 1}, 400, "unknown field 'more'"),
    ],
)
def test_what_cannot_be_spoken_is_refused(
    start: Starter, table: dict[str, object], status: int, words: str
) -> None:
    server = start(opener)
    check_refusal(server, table, status, words)
    assert http(f"{server.url}/ready")[1]["free"] == server.manager.capacity


async def test_a_sentence_that_does_not_fit_ends_the_session_with_the_reason(
    start: Starter, new_client: NewClient
) -> None:
    server = start(opener)
    client = await new_client(server).open(codecs=[], audio=["pcm"])
    await client.send("text", text="a" * 100, last=True)
    with pytest.raises(ServeError) as ended:
        async for _ in client.messages():
            pass
    assert ended.value.kind.code == "bad_request"
    assert "speak shorter texts" in ended.value.message


@contextmanager
def failing_opener() -> Iterator[SpeechPool]:
    """A pool whose calls fail."""

    def fail(**_: object) -> None:
        raise EngineRunError("the engine failed")

    with open_pool() as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "serve_next", fail)
        yield pool


TOO_LONG = "a" * 100


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_an_error_before_the_first_sound_has_its_status(start: Starter, stream_format: str) -> None:
    for opened, text, status, words in (
        (opener, TOO_LONG, 400, "speak shorter texts"),
        (failing_opener, "hallo", 500, "could not be made"),
    ):
        server = start(opened)
        table = {"input": text, "stream_format": stream_format}
        code, answer = http(f"{server.url}/v1/audio/speech", "POST", table)
        assert (code, words in answer["error"]["message"]) == (status, True), answer
        assert http(f"{server.url}/v1/sessions")[1]["data"] == []
        assert figures(server.url)[f"seko_serve_refused_total code={answer['error']['code']}"] == 1


@contextmanager
def opener_without_q() -> Iterator[SpeechPool]:
    """A pool that fails over a prompt with the letter q."""

    def wrapped(name: str, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(tensors: Any) -> Any:
            if name.startswith("prefill") and ord("q") - ord("a") in tensors[1].tolist():
                raise EngineRunError("the engine failed")
            return run(tensors)

        return call

    with open_pool(wrap=wrapped) as pool:
        yield pool


def test_an_error_behind_the_first_sound_is_no_end_of_the_sound(start: Starter) -> None:
    """What was sent before it is the beginning of the sound; how much of it, no one promises."""
    server = start(opener_without_q)
    text = "hallo.\nqqqq"
    with pytest.raises(IncompleteRead) as broken:
        spoken(server.url, input=text, seed=3, response_format="pcm")
    wanted = levels(said_alone("hallo.", seed=3)).astype("<i2").tobytes()
    assert broken.value.partial
    assert wanted.startswith(broken.value.partial)
    content, _ = spoken(server.url, input=text, seed=3, response_format="pcm", stream_format="sse")
    *deltas, last = events_of(content)
    sound = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
    assert sound
    assert wanted.startswith(sound)
    assert (last["type"], last["error"]["code"]) == ("error", "internal")
    assert http(f"{server.url}/v1/sessions")[1]["data"] == []
    assert figures(server.url)["seko_serve_refused_total code=internal"] == 2


def test_no_sentence_is_too_long_once_sound_was_sent(start: Starter) -> None:
    """Each sentence is measured with the voice before the answer begins."""
    server, recording = start(opener), noise(9 * VOICE.patch_samples)
    voice = {"ref_audio": coded(recording)}
    for text, more in ((f"hallo.\n{TOO_LONG}", {}), ("hallo.\nzzzz zz", voice)):
        check_refusal(server, {"input": text, **more}, 400, "speak shorter texts")
    assert server.manager.device.metrics.opening._sum.get() == 0  # no row was taken


async def test_a_text_with_nothing_to_say_is_applied_and_says_so(
    start: Starter, new_client: NewClient
) -> None:
    server = start(opener)
    client = await new_client(server).open(audio=["pcm"], buffer=8)
    for number, (text, last) in enumerate((("😄", True), ("...", False), ("\n", True))):
        await client.send("text", text=text, last=last)
        async for received in client.messages():
            if not isinstance(received, Media) and received["type"] == "applied":
                assert received["note"] == "the text has nothing to say: it has no letter and no digit"
                assert (received["id"], received["chunk"]) == (str(number + 1), 0)
                break
    await client.send("text", text="hallo!", last=True)
    wanted = said_alone("hallo!")
    assert np.array_equal(
        np.frombuffer(b"".join(media.payload for media in await heard(client)), "<i2"), levels(wanted)
    )
    await client.close()


@pytest.mark.parametrize(
    ("text", "words"), [("a\0b", "a zero character"), ("\ud83d", "half of a surrogate pair")]
)
async def test_a_text_that_no_tokenizer_takes_is_refused_by_its_name(
    start: Starter, text: str, words: str, new_client: NewClient
) -> None:
    server = start(opener)
    for path, table, field in (
        ("audio/speech", {"input": text}, "input"),
        ("audio/speech", {"input": "a", "ref_audio": "AAAA", "ref_text": text}, "ref_text"),
        ("sessions", {"voice": "AAAA", "voice_text": text}, "voice_text"),
    ):
        check_refusal(server, table, 400, f"{field} has {words}", path)
    client = await new_client(server).open(audio=["pcm"], buffer=8)
    await client.send("text", text=text, last=True)
    async for received in client.messages():
        if not isinstance(received, Media) and received["type"] == "rejected":
            assert (received["code"], f"text.text has {words}" in received["message"]) == (
                "bad_request",
                True,
            )
            break
    await client.close()


def spoken_in_http_1_0(url: str, **table: object) -> HTTPResponse:
    """The answer to a client of HTTP/1.0, such as a proxy of that version."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection._http_vsn, connection._http_vsn_str = 10, "HTTP/1.0"  # type: ignore[attr-defined]
    with closing(connection):
        connection.request("POST", "/v1/audio/speech", json.dumps(table), {"connection": "close"})
        return connection.getresponse()


def test_sound_without_chunks_is_whole_or_an_error(start: Starter) -> None:
    server = start(opener)
    with spoken_in_http_1_0(server.url, input="hallo", seed=3, response_format="pcm") as answer:
        content = answer.read()
        assert (answer.status, answer.headers["content-length"]) == (200, str(len(content)))
    assert np.array_equal(np.frombuffer(content, "<i2"), levels(said_alone("hallo", seed=3)))
    with spoken_in_http_1_0(server.url, input=f"hallo.\n{TOO_LONG}", response_format="pcm") as answer:
        assert (answer.status, "speak shorter texts" in json.loads(answer.read())["error"]["message"]) == (
            400,
            True,
        )
    assert http(f"{server.url}/v1/sessions")[1]["data"] == []


def test_parts_of_prompts_keep_nobody_out() -> None:
    """They take longer than a patch sounds, but come once a sentence."""
    times = CallTimes((1, 2))
    times.record(PREFILL, 1, 9.0)
    assert times.slowest(but=(PREFILL,)) == {}
    times.record("step", 1, 0.1)
    assert times.slowest(but=(PREFILL,)) == {1: 0.1, 2: 0.2}


def test_an_artifact_that_speaks_is_opened_for_its_pool(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seko_runtime.opening.artifact.open_backend", lambda *_: ToyBackend())
    folder = write_artifact(tmp_path / "toy")
    server = start(lambda: pool_of(folder))
    content, _ = spoken(server.url, input="hallo", seed=3, response_format="pcm")
    assert np.array_equal(np.frombuffer(content, "<i2"), levels(said_alone("hallo", seed=3)))


def test_models_of_the_other_kind_are_told_so(start: Starter) -> None:
    code, answer = http(f"{start().url}/v1/audio/speech", "POST", {"input": "a"})
    assert (code, answer["error"]["code"]) == (415, "unsupported")
    server = start(opener)
    (model,) = http(f"{server.url}/v1/models")[1]["data"]
    assert (model["kind"], model["takes"]) == ("speech", {"text": True, "voice": 1})
    code, answer = http(f"{server.url}/v1/videos", "POST", {"prompt": "a"})
    assert (code, answer["error"]["code"]) == (415, "unsupported")

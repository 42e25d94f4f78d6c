"""OpenAI's realtime events, sent by its own client: a text goes in, and what the model says comes out."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import av
import numpy as np
import pytest
from starlette.websockets import WebSocketDisconnect

import seko_serve.http.access
from seko_runtime.speech.prompts import assemble
from seko_serve.speech import realtime
from seko_serve.speech.fields import MAX_INPUT_LETTERS
from tests.speech.texts import said_in_turn
from tests.speech.toy_speech import MARKS, PATCH, VOICE, C, P, Tokens, all_alone, open_pool

from .bounded import LIMIT_S, comes
from .conftest import Running, Starter
from .test_controls import noise, wav
from .test_server import http
from .test_speech import KEY, OTHER, levels, opener, said_alone, spoken

if TYPE_CHECKING:
    from .fleets import FleetStarter

openai = pytest.importorskip("openai", reason="needs openai, of the extra clients")

MODEL = "toy-speech"
ENDED = next(  # what the toy ends itself
    text
    for text in ("abc", "hallo.", "zz", "abcd", "noon", "yes", "six", "lamp")
    if all_alone(assemble(Tokens().ids(text), (P, C), marks=MARKS), 16)[1]
)
OWN: dict[str, Any] = {"type": "audio/pcm", "rate": PATCH.sample_rate}


@asynccontextmanager
async def conversation(server: Running, *, key: str = "none", model: str = MODEL) -> AsyncIterator[Any]:
    async with (
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client,
        client.realtime.connect(model=model) as connection,
    ):
        yield connection


async def until(connection: Any, kind: str) -> list[Any]:
    """Take events up to the first of a kind."""
    taken = []
    async for event in connection:
        taken.append(event)
        if event.type == kind:
            return taken
    raise AssertionError(f"no {kind}, but {[event.type for event in taken]}")


def sound_of(events: list[Any]) -> Any:
    deltas = (event.delta for event in events if event.type == "response.output_audio.delta")
    return np.frombuffer(b"".join(map(base64.b64decode, deltas)), "<i2")


def item(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


async def say(connection: Any, text: str, **response: Any) -> list[Any]:
    await connection.conversation.item.create(item=item(text))
    await connection.response.create(response=response)
    return await until(connection, "response.done")


async def refused(connection: Any) -> Any:
    return (await until(connection, "error"))[-1].error


@pytest.mark.shows("live-speech")
async def test_a_text_is_spoken_with_the_events_that_the_client_knows(start: Starter) -> None:
    server = start(opener)
    async with conversation(server) as connection:
        (created,) = await until(connection, "session.created")
        assert created.session.audio.output.format.rate == 24_000
        await connection.session.update(
            session={"type": "realtime", "audio": {"output": {"voice": "alloy", "format": OWN}}}
        )
        (updated,) = await until(connection, "session.updated")
        assert (updated.session.model, updated.session.audio.output.voice) == (MODEL, "alloy")
        events = await say(connection, ENDED)
        assert [event.type for event in events if event.type != "response.output_audio.delta"] == [
            "conversation.item.added",
            "conversation.item.done",
            "response.created",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_audio_transcript.delta",
            "response.output_audio.done",
            "response.output_audio_transcript.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.done",
        ]
        wanted = said_alone(ENDED)
        assert np.array_equal(sound_of(events), levels(wanted))
        response = events[-1].response
        assert (response.status, response.usage.output_tokens) == ("completed", len(wanted))
        assert response.output[0].content[0].transcript == ENDED
        again = await say(connection, "abc")  # of the texts, only the new one
        assert np.array_equal(sound_of(again), levels(said_alone("abc")))
    assert http(f"{server.url}/v1/sessions")[1]["data"] == []


async def test_sound_at_openais_rate_is_the_models_resampled(start: Starter) -> None:
    async with conversation(start(opener), model="gpt-realtime") as connection:
        text = "hallo.\nzzzz.\nabcd"
        sound, whole = sound_of(await say(connection, text)), levels(said_in_turn(text.split()))
        frame = av.AudioFrame.from_ndarray(whole[None], format="s16", layout="mono")
        frame.sample_rate = PATCH.sample_rate
        resampler = av.AudioResampler(format="s16", layout="mono", rate=24_000)
        wanted = [part.to_ndarray()[0] for part in (*resampler.resample(frame), *resampler.resample(None))]
        assert np.array_equal(sound, np.concatenate(wanted))


async def test_a_response_has_its_own_texts_voice_and_length(start: Starter) -> None:
    server = start(opener)
    recording = base64.b64encode(wav(noise(VOICE.samples), VOICE.sample_rate)).decode()
    http(f"{server.url}/v1/audio/voices", "POST", {"name": "ada", "ref_audio": recording})
    plain, _ = spoken(server.url, input="abc.\n\nzzzz", voice="ada", response_format="pcm")
    async with conversation(server) as connection:
        await connection.conversation.item.create(item=item("left for later"))
        audio = {"output": {"voice": "ada", "format": OWN}}
        events = await say(
            connection, "", audio=audio, input=[item("abc."), item("zzzz")], metadata={"a": "b"}
        )
        assert sound_of(events).tobytes() == plain
        assert (events[-1].response.metadata, events[-1].response.audio.output.voice) == ({"a": "b"}, "ada")
        short = await say(connection, "", audio={"output": {"format": OWN}}, max_output_tokens=1)
        assert len(sound_of(short)) == PATCH.samples
        done = short[-1].response
        assert (done.status, done.status_details.reason) == ("incomplete", "max_output_tokens")
        assert done.output[0].content[0].transcript == "left for later"


async def test_an_item_follows_the_one_that_it_names(start: Starter) -> None:
    async with conversation(start(opener)) as connection:

        async def add(text: str, behind: str | None = None) -> tuple[str, str | None]:
            more = {} if behind is None else {"previous_item_id": behind}
            await connection.conversation.item.create(item=item(text), **more)
            done = (await until(connection, "conversation.item.done"))[-1]
            return done.item.id, done.previous_item_id

        async def spoken_text() -> tuple[str, str]:
            await connection.response.create()
            (said,) = (await until(connection, "response.done"))[-1].response.output
            return said.id, said.content[0].transcript

        first, before = await add("abc")
        assert before is None
        third, _ = await add("zz")
        assert (await add("abcd", first))[1] == first
        _, before = await add("six", "root")
        assert before is None
        said, text = await spoken_text()
        assert text == "six\n\nabc\n\nabcd\n\nzz"
        _, before = await add("yes")
        assert before == said
        assert (await add("noon", third))[1] == said  # what was spoken stands before what waits
        await connection.conversation.item.create(item=item("abc"), previous_item_id="item_none")
        assert (await refused(connection)).param == "previous_item_id"
        assert (await spoken_text())[1] == "noon\n\nyes"


async def test_texts_that_no_response_can_hold_together_do_not_wait(start: Starter) -> None:
    async with conversation(start(opener)) as connection:
        await connection.conversation.item.create(
            item=item(ENDED + " " * (MAX_INPUT_LETTERS - len(ENDED) - 1))
        )
        await connection.conversation.item.create(item=item("a"))  # no letter too many, without the gap
        assert (await refused(connection)).code == "too_large"
        await connection.response.create()
        assert (await until(connection, "response.done"))[-1].response.status == "completed"


async def test_a_response_is_cancelled_and_its_row_is_free(start: Starter) -> None:
    def held(_: str, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(tensors: Any) -> Any:
            time.sleep(0.05)
            return run(tensors)

        return call

    @contextmanager
    def slow() -> Any:
        with open_pool(wrap=held) as pool:
            yield pool

    server = start(slow)
    async with conversation(server) as connection:  # which leaves while it is spoken
        await connection.conversation.item.create(item=item("hallo.\n" * 300))
        await connection.response.create()
        await until(connection, "response.output_audio.delta")
        await connection.response.create(event_id="mine")
        error = await refused(connection)
        assert (error.code, error.type, error.event_id) == ("conflict", "invalid_request_error", "mine")
        await connection.response.cancel()
        done = (await until(connection, "response.done"))[-1].response
        assert (done.status, done.status_details.reason) == ("cancelled", "client_cancelled")
        assert http(f"{server.url}/v1/sessions")[1]["data"] == []
        await connection.response.cancel()
        assert (await refused(connection)).code == "not_found"
        assert (await say(connection, ENDED))[-1].response.status == "completed"
        await connection.conversation.item.create(item=item("hallo.\n" * 300))
        await connection.response.create()
        await until(connection, "response.output_audio.delta")
    await comes(lambda: not server.manager.sessions)


async def test_a_response_whose_client_leaves_before_its_first_sound_frees_its_row(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, left = realtime._Conversation._send, threading.Event()

    async def gone(conversation: Any, kind: str, **fields: object) -> None:
        if kind == "response.output_item.added":
            left.set()
            raise WebSocketDisconnect(1006)
        await send(conversation, kind, **fields)

    monkeypatch.setattr(realtime._Conversation, "_send", gone)
    server = start(opener, lease_s=3600)
    async with conversation(server) as connection:
        await connection.conversation.item.create(item=item(ENDED))
        await connection.response.create()
        assert await asyncio.to_thread(left.wait, LIMIT_S)
    await comes(lambda: not server.manager.sessions)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "unsupported", "type"),
    ({"type": "conversation.item.delete", "item_id": "a"}, "unsupported", "type"),
    ({"type": "session.update", "session": {"type": "transcription"}}, "bad_request", "type"),
    ({"type": "session.update", "session": {"tools": [{"type": "function"}]}}, "bad_request", "tools"),
    ({"type": "session.update", "session": {"instructions": "Be glad"}}, "unsupported", "instructions"),
    ({"type": "session.update", "session": {"output_modalities": ["text"]}}, "unsupported", "output_modalities"),
    ({"type": "session.update", "session": {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}},
     "unsupported", "audio.input"),
    ({"type": "session.update", "session": {"audio": {"output": {"voice": "nobody"}}}}, "not_found", "voice"),
    ({"type": "session.update", "session": {"audio": {"output": {"format": {"type": "audio/pcmu"}}}}},
     "unsupported", "audio.output.format.type"),
    ({"type": "session.update", "session": {"audio": {"output": {"format": {"type": "audio/pcm", "rate": 8}}}}},
     "unsupported", "audio.output.format.rate"),
    ({"type": "session.update", "session": {"audio": {"output": {"speed": 2}}}}, "bad_request", "audio.output.speed"),
    ({"type": "conversation.item.create", "item": {"type": "function_call", "name": "a", "arguments": ""}},
     "bad_request", "name"),
    ({"type": "conversation.item.create", "item": {"type": "message", "role": "system", "content": []}},
     "unsupported", "item.type"),
    ({"type": "conversation.item.create", "item": {**item(""), "content": [{"type": "input_audio"}]}},
     "unsupported", "item.content"),
    ({"type": "conversation.item.create", "item": item("a" * 5000)}, "too_large", ""),
    ({"type": "response.create"}, "bad_request", "input"),
    ({"type": "response.create", "response": {"input": [item("😄")]}}, "bad_request", "input"),
    ({"type": "response.create", "response": {"max_output_tokens": 0}}, "bad_request", "max_output_tokens"),
]  # fmt: skip


async def test_what_it_does_not_do_is_refused_by_name_and_the_socket_goes_on(start: Starter) -> None:
    async with conversation(start(opener)) as connection:
        for event, code, param in REFUSED:
            await connection.send({**event, "event_id": "sent"})
            error = await refused(connection)
            assert (error.code, error.param or "", error.event_id) == (code, param, "sent"), event
        await connection.send_raw("[]")
        assert (await refused(connection)).message == "an event is a JSON object"
        assert (await say(connection, ENDED))[-1].response.status == "completed"


async def test_of_too_many_events_one_is_refused_and_the_next_wait(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seko_serve.http.access, "MESSAGES", (20.0, 3.0))
    async with conversation(start(opener)) as connection:
        for _ in range(30):
            await connection.send_raw("[]")
        codes = [(await refused(connection)).code for _ in range(30)]
        assert "too_many_requests" in codes
        assert codes.count("bad_request") > 8


async def test_a_socket_needs_the_key_the_model_and_a_speaking_artifact(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def error_of(server: Running, **options: Any) -> str:
        async with conversation(server, **options) as connection:
            return str((await refused(connection)).code)

    server = start(opener, keys=(KEY, OTHER))
    assert await error_of(server, key="another-key-than-those") == "unauthorized"
    assert await error_of(server, key=KEY, model="other") == "not_found"
    assert await error_of(start()) == "unsupported"
    monkeypatch.setattr(realtime, "IDLE_S", 0.05)
    async with conversation(server, key=OTHER) as connection:
        assert [event.type async for event in connection] == ["session.created"]


async def test_by_a_gateway_the_client_is_sent_to_a_box(start_fleet: FleetStarter) -> None:
    from .fleets import KEYS

    fleet = await start_fleet(keys=KEYS)
    box, path = await fleet.box(opener, keys=KEYS), f"{fleet.url}{realtime.PATH}/link?model="
    for model, expected in (("another", 404), ("gpt-realtime", 201), (MODEL, 201)):
        status, link = await asyncio.to_thread(http, path + model, "POST", {}, KEYS[0])
        assert status == expected, (model, link)
    assert link["url"].startswith(box.facts().url)
    at, _, query = link["url"].partition("/realtime?")
    given = dict(parse_qsl(query))
    async with (
        openai.AsyncOpenAI(api_key="none", websocket_base_url=at, max_retries=0) as client,
        client.realtime.connect(model=MODEL, extra_query=given) as connection,
    ):
        await until(connection, "session.created")
        events = await say(connection, ENDED, audio={"output": {"format": OWN}})
        assert np.array_equal(sound_of(events), levels(said_alone(ENDED)))
    async with (
        openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key=KEYS[0], max_retries=0) as client,
        client.realtime.connect(model=MODEL) as connection,
    ):
        assert "/link gives" in (await refused(connection)).message

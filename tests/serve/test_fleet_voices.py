"""Voices that a fleet keeps: every box of the artifact speaks with them, for the key that sent them alone."""

from __future__ import annotations

import base64
import time
from collections.abc import Generator
from typing import Any

import pytest

from seko_runtime.speech.pool import SpeechPool
from seko_runtime.speech.voice import Voice
from seko_serve.fleet import choice
from seko_serve.speech import voices
from tests.speech.toy_speech import VOICE

from .fleets import KEYS, Fleet, FleetStarter
from .test_controls import noise, wav
from .test_fleet_gateway import ask
from .test_speech import opener

aiohttp = pytest.importorskip("aiohttp", reason="needs seko-serve[ray]")
RECORDING = base64.b64encode(wav(noise(4 * VOICE.samples), VOICE.sample_rate)).decode()
PATH = "/v1/audio/voices"


async def speak(fleet: Fleet, **table: object) -> tuple[int, bytes]:
    """Speak as clients do that follow a redirect."""
    table = {"input": "abc", "seed": 2, "response_format": "pcm", **table}
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(f"{fleet.url}/v1/audio/speech", json=table) as answer,
    ):
        return answer.status, await answer.read()


async def keep(fleet: Fleet, name: str, key: str = KEYS[0]) -> tuple[int, Any]:
    return await ask(fleet, PATH, "POST", {"name": name, "ref_audio": RECORDING}, key)


async def names(fleet: Fleet, key: str = KEYS[0]) -> list[str]:
    return [voice["name"] for voice in (await ask(fleet, PATH, key=key))[1]["data"]]


async def test_a_voice_that_one_box_encoded_speaks_at_another_that_came_later(
    start_fleet: FleetStarter,
) -> None:
    fleet = await start_fleet(keys=KEYS)
    first = await fleet.box(opener, keys=KEYS)
    status, voice = await keep(fleet, "ada")
    assert (status, voice["name"]) == (200, "ada"), voice
    wanted = await speak(fleet, ref_audio=RECORDING)
    assert wanted[0] == 200
    await fleet.box(opener, keys=KEYS)
    await fleet.stop(first)
    for name in ("ada", voice["id"]):
        assert await speak(fleet, voice=name) == wanted
    assert (await ask(fleet, PATH, key=KEYS[0]))[1]["data"] == [voice]
    assert await ask(fleet, f"{PATH}/ada", key=KEYS[0]) == (200, voice)
    assert (await ask(fleet, f"{PATH}/{voice['id']}", "DELETE", key=KEYS[0]))[1]["deleted"]
    assert (await ask(fleet, f"{PATH}/ada", key=KEYS[0]))[0] == 404
    assert (await speak(fleet, voice="ada"))[0] == 404


@pytest.mark.parametrize("path", [PATH, "/v1/sessions"])
async def test_a_box_that_encodes_a_voice_is_given_longer_to_answer(
    path: str, monkeypatch: pytest.MonkeyPatch, fleet: Fleet
) -> None:
    await fleet.box(opener)
    real = SpeechPool.encode_voice_in_parts

    def slow(pool: SpeechPool, **recordings: Any) -> Generator[None, None, Voice]:
        time.sleep(0.5)
        return (yield from real(pool, **recordings))

    monkeypatch.setattr(SpeechPool, "encode_voice_in_parts", slow)
    monkeypatch.setattr("seko_serve.fleet.boxes.ANSWER_S", 0.2)
    table = {"name": "ada", "ref_audio": RECORDING} if path == PATH else {"voice": RECORDING}
    status, answer = await ask(fleet, path, "POST", table)
    assert status < 400, answer


async def test_a_link_to_speech_takes_one_request_without_a_key_at_a_box(start_fleet: FleetStarter) -> None:
    fleet = await start_fleet(keys=KEYS)
    await fleet.box(opener, keys=KEYS)
    status, link = await ask(fleet, "/v1/audio/speech/link", "POST", key=KEYS[0])
    assert status == 201
    async with aiohttp.ClientSession() as client:
        for wanted in (200, 401):
            async with client.post(link["url"], json={"input": "abc", "response_format": "pcm"}) as said:
                assert (said.status, bool(await said.read())) == (wanted, True)


async def test_voices_of_a_key_are_counted_over_all_boxes_and_are_its_own(
    monkeypatch: pytest.MonkeyPatch, start_fleet: FleetStarter
) -> None:
    monkeypatch.setattr(voices, "MAX_VOICES", 2)
    fleet = await start_fleet(keys=KEYS)
    for _ in range(2):
        await fleet.box(opener, keys=KEYS)
    assert [(await keep(fleet, name))[0] for name in "abcab"] == [200, 200, 503, 200, 200]
    assert (await keep(fleet, "c", KEYS[1]))[0] == 200
    assert (await names(fleet), await names(fleet, KEYS[1])) == (["a", "b"], ["c"])
    assert (await ask(fleet, f"{PATH}/a", key=KEYS[1]))[0] == 404
    assert (await ask(fleet, PATH))[0] == 401


async def test_a_voice_belongs_to_an_artifact(start_fleet: FleetStarter) -> None:
    fleet = await start_fleet(keys=KEYS)
    first = await fleet.box(opener, keys=KEYS)
    await keep(fleet, "ada")
    second = await fleet.box(opener, keys=KEYS, digest="0" * 64)
    assert await names(fleet) == ["ada"]
    for box, wanted in ((first, 200), (second, 404)):
        url = f"{box.facts().inside}{PATH}/ada"
        async with aiohttp.request("GET", url, headers={"authorization": f"Bearer {KEYS[0]}"}) as answer:
            assert answer.status == wanted
    await fleet.stop(first)
    assert await names(fleet) == []


async def test_a_gateway_whose_rows_are_old_lists_the_voices_of_the_boxes_that_run(
    monkeypatch: pytest.MonkeyPatch, start_fleet: FleetStarter
) -> None:
    monkeypatch.setattr(choice, "FRESH_S", 600.0)
    fleet = await start_fleet(keys=KEYS)
    first = await fleet.box(opener, keys=KEYS)
    second = await fleet.box(opener, keys=KEYS, digest="0" * 64)
    await keep(fleet, "ada")
    assert await names(fleet) == ["ada"]
    third = await fleet.box(opener, keys=KEYS, digest="1" * 64)  # the gateway does not know it yet
    await fleet.stop(second)
    await fleet.stop(first)
    assert await names(fleet) == []
    assert (await ask(fleet, f"{PATH}/ada", key=KEYS[0]))[0] == 404
    await fleet.stop(third)
    assert (await ask(fleet, PATH, key=KEYS[0]))[0] == 503


async def test_a_fleet_without_speech_keeps_no_voices(fleet: Fleet) -> None:
    assert (await ask(fleet, PATH))[0] == 503
    await fleet.box()
    status, answer = await ask(fleet, PATH, "POST", {"name": "ada", "ref_audio": RECORDING})
    assert (status, answer["error"]["code"]) == (415, "unsupported")

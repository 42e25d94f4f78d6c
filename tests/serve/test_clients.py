"""Clients that others wrote, on loopback: what they send is taken, and what they read is there."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seko_runtime.speech.voice import NO_VOICE
from tests.runtime import toy_whole
from tests.speech.toy_speech import VOICE, open_pool

from .conftest import Running, Starter
from .outside_clients import sglang_clients, vllm_omni_benchmark
from .test_controls import noise, wav
from .test_server import PROMPT
from .test_speech import levels, said_alone
from .test_speech import opener as speech_opener
from .test_videos import FPS, SIZE, STEPS, picture, shape_of
from .toys import world_opener

__all__ = ["picture"]
LIMIT_S = 120
pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")


def openai_client(server: Running) -> Any:
    openai = pytest.importorskip("openai", reason="needs openai, of the extra clients")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def in_own_process(script: str, *arguments: str, path: Path | None = None) -> str:
    """Run a script as a process of its own, as its libraries warn and patch others; return what it prints."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(path or ""),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_openais_client_makes_videos(start: Starter, picture: bytes) -> None:
    server = start()
    client = openai_client(server)
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).created == model.created
    video = client.videos.create_and_poll(prompt=PROMPT, seconds="1", size=SIZE, poll_interval_ms=20)
    assert (video.status, video.prompt, video.seconds, video.size) == ("completed", PROMPT, "1", SIZE)
    assert shape_of(client.videos.download_content(video.id).read())[0] == FPS
    for reference in (picture, ("a.png", picture, "image/png")):
        assert client.videos.create(prompt=PROMPT, input_reference=reference).status == "queued"
    more = {"num_frames": 5, "fps": FPS, "num_inference_steps": STEPS, "seed": 7}
    other = client.videos.create(prompt=PROMPT, extra_body=more)
    assert {name: getattr(other, name) for name in more} == more
    assert len(client.videos.list().data) == 4
    assert client.videos.delete(video.id).deleted


def test_openais_client_understands_refusals(start: Starter) -> None:
    openai = pytest.importorskip("openai", reason="needs openai, of the extra clients")
    client = openai_client(start())
    with pytest.raises(openai.BadRequestError) as refused:
        client.videos.create(prompt=PROMPT, size="720x1280")
    assert (refused.value.code, refused.value.param) == ("bad_request", "size")
    assert refused.value.type == "invalid_request_error"
    video = client.videos.create(prompt=PROMPT, seconds="1")
    refusals: list[Callable[[], object]] = [
        lambda: client.videos.remix(video.id, prompt="b"),
        lambda: client.videos.edit(prompt="b", video=b"0"),
        lambda: client.videos.extend(prompt="b", seconds="4", video=b"0"),
        lambda: client.videos.download_content(video.id, variant="thumbnail"),
        lambda: client.videos.create(
            prompt=PROMPT, extra_body={"input_reference": {"image_url": "https://a/b"}}
        ),
    ]
    for refuse in refusals:
        with pytest.raises(openai.APIStatusError) as refused:
            refuse()
        assert (refused.value.status_code, refused.value.code) == (415, "unsupported")


def test_openais_client_speaks(start: Starter) -> None:
    client = openai_client(start(speech_opener))
    plain = client.audio.speech.create(
        model="toy-speech", voice="default", input="abc", response_format="pcm"
    )
    assert np.array_equal(np.frombuffer(plain.content, "<i2"), levels(said_alone("abc")))
    stock = {
        "model": "gpt-4o-mini-tts",
        "voice": "alloy",
        "input": "abc",
        "response_format": "pcm",
        "speed": 1.0,
    }
    with client.audio.speech.with_streaming_response.create(**stock) as answer:
        assert answer.headers["seko-note"].startswith("model gpt-4o-mini-tts is toy-speech")
        assert b"".join(answer.iter_bytes()) == plain.content
    recording = ("a.wav", wav(noise(4 * VOICE.samples), VOICE.sample_rate), "audio/wav")
    voice = client.audio.voices.create(name="mine", audio_sample=recording, consent="cons_1")
    kept = client.audio.speech.create(**{**stock, "voice": {"id": voice.id}})
    assert kept.content != plain.content
    assert kept.content == client.audio.speech.create(**{**stock, "voice": "mine"}).content
    assert client.audio.voices.delete(voice.id).deleted


LITELLM = """
    import sys, time, warnings
    warnings.simplefilter("ignore")
    import litellm

    url, prompt, size, model, picture, speaks = sys.argv[1:]
    for provider in ("openai", "hosted_vllm"):
        how = {"custom_llm_provider": provider, "api_base": url + "/v1", "api_key": "none"}
        video = litellm.video_generation(
            model=f"{provider}/{model}", prompt=prompt, seconds="1", size=size,
            input_reference=open(picture, "rb"), **how
        )
        while video.status in ("queued", "in_progress"):
            time.sleep(0.05)
            video = litellm.video_status(video_id=video.id, **how)
        content = litellm.video_content(video_id=video.id, **how)
        print(provider, video.status, video.seconds, content[4:8])
    where = {"api_base": speaks + "/v1", "api_key": "none"}
    answer = litellm.speech(model="openai/tts-1", voice="alloy", input="abc", response_format="pcm", **where)
    print(answer.content.hex())
"""


@pytest.mark.slow
def test_litellm_makes_videos_and_speaks(start: Starter, picture: bytes, tmp_path: Path) -> None:
    pytest.importorskip("tiktoken", reason="needs litellm, of the extra clients")
    server, speaks = start(), start(speech_opener)
    model = server.manager.device.manifest.name
    (tmp_path / "a.png").write_bytes(picture)
    told = in_own_process(
        LITELLM, server.url, PROMPT, SIZE, model, str(tmp_path / "a.png"), speaks.url
    ).splitlines()
    assert told[:-1] == [f"{name} completed 1 b'ftyp'" for name in ("openai", "hosted_vllm")]
    assert np.array_equal(np.frombuffer(bytes.fromhex(told[-1]), "<i2"), levels(said_alone("abc")))


VLLM_OMNI = """
    import asyncio, json, sys, warnings
    warnings.simplefilter("ignore")
    import aiohttp
    from vllm_omni.benchmarks.patch.patch import async_request_openai_videos_omni
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput

    url, prompt, model, references, fields = sys.argv[1:]

    async def main():
        async with aiohttp.ClientSession() as session:
            for reference in (None, *json.loads(references)):
                asked = RequestFuncInput(
                    prompt, url + "/v1/videos", 1, 1, model,
                    extra_body={**json.loads(fields), "poll_interval_s": 0.02}, multi_modal_content=reference,
                )
                told = await async_request_openai_videos_omni(asked, session)
                print(json.dumps([told.success, told.video_frames, told.video_duration, told.error]))

    asyncio.run(main())
"""


@pytest.mark.slow
def test_vllm_omnis_benchmark_makes_videos(
    start: Starter, cached: Path, picture: bytes, tmp_path: Path
) -> None:
    server, path = start(), vllm_omni_benchmark(cached)
    (tmp_path / "a.png").write_bytes(picture)
    addresses = [f"data:image/png;base64,{b64encode(picture).decode()}", "https://a/b.png"]
    in_parts = [{"type": "image_url", "image_url": {"url": address}} for address in addresses]
    references = json.dumps([{"image": str(tmp_path / "a.png")}, *in_parts])
    fields = {"width": toy_whole.WIDTH, "height": toy_whole.HEIGHT, "num_frames": 8, "fps": FPS, "seed": 7}
    fields["num_inference_steps"] = STEPS
    model = server.manager.device.manifest.name
    told = in_own_process(VLLM_OMNI, server.url, PROMPT, model, references, json.dumps(fields), path=path)
    *made, refused = map(json.loads, told.splitlines())
    assert made == [[True, 8, 8 / FPS, ""]] * 3
    assert not refused[0]
    assert "image_reference is a web address" in refused[3]


VLLM_OMNI_SPEECH = """
    import asyncio, json, sys, warnings
    warnings.simplefilter("ignore")
    import aiohttp
    from vllm_omni.benchmarks.patch.patch import async_request_openai_audio_speech
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput

    url, model, requests = sys.argv[1:]

    async def main():
        async with aiohttp.ClientSession() as session:
            for extra in json.loads(requests):
                asked = RequestFuncInput("abc", url + "/v1/audio/speech", 1, 2048, model, extra_body=extra)
                told = await async_request_openai_audio_speech(asked, session)
                print(json.dumps([told.success, told.audio_frames, told.error]))

    asyncio.run(main())
"""


@pytest.mark.slow
def test_vllm_omnis_benchmark_speaks(start: Starter, cached: Path) -> None:
    """With the fields that its data sets seed-tts, seed-tts-text and seed-tts-design send."""
    server, path = start(speech_opener), vllm_omni_benchmark(cached)
    recording = noise(4 * VOICE.samples)
    address = f"data:audio/wav;base64,{b64encode(wav(recording, VOICE.sample_rate)).decode()}"
    cloned = {"ref_audio": address, "ref_text": "yes", "task_type": "Base", "language": "English"}
    designed = {"instructions": "a glad voice", "task_type": "VoiceDesign"}
    requests = [{**cloned, "max_new_tokens": 2048}, {"voice": "alloy"}, designed]
    told = in_own_process(VLLM_OMNI_SPEECH, server.url, "toy-speech", json.dumps(requests), path=path)
    with open_pool() as pool:
        voice = pool.encode_voice(continued=recording.astype(np.float32) / 32768, text="yes")
    frames = [len(levels(said_alone("abc", of_voice))) for of_voice in (voice, NO_VOICE)]
    *made, refused = map(json.loads, told.splitlines())
    assert made == [[True, count, ""] for count in frames]
    assert not refused[0]


SGLANG = """
    import runpy, sys, warnings
    warnings.simplefilter("ignore")
    sys.argv[0] = "bench_serving"
    runpy.run_module("sglang.multimodal_gen.benchmarks.bench_serving", run_name="__main__")
"""


@pytest.mark.slow
def test_sglangs_benchmark_makes_videos(start: Starter, cached: Path, tmp_path: Path) -> None:
    server, path = start(), sglang_clients(cached)
    options = {
        "base-url": server.url,
        "dataset": "random",
        "task": "text-to-video",
        "num-prompts": 3,
        "max-concurrency": 2,
        "width": toy_whole.WIDTH,
        "height": toy_whole.HEIGHT,
        "num-frames": 8,
        "fps": FPS,
        "warmup-inference-steps": STEPS,
        "num-inference-steps": STEPS,
        "output-file": tmp_path / "told.json",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    printed = in_own_process(SGLANG, *words, path=path)
    assert server.manager.device.manifest.name in printed  # from /v1/model_info
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["completed_requests"], told["failed_requests"]) == (3, 0)


SGLANG_REALTIME = """
    import asyncio, json, sys, warnings
    from types import SimpleNamespace
    warnings.simplefilter("ignore")
    from openai import Client
    from sglang.multimodal_gen.test.server import realtime_consistency as sglang

    url, model, prompt, size, picture = sys.argv[1:]
    asked = SimpleNamespace(
        prompt=prompt, seconds=4, fps=None, num_frames=None, realtime_output_format=None, extras={"seed": 3}
    )
    init = sglang.build_realtime_init_payload(
        model_path=model,
        sampling_params=asked,
        output_size=size,
        first_frame=sglang.prepare_realtime_first_frame(picture),
    )
    held = {"mode": "state", "transitions": [{"actions": ["w", "l"]}]}
    got = asyncio.run(
        sglang.collect_realtime_output(
            ws_url=sglang.realtime_ws_url(Client(base_url=url + "/v1", api_key="none")),
            init_payload=init,
            events=[{"kind": "camera_actions", "payload": held, "event_id": 1, "after_chunk": 0}],
            num_chunks=5,
            require_chunk_stats=True,
        )
    )
    print(json.dumps([[frame.mean((0, 1)).tolist() for frame in got.frames], [s.num_frames for s in got.chunk_stats]]))
"""


@pytest.mark.slow
def test_sglangs_client_of_realtime_video_steers(
    start: Starter, cached: Path, picture: bytes, tmp_path: Path
) -> None:
    pytest.importorskip("openai", reason="needs openai, of the extra clients")
    pytest.importorskip("msgpack", reason="needs msgpack, of the extra realtime")
    server, path, file = start(world_opener), sglang_clients(cached), tmp_path / "a.png"
    file.write_bytes(picture)
    told = in_own_process(
        SGLANG_REALTIME,
        server.url,
        server.manager.device.manifest.name,
        PROMPT,
        SIZE,
        str(file),
        path=path,
    )
    frames, counts = json.loads(told)
    assert counts == [toy_whole.FIRST_FRAMES, *(toy_whole.CHUNK_VIDEO,) * 4]
    assert np.shape(frames) == (sum(counts), 3)

"""Videos as jobs behind the live sessions: their bytes, their life, and that live sessions go first."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import threading
import time
from base64 import b64encode
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import seko_serve.video.background
import seko_serve.video.jobs
from seko_runtime import Chunk, Pool, VideoManifest
from seko_runtime.errors import EnvironmentLacksError
from seko_runtime.video.sinks import Mp4Sink
from seko_serve.errors import ServeError
from seko_serve.http.forms import MAX_FIELDS, form_fields
from seko_serve.live.device import CAUTION, PATIENCE_S, Device, _PartialWork
from seko_serve.media.uploads import MAX_PICTURE_BYTES
from seko_serve.store.saved import Record, Saved, SavedSessions
from seko_serve.video.background import BackgroundVideo
from seko_serve.video.fields import PICTURES
from seko_serve.video.jobs import Video, VideoJobs, _bytes_in
from tests.runtime import toy_pool, toy_whole

from .bounded import comes, until
from .conftest import NewClient, Running, Starter, plain_opener
from .test_server import PROMPT, alone, http, pictures, watch

FPS = toy_pool.pool_manifest().workload.stream.fps
KEY, OTHER = "a-key-of-the-first-tenant", "a-key-of-the-second-tenant"


def created(server: Running, key: str = "", **fields: object) -> dict[str, Any]:
    status, video = http(f"{server.url}/v1/videos", "POST", {"prompt": PROMPT, "seed": 3, **fields}, key)
    assert status == 200, video
    return dict(video)


def ended(server: Running, name: str, key: str = "") -> dict[str, Any]:
    while True:
        status, video = http(f"{server.url}/v1/videos/{name}", key=key)
        assert status == 200
        if video["status"] in ("completed", "failed"):
            return dict(video)
        assert video["status"] in ("queued", "in_progress")
        time.sleep(0.01)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The frames that are handed to the encoder of videos: what comes out hangs on its version and threads."""
    frames: list[np.ndarray] = []

    class Sink(Mp4Sink):
        def write(self, pictures: Iterable[np.ndarray]) -> None:
            frames.append(np.array(list(pictures)))
            super().write(pictures)

    monkeypatch.setattr(seko_serve.video.background, "Mp4Sink", Sink)
    return frames


def shape_of(file: bytes) -> tuple[int, ...]:
    """Return the shape of a file's decoded frames."""
    with av.open(io.BytesIO(file)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).shape


@pytest.mark.shows("videos")
def test_a_video_is_that_of_the_runtime_alone_and_lives_as_openai_says(
    start: Starter, tmp_path: Path, written: list[np.ndarray]
) -> None:
    server = start(keys=(KEY, OTHER), video_folder=tmp_path / "videos")
    video = created(server, KEY, seconds="1", size=f"{toy_whole.WIDTH}x{toy_whole.HEIGHT}")
    assert (video["object"], video["status"], video["progress"], video["error"]) == (
        "video",
        "queued",
        0,
        None,
    )
    url = f"{server.url}/v1/videos/{video['id']}"
    done = ended(server, video["id"], KEY)
    assert (done["status"], done["progress"], done["seconds"]) == ("completed", 100, "1")
    assert done["created_at"] <= done["completed_at"] < done["expires_at"]
    content = http(f"{url}/content", key=KEY)[1]
    assert shape_of(content) == (FPS, toy_whole.HEIGHT, toy_whole.WIDTH, 3)
    with av.open(io.BytesIO(content)) as container:
        assert container.start_time == 0
    assert np.array_equal(np.concatenate(written), alone(20, {0: PROMPT})[:FPS])
    (file,) = (tmp_path / "videos").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    for method, path in (("GET", url), ("GET", f"{url}/content"), ("DELETE", url)):
        assert http(path, method, key=OTHER)[0] == 404
        assert http(path, method)[0] == 401
    assert http(f"{server.url}/v1/videos", key=OTHER)[1]["data"] == []
    second = created(server, KEY, seconds=0.5)
    listed = http(f"{server.url}/v1/videos?limit=1", key=KEY)[1]
    assert ([entry["id"] for entry in listed["data"]], listed["has_more"]) == ([second["id"]], True)
    listed = http(f"{server.url}/v1/videos?after={second['id']}", key=KEY)[1]
    assert ([entry["id"] for entry in listed["data"]], listed["has_more"]) == ([video["id"]], False)
    assert http(url, "DELETE", key=KEY)[1] == {"id": video["id"], "object": "video.deleted", "deleted": True}
    assert http(url, key=KEY)[0] == 404
    status, answer = http(f"{server.url}/v1/videos?after={video['id']}", key=KEY)
    # no end of the list, as other videos may follow
    assert (status, answer["error"]["param"]) == (404, "after")
    ended(server, second["id"], KEY)
    assert [path.name for path in (tmp_path / "videos").iterdir()] == [f"seko-serve-{second['id']}.mp4"]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "other"}, 404),
        ({"prompt": "x" * 5000}, 413),
        ({"more": 1}, 400),
        ({"image": "AAAA", "input_reference": "AAAA"}, 400),
    ],
)
def test_what_cannot_be_made_is_refused(start: Starter, fields: dict[str, object], status: int) -> None:
    server = start()
    assert http(f"{server.url}/v1/videos", "POST", {"prompt": PROMPT, **fields})[0] == status
    assert http(f"{server.url}/v1/videos")[1]["data"] == []


@pytest.mark.parametrize("name", ["image", "input_reference"])
def test_a_picture_is_named_as_the_client_named_it(start: Starter, name: str) -> None:
    server = start()
    for picture, message in (
        ({}, f"{name} is of type dict"),
        ("AAAA", f"{name} is no picture"),
    ):
        status, answer = http(f"{server.url}/v1/videos", "POST", {"prompt": PROMPT, name: picture})
        assert status in (400, 415)
        assert message in answer["error"]["message"]


@pytest.mark.parametrize(("order", "status"), [("asc", 200), ("desc", 200), ("up", 400)])
def test_no_other_order_is_taken(start: Starter, order: str, status: int) -> None:
    found, answer = http(f"{start().url}/v1/videos?order={order}")
    assert found == status
    if status == 400:
        assert answer["error"]["param"] == "order"


@pytest.mark.parametrize("limit", ["0", "101", "00501", "1" * 5000, "-1", "\u0661"])
def test_no_other_number_of_videos_is_listed(start: Starter, limit: str) -> None:
    status, answer = http(f"{start().url}/v1/videos?limit={quote(limit)}")
    assert (status, answer["error"]["param"]) == (400, "limit")


def test_a_file_that_is_renamed_while_a_folder_is_counted_has_no_size(tmp_path: Path) -> None:
    (tmp_path / "whole").write_bytes(bytes(7))
    (tmp_path / "renamed").symlink_to(tmp_path / "nowhere")
    assert _bytes_in(tmp_path) == 7


def test_an_artifact_whose_sessions_keep_their_row_makes_no_videos(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    monkeypatch.setattr(VideoManifest, "offloads_cache", True)
    status, answer = http(f"{server.url}/v1/videos", "POST", {"prompt": PROMPT})
    assert (status, answer["error"]["code"]) == (415, "unsupported")


def test_a_server_without_videos_says_so(start: Starter) -> None:
    server = start(videos=0)
    assert http(f"{server.url}/v1/videos", "POST", {"prompt": PROMPT})[0] == 415


SIZE = f"{toy_whole.WIDTH}x{toy_whole.HEIGHT}"
STEPS = toy_pool.pool_manifest().workload.schedule.denoise_passes


def form_of(parts: Mapping[str, str | bytes]) -> tuple[bytes, dict[str, str]]:
    """A form as clients send it: bytes are a file."""
    content = b""
    for name, value in parts.items():
        file = '; filename="a"' if isinstance(value, bytes) else ""
        data = value if isinstance(value, bytes) else value.encode()
        content += (
            f'--x\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + data + b"\r\n"
        )
    return content + b"--x--\r\n", {"content-type": "multipart/form-data; boundary=x"}


def posted(server: Running, table: Mapping[str, Any], *, form: bool) -> tuple[int, Any]:
    body, headers = form_of(table) if form else (json.dumps(table).encode(), {})
    try:
        with urlopen(Request(f"{server.url}/v1/videos", body, headers), timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as refused:
        return refused.code, json.loads(refused.read())


@pytest.mark.parametrize(
    ("table", "frames"),
    [
        ({"size": SIZE, "seconds": "1"}, FPS),
        ({"num_frames": "5", "fps": str(FPS)}, 5),
        ({"num_frames": "5", "seconds": str(5 / FPS)}, 5),
        (
            {
                "width": str(toy_whole.WIDTH),
                "height": str(toy_whole.HEIGHT),
                "num_frames": "7",
                "fps": f"{FPS}.0",
                "num_inference_steps": str(STEPS),
                "num_outputs_per_prompt": "1",
                "seed": "3",
                "extra_body": '{"n": 1}',
            },
            7,
        ),
    ],
)
@pytest.mark.parametrize("form", [False, True])
def test_what_the_artifact_has_is_honoured_and_told(
    start: Starter, table: dict[str, Any], frames: int, form: bool
) -> None:
    """Numbers may be texts in either kind of body, and null is as nothing."""
    server = start()
    more = {} if form else {"model": None, "image": None, "seconds": table.get("seconds"), "extra_body": None}
    status, video = posted(server, {"prompt": PROMPT, "seed": "3", **more, **table}, form=form)
    assert status == 200, video
    told = {
        "prompt": PROMPT,
        "num_frames": frames,
        "fps": FPS,
        "size": SIZE,
        "width": toy_whole.WIDTH,
        "height": toy_whole.HEIGHT,
        "num_inference_steps": STEPS,
        "seed": 3,
    }
    assert {name: video[name] for name in told} == told
    assert ended(server, video["id"])["status"] == "completed"
    content = http(f"{server.url}/v1/videos/{video['id']}/content")[1]
    assert shape_of(content)[0] == frames


@pytest.mark.parametrize(
    ("field", "value", "own"),
    [
        ("width", 512, toy_whole.WIDTH),
        ("height", "512", toy_whole.HEIGHT),
        ("size", "512x512", SIZE),
        ("fps", FPS + 8, FPS),
        ("num_inference_steps", STEPS + 1, STEPS),
        ("n", 2, 1),
        ("num_frames", 0, 1),
        ("num_frames", 1.5, "whole"),
        ("num_frames", 60 * FPS + 1, 60 * FPS),
        ("fps", "fast", "number"),
    ],
)
def test_what_the_artifact_lacks_is_named_with_what_it_has(
    start: Starter, field: str, value: object, own: object
) -> None:
    server = start()
    status, answer = posted(server, {"prompt": PROMPT, "seconds": None, field: value}, form=False)
    error = answer["error"]
    assert (status, error["param"], error["type"]) == (400, field, "invalid_request_error")
    assert error["message"].startswith(f"{field} is ")
    assert str(own) in error["message"]


def test_a_length_that_contradicts_the_number_of_frames_is_refused(start: Starter) -> None:
    status, answer = posted(start(), {"prompt": PROMPT, "seconds": 1, "num_frames": 5}, form=False)
    assert (status, answer["error"]["param"]) == (400, "num_frames")


@pytest.fixture(scope="module")
def picture() -> bytes:
    """A file in PNG."""
    content = io.BytesIO()
    Image.new("RGB", (toy_whole.WIDTH, toy_whole.HEIGHT), "red").save(content, "png")
    return content.getvalue()


@pytest.mark.parametrize("form", [False, True])
def test_a_picture_is_read_wherever_a_client_puts_it(start: Starter, form: bool, picture: bytes) -> None:
    server, address = start(), f"data:image/png;base64,{b64encode(picture).decode()}"
    values: list[Any] = [address, {"image_url": address}, [{"image_url": address}]]
    sent: list[dict[str, Any]] = [
        {name: json.dumps(value) if form and value is not address else value}
        for name in PICTURES
        for value in values
    ]
    if form:  # a file, and an object as OpenAI's client sends it
        sent += [{"input_reference": picture}, {"input_reference[image_url]": address}]
    for table in sent:
        status, answer = posted(server, {"prompt": PROMPT, "num_frames": "1", **table}, form=form)
        assert status == 200, answer
    cut = {"input_reference": address[:-60]}
    status, answer = posted(server, {"prompt": PROMPT, **cut}, form=form)
    assert (status, "input_reference is no picture" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize("value", ["http://a/b.png", {"image_url": "HTTPS://a/b.png"}, {"file_id": "file-1"}])
def test_no_picture_is_fetched(start: Starter, value: object) -> None:
    status, answer = posted(start(), {"prompt": PROMPT, "input_reference": value}, form=False)
    assert (status, answer["error"]["param"]) == (415, "input_reference")
    assert "send the picture" in answer["error"]["message"]


class Pictures(BaseHTTPRequestHandler):
    """A host that has a picture, a redirect to it, and more than anybody takes."""

    content = b""

    def do_GET(self) -> None:
        self.send_response({"/a.png": 200, "/long": 200, "/moved": 302}.get(self.path, 404))
        self.send_header("location", "/a.png")
        self.end_headers()
        with suppress(OSError):  # the server leaves in the middle
            if self.path == "/a.png":
                self.wfile.write(self.content)
            for _ in range((MAX_PICTURE_BYTES >> 16) + 1 if self.path == "/long" else 0):
                self.wfile.write(bytes(1 << 16))

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/a.png", 200, ""),
        ("/moved", 400, "its host answers 302"),
        ("/none", 400, "its host answers 404"),
        ("/long", 413, "has more than"),
    ],
)
def test_a_picture_is_fetched_from_a_host_that_the_operator_named(
    start: Starter, picture: bytes, monkeypatch: pytest.MonkeyPatch, path: str, status: int, words: str
) -> None:
    monkeypatch.setattr(Pictures, "content", picture)
    host = ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    thread = threading.Thread(target=host.serve_forever)
    thread.start()
    try:
        name = f"127.0.0.1:{host.server_port}"
        server = start(picture_hosts=frozenset({name}))
        for reference in (f"http://{name}{path}", {"image_url": f"HTTP://{name}{path}"}):
            table = {"prompt": PROMPT, "num_frames": 1, "input_reference": reference}
            code, answer = posted(server, table, form=False)
            assert code == status, answer
            if words:
                assert answer["error"]["param"] == "input_reference"
                assert words in answer["error"]["message"]
        for other in (
            f"http://localhost:{host.server_port}",
            f"http://{name}@{name}",
            "http://127.0.0.1",
            "http://[",
        ):
            code, answer = posted(server, {"prompt": PROMPT, "input_reference": f"{other}/a.png"}, form=False)
            assert (code, answer["error"]["param"]) == (415, "input_reference")
    finally:
        host.shutdown()
        thread.join()
        host.server_close()
    if path == "/a.png":
        code, answer = posted(server, table, form=False)
        assert (code, "cannot be had" in answer["error"]["message"]) == (400, True)


def test_who_leaves_before_the_answer_gets_no_video(
    start: Starter, picture: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, left = threading.Event(), threading.Event()

    def slow(*_: object) -> bytes:
        asked.set()
        left.wait()
        return picture

    monkeypatch.setattr("seko_serve.video.routes.downloaded", slow)
    server = start()
    body = json.dumps({"prompt": PROMPT, "input_reference": "http://a/b.png"})
    client = HTTPConnection(urlsplit(server.url).netloc)
    client.request("POST", "/v1/videos", body)
    asked.wait()
    client.close()
    assert http(f"{server.url}/health")[0] == 200  # the server has seen the end of the connection, too
    left.set()
    while b'refused_total{code="bad_request"} 1' not in http(f"{server.url}/metrics")[1]:
        assert not http(f"{server.url}/v1/videos")[1]["data"]
        time.sleep(0.02)


def test_a_box_that_is_closed_while_a_video_is_requested_takes_none(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()

    async def closing(_: object) -> bool:
        server.manager.closed = True
        return False

    monkeypatch.setattr("starlette.requests.Request.is_disconnected", closing)
    status, answer = http(f"{server.url}/v1/videos", "POST", {"prompt": PROMPT})
    assert (status, answer["error"]["code"]) == (503, "stopping")
    assert http(f"{server.url}/v1/videos")[1]["data"] == []


@pytest.mark.parametrize("path", ["x/remix", "edits", "extensions", "characters"])
def test_what_no_artifact_does_is_refused_in_openais_shape(start: Starter, path: str) -> None:
    status, answer = http(f"{start().url}/v1/videos/{path}", "POST", {"prompt": PROMPT})
    assert (status, answer["error"]["code"]) == (415, "unsupported")
    assert answer["error"]["type"] == "invalid_request_error"


KINDS = ["multipart/form-data; boundary=x", "multipart/form-data", "application/x-www-form-urlencoded"]


@given(st.binary(max_size=400), st.sampled_from(KINDS))
def test_random_forms_are_refused_by_name(body: bytes, kind: str) -> None:
    for content in (body, b"--x\r\n" + body + b"\r\n--x--\r\n"):
        try:
            fields = form_fields(kind, content)
        except ServeError:
            continue
        assert all(
            isinstance(name, str) and isinstance(value, str | dict | list) for name, value in fields.items()
        )


def part(headers: str, content: str) -> bytes:
    return f"--x\r\n{headers}\r\n\r\n{content}\r\n".encode()


@pytest.mark.parametrize("name", ["voice", "voice[]"])
def test_a_field_that_comes_again_in_a_form_is_a_list(start: Starter, name: str) -> None:
    files = [part(f'Content-Disposition: form-data; name="{name}"; filename="a"', sound) for sound in "ab"]
    assert form_fields(KINDS[0], b"".join(files) + b"--x--") == {"voice": ["YQ==", "Yg=="]}
    assert form_fields(KINDS[0], files[0] + b"--x--") == {"voice": "YQ=="}
    assert form_fields(KINDS[2], f"a[b]=1&{name}=2&a[c]=3&{name}=4&{name}=5".encode()) == {
        "a": {"b": "1", "c": "3"},
        "voice": ["2", "4", "5"],
    }
    for body in ("a=1&a[b]=2", "a[b]=1&a=2"):
        with pytest.raises(ServeError):
            form_fields(KINDS[2], body.encode())
    request = Request(f"{start().url}/v1/videos", b"prompt=a&prompt=b", {"content-type": KINDS[2]})
    with pytest.raises(HTTPError) as refused:
        urlopen(request, timeout=30)
    with refused.value as answer:
        assert answer.code == 400


@pytest.mark.parametrize(
    "body",
    [
        b"".join(
            part(f'Content-Disposition: form-data; name="{name}"', "") for name in range(MAX_FIELDS + 1)
        ),
        part("Content-Type: message/rfc822", "Content-Type: message/rfc822\r\n\r\n" * 3000),
        part("Content-Disposition: \0%;\xff\t*", ""),
        part('Content-Disposition: form-data; name="a"', "") * 2 + b"--x\r\n",
    ],
    ids=["many parts", "parts in parts", "a header that no library reads", "no end"],
)
def test_hostile_forms_are_refused(body: bytes) -> None:
    end = b"" if body.endswith(b"--x\r\n") else b"--x--\r\n"
    with pytest.raises(ServeError):
        form_fields(KINDS[0], body + end)


async def test_a_live_session_takes_the_row_of_a_video_which_goes_on_behind_it(
    start: Starter, written: list[np.ndarray], new_client: NewClient
) -> None:
    server = start(plain_opener)  # one row
    video = created(server, seconds=4)
    seen: list[np.ndarray] = []
    while http(f"{server.url}/v1/videos/{video['id']}")[1]["progress"] < 5:
        await asyncio.sleep(0.005)
    viewer = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media, _ = await watch(viewer, 5)
    frames = http(f"{server.url}/v1/videos/{video['id']}")[1]["progress"]
    assert frames < 100
    await viewer.close()
    seen.append(pictures(media))
    assert ended(server, video["id"])["status"] == "completed"
    with plain_opener() as pool, pool.open_session(seed=3, prompt=PROMPT) as session:
        whole = np.concatenate([session.run_chunk().video()[0] for _ in range(60)])
    assert np.array_equal(seen[0], whole[: len(seen[0])])
    assert np.array_equal(np.concatenate(written), whole[: 4 * FPS])


async def test_a_live_session_takes_the_row_of_a_video_whose_encoder_is_at_work(
    start: Starter, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    written: list[np.ndarray] = []
    made: list[int] = []
    encoding, made_next, release = threading.Event(), threading.Event(), threading.Event()

    class Sink(Mp4Sink):
        def write(self, pictures: Iterable[np.ndarray]) -> None:
            encoding.set()
            release.wait()
            written.append(np.array(list(pictures)))
            super().write(pictures)

    class Stream(BackgroundVideo):
        def accept_chunk(self, chunk: Chunk) -> None:
            super().accept_chunk(chunk)
            made.append(chunk.index)
            if chunk.index:
                made_next.set()

    monkeypatch.setattr(seko_serve.video.background, "Mp4Sink", Sink)
    monkeypatch.setattr(seko_serve.video.jobs, "BackgroundVideo", Stream)
    server = start(plain_opener)  # one row
    video = created(server, seconds=1)
    try:
        for event in (encoding, made_next):
            await asyncio.to_thread(event.wait)
        viewer = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
        await watch(viewer, 2)
        await viewer.close()
        assert made == [0, 1]  # no more of them wait for the encoder
        assert written == []
    finally:
        release.set()
    assert ended(server, video["id"])["status"] == "completed"
    assert np.array_equal(np.concatenate(written), alone(20, {0: PROMPT})[:FPS])


async def test_a_saved_session_takes_the_row_of_a_video_which_leaves_it_the_row_while_it_is_read(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    server, looks = start(plain_opener, snapshots=str(tmp_path / "store"), lease_s=0.3), []  # one row
    fits, real = Device._fits_background, SavedSessions.read

    def fits_background(device: Device, pool: Any, now: float) -> bool:
        looks.append(now)
        return fits(device, pool, now)

    def read(saved: SavedSessions, record: Record) -> Saved:
        enough = len(looks) + 3
        while len(looks) < enough:  # the device's thread looks whether the video may run
            time.sleep(0.01)
        return real(saved, record)

    monkeypatch.setattr(Device, "_fits_background", fits_background)
    monkeypatch.setattr(SavedSessions, "read", read)

    def progress() -> int:
        return int(http(f"{server.url}/v1/videos/{video['id']}")[1]["progress"])

    video: dict[str, Any] = {}
    seen: list[np.ndarray] = []
    viewer = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media, _ = await watch(viewer, 2)
    await viewer.drop()
    await comes(lambda: not server.manager.sessions)
    video.update(created(server, seconds=60))
    while progress() < 1:
        await asyncio.sleep(0.005)
    await viewer.resume()
    before = progress()
    assert before < 100
    media += (await watch(viewer, 3))[0]
    seen.append(pictures(media))
    await viewer.close()
    await comes(lambda: progress() > before)  # the video goes on
    with plain_opener() as pool, pool.open_session(seed=3, prompt=PROMPT) as session:
        whole = np.concatenate([session.run_chunk().video()[0] for _ in range(20)])
    assert np.array_equal(seen[0], whole[: len(seen[0])])


def test_a_removed_video_ends_and_the_next_one_begins(start: Starter, tmp_path: Path) -> None:
    server = start(video_folder=tmp_path)
    first, second = created(server, seconds=60), created(server, seconds=0.5)
    until(lambda: http(f"{server.url}/v1/videos/{first['id']}")[1]["status"] != "queued")
    assert http(f"{server.url}/v1/videos/{first['id']}", "DELETE")[0] == 200
    assert ended(server, second["id"])["status"] == "completed"
    assert http(f"{server.url}/ready")[1]["free"] == server.manager.capacity
    assert [file.name for file in tmp_path.iterdir()] == [f"seko-serve-{second['id']}.mp4"]


def test_what_the_server_lacks_for_a_video_is_not_the_clients_fault(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()

    def lack(*_: object, **__: object) -> None:
        raise EnvironmentLacksError("planted")

    monkeypatch.setattr(Pool, "open_session", lack)
    failed = ended(server, created(server, seconds=0.5)["id"])
    assert (failed["status"], failed["error"]["code"]) == ("failed", "exhausted")


def test_a_full_disk_fails_a_video_by_name_and_keeps_nothing_of_it(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, mode: str) -> Any:
        os.close(descriptor)
        return open("/dev/full", mode)

    server = start(video_folder=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(seko_serve.video.background.os, "fdopen", full)
        video = ended(server, created(server, seconds=1)["id"])
    assert (video["status"], video["error"]["code"]) == ("failed", "full")
    assert list(tmp_path.iterdir()) == []
    assert http(f"{server.url}/ready")[1]["free"] == server.manager.capacity
    assert ended(server, created(server, seconds=1)["id"])["status"] == "completed"


def test_videos_whose_folder_was_removed_are_gone_and_others_are_made(start: Starter, tmp_path: Path) -> None:
    """As temporary files are that nobody has used for days."""
    server = start(video_folder=tmp_path / "videos")
    first = ended(server, created(server, seconds=1)["id"])
    shutil.rmtree(tmp_path / "videos")
    status, answer = http(f"{server.url}/v1/videos/{first['id']}/content")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    second = ended(server, created(server, seconds=1)["id"])
    assert http(f"{server.url}/v1/videos/{second['id']}/content")[0] == 200
    assert http(f"{server.url}/v1/videos/{first['id']}", "DELETE")[0] == 200


def test_a_video_that_cannot_be_made_fails_and_the_next_one_is_made(start: Starter, tmp_path: Path) -> None:
    """As behind a folder whose place a file has taken."""
    place = tmp_path / "videos"
    server = start(video_folder=place)
    first, second = created(server, seconds=60), created(server, seconds=0.5)
    until(lambda: http(f"{server.url}/v1/videos/{first['id']}")[1]["status"] != "queued")
    shutil.rmtree(place)
    place.write_bytes(b"")
    assert http(f"{server.url}/v1/videos/{first['id']}", "DELETE")[0] == 500
    failed = ended(server, second["id"])
    assert (failed["status"], failed["error"]["code"]) == ("failed", "internal")
    place.unlink()
    assert ended(server, created(server, seconds=0.5)["id"])["status"] == "completed"
    assert http(f"{server.url}/ready")[1]["free"] == server.manager.capacity


def test_a_video_that_cannot_be_removed_keeps_no_other(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seko_serve.video.jobs, "REAP_S", 0.05)
    monkeypatch.setattr(seko_serve.video.jobs, "KEPT_S", 0.0)
    stuck: list[str] = []
    remove = VideoJobs._remove_file

    async def fail_for_the_first(jobs: VideoJobs, video: Video) -> None:
        stuck.append(video.id)
        if video.id == stuck[0]:
            raise OSError("planted")
        await remove(jobs, video)

    monkeypatch.setattr(VideoJobs, "_remove_file", fail_for_the_first)
    server = start(video_folder=tmp_path)
    for _ in range(2):
        video = created(server, seconds=0.5)
        until(lambda video=video: http(f"{server.url}/v1/videos/{video['id']}")[0] != 200)
    until(  # a file goes behind its video
        lambda: [file.name for file in tmp_path.iterdir()] == [f"seko-serve-{stuck[0]}.mp4"]
    )


def test_videos_expire_and_too_many_are_refused(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seko_serve.video.jobs, "REAP_S", 0.05)
    monkeypatch.setattr(seko_serve.video.jobs, "KEPT_S", 0.5)
    server = start(videos=1)
    video = created(server, seconds=0.5)
    status, answer = http(f"{server.url}/v1/videos", "POST", {"prompt": PROMPT})
    assert (status, answer["error"]["code"]) == (503, "full")
    assert answer["error"]["retry_after"] > 0
    until(lambda: http(f"{server.url}/v1/videos/{video['id']}")[0] != 200)
    created(server, seconds=0.5)


def refusal_of(server: Running, key: str) -> str:
    """Return the message with which a key's request for a video is refused; empty: the request is accepted."""
    status, answer = http(f"{server.url}/v1/videos", "POST", {"prompt": PROMPT, "seconds": 0.1}, key)
    assert (status, (answer["error"] or {}).get("code")) in ((200, None), (503, "full"))
    return str(answer["error"]["message"]) if status == 503 else ""


OWN_SHARE = "too many videos of this API key wait or are kept; delete some"
ALL_PLACES = "too many videos wait or are kept; delete some"


def test_one_of_several_keys_has_half_of_the_videos(start: Starter) -> None:
    server = start(videos=3, keys=(KEY, OTHER))
    assert [refusal_of(server, KEY) for _ in range(3)] == ["", "", OWN_SHARE]
    assert [refusal_of(server, OTHER) for _ in range(2)] == ["", ALL_PLACES]
    alone_there = start(videos=3, keys=(KEY,))
    assert [refusal_of(alone_there, KEY) for _ in range(4)] == ["", "", "", ALL_PLACES]


def test_one_of_several_keys_fills_half_of_the_folder(
    start: Starter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = start(keys=(KEY, OTHER), video_folder=tmp_path)
    ended(server, created(server, KEY, seconds=0.5)["id"], KEY)
    (file,) = tmp_path.iterdir()
    monkeypatch.setattr(seko_serve.video.jobs, "MAX_FOLDER_BYTES", 2 * file.stat().st_size)
    assert refusal_of(server, KEY) == OWN_SHARE
    assert refusal_of(server, OTHER) == ""


class Stream:
    """A stream that plays, or runs behind."""

    def __init__(self, due: float | None = None, *, holds_row: bool = True) -> None:
        self._due, self.holds_row = due, holds_row

    def ready(self) -> bool:
        return True

    def next_due(self) -> float | None:
        return self._due

    def yield_row(self) -> None:
        self.holds_row = False


def test_the_row_of_a_video_is_freed_for_the_second_of_two_sessions_that_share_one_free_row() -> None:
    device, video = Device(nullcontext), Stream()  # type: ignore[arg-type]
    device.run_in_background(video)  # type: ignore[arg-type]
    pool: Any = SimpleNamespace(free=1)
    with device.reserved_row():
        device.make_room(pool)
        assert video.holds_row
        with device.reserved_row():
            device.make_room(pool)
            assert not video.holds_row


@given(
    dues=st.lists(st.none() | st.floats(0, 20), max_size=5),
    seconds=st.floats(0.01, 3),
    holds_row=st.booleans(),
    free=st.integers(0, 2),
)
def test_a_video_runs_only_if_all_live_chunks_can_follow_in_time(
    dues: list[float | None], seconds: float, holds_row: bool, free: int
) -> None:
    device = Device(nullcontext)  # type: ignore[arg-type]
    device.run_in_background(Stream(holds_row=holds_row))  # type: ignore[arg-type]
    for due in dues:
        device.add(Stream(due))  # type: ignore[arg-type]
    times: Mapping[int, float] = {1: seconds, 2: 1.5 * seconds}
    pool: Any = SimpleNamespace(free=free, call_times=SimpleNamespace(expected=lambda: times))
    now = 5.0
    if not device._fits_background(pool, now):
        return
    assert holds_row or free
    # One after another, in calls of two, at the pace that was measured.
    end = now + CAUTION * times[1] * (1 if holds_row else 2)
    for place, due in enumerate(sorted(due for due in dues if due is not None)):
        assert end + CAUTION * times[2] * (place // 2 + 1) <= due + 1e-9


@given(
    dues=st.lists(st.none() | st.floats(0, 20), max_size=5),
    seconds=st.floats(0.01, 3),
    part_s=st.floats(0, 3),
)
def test_a_part_of_work_runs_only_if_all_live_chunks_can_follow_in_time_or_it_has_waited_long(
    dues: list[float | None], seconds: float, part_s: float
) -> None:
    device = Device(nullcontext)  # type: ignore[arg-type]
    assert not device._fits_part(5.0)
    device._works.append(_PartialWork(lambda _: iter(()), Future(), since=5.0))  # type: ignore[arg-type, return-value]
    device._parts_s.append(part_s)
    for due in dues:
        device.add(Stream(due))  # type: ignore[arg-type]
    device.call_seconds = {1: seconds, 2: 1.5 * seconds}
    now = 5.0
    assert device._fits_part(now + PATIENCE_S + 0.01)
    if not device._fits_part(now):
        return
    end = now + CAUTION * part_s
    for place, due in enumerate(sorted(due for due in dues if due is not None)):
        assert end + CAUTION * device.call_seconds[2] * (place // 2 + 1) <= due + 1e-9

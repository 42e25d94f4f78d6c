"""What an artifact brings for the person who meets it, as the server and the page show it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest

from seko_runtime import Pool
from seko_runtime.controls.pictures import PicturesControl
from seko_runtime.format.manifest import FileEntry
from seko_runtime.video.manifest import Viewer, ViewerPicture
from seko_serve.client import Client
from seko_serve.errors import ServeError
from tests.runtime import toy, toy_pool

from .browser import open_page
from .conftest import Running, Starter
from .pages import FRAMES, NEEDS_BROWSER, STATE, wait_until_empty
from .test_server import http
from .test_uploads import coded

VIEWER = Viewer(
    "It knows letters.",
    ("a b", "c a"),
    (ViewerPicture("viewer/0.png", "Red"), ViewerPicture("viewer/1.png", "Blue")),
)


def picture(colour: tuple[int, int, int]) -> bytes:
    return coded(np.full((8, 24, 3), colour, np.uint8), "png")


PICTURES = {"viewer/0.png": picture((200, 0, 0)), "viewer/1.png": picture((0, 0, 200))}


def bring(start: Starter, monkeypatch: pytest.MonkeyPatch, artifact: Path, **settings: object) -> Running:
    """Start a server of the toy, whose artifact brings two prompts and two pictures."""
    for name, content in PICTURES.items():
        (artifact / name).parent.mkdir(exist_ok=True)
        (artifact / name).write_bytes(content)
    files = {name: FileEntry(hashlib.sha256(data).hexdigest(), len(data)) for name, data in PICTURES.items()}
    (artifact / "manifest.json").write_text("{}")

    @contextmanager
    def opener() -> Iterator[Pool]:
        manifest = toy.changed(toy_pool.pool_manifest(), viewer=VIEWER, files=files)
        with toy_pool.open_pool(manifest=manifest) as pool:
            yield pool

    server = start(opener, **settings)
    monkeypatch.setattr(server.manager, "settings", replace(server.manager.settings, artifact=artifact))
    return server


def test_models_tell_it_and_pictures_have_addresses(
    start: Starter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = bring(start, monkeypatch, tmp_path)
    (model,) = http(f"{server.url}/v1/models")[1]["data"]
    brought = model["viewer"]
    assert (brought["help"], brought["prompts"]) == ("It knows letters.", ["a b", "c a"])
    assert [entry["caption"] for entry in brought["pictures"]] == ["Red", "Blue"]
    for entry, content in zip(brought["pictures"], PICTURES.values(), strict=True):
        with urlopen(f"{server.url}/{entry['url']}") as answer:
            assert answer.headers["content-type"] == "image/png"
            assert answer.read() == content
    for wrong in (f"{brought['pictures'][0]['url'][:-1]}2", "v1/models/other/pictures/0"):
        assert http(f"{server.url}/{wrong}")[1]["error"]["code"] == "not_found"


def test_a_picture_that_was_changed_is_not_sent(
    start: Starter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = bring(start, monkeypatch, tmp_path)
    (tmp_path / "viewer/0.png").write_bytes(PICTURES["viewer/1.png"])
    (model,) = http(f"{server.url}/v1/models")[1]["data"]
    assert http(f"{server.url}/{model['viewer']['pictures'][0]['url']}")[0] == 500


def test_a_client_opens_a_session_with_it(
    start: Starter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a picture only where the model needs one."""
    server = bring(start, monkeypatch, tmp_path)
    with Client(server.url) as client:
        assert client.example() == {"model": "toy", "prompt": "a b"}
        asked = {"field": "image", "label": "Picture", "required": True}
        monkeypatch.setattr(PicturesControl, "describe", lambda _: {"events": {}, "pictures": [asked]})
        example = client.example("toy")
        client.open(codecs=["rgb24"], **example)
        (session,) = server.manager.sessions.values()
        assert session.content.opening.prompt == "a b"
        with pytest.raises(ServeError, match="no such model"):
            client.example("other")


def test_an_artifact_that_brings_nothing_shows_nothing(start: Starter) -> None:
    server = start()
    (model,) = http(f"{server.url}/v1/models")[1]["data"]
    assert model["viewer"] == {"help": "", "prompts": [], "pictures": []}
    assert http(f"{server.url}/v1/models/{model['id']}/pictures/0")[0] == 404


def test_pictures_need_a_key_where_models_do(
    start: Starter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = bring(start, monkeypatch, tmp_path, keys=("k" * 20,))
    assert http(f"{server.url}/v1/models/toy/pictures/0")[0] == 401


@NEEDS_BROWSER
def test_the_page_begins_with_what_the_artifact_brings(
    start: Starter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = bring(start, monkeypatch, tmp_path)
    with open_page(f"{server.url}/") as page:
        page.until(f"{FRAMES} > 3")  # the first prompt plays at once
        (session,) = server.manager.sessions.values()
        assert session.content.opening.prompt == "a b"
        page.click("stop")
        page.until("document.getElementById('start').textContent === 'Start'")
        wait_until_empty(server)
        assert page.value("document.getElementById('help').textContent") == "It knows letters."
        assert page.value("document.getElementById('prompt').value") == "a b"
        names = "[...document.querySelectorAll('#examples img')].map((image) => image.alt)"
        assert page.value(names) == ["Red", "Blue"]
        page.value("document.querySelectorAll('#examples button:has(img)')[1].click(); true")
        page.until("document.getElementById('image-name').textContent === 'Blue'")
        page.value("document.querySelectorAll('#examples button:not(:has(img))')[1].click(); true")
        assert page.value("document.getElementById('prompt').value") == "c a"
        assert not server.manager.sessions
        page.click("start")
        page.until(f"{STATE} === 'Live'")
        (session,) = server.manager.sessions.values()
        assert session.content.opening.pictures["arguments"]["image"].max(axis=(0, 1)).tolist() == [0, 0, 200]
        assert session.content.opening.prompt == "c a"
        assert page.problems == []


@NEEDS_BROWSER
def test_without_prompts_of_the_artifact_the_field_is_empty_and_asked_for(start: Starter) -> None:
    server = start()
    with open_page(f"{server.url}/") as page:
        page.until(f"{STATE} === 'Ready'")
        assert page.value("document.getElementById('prompt').value") == ""
        page.click("start")
        assert page.value("document.getElementById('prompt').validity.valueMissing")
        assert not server.manager.sessions

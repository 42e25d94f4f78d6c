"""Masks of several speakers come with the request that opens a session, or from the page's own fields."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seko_runtime import Pool
from seko_runtime.controls.masks import MASKS, MasksControl
from seko_runtime.format.manifest import Buffer, InputSpec
from seko_runtime.video.manifest import VideoManifest
from seko_serve.errors import ServeError
from seko_serve.video.content import VideoContent
from seko_serve.video.opening import opening_of
from tests.runtime import toy, toy_pool, toy_whole

from .browser import open_page
from .conftest import Starter
from .pages import NEEDS_BROWSER, play
from .test_server import http
from .test_uploads import coded

TOKENS = 4  # 2 x 2 of a frame
INPUT = InputSpec(
    "who", (2, TOKENS), "float32", "input.who", "session", "caller", "required", "speaker_masks"
)
CONTROL = MasksControl.declared("who", height=toy_whole.HEIGHT, width=toy_whole.WIDTH, rows=2, columns=2)
HEIGHT, WIDTH = toy_whole.HEIGHT, toy_whole.WIDTH


def manifest() -> VideoManifest:
    """The toy's manifest, with masks that its model does not look at."""
    base = toy_pool.pool_manifest()
    buffer = Buffer(INPUT.buffer, (base.state_rows, *INPUT.shape), INPUT.dtype, "session")
    return toy.changed(base, buffers=(*base.buffers, buffer), inputs=(INPUT,), controls=(CONTROL,))


@contextmanager
def opener() -> Iterator[Pool]:
    with toy_pool.open_pool(manifest=manifest()) as pool:
        yield pool


def half(side: str) -> np.ndarray:
    """A picture, uint8 [rows, columns, 3], that is white on one side."""
    picture = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    picture[:, : WIDTH // 2] = 255
    return picture if side == "left" else 255 - picture


def upload(picture: np.ndarray) -> str:
    return base64.b64encode(coded(picture, "png")).decode()


BOTH = [upload(half("left")), upload(half("right"))]
EXPECTED = [[1, 0, 1, 0], [0, 1, 0, 1]]  # tokens by rows


def taken(content: Any) -> list[list[float]]:
    assert isinstance(content, VideoContent)
    masks: list[list[float]] = content.state()["controls"]["speaker_masks"][MASKS].tolist()
    return masks


def test_masks_of_a_request_are_those_of_the_session(start: Starter) -> None:
    server = start(opener)
    status, answer = http(f"{server.url}/v1/sessions", "POST", {"prompt": "a b", "masks": BOTH})
    assert status == 201, answer
    (session,) = server.manager.sessions.values()
    assert taken(session.content) == EXPECTED


@pytest.mark.parametrize(
    ("masks", "code"),
    [
        (BOTH[:1], "bad_request"),
        ([*BOTH, BOTH[0]], "bad_request"),
        ("both", "bad_request"),
        ([BOTH[0], "no picture"], "bad_request"),
        ([BOTH[0], 3], "bad_request"),
    ],
)
def test_masks_that_are_none_are_refused(masks: object, code: str) -> None:
    with pytest.raises(ServeError) as refused:
        opening_of({"prompt": "a b", "masks": masks}, manifest())
    assert refused.value.kind.code == code


def test_masks_for_an_artifact_without_speakers_are_refused() -> None:
    with pytest.raises(ServeError) as refused:
        opening_of({"prompt": "a b", "masks": BOTH}, toy_pool.pool_manifest())
    assert refused.value.kind.code == "unsupported"


@NEEDS_BROWSER
def test_the_page_has_a_field_for_each_mask(start: Starter, tmp_path: Path) -> None:
    server = start(opener)
    for side in ("left", "right"):
        (tmp_path / f"{side}.png").write_bytes(coded(half(side), "png"))
    with open_page(f"{server.url}/") as page:
        page.until("document.getElementById('model').textContent")
        page.upload("#masks-1", tmp_path / "right.png")
        page.until("document.getElementById('masks-1-thumbnail').naturalWidth")
        assert page.value("document.getElementById('start').disabled")  # one is lacking
        page.upload("#masks-0", tmp_path / "left.png")
        page.until("!document.getElementById('start').disabled")
        play(page)
        (session,) = server.manager.sessions.values()
        assert taken(session.content) == EXPECTED
        assert page.problems == []

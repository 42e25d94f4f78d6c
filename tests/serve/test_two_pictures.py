"""Sessions and videos that lead from one picture to another."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seko_runtime import Pool
from seko_runtime.controls import controls_of
from seko_runtime.video.manifest import VideoManifest
from seko_serve.errors import ServeError
from seko_serve.live.device import pool_of
from seko_serve.video.facts import described
from seko_serve.video.opening import Opening, blank_opening, opening_of
from tests.support.given_pictures import opening_with
from tests.support.shared import made_once
from tests.wan_i2v.streams import ONE, TWO
from tests.wan_i2v.test_picture import LAST, PHOTO, build, clip, manifest_of

from .artifacts import ENVIRONMENT, make_way
from .conftest import NewClient, Starter
from .test_server import watch
from .test_uploads import coded

__all__ = ["clip"]
Table = dict[str, Any]


def upload(picture: np.ndarray) -> str:
    return base64.b64encode(coded(picture, "png")).decode()


@pytest.fixture(scope="module")
def manifest() -> VideoManifest:
    return manifest_of(*build(TWO))


def test_a_session_begins_with_what_the_command_line_would_give_it(clip: tuple[Path, Any]) -> None:
    manifest = manifest_of(*build(TWO, clip[0]))
    frames = manifest.workload.stream.chunk_frames * 4  # latent frames
    fps = manifest.workload.stream.fps
    seconds = (1 + 4 * (frames - 1)) / fps  # the first latent frame holds one video frame, the others four
    opening = opening_of({"image": upload(PHOTO), "last_image": upload(LAST), "last_s": seconds}, manifest)
    begins = opening_with(manifest, 4, start=PHOTO, last=LAST)
    taken = of_controls(opening, manifest)
    assert np.array_equal(taken["image"], begins["image"])
    assert set(taken["inputs"]) == set(begins["inputs"]) == {"last_frame", "squashed"}
    assert all(np.array_equal(taken["inputs"][name], begins["inputs"][name]) for name in begins["inputs"])


def of_controls(opening: Opening, manifest: VideoManifest) -> Table:
    """What a session begins with by the pictures of an opening."""
    (control,) = controls_of(manifest).of_kind("pictures")
    assert opening.pictures is not None
    control.load(opening.pictures)
    return control.opening()


@pytest.mark.parametrize(("video_frames", "frame"), [(2, 1), (5, 1), (6, 2), (81, 20)])
def test_the_latent_frame_of_a_moment(manifest: VideoManifest, video_frames: int, frame: int) -> None:
    begins = opening_with(manifest, start=PHOTO, last=LAST, last_s=video_frames / 16, fps=16.0)
    assert begins["inputs"]["last_frame"].tolist() == [frame]


def test_a_page_is_told_that_there_are_two_pictures(manifest: VideoManifest) -> None:
    takes = described(manifest)["takes"]
    assert isinstance(takes, dict)
    assert (takes["image"], takes["last_image"]) == ("required", True)
    blank = of_controls(blank_opening(manifest), manifest)
    assert blank["image"].shape == (2, 32, 48, 3)
    assert blank["inputs"]["last_frame"].tolist() == [0]


@pytest.mark.parametrize(
    ("table", "code", "said"),
    [
        ({}, "bad_request", "image is missing"),
        ({"image": 1}, "bad_request", "last_image is missing: .* from one picture to another"),
        ({"last_image": 1}, "bad_request", "image is missing"),
        ({"image": 1, "last_image": "x"}, "bad_request", "last_image is no base64"),
        (
            {"image": 1, "last_image": 1, "last_s": 0},
            "bad_request",
            "last_s is .*, expected a number above 0",
        ),
        ({"image": 1, "last_image": 1, "last_s": 0.01}, "bad_request", "last_s is so early"),
    ],
)
def test_pictures_that_cannot_be_are_named(
    manifest: VideoManifest, table: Table, code: str, said: str
) -> None:
    picture = upload(PHOTO)
    table = {name: picture if name != "last_s" and value == 1 else value for name, value in table.items()}
    with pytest.raises(ServeError, match=said) as refused:
        opening_of(table, manifest)
    assert refused.value.kind.code == code


@pytest.mark.parametrize("table", [{"last_image": "x"}, {"last_s": 3}])
def test_a_model_of_one_picture_takes_no_last_one(table: Table) -> None:
    with pytest.raises(ServeError, match="takes no last picture: leave last_image and last_s out"):
        opening_of(table, manifest_of(*build(ONE)))


@pytest.mark.slow
async def test_frames_are_the_runtimes_also_when_a_session_starts_over(
    start: Starter,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    new_client: NewClient,
) -> None:
    """The last picture shows where it arrives, and nowhere before."""
    way = made_once(tmp_path_factory, "serve-way", make_way)
    monkeypatch.setenv(*next(iter(ENVIRONMENT.items())))
    pictures = {"image": upload(PHOTO), "last_image": upload(LAST)}
    with pool_of(way / "artifact") as pool:
        assert isinstance(pool, Pool)
        manifest, wanted = pool.manifest, {}
        for frame in (4, 0):
            opening = opening_of({"prompt": "a red disc", "seed": 3, **pictures, "last_s": 1}, manifest)
            begins = of_controls(opening, manifest)
            begins["inputs"]["last_frame"] = np.array([frame])
            with pool.open_session(seed=3, prompt="a red disc", **begins) as session:
                wanted[frame] = np.concatenate([session.run_chunk().video()[0] for _ in range(3)])
    assert np.array_equal(wanted[4][:13], wanted[0][:13])  # the chunks before latent frame 4
    assert not np.array_equal(wanted[4][13:], wanted[0][13:])
    server = start(lambda: pool_of(way / "artifact"))
    client = await new_client(server).open(
        codecs=["rgb24"], prompt="a red disc", seed=3, **pictures, last_s=1
    )
    shape = (client.ready["height"], client.ready["width"], 3)
    media, _ = await watch(client, 3)
    await client.send("restart", seed=3)
    while not media[-1].chunk or not any(frame.discontinuity for frame in media[1:]):
        media += (await watch(client, 1))[0]
    restarted = next(at for at, frame in enumerate(media) if at and frame.discontinuity)
    media += (await watch(client, 2))[0]
    await client.close()
    frames = [np.frombuffer(frame.payload, np.uint8).reshape(shape) for frame in media]
    assert np.array_equal(np.stack(frames[: len(wanted[4])]), wanted[4])
    again = np.stack(frames[restarted : restarted + len(wanted[4])])
    assert np.array_equal(again, wanted[4][: len(again)])
    assert len(again) > 13

"""Given frames and passes of a session's own: what begins a stream, and the one formula of the times."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seko_runtime.controls.poses import checked_poses, recorded_intrinsics
from seko_runtime.controls.voice import checked_samples
from seko_runtime.errors import EngineRunError, ManifestError, TornStreamError, UsageError
from seko_runtime.format.manifest import Buffer, InputSpec
from seko_runtime.sessions.artifact import OpenedFiles
from seko_runtime.video.artifact import VideoArtifact
from seko_runtime.video.contract import resolve_video
from seko_runtime.video.golden import input_tensor
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.schedule import Passes, rescheduled, schedule_tables, warped_timesteps
from seko_runtime.video.session import Session
from tests.support.rows import rows_of

from . import toy, toy_whole
from .toy_whole import HEIGHT, WIDTH, open_whole, whole_manifest


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)


def encoded(image: np.ndarray) -> np.ndarray:
    latents: np.ndarray = toy_whole.Encode()(torch.from_numpy(image)).numpy()
    return latents


def test_a_picture_is_the_first_latent_frame_of_the_first_chunk_and_of_no_other() -> None:
    with open_whole(2, image=picture(0)) as session, open_whole(2) as plain:
        first = session.run_chunk().to_host()
        free = plain.run_chunk().to_host()
        for row in range(2):
            assert first[row, :, :1].tobytes() == encoded(picture(0)).tobytes()
            assert first[row, :, 1:].tobytes() != free[row, :, 1:].tobytes()  # it is seen
        assert session.run_chunk().to_host()[0, :, :1].tobytes() != encoded(picture(0)).tobytes()


@pytest.mark.parametrize("kind", ["picture_condition", "squashed_pictures", "picture_features"])
def test_a_picture_of_the_callers_is_not_described_by_the_recorded_inputs(kind: str) -> None:
    """Which say what the golden's picture shows; other recorded inputs stay."""
    specs = (
        InputSpec("place", (1,), "float32", "input.place", "session"),
        InputSpec("seen", (1,), "float32", "input.seen", "session", kind=kind),
    )
    recorded: Any = {
        input_tensor(spec.name): SimpleNamespace(to_numpy=lambda: np.ones((1, 1))) for spec in specs
    }
    files = OpenedFiles(toy.changed(whole_manifest(), inputs=specs), "", "cpu", recorded)
    engines: Any = None
    artifact = VideoArtifact(files, engines)
    assert set(artifact.beginning(0, prompt="a red disc")["inputs"]) == {"place", "seen"}
    assert set(artifact.beginning(0, prompt="a red disc", image=picture(0))["inputs"]) == {"place"}


def test_each_row_may_have_its_own_picture_and_a_restarted_row_begins_with_what_it_is_given() -> None:
    images = np.stack([picture(0), picture(1)])
    with open_whole(2, image=images) as session:
        first = session.run_chunk().to_host()
        for row in range(2):
            assert first[row, :, :1].tobytes() == encoded(images[row]).tobytes()
        session.restart_row(0, image=picture(2))
        session.restart_row(1)
        again = session.run_chunk().to_host()
        assert again[0, :, :1].tobytes() == encoded(picture(2)).tobytes()
        with open_whole(2) as plain:
            assert again[1].tobytes() == plain.run_chunk().to_host()[1].tobytes()


@pytest.mark.parametrize("count", [1, toy.CHUNK])
def test_latents_can_be_given_up_to_a_chunk(count: int) -> None:
    clip = np.random.default_rng(3).standard_normal((toy.CHANNELS, count, toy.ROWS, toy.COLUMNS), np.float32)
    with open_whole(2, conditioning_latents=clip) as session:
        first = session.run_chunk().to_host()
        assert [row[:, :count].tobytes() for row in first] == [clip.tobytes()] * 2
        session.run_chunk()


def reference_manifest() -> VideoManifest:
    """The toy's cache with two of its ring's slots as references."""
    base = whole_manifest(2)
    stream = dataclasses.replace(
        base.workload.stream, reference_frames=2, ring_frames=base.workload.stream.ring_frames - 2
    )
    shape = (2, toy.CHANNELS, 2, toy.ROWS, toy.COLUMNS)
    buffers = (*base.buffers, Buffer("reference.latents", shape, "float32", "session"))
    return toy.changed(base, stream=stream, buffers=buffers)


def test_pictures_as_references_are_their_latents_each_encoded_alone() -> None:
    """A row each, and one picture for a restart."""
    manifest = reference_manifest()
    pictures = np.stack([[picture(0), picture(1)], [picture(2), picture(3)]])
    latents = np.stack([np.concatenate([encoded(image) for image in row], axis=1) for row in pictures])

    def chunks(reference: np.ndarray) -> list[bytes]:
        with open_whole(2, manifest=manifest, reference=reference) as session:
            return [session.run_chunk().to_host().tobytes() for _ in range(4)]

    assert chunks(pictures) == chunks(latents)
    assert chunks(pictures[0]) == chunks(latents[0]) != chunks(latents)
    with pytest.raises(UsageError, match="reference is uint8"):
        chunks(picture(0))
    missing = dataclasses.replace(manifest, buffers=whole_manifest(2).buffers)
    with pytest.raises(ManifestError, match=r"buffer reference\.latents is not there"):
        resolve_video(missing)


def test_a_restart_that_is_refused_changes_nothing_and_one_that_fails_is_made_again() -> None:
    """Neither seed, picture nor reference; the encoder fails at the second of the new reference frames."""
    pictures, calls_left, real = (
        np.stack([picture(0), picture(1)]),
        [-1],
        toy_whole.eager_engines()["vae_encode"],
    )

    def encode(inputs: list[Any]) -> list[Any]:
        calls_left[0] -= 1
        if calls_left[0] == 0:
            raise RuntimeError("planted")
        return real(inputs)

    def opened(**more: Any) -> Session:
        return open_whole(2, manifest=reference_manifest(), reference=pictures, image=picture(2), **more)

    with opened() as whole, opened(engines={"vae_encode": encode}) as session:
        with pytest.raises(UsageError, match="reference is uint8"):
            session.restart_row(0, seed=9, image=picture(3), reference=pictures[:, 1:])
        for _ in range(2):
            assert session.run_chunk().to_host().tobytes() == whole.run_chunk().to_host().tobytes()
        calls_left[0] = 2
        with pytest.raises(EngineRunError, match="planted"):
            session.restart_row(0, seed=9, reference=pictures[::-1])
        with pytest.raises(TornStreamError, match="restart it"):
            session.run_chunk()
        for restarted in (whole, session):
            restarted.restart_row(0, seed=9, reference=pictures[::-1])
        assert session.run_chunk().to_host().tobytes() == whole.run_chunk().to_host().tobytes()


def test_what_cannot_be_given_is_a_usage_error() -> None:
    for image, words in (
        (picture(0)[:4], "expected uint8"),
        (picture(0).astype(np.float32), "float32"),
    ):
        with pytest.raises(UsageError, match=words):
            open_whole(2, image=image)
    wide = np.zeros((toy.CHANNELS, toy.CHUNK + 1, toy.ROWS, toy.COLUMNS), np.float32)
    for latents, words in (
        (wide, "n of 1 to 2"),
        (wide[:, :0], "n of 1 to 2"),
        (wide[:, :1] * np.nan, "not finite"),
        (np.zeros(3, np.float32), "n of 1 to 2"),
    ):
        with pytest.raises(UsageError, match=words):
            open_whole(conditioning_latents=latents)
    with pytest.raises(UsageError, match="both image and conditioning_latents"):
        open_whole(image=picture(0), conditioning_latents=wide[:, :1])
    base = toy.toy_manifest()
    plain = {
        "manifest": base,
        "text": toy.toy_text(),
    }
    with pytest.raises(UsageError, match=r"encodes no pictures; .* --vae-encoder beside a tiny decoder"):
        open_whole(**plain, image=picture(0), engines=toy.eager_engines())
    with pytest.raises(UsageError, match="takes no conditioning frames"):
        open_whole(**plain, conditioning_latents=wide[:, :1], engines=toy.eager_engines())
    with open_whole() as session:
        with pytest.raises(UsageError, match="image is"):
            session.restart_row(0, image=picture(0)[:, :1])
        session.run_chunk()


class OnDevice:
    """As a tensor of torch on a GPU."""

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


@pytest.mark.parametrize("odd", [[[1], [2, 3]], OnDevice()])
def test_what_is_no_array_is_a_usage_error(odd: object) -> None:
    with open_whole(2) as session:
        for use in (
            lambda: session.restart_row(0, image=odd),
            lambda: session.restart_row(0, reference=odd),
            lambda: rows_of(session).set_conditioning(0, latents=odd),
            lambda: checked_samples(odd, 1),
            lambda: checked_poses(odd),
            lambda: recorded_intrinsics(odd, HEIGHT, WIDTH),
        ):
            with pytest.raises(UsageError, match="is no array"):
                use()
        for kind in (object, complex, "U1"):
            with pytest.raises(UsageError, match="expected numbers"):
                session.set_text(np.zeros((2, toy.TEXT_TOKENS, toy.TEXT_DIM), kind))


def test_times_are_the_formulas() -> None:
    assert warped_timesteps(4, 1.0) == (1000.0, 750.0, 500.0, 250.0)
    assert warped_timesteps(4, 5.0) == warped_timesteps((1000.0, 750.0, 500.0, 250.0), 5.0)
    assert warped_timesteps(4, 5.0) == (1000.0, 937.5, 833.3333333333334, 625.0)


@given(st.integers(1, 1024), st.floats(0.01, 100))
def test_any_number_of_passes_falls_from_pure_noise(steps: int, shift: float) -> None:
    times = warped_timesteps(steps, shift)
    assert len(times) == steps
    assert np.float32(times[0]) == 1000.0
    assert all(a > b > 0 for a, b in pairwise(times))
    tables = schedule_tables(Passes(times), 0.0, 2, 3)
    assert tables["schedule.timestep"].shape == (steps + 1, 2, 3)
    assert (tables["schedule.timestep"][-1] == 0).all()
    assert tables["schedule.sigma_next"][:-1].tobytes() == tables["schedule.sigma"][1:].tobytes()
    assert tables["schedule.sigma_next"][-1] == 0
    assert tables["schedule.draw"][:, 0].tolist() == list(range(1, steps + 1))
    dtypes = {name: str(table.dtype) for name, table in tables.items()}
    assert dtypes == {
        "schedule.timestep": "float32",
        "schedule.sigma": "float32",
        "schedule.sigma_next": "float32",
        "schedule.draw": "int64",
        "schedule.first_draw": "int64",
        "schedule.context_timestep": "float32",
    }


@pytest.mark.parametrize(
    ("steps", "shift"),
    [(0, 1.0), (1025, 1.0), (4, 0.0), (4, 1e-30), (4, float("nan")), (4, float("inf")), (True, 1.0)],
)
def test_what_is_no_schedule_is_a_usage_error(steps: int, shift: float) -> None:
    with pytest.raises(UsageError):
        warped_timesteps(steps, shift)
    for times, context in (((), 0.0), ((500.0, 500.0), 0.0), ((1001.0,), 0.0), ((5.0,), 1001.0)):
        with pytest.raises(UsageError):
            schedule_tables(Passes(times), context, 1, 1)


def test_a_session_with_the_artifacts_own_numbers_has_the_artifacts_own_times() -> None:
    manifest = whole_manifest()
    for steps, shift in ((toy.PASSES, None), (None, toy_whole.SHIFT), (toy.PASSES, toy_whole.SHIFT)):
        changed, tables = rescheduled(manifest, steps, shift)
        assert changed == manifest
        assert set(tables) == {"schedule.timestep"}
    changed, tables = rescheduled(manifest, 7, 3.0)
    assert len(resolve_video(replace_gain(changed))["denoise"]) == 7
    assert tables["schedule.timestep"].shape == (8, 1, toy.CHUNK)
    for lacking in (
        whole_manifest(schedule=toy.toy_manifest().workload.schedule),
        whole_manifest(weights=tuple(w for w in manifest.weights if w.name != "schedule.timestep")),
    ):
        with pytest.raises(UsageError, match="this artifact"):
            rescheduled(lacking, 3, None)


def replace_gain(manifest: toy_whole.Manifest) -> toy_whole.Manifest:
    """The toy's own table by pass grows with the passes, as `schedule.*` do."""
    weights = tuple(
        toy_whole.replace(weight, shape=(manifest.workload.schedule.denoise_passes + 1,))
        if weight.name == "gain"
        else weight
        for weight in manifest.weights
    )
    return toy_whole.replace(manifest, weights=weights)

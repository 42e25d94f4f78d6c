"""Streams by the runtime's own session and pool over the eager model: keys, poses, rows, rebuilt caches, snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seko_export.config.pool import PoolConfig
from seko_export.config.video import VideoBuild
from seko_export.errors import UsageError as ExportUsageError
from seko_export.families.layers.choice import INTRINSICS, POSES
from seko_export.families.minwm.camera import KEPT
from seko_export.families.minwm.family import FAMILY
from seko_export.families.minwm.model import NO_CAMERA, PER_CHUNK
from seko_export.video.recording import golden_text
from seko_runtime.errors import UsageError
from seko_runtime.video.contract import RECALL
from seko_runtime.video.pool import Pool
from seko_runtime.video.session import Session
from tests.minwm.streams import MODEL, cameras_of, look, minwm_config, random_checkpoint
from tests.support.eager_pool import eager_pool
from tests.support.lives import check_lives, equal, run
from tests.support.stacked import eager_session
from tests.support.tolerances import FP8_MATMULS_PASS, FP8_PASS, STEP, relative_error
from tests.truth.eager_stream import EagerStream, random_text, weights_of
from tests.truth.naive_minwm import walked

CHUNKS = 5  # past two windows of 8 latent frames
SEEDS = (3, 8)
# Four passes in float32 that feed on each other, over a few chunks: some ten times the bar of one pass.
STREAM = 1e-5
KEYS = ("w-6,wl-4,none-2", "j-3,e-4,ik-5,d-6")  # of two rows: a value for each latent frame


@contextmanager
def opened(config: VideoBuild, rows: int = 3) -> Iterator[Pool]:
    """A pool over the eager model."""
    pooled = config.changed(pool=PoolConfig(rows, (1, 2)[:rows]))
    with eager_pool(pooled, weights_of(pooled, random_checkpoint())) as pool:
        yield pool


def test_a_session_is_itself_whatever_happens_to_it_and_beside_it(tmp_path: Path) -> None:
    config = minwm_config()

    def begin(pool: Pool, row: int) -> Session:
        return pool.open_session(seed=SEEDS[row], text=golden_text(config).numpy()[:1])

    life = {"chunks": CHUNKS, "bound": STREAM, "folder": tmp_path}
    check_lives(partial(opened, config), begin, "camera", KEYS, **life)


def test_thirty_chunks_later_a_rebuilt_cache_is_the_one_that_was_there() -> None:
    """A cached frame of a single layer depends on nothing but its own latents; its camera is kept."""
    config = minwm_config()
    config = config.changed(model=replace(config.model, layers=1))
    text, checkpoint = golden_text(config), random_checkpoint()
    after: list[torch.Tensor] = []
    kept = []
    for rebuilt in (False, True):
        with eager_session(config, weights_of(config, checkpoint), text, SEEDS[:1]) as session:
            for number in range(30):
                session.run_chunk({name: x.numpy() for name, x in cameras_of(config, number).items()})
            if rebuilt:
                session.set_text(text.numpy(), recache=True)
            kept.append(session.cache_sample(1)[f"{RECALL}{KEPT}"])
            cameras = {name: x.numpy() for name, x in cameras_of(config, 40).items()}
            after += [torch.from_numpy(session.run_chunk(cameras).to_host()) for _ in range(2)]
    assert np.array_equal(kept[0], kept[1])
    assert all(relative_error(*both) <= STREAM for both in zip(after[2:], after[:2], strict=True))


@pytest.mark.parametrize(
    ("scheme", "change", "bar"),
    [
        ("fp32", {}, STEP[torch.float32]),
        ("fp4", {"attention": "fp8", "resident_window": True}, FP8_PASS),
        ("fp4", {"attention": "fp8", "resident_window": True, "fp8": True}, FP8_MATMULS_PASS),
        ("fp4", {"attention": "fp8", "fp8": True, "fp8_except": (1,)}, FP8_MATMULS_PASS),
        ("fp4", {"attention": "bf16"}, STEP[torch.float32]),
    ],
)
def test_fused_layers_are_the_plain_ones(
    scheme: str, change: Mapping[str, Any], bar: float, worst: Callable[[str, float], None]
) -> None:
    """Past the wrap, each pass fed the plain stream's latents."""
    plain = minwm_config(scheme)
    checkpoint, text = random_checkpoint(), random_text(plain.model, 1)
    streams = [
        EagerStream(config, checkpoint, text) for config in (plain, plain.changed(fused=True, **change))
    ]
    in_fp8 = {name.split(".")[1] for name in streams[1].weights if "prope_o.weight_fp8" in name}
    assert in_fp8 == (
        {"0", "1"} - {str(n) for n in change.get("fp8_except", ())} if "fp8" in change else set()
    )
    for number in range(3):
        for stream in streams:
            look(stream, cameras_of(plain, number))
        first = [number * plain.workload.stream.chunk_frames]
        wanted = streams[0].run_chunk(first, [3])
        fused = streams[1].run_chunk(first, [3], feed=[done.latents for done in wanted])
        for plain_pass, other in zip(wanted[:-1], fused[:-1], strict=True):
            assert plain_pass.velocity is not None
            assert other.velocity is not None
            error = relative_error(other.velocity, plain_pass.velocity)
            worst(f"minwm, fused layers, {scheme} {sorted(change)}", error)
            assert error <= bar


def test_an_fp4_cache_serves_the_camera_however_far_it_is(worst: Callable[[str, float], None]) -> None:
    """What is quantised are keys and values without a camera: the error is about that of the plain attention, and does
    not grow with the distance from where the stream began."""
    errors = {}
    for name, camera, far in (
        ("plain", NO_CAMERA, 0.0),
        ("near", PER_CHUNK, 0.0),
        ("far", PER_CHUNK, 1000.0),
    ):
        model, text = replace(MODEL, camera=camera), random_text(MODEL, 1)
        streams = [
            EagerStream(minwm_config(scheme).changed(model=model), random_checkpoint(), text)
            for scheme in ("fp32", "fp4")
        ]
        for number in range(3):
            cameras = cameras_of(streams[0].config, number)
            for stream in streams if cameras else ():
                look(stream, {**cameras, POSES: cameras[POSES] + far * torch.eye(4)[3]})
            exact = streams[0].run_chunk([4 * number], [3])
            coded = streams[1].run_chunk([4 * number], [3], feed=[done.latents for done in exact])
        assert exact[0].velocity is not None
        assert coded[0].velocity is not None
        errors[name] = relative_error(coded[0].velocity, exact[0].velocity)
        worst(f"minwm, fp4 against float32, {name}", errors[name])
    assert errors["near"] <= 2.5 * errors["plain"] <= 0.02
    assert errors["far"] <= 1.1 * errors["near"]


def test_held_keys_are_the_poses_of_the_reference_and_none_is_a_camera_at_rest() -> None:
    """For each key of the authors' script, ours on other letters for up and down, past a turned camera."""
    config = minwm_config()
    ours = {"u": "e", "dn": "q", "": "none"}
    keys = ["w", "l", "w", "u", "i", "a", "dn", "j", "j", "k", "s", "d", "", "l", "w"]
    with opened(config, rows=1) as pool, pool.open_session(text=golden_text(config).numpy()) as session:
        control = session.controls["camera"]
        control.take({"keys": ",".join(f"{ours.get(key, key)}-1" for key in keys)})
        poses = []
        for _ in range(4):
            given = control.next_chunk()
            poses += list(given[POSES])
            np.testing.assert_array_equal(given[INTRINSICS], np.tile([24.0, 16.0, 24.0, 16.0], (4, 1)))
            control.advance()
        np.testing.assert_allclose(poses, [pose[:3] for pose in walked(keys)], atol=1e-7)
        faces = {(key["pad"], key["label"]) for key in control.describe()["keys"]}
        assert ("Move", "Move up") in faces
        assert len(faces) == 10


def test_poses_follow_where_the_keys_have_come_to() -> None:
    """Recorded poses are relative to their first, in their own unit, and begin at the camera that was shown last."""
    config = minwm_config()
    walk = np.stack(walked(["w", "l"] * 14))
    with opened(config, rows=1) as pool, pool.open_session(text=golden_text(config).numpy()) as session:
        control = session.controls["camera"]
        control.take({"keys": "d-3"})
        shown = control.next_chunk()[POSES][-1]
        control.advance()
        away = np.eye(4)
        away[:3, 3] = 5
        control.take({"path": away @ walk, "intrinsics": [416, 240, 416, 240]})
        state = control.state()
        poses = []
        for _ in range(2):
            poses += list(control.next_chunk()[POSES])
            control.advance()
        wanted = np.vstack((shown, [0, 0, 0, 1])) @ walk[::4]
        np.testing.assert_allclose(poses, wanted[:, :3], atol=1e-6)
        with pytest.raises(UsageError, match="path has ended"):
            control.next_chunk()
        control.load(state)
        np.testing.assert_allclose(control.next_chunk()[POSES], wanted[:4, :3], atol=1e-6)
        with pytest.raises(UsageError, match="no state of a camera"):
            control.load({**state, "shown": np.zeros((4, 4)).tolist()})


def test_a_step_back_has_the_camera_that_was_shown_before() -> None:
    """A held key goes on from there, as the cached frames see the world."""
    config = minwm_config()
    with opened(config, rows=1) as pool, pool.open_session(text=golden_text(config).numpy()) as session:
        control = session.controls["camera"]
        control.take({"held": ["w", "j"]})
        shown, chunks = [], []
        for _ in range(2):
            shown.append(control.next_chunk()[POSES])
            chunks += run(session, 1)
        for chunk in (1, 0):
            session.rewind(chunk)
            np.testing.assert_array_equal(control.next_chunk()[POSES], shown[chunk])
        assert equal(run(session, 2), chunks)


def test_what_it_cannot_have_is_refused() -> None:
    for layout, option in (
        ({"layer_rings": (8, 4)}, "--layer-rings"),
        ({"pass_caches": True}, "--pass-caches"),
    ):
        with pytest.raises(ExportUsageError, match=f"{option}: the layers of 'minwm-tiny' keep tensors"):
            FAMILY.graph(minwm_config(layout=layout))
    with pytest.raises(
        ExportUsageError, match="--reference-frames 4: 'minwm-tiny' sees each frame by a camera"
    ):
        FAMILY.graph(minwm_config(layout={"reference_frames": 4}))
    with pytest.raises(ExportUsageError, match="camera is 'pass'"):
        replace(MODEL, camera="pass")

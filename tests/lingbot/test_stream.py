"""Streams by the runtime's own session and pool over the eager model: keys, poses, rows, rebuilt caches, snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from seko_export.config.pool import PoolConfig
from seko_export.config.video import VideoBuild
from seko_export.video.recording import golden_text
from seko_runtime.controls.camera import CameraControl
from seko_runtime.video.pool import Pool
from tests.lingbot.streams import INPUTS, given_of, lingbot_config, random_checkpoint
from tests.support.cameras import camera, chunk_of
from tests.support.eager_pool import eager_pool
from tests.support.stacked import eager_session
from tests.support.tolerances import FP8_MATMULS_PASS, FP8_PASS, STEP, relative_error
from tests.truth.eager_stream import EagerStream, random_text, weights_of

# Four passes in float32 that feed on each other, over a few chunks: some ten times the bar of one pass.
STREAM_BAR = 5e-5
CHUNKS = 5  # past the wrap: the cache holds 5 latent frames, a chunk is 2
KEYS = ("iw-9,wl-9,none-9,sa-9", "d-12,kj-12,w-12")  # of two rows
SEEDS = (3, 8)
Steps = Sequence[Mapping[str, Any]]


def keyboard(config: VideoBuild, keys: str, chunk_frames: int = 0) -> CameraControl:
    s = config.workload.stream
    return camera(s.height, s.width, chunk_frames or s.chunk_frames, keys)


def by_keys(config: VideoBuild, keys: str) -> Steps:
    control = keyboard(config, keys)
    return [chunk_of(control) for _ in range(CHUNKS)]


def table_of(config: VideoBuild) -> np.ndarray:
    return given_of(config, None)["condition"].numpy()


def alone(
    config: VideoBuild, steps: Steps, seed: int = SEEDS[0], recache_at: int | None = None
) -> list[Tensor]:
    """The chunks of a session of its own; the cache is rebuilt before one, with the prompt that was there."""
    text, chunks = golden_text(config), []
    with eager_session(config, weights_of(config, random_checkpoint()), text, [seed]) as session:
        for number, step in enumerate(steps):
            if number == recache_at:
                session.set_text(text.numpy(), recache=True)
            chunks.append(torch.from_numpy(session.run_chunk(step).to_host()))
    return chunks


def assert_alike(chunks: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for output, other in zip(chunks, wanted, strict=True):
        assert relative_error(output, other) <= STREAM_BAR


@pytest.mark.shows("lingbot")
def test_keys_make_the_stream_of_the_poses_that_they_make() -> None:
    """The keyboard's own poses, one for each video frame, given as a recorded path with the same unit of length."""
    config = lingbot_config()
    steps = by_keys(config, KEYS[0])
    s = config.workload.stream
    each, poses = camera(s.height, s.width, 1, KEYS[0], steps_per_frame=1), []
    for _ in range(4 * s.chunk_frames * CHUNKS):
        each.advance()
        poses.append(each.pose)
    usual = np.array([500, 500, s.width / 2, s.height / 2]) / np.array([s.width / 832, s.height / 480] * 2)
    path = keyboard(config, "")
    path.take({"path": poses, "intrinsics": usual, "unit": path.settings.length})
    by_poses = [chunk_of(path) for _ in range(CHUNKS)]
    wanted = alone(config, steps)
    assert_alike(alone(config, by_poses), wanted)
    resting = [steps[0]] * CHUNKS  # the same start, and a camera that stays there
    assert relative_error(alone(config, resting)[-1], wanted[-1]) > 100 * STREAM_BAR


@pytest.mark.parametrize(
    ("how", "scheme", "change", "bar"),
    [
        ("pass", "fp32", {}, STEP[torch.float32]),
        ("chunk", "fp4", {"attention": "fp8"}, FP8_PASS),
        ("pass", "fp4", {"attention": "fp8", "resident_window": True}, FP8_PASS),
        ("chunk", "fp4", {"attention": "fp8", "fp8": True}, FP8_MATMULS_PASS),
    ],
)
def test_fused_layers_are_the_plain_ones(
    how: str, scheme: str, change: Mapping[str, Any], bar: float, worst: Callable[[str, float], None]
) -> None:
    """Past the wrap, each pass fed the plain stream's latents."""
    plain = lingbot_config(scheme, how=how)
    checkpoint, text = random_checkpoint(), random_text(plain.model, 1)
    streams = [
        EagerStream(config, checkpoint, text) for config in (plain, plain.changed(fused=True, **change))
    ]
    for chunk in (None, *range(4)):
        for stream in streams:
            for name, value in given_of(plain, chunk).items():
                stream.buffers[INPUTS[name]].copy_(value)
        if chunk is None:
            continue
        first = [chunk * plain.workload.stream.chunk_frames]
        wanted = streams[0].run_chunk(first, [3])
        fused = streams[1].run_chunk(first, [3], feed=[output.latents for output in wanted])
        for plain_pass, other in zip(wanted[:-1], fused[:-1], strict=True):
            error = relative_error(other.velocity, plain_pass.velocity)
            worst(f"lingbot, fused layers, {scheme} {sorted(change)}, camera each {how}", error)
            assert error <= bar


def test_a_scale_kept_for_the_chunk_is_the_one_of_every_pass() -> None:
    """Two ways to use memory: the same numbers."""
    config = lingbot_config()
    steps = by_keys(config, KEYS[0])
    assert_alike(alone(lingbot_config(how="pass"), steps), alone(config, steps))


def test_a_rebuilt_cache_sees_the_camera_of_each_kept_chunk() -> None:
    """With the same prompt the next chunk is the same, as long as nothing was evicted; other cameras show."""
    config = lingbot_config()
    steps = by_keys(config, KEYS[0])[:3]
    plain = alone(config, steps)
    assert torch.equal(alone(config, steps, recache_at=2)[-1], plain[-1])
    other = [*by_keys(config, KEYS[1])[:2], steps[2]]
    assert relative_error(alone(config, other, recache_at=2)[-1], plain[-1]) > 100 * STREAM_BAR


@contextmanager
def opened(config: VideoBuild, rows: int = 2) -> Iterator[Pool]:
    """A pool over the eager model."""
    pooled = config.changed(pool=PoolConfig(rows, (1, 2)))
    weights = weights_of(pooled, random_checkpoint()) | config.workload.schedule.tables(
        pooled.as_batch.workload.stream
    )
    with eager_pool(pooled, weights) as pool:
        yield pool


def test_rows_of_a_pool_have_pictures_and_cameras_of_their_own() -> None:
    """They begin at different times, so that a call holds different frames of their tables, too."""
    config = lingbot_config()
    steps, text = [by_keys(config, keys) for keys in KEYS], golden_text(config)
    tables = [table_of(config), table_of(config)[..., ::-1].copy()]
    wanted = []
    for row in range(2):
        with eager_session(
            config, weights_of(config, random_checkpoint()), text, SEEDS[row : row + 1]
        ) as alone:
            alone.set_inputs({"condition": tables[row]})
            wanted.append([torch.from_numpy(alone.run_chunk(step).to_host()) for step in steps[row]])
    assert relative_error(wanted[0][0], wanted[1][0]) > 100 * STREAM_BAR
    pooled: list[list[Tensor]] = [[], []]
    with opened(config) as pool:
        sessions = [
            pool.open_session(seed=seed, text=text.numpy(), inputs={"condition": table})
            for seed, table in zip(SEEDS, tables, strict=True)
        ]
        pooled[0].append(torch.from_numpy(sessions[0].run_chunk(steps[0][0]).to_host()))
        for number in range(1, CHUNKS):
            inputs = [steps[0][number], steps[1][number - 1]]
            for row, chunk in enumerate(pool.run(sessions, inputs)):
                pooled[row].append(torch.from_numpy(chunk.to_host()))
        for session in sessions:
            session.close()
    assert_alike(pooled[0], wanted[0])
    assert_alike(pooled[1], wanted[1][: CHUNKS - 1])


def test_a_stream_goes_on_from_a_snapshot_with_its_keys(tmp_path: Path) -> None:
    """Stream and controller, whose state is JSON: the same bytes as without the break; a restart is the beginning."""
    config, text = lingbot_config(), golden_text(lingbot_config()).numpy()
    with opened(config) as pool:
        session = pool.open_session(seed=SEEDS[0], text=text, inputs={"condition": table_of(config)})
        session.controls["camera"].take({"keys": KEYS[0]})
        first = session.run_chunk().to_host().copy()
        session.controls["camera"].take({"held": ["w", "l"]})
        session.run_chunk()
        session.save(tmp_path / "stream")
        state = session.controls.state()
        wanted = [session.run_chunk().to_host().copy() for _ in range(2)]
        again = pool.restore(tmp_path / "stream")
        again.controls.load(state)
        for latents in wanted:
            assert np.array_equal(again.run_chunk().to_host(), latents)
        session.restart()
        session.controls["camera"].take({"keys": KEYS[0]})
        assert np.array_equal(session.run_chunk().to_host(), first)
        session.close()
        again.close()


def test_a_prompt_switch_leaves_picture_and_camera() -> None:
    """A new text without a rebuilt cache changes the next chunk; the same text again changes nothing."""
    config = lingbot_config()
    steps, text = by_keys(config, KEYS[0]), golden_text(config)
    plain = alone(config, steps)
    with eager_session(config, weights_of(config, random_checkpoint()), text, SEEDS[:1]) as session:
        for number, step in enumerate(steps):
            if number == 2:
                session.set_text(text.numpy())
            if number == 3:
                session.set_text(2 * text.numpy(), recache=True)
            latents = torch.from_numpy(session.run_chunk(step).to_host())
            assert torch.equal(latents, plain[number]) == (number < 3)

"""Keys and poses to a stream's cameras, against the authors' formulas written out; no torch."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seko_runtime.controls.camera import KEYS as CODES
from seko_runtime.controls.camera import CameraControl
from seko_runtime.controls.camera_steps import KeySettings
from seko_runtime.controls.key_text import key_letters, key_steps
from seko_runtime.errors import UsageError
from tests.support.cameras import LETTERS as KEYS
from tests.support.cameras import camera as camera_at
from tests.support.cameras import chunk_of, text_of

# One rounding to float32 of numbers up to about 4, beside float64's own.
ROUNDED = 5e-7

rows = st.lists(st.frozensets(st.sampled_from(KEYS), max_size=4), min_size=9, max_size=60)
tuned = st.builds(
    KeySettings,
    steps_per_frame=st.integers(1, 4),
    move=st.floats(0.01, 2),
    yaw=st.floats(0, 30),
    pitch=st.floats(0, 30),
    pitch_limit=st.floats(0, 85),
)


def turn(axis: str, degrees: float) -> np.ndarray:
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    about_x = [[1, 0, 0], [0, c, -s], [0, s, c]]
    return np.array(about_x if axis == "x" else [[c, 0, s], [0, 1, 0], [-s, 0, c]])


def poses_by_formula(keys: list[frozenset[str]], how: KeySettings) -> np.ndarray:
    """The original's tool in float64: one more pose than there are rows of keys, turned first, then moved.

    A step of pitch that would pass the limit is left out, and 1e-6 is added to a length before it divides.
    """
    rotation, place, total = np.eye(3), np.zeros(3), 0.0
    poses = [np.eye(4)]
    for key in keys:
        pitch = how.pitch * (("i" in key) - ("k" in key))
        if not -np.radians(how.pitch_limit) <= total + np.radians(pitch) <= np.radians(how.pitch_limit):
            pitch = 0.0
        total += np.radians(pitch)
        rotation = turn("y", how.yaw * (("l" in key) - ("j" in key))) @ rotation @ turn("x", pitch)
        forward, right = rotation[:, 2].copy(), rotation[:, 0].copy()
        forward[1] = right[1] = 0
        forward, right = (axis / (np.linalg.norm(axis) + 1e-6) for axis in (forward, right))
        place = place + how.move * (
            ("w" in key) * forward - ("s" in key) * forward + ("d" in key) * right - ("a" in key) * right
        )
        pose = np.eye(4)
        pose[:3, :3], pose[:3, 3] = rotation, place
        poses.append(pose)
    return np.array(poses)


def relative_by_formula(latent_poses: np.ndarray, unit: float) -> np.ndarray:
    """Relative to the first, then each in the one before."""
    from_first = np.linalg.inv(latent_poses[0]) @ latent_poses
    each = [np.eye(4)] + [np.linalg.inv(pose) @ other for pose, other in pairwise(from_first)]
    poses = np.array(each)[:, :3]
    poses[:, :, 3] /= unit
    return poses


@given(rows, tuned, st.integers(1, 4))
@settings(max_examples=60)
def test_keys_give_the_cameras_of_the_formulas(keys, how, chunk_frames) -> None:
    camera = camera_at(64, 96, chunk_frames, keys, **asdict(how))
    latents = len(keys) // how.steps_per_frame + 1
    chunks = latents // chunk_frames
    tables = [chunk_of(camera)["camera"] for _ in range(chunks)]
    poses = poses_by_formula(keys, how)[:: how.steps_per_frame]
    wanted = relative_by_formula(poses, how.move * how.steps_per_frame)[: chunks * chunk_frames]
    if chunks:
        assert np.abs(np.concatenate(tables) - wanted).max() <= ROUNDED
        assert np.abs(camera.pose - poses[chunks * chunk_frames - 1]).max() <= 1e-9


@given(rows, st.integers(1, 4))
@settings(max_examples=30)
def test_a_stream_of_keys_is_the_stream_of_the_poses_that_they_make(keys, chunk_frames) -> None:
    how = KeySettings()
    focal = [500.0, 510.0, 400.0, 200.0]
    poses = poses_by_formula(keys, how)
    if (len(poses) - 1) // 4 + 1 < chunk_frames:
        return
    path = camera_at(64, 96, chunk_frames)
    path.take({"path": poses, "intrinsics": focal, "unit": how.length})
    camera = camera_at(64, 96, chunk_frames)
    camera.take({"keys": text_of(keys), "intrinsics": focal})
    assert path.chunks is not None
    for _ in range(path.chunks):
        by_keys, by_poses = chunk_of(camera), chunk_of(path)
        assert np.abs(by_keys["camera"] - by_poses["camera"]).max() <= ROUNDED
        assert np.array_equal(by_keys["intrinsics"], by_poses["intrinsics"])


def test_a_straight_walk_moves_by_one_and_a_camera_at_rest_stays() -> None:
    for how in ({}, {"steps_per_frame": 1, "yaw": 6.0, "pitch": 4.0}):
        camera = camera_at(64, 96, 3, **how)
        first = chunk_of(camera)["camera"]
        assert np.array_equal(first, np.tile(np.eye(4, dtype=np.float32)[:3], (3, 1, 1)))
        camera.take({"held": ["KeyW"]})
        walk = chunk_of(camera)["camera"]
        assert np.allclose(walk[:, :, 3], [0, 0, 1], atol=ROUNDED)
        camera.take({"held": ["KeyW", "KeyD"]})
        assert np.allclose(np.linalg.norm(chunk_of(camera)["camera"][:, :, 3], axis=1), 2**0.5, atol=ROUNDED)
        camera.take({"held": []})
        assert np.array_equal(chunk_of(camera)["camera"], first)


def test_a_key_that_was_tapped_between_two_chunks_counts_for_one_latent_frame() -> None:
    camera = camera_at(64, 96, 3)
    chunk_of(camera)
    camera.take({"held": ["KeyW"]})
    camera.take({"held": []})
    moved = chunk_of(camera)["camera"][:, 2, 3]
    assert np.allclose(moved, [1, 0, 0], atol=ROUNDED)
    assert not chunk_of(camera)["camera"][:, :, 3].any()


@given(rows, st.integers(1, 3))
@settings(max_examples=30)
def test_it_never_looks_further_up_than_the_limit(keys, chunk_frames) -> None:
    camera = camera_at(64, 96, chunk_frames, keys, pitch=30.0, pitch_limit=40.0)
    while camera.chunks:
        chunk_of(camera)
        assert abs(np.degrees(np.arcsin(camera.pose[1, 2]))) <= 40.0 + 1e-9


def test_a_step_that_would_pass_the_limit_does_not_turn_the_camera() -> None:
    """Steps of 2 degrees end at 84 below a limit of 85, whichever way; a walk after that is the authors'."""
    for key, sign in (("i", -1.0), ("k", 1.0)):
        keys = [frozenset(key)] * 60 + [frozenset({"w", key})] * 8 + [frozenset("d")] * 8
        camera = camera_at(64, 96, 1, keys)
        while camera.chunks:
            chunk_of(camera)
        wanted = poses_by_formula(keys, KeySettings())[-1]
        assert np.degrees(np.arcsin(camera.pose[1, 2])) == pytest.approx(sign * 84, abs=1e-9)
        assert np.abs(camera.pose - wanted).max() <= 1e-12


def test_a_limit_that_is_lowered_below_where_the_camera_looks_lets_it_turn_back() -> None:
    """And its state can be loaded."""
    camera = camera_at(64, 96, 3, "i-40")
    while camera.chunks:
        chunk_of(camera)
    camera.take({"settings": {"pitch_limit": 30.0}})
    camera.load(json.loads(json.dumps(camera.state())))
    camera.take({"held": ["i"]})
    chunk_of(camera)
    assert np.degrees(np.arcsin(camera.pose[1, 2])) == pytest.approx(-80.0)
    camera.take({"held": ["k"]})
    chunk_of(camera)
    assert np.degrees(np.arcsin(camera.pose[1, 2])) == pytest.approx(-56.0)


def test_a_move_is_divided_by_a_millionth_more_than_its_length() -> None:
    """Steeply down, where the axis ahead is short over the ground: 5e-7 of a step of 0.05 are missing."""
    keys = [frozenset("k")] * 42 + [frozenset("w")] * 400
    camera = camera_at(64, 96, 1, keys)
    while camera.chunks:
        chunk_of(camera)
    walked, level = np.linalg.norm(camera.pose[:3, 3]), np.cos(np.radians(84))
    assert walked == pytest.approx(400 * 0.05 * level / (level + 1e-6), abs=1e-9)
    assert np.abs(camera.pose - poses_by_formula(keys, KeySettings())[-1]).max() <= 1e-12


def test_a_long_turn_stays_a_rotation() -> None:
    camera = camera_at(64, 96, 4)
    camera.take({"held": ["j", "w", "i"]})
    for _ in range(500):
        poses = chunk_of(camera)["camera"]
    turned = poses[:, :, :3].astype(np.float64)
    assert np.abs(turned @ turned.swapaxes(1, 2) - np.eye(3)).max() <= ROUNDED


def test_a_long_path_whose_rotations_are_rounded_stays_one_of_rotations() -> None:
    """For a model that takes poses to the world, which are products of all moves; four decimals."""
    plain = camera_at(64, 96, 1)
    spec = replace(plain.spec, parameters={**plain.spec.parameters, "world": True})
    camera = CameraControl(spec, plain.inputs)
    path = np.tile(np.eye(4), (4000, 1, 1))
    path[:, :3, :3] = [turn("y", 0.6 * frame).round(4) for frame in range(4000)]
    camera.take({"path": path, "intrinsics": [500, 500, 416, 240]})
    while camera.chunks:
        turned = chunk_of(camera)["camera"][0, :, :3]
        assert np.abs(turned @ turned.T - np.eye(3)).max() <= 1e-3
    camera.load(json.loads(json.dumps(camera.state())))


@given(rows, st.integers(0, 6))
@settings(max_examples=30)
def test_a_state_goes_on_where_it_was_taken(keys, chunks) -> None:
    camera, loaded = camera_at(64, 96, 2, keys), camera_at(64, 96, 2)
    camera.take({"held": ["w", "l"]})
    for _ in range(chunks):
        chunk_of(camera)
    camera.take({"held": ["w", "k"]})
    loaded.load(json.loads(json.dumps(camera.state())))
    for _ in range(3):
        assert np.array_equal(chunk_of(camera)["camera"], chunk_of(loaded)["camera"])
    camera.reset()
    again = camera_at(64, 96, 2)
    again.take({"held": ["w", "k"]})
    assert np.array_equal(chunk_of(camera)["camera"], chunk_of(again)["camera"])


@given(rows, st.integers(0, 3), st.booleans())
@settings(max_examples=30)
def test_after_a_step_back_the_camera_stands_where_it_stood(keys, back, loaded) -> None:
    """Steps of a text that were taken are gone; the first frame of a stream shows the camera's start."""
    camera, plain = camera_at(64, 96, 2, keys), camera_at(64, 96, 2, keys)
    for chunk in range(3):
        chunk_of(camera)
        if chunk < back:
            chunk_of(plain)
    if loaded:
        camera.load(json.loads(json.dumps(camera.state())))
    camera.go_to(2 * back)
    assert np.array_equal(camera.pose, plain.pose)
    for control in (camera, plain):
        control.load({**control.state(), "steps": []})
        control.take({"held": ["w", "l"]})
    assert np.array_equal(chunk_of(camera)["camera"], chunk_of(plain)["camera"])


def test_a_step_back_over_many_chunks_finds_the_camera_as_it_stood() -> None:
    """As many as a long cache holds."""
    camera, plain = camera_at(64, 96, 1), camera_at(64, 96, 1)
    for control, chunks in ((camera, 60), (plain, 3)):
        control.take({"held": ["w"]})
        for _ in range(chunks):
            chunk_of(control)
    camera.go_to(3)
    assert np.array_equal(camera.pose, plain.pose)


def test_a_lens_stays_at_a_restart() -> None:
    camera = camera_at(64, 96, 2)
    camera.take({"intrinsics": [30, 30, 48, 32]})
    lens = chunk_of(camera)["intrinsics"]
    camera.reset()
    assert np.array_equal(chunk_of(camera)["intrinsics"], lens)


def test_a_camera_that_is_steered_from_a_later_chunk_on_moves_before_each_frame() -> None:
    """As after chunks whose cameras were arrays, or from a snapshot without the control's state."""
    camera, restored = (CameraControl.without_artifact(64, 96, 3) for _ in range(2))
    camera.advance()
    restored.go_to(3)
    for control in (camera, restored):
        control.take({"held": ["w"]})
        assert np.allclose(chunk_of(control)["camera"][:, 2, 3], 1, atol=ROUNDED)


def test_nothing_moves_until_the_chunk_is_on_its_way() -> None:
    """A chunk may be asked for twice, and an event between the two counts; a tap is not lost by the first."""
    camera, plain = camera_at(64, 96, 3), camera_at(64, 96, 3)
    for control in (camera, plain):
        chunk_of(control)
    camera.take({"held": ["KeyW"]})
    camera.take({"held": []})
    before = camera.state()
    first = camera.next_chunk()["camera"]
    assert np.array_equal(camera.next_chunk()["camera"], first)
    assert camera.state() == before
    camera.take({"held": ["KeyD"]})
    plain.take({"held": ["KeyW"]})
    plain.take({"held": ["KeyD"]})
    assert not np.array_equal(camera.next_chunk()["camera"], first)
    assert np.array_equal(chunk_of(camera)["camera"], chunk_of(plain)["camera"])


@pytest.mark.parametrize(
    "change",
    [
        {"place": [0, 0]},
        {"yaw": float("nan")},
        {"pitch": 1.6},  # beyond straight up
        {"held": "x"},
        {"steps": [["sideways"]]},
        {"poses": [[[0], None]]},
        {"frame": -1},
        {"before": [[0, {}, np.eye(4).tolist()]]},
        {"place": None},
    ],
)
def test_states_of_others_are_refused(change) -> None:
    camera = camera_at(64, 96, 2)
    with pytest.raises(UsageError, match="no state of a camera"):
        camera.load(camera.state() | change)
    with pytest.raises(UsageError, match="no state"):
        camera.load({})


def steps_of(text: str) -> list[frozenset[str]]:
    return key_steps(text, {letter: letter for letter in key_letters(CODES)})


def test_key_strings() -> None:
    walk = steps_of("w-10, iw-15,none-5")
    assert walk == [frozenset("w")] * 10 + [frozenset("iw")] * 15 + [frozenset()] * 5
    for same in (
        "W-10,Iw-15,NONE-5",
        "w-10,iw-15,None-5".replace(",", "\N{FULLWIDTH COMMA}"),
        " w - 1 0 ,\tIW-15\n,none-5 ",
    ):
        assert steps_of(same) == walk


@pytest.mark.parametrize(
    "text",
    [
        "",
        "w",
        "w-",
        "x-3",
        "w-0",
        "w-3,",
        "w--3",
        "X-3",
        "w-3;s-3",
        "w-99999999",
        "nonew-3",
        "w-٣",
        "\N{LATIN SMALL LETTER LONG S}-3",
    ],
)
def test_key_strings_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError, match="keys"):
        steps_of(text)


@given(st.integers(9, 40), st.integers(1, 3), st.integers(0, 2**31))
@settings(max_examples=30)
def test_a_path_is_the_formulas(count: int, chunk_frames: int, seed: int) -> None:
    """Every fourth pose, relative, translations by the largest norm, the first intrinsics at the video's size."""
    random = np.random.default_rng(seed)
    keys = [frozenset(key for key in KEYS if random.random() < 0.4) for _ in range(count - 1)]
    world = np.eye(4)
    world[:3, :3], world[:3, 3] = turn("x", 20) @ turn("y", 77), [3, -2, 5]
    poses = world @ poses_by_formula(keys, KeySettings(yaw=7.0, move=0.3))
    focal = random.uniform(200, 600, (count, 4))
    path = camera_at(64, 96, chunk_frames)
    path.take({"path": poses, "intrinsics": focal})
    latents = ((count - 1) // 4 + 1) // chunk_frames * chunk_frames
    wanted = relative_by_formula(poses[: 4 * latents : 4][:latents], 1.0)
    longest = np.linalg.norm(wanted[:, :, 3], axis=1).max()
    wanted[:, :, 3] /= longest or 1.0
    chunks = [chunk_of(path) for _ in range(latents // chunk_frames)]
    assert np.abs(np.concatenate([chunk["camera"] for chunk in chunks]) - wanted).max() <= ROUNDED
    fx, fy, cx, cy = focal[0]
    at_size = np.array([fx * 96 / 832, fy * 64 / 480, cx * 96 / 832, cy * 64 / 480], np.float32)
    assert all(np.array_equal(row, at_size) for row in chunks[0]["intrinsics"])
    own = camera_at(64, 96, chunk_frames)
    own.take({"path": poses, "intrinsics": focal, "own_intrinsics": True})
    last = [chunk_of(own) for _ in chunks][-1]["intrinsics"][-1]
    assert np.allclose(last[0], focal[4 * (latents - 1), 0] * 96 / 832, rtol=1e-6)
    with pytest.raises(UsageError, match="give more poses"):
        path.next_chunk()
    path.take({"held": []})
    assert not path.next_chunk()["camera"][:, :, 3].any()  # a person may go on from there


@pytest.mark.parametrize(
    ("poses", "intrinsics"),
    [
        (np.zeros((9, 4, 4)), [1, 1, 0, 0]),
        (np.tile(np.diag([1.0, 1, -1, 1]), (9, 1, 1)), [1, 1, 0, 0]),  # a mirror
        (np.full((9, 4, 4), np.nan), [1, 1, 0, 0]),
        (np.tile(np.eye(4), (9, 1, 1))[:, :3], [1, 1, 0, 0]),
        (np.tile(np.eye(4), (4, 1, 1)), [1, 1, 0, 0]),  # too few for two latent frames
        (np.tile(np.eye(4), (9, 1, 1)), [0, 1, 0, 0]),
        (np.tile(np.eye(4), (9, 1, 1)), [1, 1, 0]),
        (np.tile(np.eye(4), (9, 1, 1)), "wide"),
    ],
)
def test_paths_that_cannot_be(poses, intrinsics) -> None:
    with pytest.raises(UsageError):
        camera_at(64, 96, 2).take({"path": poses, "intrinsics": intrinsics})


@pytest.mark.parametrize(
    "change",
    [
        {"move": -1.0},
        {"yaw": 200.0},
        {"pitch_limit": 91.0},
        {"steps_per_frame": 0},
        {"unit": 0.0},
        {"move": float("nan")},
    ],
)
def test_settings_that_cannot_be(change) -> None:
    with pytest.raises(UsageError):
        KeySettings(**change)
    with pytest.raises(UsageError):
        camera_at(64, 96, 2).take({"settings": change})


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"held": ["q"]}, "'q' is not known"),
        ({"held": 3}, "keys are 3, expected some of"),
        ({"held": {"w": 1}}, "keys are {'w': 1}, expected some of"),
        ({"keys": 7}, "keys are 7, expected a text such as w-10"),
        ({}, "has the fields [], expected one of held"),
        ({"held": [], "keys": "w-1"}, "expected one of held"),
        ({"held": [], "fog": 1}, "has the unknown field 'fog', expected held"),
        (7, "an event of a camera is 7"),
        ({"poses": [np.eye(4)] * 257}, "poses are 257, at most 256"),
        ({"settings": {"speed": 1}}, "unknown field 'speed'"),
    ],
)
def test_events_that_cannot_be(event: Any, words: str) -> None:
    camera = camera_at(64, 96, 2)
    before = camera.state()
    with pytest.raises(UsageError, match=re.escape(words)):
        camera.take(event)
    assert camera.state() == before


def test_keys_that_steer_nothing_are_held_without_effect_and_others_wait() -> None:
    camera = camera_at(64, 96, 2)
    camera.take({"held": ["Space", "ShiftLeft"]})
    chunk_of(camera)
    assert np.array_equal(chunk_of(camera)["camera"], np.tile(np.eye(4, dtype=np.float32)[:3], (2, 1, 1)))
    for _ in range(16):
        camera.take({"poses": [np.eye(4)] * 256})
    with pytest.raises(UsageError, match="4096 poses wait, at most 4096 do"):
        camera.take({"poses": [np.eye(4)]})

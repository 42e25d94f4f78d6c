"""Keys and poses to a stream's cameras, against the authors' formulas written out; no torch."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seko_runtime.errors import UsageError
from seko_runtime.video.conditioning import CameraPath, KeyboardCamera, KeySettings, key_rows
from seko_runtime.video.conditioning.keyboard import KEYS

# One rounding to float32 of numbers up to about 4, beside float64's own.
ROUNDED = 5e-7
SIZE = {"height": 64, "width": 96}

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
    camera = KeyboardCamera(64, 96, chunk_frames, how, keys=keys)
    latents = len(keys) // how.steps_per_frame + 1
    chunks = latents // chunk_frames
    tables = [camera.next_chunk()["camera"] for _ in range(chunks)]
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
    path = CameraPath(poses, focal, chunk_frames=chunk_frames, unit=how.length, **SIZE)
    camera = KeyboardCamera(64, 96, chunk_frames, how, intrinsics=focal, keys=keys)
    for number in range(len(path)):
        by_keys, by_poses = camera.next_chunk(), path.chunk(number)
        assert np.abs(by_keys["camera"] - by_poses["camera"]).max() <= ROUNDED
        assert np.array_equal(by_keys["intrinsics"], by_poses["intrinsics"])


def test_a_straight_walk_moves_by_one_and_a_camera_at_rest_stays() -> None:
    for how in (KeySettings(), KeySettings(steps_per_frame=1, yaw=6.0, pitch=4.0)):
        camera = KeyboardCamera(64, 96, 3, how)
        first = camera.next_chunk()["camera"]
        assert np.array_equal(first, np.tile(np.eye(4, dtype=np.float32)[:3], (3, 1, 1)))
        camera.press("w")
        walk = camera.next_chunk()["camera"]
        assert np.allclose(walk[:, :, 3], [0, 0, 1], atol=ROUNDED)
        camera.press("d")
        assert np.allclose(
            np.linalg.norm(camera.next_chunk()["camera"][:, :, 3], axis=1), 2**0.5, atol=ROUNDED
        )
        camera.release("wd")
        assert np.array_equal(camera.next_chunk()["camera"], first)


def test_a_key_that_was_tapped_between_two_chunks_counts_for_one_latent_frame() -> None:
    camera = KeyboardCamera(64, 96, 3)
    camera.next_chunk()
    camera.press("w")
    camera.release("w")
    moved = camera.next_chunk()["camera"][:, 2, 3]
    assert np.allclose(moved, [1, 0, 0], atol=ROUNDED)
    assert not camera.next_chunk()["camera"][:, :, 3].any()


@given(rows, st.integers(1, 3))
@settings(max_examples=30)
def test_it_never_looks_further_up_than_the_limit(keys, chunk_frames) -> None:
    how = KeySettings(pitch=30.0, pitch_limit=40.0)
    camera = KeyboardCamera(64, 96, chunk_frames, how, keys=keys)
    while camera.steps_left:
        camera.next_chunk()
        assert abs(np.degrees(np.arcsin(camera.pose[1, 2]))) <= 40.0 + 1e-9


def test_a_step_that_would_pass_the_limit_does_not_turn_the_camera() -> None:
    """Steps of 2 degrees end at 84 below a limit of 85, whichever way; a walk after that is the authors'."""
    for key, sign in (("i", -1.0), ("k", 1.0)):
        keys = [frozenset(key)] * 60 + [frozenset({"w", key})] * 8 + [frozenset("d")] * 8
        camera = KeyboardCamera(64, 96, 1, keys=keys)
        while camera.steps_left:
            camera.next_chunk()
        wanted = poses_by_formula(keys, KeySettings())[-1]
        assert np.degrees(np.arcsin(camera.pose[1, 2])) == pytest.approx(sign * 84, abs=1e-9)
        assert np.abs(camera.pose - wanted).max() <= 1e-12


def test_a_move_is_divided_by_a_millionth_more_than_its_length() -> None:
    """Steeply down, where the axis ahead is short over the ground: 5e-7 of a step of 0.05 are missing."""
    keys = [frozenset("k")] * 42 + [frozenset("w")] * 400
    camera = KeyboardCamera(64, 96, 1, keys=keys)
    while camera.steps_left:
        camera.next_chunk()
    walked, level = np.linalg.norm(camera.pose[:3, 3]), np.cos(np.radians(84))
    assert walked == pytest.approx(400 * 0.05 * level / (level + 1e-6), abs=1e-9)
    assert np.abs(camera.pose - poses_by_formula(keys, KeySettings())[-1]).max() <= 1e-12


def test_a_long_turn_stays_a_rotation() -> None:
    camera = KeyboardCamera(64, 96, 4)
    camera.press("jwi")
    for _ in range(500):
        poses = camera.next_chunk()["camera"]
    turned = poses[:, :, :3].astype(np.float64)
    assert np.abs(turned @ turned.swapaxes(1, 2) - np.eye(3)).max() <= ROUNDED


@given(rows, st.integers(0, 6))
@settings(max_examples=30)
def test_a_state_goes_on_where_it_was_taken(keys, chunks) -> None:
    camera, loaded = (KeyboardCamera(64, 96, 2, keys=keys) for _ in range(2))
    camera.press("wl")
    for _ in range(chunks):
        camera.next_chunk()
    camera.press("k")
    camera.release("l")
    loaded.load(json.loads(json.dumps(camera.state())))
    for _ in range(3):
        assert np.array_equal(camera.next_chunk()["camera"], loaded.next_chunk()["camera"])
    camera.reset()
    again = KeyboardCamera(64, 96, 2, keys=keys)
    assert np.array_equal(camera.next_chunk()["camera"], again.next_chunk()["camera"])


@pytest.mark.parametrize(
    "change",
    [
        {"place": [0, 0]},
        {"yaw": float("nan")},
        {"pitch": 1.5},  # beyond the limit, from where no step would turn it back
        {"held": "x"},
        {"steps_left": 3},
        {"begun": 1},
        {"place": None},
    ],
)
def test_states_of_others_are_refused(change) -> None:
    camera = KeyboardCamera(64, 96, 2)
    with pytest.raises(UsageError):
        camera.load(camera.state() | change)
    with pytest.raises(UsageError, match="no state"):
        camera.load({})


def test_key_strings() -> None:
    walk = key_rows("w-10, iw-15,none-5")
    assert walk == [frozenset("w")] * 10 + [frozenset("iw")] * 15 + [frozenset()] * 5
    for same in (
        "W-10,Iw-15,NONE-5",
        "w-10,iw-15,None-5".replace(",", "\N{FULLWIDTH COMMA}"),
        " w - 1 0 ,\tIW-15\n,none-5 ",
    ):
        assert key_rows(same) == walk


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
        key_rows(text)


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
    path = CameraPath(poses, focal, chunk_frames=chunk_frames, **SIZE)
    latents = ((count - 1) // 4 + 1) // chunk_frames * chunk_frames
    wanted = relative_by_formula(poses[: 4 * latents : 4][:latents], 1.0)
    longest = np.linalg.norm(wanted[:, :, 3], axis=1).max()
    wanted[:, :, 3] /= longest or 1.0
    cameras = np.concatenate([path.chunk(number)["camera"] for number in range(len(path))])
    assert np.abs(cameras - wanted).max() <= ROUNDED
    fx, fy, cx, cy = focal[0]
    at_size = np.array([fx * 96 / 832, fy * 64 / 480, cx * 96 / 832, cy * 64 / 480], np.float32)
    assert all(np.array_equal(row, at_size) for row in path.chunk(0)["intrinsics"])
    own = CameraPath(poses, focal, chunk_frames=chunk_frames, own_intrinsics=True, **SIZE)
    last = own.chunk(len(own) - 1)["intrinsics"][-1]
    assert np.allclose(last[0], focal[4 * (latents - 1), 0] * 96 / 832, rtol=1e-6)
    with pytest.raises(UsageError, match="give more poses"):
        path.chunk(len(path))


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
        CameraPath(poses, intrinsics, chunk_frames=2, **SIZE)


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
    with pytest.raises(UsageError, match="'q' is not known"):
        KeyboardCamera(64, 96, 2).press("q")

"""Streams by the runtime's own sessions and pool over the eager model: keys and mouse, rows, a rebuilt cache,
snapshots, quantised caches and fp8 matmuls; and no text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from seko_export.config.pool import PoolConfig
from seko_export.config.video import VideoBuild
from seko_export.errors import UsageError as ExportUsageError
from seko_export.families.matrix_game.family import FAMILY
from seko_runtime.errors import UsageError
from seko_runtime.video.pool import Pool
from seko_runtime.video.session import Session
from tests.matrix_game.streams import GAMES, GameStream, Played, game_config, random_checkpoint
from tests.support.eager_pool import eager_pool
from tests.support.stacked import eager_session
from tests.support.tolerances import FP8_MATMULS_PASS, FP8_PASS, STEP, relative_error
from tests.truth.eager_stream import weights_of

# Three passes in float32 that feed on each other, over a few chunks: some ten times the bar of one pass.
STREAM_BAR = 5e-5
CHUNKS = 5  # past the wrap: the cache holds six latent frames, a chunk is three
SEEDS = (3, 8)
# What a player does before each chunk.
PLAYS: Sequence[Sequence[Sequence[Mapping[str, Any]]]] = (
    ([{"held": ["KeyW"]}], [{"moved": {"yaw": 0.7}}], [{"held": ["KeyW", "KeyL"]}], [{"tap": ["KeyA"]}], []),
    ([{"held": ["KeyS", "KeyI"]}], [{"held": []}], [{"axes": {"pitch": -0.5}}], [{"keys": "wd-30"}], []),
)


def opening_of(row: int = 0) -> dict[str, np.ndarray]:
    """The picture of a row: the golden's condition and features, or those turned around."""
    inputs = {name: value[0].numpy() for name, value in FAMILY.golden_inputs(game_config(), None).items()}
    return {name: value[..., ::-1].copy() if row else value for name, value in inputs.items()}


@contextmanager
def opened(config: VideoBuild, rows: int = 2) -> Iterator[Pool]:
    """A pool over the eager model."""
    pooled = config.changed(pool=PoolConfig(rows, (1, 2)))
    weights = weights_of(pooled, random_checkpoint(pooled))
    with eager_pool(pooled, weights) as pool:
        yield pool


def begun(pool: Pool, row: int = 0) -> Session:
    return pool.open_session(seed=SEEDS[row], inputs=opening_of(row))


def play(session: Session, row: int, number: int) -> None:
    for event in PLAYS[row][number]:
        session.controls["actions"].take(event)


def played(session: Session, row: int, numbers: Sequence[int] = range(CHUNKS)) -> list[np.ndarray]:
    chunks = []
    for number in numbers:
        play(session, row, number)
        chunks.append(session.run_chunk().to_host().copy())
    return chunks


def assert_alike(chunks: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    for one, other in zip(chunks, wanted, strict=True):
        assert relative_error(torch.from_numpy(one), torch.from_numpy(other)) <= STREAM_BAR


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with opened(game_config()) as pool:
        yield pool


@pytest.fixture(scope="module")
def wanted(pool: Pool) -> list[list[np.ndarray]]:
    """The streams of both players, each alone."""
    streams = []
    for row in range(2):
        with begun(pool, row) as session:
            streams.append(played(session, row))
    return streams


def test_rows_at_different_chunks_share_calls(pool: Pool, wanted: list[list[np.ndarray]]) -> None:
    """Each has a picture, keys and a mouse of its own, and caches of its own."""
    with begun(pool, 0) as ahead, begun(pool, 1) as behind:
        found: list[list[np.ndarray]] = [played(ahead, 0, [0]), []]
        for number in range(1, CHUNKS):
            play(ahead, 0, number)
            play(behind, 1, number - 1)
            for row, chunk in enumerate(pool.run([ahead, behind])):
                found[row].append(chunk.to_host().copy())
    assert_alike(found[0], wanted[0])
    assert_alike(found[1], wanted[1][: CHUNKS - 1])
    assert relative_error(*(torch.from_numpy(stream[-1]) for stream in wanted)) > 100 * STREAM_BAR


def test_a_second_session_on_a_row_is_as_the_first(pool: Pool, wanted: list[list[np.ndarray]]) -> None:
    """To the last bit, and so is a stream that begins anew: nothing of what was played before is left."""
    for row in (0, 1, 0):
        with begun(pool, row) as session:
            assert all(map(np.array_equal, played(session, row), wanted[row]))
            session.controls["actions"].take({"held": []})
            session.controls["actions"].take({"axes": {"pitch": 0.0}})
            session.restart()
            assert all(map(np.array_equal, played(session, row), wanted[row]))


def test_a_stream_goes_on_after_a_pause_and_from_a_snapshot(
    pool: Pool, wanted: list[list[np.ndarray]], tmp_path: Path
) -> None:
    """The caches of mouse and keyboard are a part of it, and the control's state stands beside it, as JSON."""
    with begun(pool, 0) as session:
        played(session, 0, range(3))
        session.pause()
        with begun(pool, 1) as other:
            played(other, 1, range(2))
        session.resume()
        session.save(tmp_path / "stream")
        state = session.controls.state()
        assert all(map(np.array_equal, played(session, 0, (3, 4)), wanted[0][3:]))
    with pool.restore(tmp_path / "stream") as again:
        again.controls.load(state)
        assert all(map(np.array_equal, played(again, 0, (3, 4)), wanted[0][3:]))


def test_a_rebuilt_cache_has_the_actions_of_each_kept_chunk(
    pool: Pool, wanted: list[list[np.ndarray]]
) -> None:
    """As long as nothing was evicted the next chunk is the same."""
    with begun(pool, 0) as session:
        played(session, 0, range(2))
        session.set_text(None, recache=True)
        assert_alike(played(session, 0, [2]), wanted[0][2:3])


def test_a_step_back_makes_the_same_chunks_again(pool: Pool, wanted: list[list[np.ndarray]]) -> None:
    """The control goes back to the actions before the chunk, as the caches do to theirs."""
    with begun(pool, 0) as session:
        played(session, 0, [0])
        state = session.controls.state()
        played(session, 0, [1])
        session.rewind(1)
        session.controls["actions"].take({"held": ["KeyW"]})
        assert np.array_equal(session.controls["actions"].next_chunk()["keyboard"][:12], np.eye(4)[[0] * 12])
        session.controls.load(state)
        assert all(map(np.array_equal, played(session, 0, (1, 2)), wanted[0][1:3]))


def test_without_a_control_there_are_arrays(pool: Pool, wanted: list[list[np.ndarray]]) -> None:
    """What the control says of each video frame, as arrays by the inputs' names; without either nothing is pressed."""
    chunks = []
    with begun(pool, 0) as steered, begun(pool, 0) as fed:
        for number in range(CHUNKS):
            play(steered, 0, number)
            inputs = dict(steered.controls["actions"].next_chunk())
            assert {name: array.shape for name, array in inputs.items()} == {
                "keyboard": (24, 4),
                "mouse": (24, 2),
            }
            steered.run_chunk()
            chunks.append(fed.run_chunk(inputs).to_host().copy())
        with pytest.raises(UsageError, match="events of the control 'actions', which makes the same input"):
            steered.run_chunk(inputs)
    assert_alike(chunks, wanted[0])
    with begun(pool, 0) as resting:
        assert np.isfinite(resting.run_chunk().to_host()).all()


def test_a_prompt_is_refused_in_a_sentence(pool: Pool) -> None:
    each: list[dict[str, Any]] = [{"prompt": "a castle"}, {"text": np.zeros((1, 4, 4), np.float32)}]
    for more in each:
        with pytest.raises(UsageError, match="takes no text; leave prompt and text out"):
            pool.open_session(seed=1, inputs=opening_of(), **more)
    with begun(pool) as session, pytest.raises(UsageError, match="takes no text"):
        session.set_prompt("a castle")
    with pytest.raises(UsageError, match="takes no text"):
        pool.check_prompt("a castle")


@pytest.mark.parametrize("game", GAMES)
def test_every_game_is_played_by_its_own_keys(game: str) -> None:
    """Each key of the game makes another stream than no key; TempleRun's key for nothing does not."""
    config = game_config(game)
    weights = weights_of(config, random_checkpoint(config))
    last: dict[str, Tensor] = {}
    with eager_session(config, weights, None, [3]) as session:
        described = session.sessions[0].controls.describe()["actions"]
        names = {key["name"]: key["codes"][0] for key in described["keys"]}
        for name, code in [("nothing", ""), *names.items()]:
            session.restart_row(0)
            session.take("actions", {"held": [code] if code else []})
            session.run_chunk()
            last[name] = torch.from_numpy(session.run_chunk().to_host().copy())
    nothing = last.pop("nothing")
    if game == "templerun":
        assert torch.equal(last.pop("none"), nothing)
    for name, chunk in last.items():
        assert relative_error(chunk, nothing) > 1e-4, name
    different = [*last.values()]
    assert all(relative_error(one, other) > 1e-4 for one, other in pairwise(different))


@pytest.mark.parametrize(
    ("action_layers", "scheme", "change", "bar"),
    [
        (2, "fp32", {}, STEP[torch.float32]),
        (2, "fp4", {"attention": "fp8"}, FP8_PASS),
        (1, "fp4", {"attention": "fp8", "resident_window": True}, FP8_PASS),
        (1, "fp4", {"attention": "fp8", "fp8": True}, FP8_MATMULS_PASS),
        (1, "fp4", {"attention": "fp8", "fp8": True, "fp8_except": (0,)}, FP8_MATMULS_PASS),
    ],
)
def test_fused_layers_are_the_plain_ones(
    action_layers: int,
    scheme: str,
    change: Mapping[str, Any],
    bar: float,
    worst: Callable[[str, float], None],
) -> None:
    """Past the wrap, each pass fed the plain stream's latents; the caches of the action modules stay exact. With an
    action module in the last layer, the context pass runs that layer whole."""
    plain = game_config(scheme=scheme, action_layers=action_layers)
    checkpoint = random_checkpoint(plain)
    fused = plain.changed(fused=True, **change)
    streams = [GameStream(config, checkpoint) for config in (plain, fused)]
    in_fp8 = {name for name in streams[1].weights if ".after_cross." in name and name.endswith("weight_fp8")}
    layers = {"t_qkv", "proj_mouse", "mouse_attn_q", "proj_keyboard"}
    wanted_fp8 = layers if "fp8" in change else set()
    in_layers = [n for n in range(action_layers) if n not in change.get("fp8_except", ())]
    assert in_fp8 == {f"blocks.{n}.after_cross.{layer}.weight_fp8" for n in in_layers for layer in wanted_fp8}
    for chunk in range(4):
        first = [chunk * plain.workload.stream.chunk_frames]
        wanted = streams[0].run_chunk(first, [3])
        found = streams[1].run_chunk(first, [3], feed=[done.latents for done in wanted])
        for plain_pass, other in zip(wanted[:-1], found[:-1], strict=True):
            assert other.velocity is not None
            assert plain_pass.velocity is not None
            error = relative_error(other.velocity, plain_pass.velocity)
            worst(f"Matrix-Game, fused layers, {scheme} {sorted(change)}", error)
            assert error <= bar


def test_a_cache_on_the_host_makes_the_same_chunks() -> None:
    """Keys and values come layer by layer; the caches of the action modules stay on the device."""
    made = []
    for offload in (False, True):
        config = game_config(action_layers=2)
        stream = replace(config.workload.stream, offload_cache=offload)
        config = config.changed(model=replace(config.model, layers=5), stream=stream)
        with eager_session(config, weights_of(config, random_checkpoint(config)), None, [3]) as session:
            session.take("actions", {"held": ["KeyW", "KeyL"]})
            made.append([session.run_chunk().to_host().copy() for _ in range(4)])
            seats = {buffer.name: buffer.device_layers for buffer in session.manifest.buffers}
            assert (seats["kv.k"], seats["recall.mouse_k"]) == (3 if offload else 0, 0)
    assert all(map(np.array_equal, *made))


def test_layers_share_one_ring() -> None:
    """The action modules keep tensors in the slots of self-attention's cache, of which there is one kind."""
    with pytest.raises(
        ExportUsageError, match="--layer-rings: the layers of 'matrix-game-tiny' keep tensors"
    ):
        FAMILY.graph(game_config(layout={"layer_rings": (6, 3)}))
    with pytest.raises(ExportUsageError, match="--pass-caches: the layers of"):
        FAMILY.graph(game_config(layout={"pass_caches": True}))


def test_the_control_gives_the_frames_that_the_truth_sees() -> None:
    """Recorded actions of every video frame become the inputs that the tests against the truth are fed."""
    config = game_config()
    actions = Played(config, frames=60)
    assert actions.mouse is not None
    letters = ("W", "S", "A", "D")
    recorded = [
        {
            "keys": [letter for letter, down in zip(letters, keys.tolist(), strict=True) if down],
            "axes": {"pitch": 10 * float(mouse[0]), "yaw": 10 * float(mouse[1])},
        }
        for keys, mouse in zip(actions.keyboard, actions.mouse, strict=True)
    ]
    weights = weights_of(config, random_checkpoint(config))
    with eager_session(config, weights, None, [3]) as session:
        control = session.sessions[0].controls["actions"]
        control.take({"recorded": recorded})
        for number in range(4):
            found, wanted = control.next_chunk(), actions.inputs(3 * number)
            assert np.array_equal(found["keyboard"], wanted["keyboard"])
            np.testing.assert_allclose(found["mouse"], wanted["mouse"], atol=1e-7)
            control.advance()

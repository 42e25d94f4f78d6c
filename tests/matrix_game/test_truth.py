"""Every chunk past two windows against a truth that is written from the model's description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.matrix_game.streams import GAMES, GameStream, Played, Reference, game_config, random_checkpoint
from tests.support.tolerances import STEP, relative_error

CHUNKS = 6  # of three latent frames; the window has six


@pytest.mark.shows("matrix_game")
@pytest.mark.parametrize(
    ("game", "change"),
    [
        *((game, {}) for game in GAMES),
        ("universal", {"action_layers": 2}),
        ("universal", {"layout": {"window_positions": True}}),
        ("universal", {"layout": {"context": "reuse"}}),
    ],
)
def test_every_chunk_is_the_naive_models(
    game: str, change: Mapping[str, Any], worst: Callable[[str, float], None]
) -> None:
    """Also with action modules in all layers, and with positions within the window, of which the distances alone
    count."""
    config = game_config(game, **change)
    checkpoint = random_checkpoint(config)
    stream = GameStream(config, checkpoint)
    naive = Reference(config, checkpoint, stream.played[0])
    frames = config.workload.stream.chunk_frames
    for number in range(CHUNKS):
        first = number * frames
        for done in stream.run_chunk([first], [3]):
            velocity = naive.velocity(done.latents[0], done.timestep, first, commit=done.kept)
            if done.velocity is not None:
                error = relative_error(done.velocity[0], velocity)
                worst(f"Matrix-Game, {game}, against the naive model", error)
                assert error <= STEP[torch.float32], (number, done.timestep)
    assert CHUNKS * frames > 2 * config.workload.stream.cache_frames


def changed(stream: GameStream, video_frame: int) -> None:
    """Press other keys and move the mouse elsewhere in one video frame."""
    played = stream.played[0]
    played.keyboard[video_frame] = 1 - played.keyboard[video_frame]
    assert played.mouse is not None
    played.mouse[video_frame] = played.mouse[video_frame] + 0.3


def latents_of(stream: GameStream, chunks: int, first: int = 0) -> list[Tensor]:
    frames = stream.config.workload.stream.chunk_frames
    return [stream.run_chunk([first + at * frames], [3])[-1].latents for at in range(chunks)]


def test_one_key_makes_another_world_than_another() -> None:
    config = game_config()
    checkpoint = random_checkpoint(config)
    made = []
    for key in range(2):
        stream = GameStream(config, checkpoint)
        stream.played[0].keyboard = [torch.eye(4)[key]] * 100
        made.append(latents_of(stream, 2)[-1])
    assert relative_error(*made) > 0.01


@pytest.mark.parametrize("frame", [0, 2, 3])
def test_a_latent_frame_sees_the_actions_before_its_last_video_frame(frame: int) -> None:
    """Chunks of one latent frame, so that none sees a later one: the action of video frame 4f changes latent frame f +
    1 and not f; that of 4f - 1, and for f = 0 that of frame 0, changes f."""
    config = game_config(layout={"chunk_frames": 1})
    checkpoint = random_checkpoint(config)
    wanted = latents_of(GameStream(config, checkpoint), 5)
    for shown, first_changed in ((4 * frame, frame + 1 if frame else 0), (max(0, 4 * frame - 1), frame)):
        stream = GameStream(config, checkpoint)
        changed(stream, shown)
        found = latents_of(stream, 5)
        alike = [torch.equal(one, other) for one, other in zip(found, wanted, strict=True)]
        assert alike == [number < first_changed for number in range(5)]


@pytest.mark.parametrize("branch", ["mouse", "keyboard"])
def test_each_branch_shows(branch: str) -> None:
    """Their projections are away from zero, and by far more than the bars above."""
    config = game_config()
    checkpoint = random_checkpoint(config)
    plain = GameStream(config, checkpoint).run_chunk([0], [3])[0].velocity
    name = f"blocks.0.action_model.proj_{branch}.weight"
    without = GameStream(config, {**checkpoint, name: torch.zeros_like(checkpoint[name])})
    other = without.run_chunk([0], [3])[0].velocity
    assert plain is not None
    assert other is not None
    assert relative_error(other, plain) > 0.01


def test_the_stored_norms_of_queries_and_keys_are_not_used() -> None:
    """As in the authors' code; FastVideo's multiplies by them."""
    config = game_config()
    checkpoint = random_checkpoint(config)
    plain = latents_of(GameStream(config, checkpoint), 2)
    for name in [name for name in checkpoint if "action_model" in name and "_norm." in name]:
        checkpoint[name] = torch.ones_like(checkpoint[name])
    assert all(map(torch.equal, latents_of(GameStream(config, checkpoint), 2), plain))


def test_only_the_distance_of_frames_counts(worst: Callable[[str, float], None]) -> None:
    """Frames beyond the authors' table of 1,024: the keys of both attentions turn with the absolute frame, in float64,
    so a stream needs no rebase. Noise and the picture's condition are fed alike."""
    config = game_config()
    checkpoint, frames = random_checkpoint(config), config.workload.stream.chunk_frames
    near, far = GameStream(config, checkpoint), GameStream(config, checkpoint)
    start = 120  # beyond the table of the picture's condition
    first = 300_000_000
    far.played = [Shifted(near.played[0], first - start)]
    for number in range(4):
        at = number * frames
        wanted = near.run_chunk([start + at], [3])
        found = far.run_chunk([first + at], [3], feed=[done.latents for done in wanted])
        for one, other in zip(found[:-1], wanted[:-1], strict=True):
            assert one.velocity is not None
            assert other.velocity is not None
            error = relative_error(one.velocity, other.velocity)
            worst(f"Matrix-Game at frame {first:,}", error)
            assert error <= STEP[torch.float32]


class Shifted(Played):
    """The same actions, so many latent frames later."""

    def __init__(self, played: Played, later: int) -> None:
        self.keyboard, self.mouse, self.stream, self.later = (
            played.keyboard,
            played.mouse,
            played.stream,
            later,
        )

    def inputs(self, first: int) -> dict[str, np.ndarray]:
        return super().inputs(first - self.later)


def test_a_cache_that_is_computed_again_from_kept_latents_is_the_same() -> None:
    """Forty chunks, far past the window: their context passes alone fill an empty cache with the same bytes."""
    config = game_config()
    checkpoint, frames = random_checkpoint(config), config.workload.stream.chunk_frames
    stream, again = GameStream(config, checkpoint), GameStream(config, checkpoint)
    for number, latents in enumerate(latents_of(stream, 40)):
        again.write_cache(number * frames, latents)
    caches = [name for name in stream.buffers if name.startswith(("kv.", "recall."))]
    assert {"kv.k", "recall.mouse_k", "recall.mouse_v", "recall.key_k", "recall.key_v"} <= set(caches)
    assert all(torch.equal(stream.buffers[name], again.buffers[name]) for name in caches)
    wanted, found = (one.run_chunk([40 * frames], [3])[-1].latents for one in (stream, again))
    assert torch.equal(wanted, found)

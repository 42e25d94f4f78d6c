"""Every chunk past two windows against a truth that is written from the model's description."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.matrix_game.streams import GAMES, GameStream, Reference, game_config, random_checkpoint
from tests.tolerances import STEP, relative_error

CHUNKS = 6  # of three latent frames; the window has six


@pytest.mark.parametrize("game", GAMES)
def test_every_chunk_is_the_naive_models(game: str, worst: Callable[[str, float], None]) -> None:
    config = game_config(game)
    checkpoint = random_checkpoint(config)
    stream = GameStream(config, checkpoint)
    naive = Reference(config, checkpoint, stream.played[0])
    frames = config.workload.stream.chunk_frames
    for number in range(CHUNKS):
        first = number * frames
        for done in stream.run_chunk([first], [3]):
            velocity = naive.velocity(done.latents[0], done.timestep, first, commit=done.velocity is None)
            if done.velocity is not None:
                error = relative_error(done.velocity[0], velocity)
                worst(f"Matrix-Game, {game}, against the naive model", error)
                assert error <= STEP[torch.float32], (number, done.timestep)
    assert CHUNKS * frames > 2 * config.workload.stream.cache_frames

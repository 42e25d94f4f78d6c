"""Streams by the runtime's own session and pool over the eager model: keys, rows, rebuilt caches, snapshots."""

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
from seko_export.errors import UsageError
from seko_export.families.abot.actions import ACTIONS
from seko_export.families.abot.model import KEY_BITS
from seko_export.video.recording import golden_text
from seko_runtime.errors import UsageError as SessionUsageError
from seko_runtime.video.contract import FRONT_CACHES
from seko_runtime.video.pool import Pool
from seko_runtime.video.session import Session
from tests.abot.streams import abot_config, keys_of, press, random_checkpoint
from tests.support.eager_pool import eager_pool
from tests.support.lives import check_lives, equal, run
from tests.support.stacked import eager_session
from tests.support.tolerances import FP8_MATMULS_PASS, FP8_PASS, STEP, relative_error
from tests.truth.eager_stream import EagerStream, random_text, weights_of

CHUNKS = 6  # past two windows of 6 latent frames
SEEDS = (3, 8)
# Four passes in float32 that feed on each other, over a few chunks: some ten times the bar of one pass.
STREAM = 1e-5
KEYS = ("w-30,wd-20,none-9", "j-12,sl-12,ik-35")  # of two rows: a value for each video frame


@contextmanager
def opened(config: VideoBuild, rows: int = 3) -> Iterator[Pool]:
    """A pool over the eager model."""
    pooled = config.changed(pool=PoolConfig(rows, (1, 2)[:rows]))
    with eager_pool(pooled, weights_of(pooled, random_checkpoint())) as pool:
        yield pool


@pytest.mark.shows("abot")
def test_a_session_is_itself_whatever_happens_to_it_and_beside_it(tmp_path: Path) -> None:
    """Reference tokens included: what the first chunk leaves of them goes along."""
    config = abot_config()

    def begin(pool: Pool, row: int) -> Session:
        return pool.open_session(seed=SEEDS[row], text=golden_text(config).numpy()[:1])

    life = {"chunks": CHUNKS, "bound": STREAM, "folder": tmp_path}
    check_lives(partial(opened, config), begin, "actions", KEYS, **life)


def test_thirty_chunks_later_a_rebuilt_cache_is_the_one_that_was_there() -> None:
    """A cached frame of a single layer depends on nothing but its own latents and keys, which are kept."""
    config = abot_config()
    config = config.changed(model=replace(config.model, layers=1))
    text, checkpoint = golden_text(config), random_checkpoint()
    after, fronts = [], []
    for rebuilt in (False, True):
        with eager_session(config, weights_of(config, checkpoint), text, SEEDS[:1]) as session:
            for number in range(30):
                session.run_chunk({ACTIONS: keys_of(config, number).numpy()})
            if rebuilt:
                session.set_text(text.numpy(), recache=True)
            fronts.append([session.cache_sample(1)[name] for name in FRONT_CACHES])
            after += map(torch.from_numpy, run(session, 2))
    assert equal(*fronts)
    assert all(relative_error(*both) <= STREAM for both in zip(after[2:], after[:2], strict=True))


@pytest.mark.parametrize(
    ("scheme", "change", "bar"),
    [
        ("fp32", {}, STEP[torch.float32]),
        ("fp4", {"attention": "fp8", "resident_window": True}, FP8_PASS),
        ("fp4", {"attention": "fp8", "resident_window": True, "fp8": True}, FP8_MATMULS_PASS),
        ("fp4", {"fp8": True, "fp8_except": (1,)}, FP8_MATMULS_PASS),
        ("fp4", {"attention": "bf16"}, STEP[torch.float32]),
    ],
)
def test_fused_layers_are_the_plain_ones(
    scheme: str, change: Mapping[str, Any], bar: float, worst: Callable[[str, float], None]
) -> None:
    """Past the wrap, each pass fed the plain stream's latents."""
    plain = abot_config(scheme)
    checkpoint, text = random_checkpoint(), random_text(plain.model, 1)
    streams = [
        EagerStream(config, checkpoint, text) for config in (plain, plain.changed(fused=True, **change))
    ]
    for number in range(4):
        for stream in streams:
            press(stream, keys_of(plain, number))
        first = [number * plain.workload.stream.chunk_frames]
        wanted = streams[0].run_chunk(first, [3])
        fused = streams[1].run_chunk(first, [3], feed=[done.latents for done in wanted])
        for plain_pass, other in zip(wanted[:-1], fused[:-1], strict=True):
            error = relative_error(other.velocity, plain_pass.velocity)
            worst(f"abot, fused layers, {scheme} {sorted(change)}", error)
            assert error <= bar


@pytest.mark.parametrize(
    ("events", "first", "second"),
    [
        ([], "", ""),
        ([{"held": ["KeyW", "ArrowLeft"]}], "WJ", "WJ"),
        ([{"held": ["KeyW"]}, {"held": []}], "W", ""),  # a tap within a chunk counts for the whole chunk
        (
            [{"held": ["KeyS"]}, None, {"held": ["KeyS", "KeyW"]}],
            "W",
            "WS",
        ),  # a new key beats a held one, once
        ([{"held": ["KeyI", "KeyK"]}], "IK", "IK"),
    ],
)
def test_held_and_tapped_keys_are_the_bits_of_every_frame_of_a_chunk(events, first, second) -> None:
    """None in the events stands for a chunk; the model's bits are W A S D I J K L."""
    config = abot_config()
    with opened(config, rows=1) as pool, pool.open_session(text=golden_text(config).numpy()) as session:
        keys = session.controls["actions"]
        for event in events:
            keys.advance() if event is None else keys.take(event)
        for wanted in (first, second):
            bits = keys.next_chunk()[ACTIONS]
            assert (bits.shape, bits.dtype) == ((3, 8), np.uint8)
            assert {"".join(np.array(KEY_BITS)[row > 0]) for row in bits} == {wanted}
            keys.advance()
        shown = {binding["name"]: binding for binding in keys.describe()["keys"]}
        assert list(shown) == list(KEY_BITS)
        assert shown["L"]["codes"] == ["KeyL", "ArrowRight"]


def test_what_it_cannot_have_is_refused() -> None:
    config = abot_config()
    with pytest.raises(UsageError, match="pictures of a person"):
        abot_config(layout={"reference_frames": 5})
    with pytest.raises(UsageError, match="--stream-positions"):
        abot_config(layout={"window_positions": False})
    with pytest.raises(UsageError, match="tokens before its streams"):
        config.changed(ranks=2)
    with opened(config) as pool, pytest.raises(SessionUsageError, match="no reference frames"):
        pool.open_session(text=golden_text(config).numpy(), reference=np.zeros((5, 64, 96, 3), np.uint8))

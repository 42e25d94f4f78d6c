"""Cuts to another scene: positions that jump and a pinned chunk, against a naive cache in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from seko_export.config.pool import PoolConfig
from seko_export.config.schedule import Schedule
from seko_export.config.video import VideoBuild
from seko_runtime.errors import SnapshotError, UsageError
from seko_runtime.video.clocks import Cut, RowClocks
from seko_runtime.video.ring import Ring
from tests.support.eager_pool import eager_pool
from tests.support.stacked import eager_session
from tests.support.tolerances import STREAM, relative_error
from tests.truth.eager_stream import random_text, random_wan_weights, small_config
from tests.truth.naive_loop import NaiveLoop, PinningDit
from tests.truth.test_chunk_passes import SEED, weights_of

TIMES, JUMP, CUTS = (1000.0, 500.0), 8, (2, 5, 6, 11)


class NaiveCuts(NaiveLoop):
    naive_dit = PinningDit

    def chunk(self, number: int) -> torch.Tensor:
        """Make a chunk; a cut pins it once its passes have run, until when the chunk of the cut before stays."""
        self.jump += JUMP * (number in CUTS)
        latents = self.renoised(number, TIMES, [time / 1000 for time in TIMES])
        if number in CUTS:
            first = number * self.stream.chunk_frames + self.jump
            self.dit.pinned = frozenset(range(first, first + self.stream.chunk_frames))
        return latents


def config_of(sink: int = 2, ring: int = 6) -> VideoBuild:
    return small_config(2, sink, ring).changed(schedule=Schedule(TIMES))


@pytest.mark.parametrize(("sink", "ring"), [(2, 6), (0, 4)])
def test_a_cut_jumps_and_pins_its_chunk(sink, ring, worst):
    config = config_of(sink, ring)
    wan, text = random_wan_weights(config.model), random_text(config.model, 1)
    naive = NaiveCuts(config, wan, text[0], SEED)
    with eager_session(config, weights_of(config, wan), text, [SEED]) as session:
        for number in range(13):
            if number in CUTS:
                session.sessions[0].cut(frames=JUMP)
            error = relative_error(torch.from_numpy(session.run_chunk().to_host())[0], naive.chunk(number))
            worst("scene cuts", error)
            assert error <= STREAM[torch.float32], number


def test_a_neighbour_does_not_change_a_cut_and_a_snapshot_keeps_it(tmp_path):
    config = config_of().changed(pool=PoolConfig(3, (1, 2)))
    weights = weights_of(config, random_wan_weights(config.model))
    text = random_text(config.model, 1).numpy()

    def chunks_of(session, numbers):
        chunks = []
        for number in numbers:
            if number in CUTS:
                session.cut(frames=JUMP)
            chunks.append(session.run_chunk().to_host())
        return chunks

    with eager_pool(config, weights) as pool, pool.open_session(seed=SEED, text=text) as alone:
        wanted = chunks_of(alone, range(12))
    with (
        eager_pool(config, weights) as pool,
        pool.open_session(seed=7, text=text) as other,
        pool.open_session(seed=SEED, text=text) as session,
    ):
        other.run_chunk()
        got = chunks_of(session, range(9))
        other.run_chunk()
        session.save(tmp_path / "row")
        with pool.restore(tmp_path / "row") as restored:
            got += chunks_of(restored, range(9, 12))
    assert all(np.array_equal(*pair) for pair in zip(got, wanted, strict=True))


def test_the_oldest_chunk_that_is_not_pinned_is_evicted():
    """Chunks are written to the places 0, 1, 2 of a ring of three; a pinned one is passed over until the next cut."""
    clocks = RowClocks(Ring(2, 6, 2), 1)
    places = []
    for number in range(12):
        if number in (4, 9):
            clocks.cut(0, 8)
        first = clocks.next_slot_first(0)
        places.append((first - 2) // 2 % 3 if number else None)
        clocks.chunk_made([0])
    # chunk 4 goes to place 0 and stays while 5 to 9 take the others; chunk 9 is pinned next, and 10 takes 4's place
    assert places == [None, 0, 1, 2, 0, 1, 2, 1, 2, 1, 0, 2]


@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_a_cut_anywhere_can_be_saved_after_every_chunk(at):
    """A pinned chunk of the sink is in no place of the ring, which has the last three chunks then."""
    clocks = RowClocks(Ring(6, 6, 2), 1)
    for number in range(12):
        if number == at:
            clocks.cut(0, 8)
        clocks.chunk_made([0])
        clocks.check(clocks.state(0))
    assert (at in clocks.state(0).cut.ring) == (at > 2)


@pytest.mark.parametrize(
    "cut",
    [
        Cut(jump=8, pinned=5),
        Cut(jump=8, pinned=2, ring=(2, 3)),
        Cut(jump=8, pinned=2, ring=(3, 3, 4)),
        Cut(jump=8, pinned=2, ring=(1, 3, 4)),
        Cut(jump=8, pinned=2, ring=(2, 3, 5)),
        Cut(jump=1 << 40, pinned=2),
    ],
)
def test_impossible_cuts_of_a_snapshot_are_refused(cut):
    clocks = RowClocks(Ring(2, 6, 2), 1)
    for _ in range(5):
        clocks.chunk_made([0])
    good = clocks.state(0)
    clocks.check(good)
    with pytest.raises(SnapshotError, match="cannot have pinned chunk"):
        clocks.check(type(good)(good.first, good.slot_first, good.made, good.first_frames, cut))


def test_what_cannot_be_cut_is_refused():
    config = config_of()
    wan, text = random_wan_weights(config.model), random_text(config.model, 1)
    with eager_session(config, weights_of(config, wan), text, [SEED]) as stacked:
        session = stacked.sessions[0]
        with pytest.raises(UsageError, match="begins a scene already"):
            session.cut()
        stacked.run_chunk()
        with pytest.raises(UsageError, match="frames is -1"):
            session.cut(frames=-1)
        session.cut()
        with pytest.raises(UsageError, match="begins a scene already"):
            session.cut()
        stacked.run_chunk()
        with pytest.raises(UsageError, match="cannot step back to chunk 1"):
            session.rewind(1)
        with pytest.raises(UsageError, match="cut to another scene"):
            session.set_text(text.numpy(), recache=True)
        session.restart()
        first = stacked.run_chunk().to_host()
    with eager_session(config, weights_of(config, wan), text, [SEED]) as fresh:
        assert np.array_equal(first, fresh.run_chunk().to_host())
    odd = config_of(sink=1)
    with eager_session(odd, weights_of(odd, wan), text, [SEED]) as stacked:
        stacked.run_chunk()
        with pytest.raises(UsageError, match="a sink of 1 and a ring of 6 frames"):
            stacked.sessions[0].cut()

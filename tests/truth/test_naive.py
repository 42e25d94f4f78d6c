"""The static step against the naive references: equal bytes for slice writes, fp32 rounding for a shifting cache."""

from __future__ import annotations

import pytest
import torch

from seko_kernels.formats import NUMBER_FORMATS
from tests.support.tiers import first_is_fast
from tests.support.tolerances import STEP, relative_error
from tests.truth.against_naive import chunks_of_two_rings
from tests.truth.eager_stream import EagerStream, random_text, random_wan_weights, same_bytes, small_config
from tests.truth.naive_dit import ShiftingDit, SliceWrites

BAR = STEP[torch.float32]
SCHEMES = [
    "fp32",
    *NUMBER_FORMATS,
    "int8-fp4",
    "fp32-int4",
    "fp4-sink",
    "int4-fp32-sink",
]

FEW = ["fp32", "fp4", "int8-fp4", "int4-fp32-sink"]

# Each scheme in one layout, and one in each of two others.
WRITTEN = [
    *(((3, 1, 6), 2, scheme) for scheme in SCHEMES),
    ((2, 3, 5), 2, "fp4"),
    ((3, 1, 6), 1, "fp32"),
]


@pytest.mark.parametrize(("layout", "batch", "scheme"), first_is_fast(WRITTEN, 3), ids=str)
def test_index_copy_writes_what_slices_write(layout, batch, scheme):
    """(a) outputs and every cache byte are equal, through fill and wrap, rows two chunks apart."""
    chunk, sink, ring = layout
    config = small_config(chunk, sink, ring, batch=batch, scheme=scheme, passes=2)
    weights, text = random_wan_weights(config.model), random_text(config.model, batch)
    static, naive = EagerStream(config, weights, text), EagerStream(config, weights, text)
    writes = SliceWrites(config.kv, config.workload.stream)
    naive.pieces["block"].module.kv = writes

    starts = [[0], [0, 2 * chunk]][batch - 1]
    last = 0
    for number in range(5):
        # Row 1 begins mid-stream over zeroed slots, and starts anew at chunk 3.
        first = [start + number * chunk for start in starts]
        if batch == 2 and number >= 3:
            first[1] = (number - 3) * chunk
        writes.start_chunk(first)
        if number == 0:
            for row, frame in enumerate(first):
                for earlier in range(frame):
                    writes.slots[row].place(earlier)
        got, wanted = static.run_chunk(first, [7] * batch), naive.run_chunk(first, [7] * batch)
        last = max(first)
        for ours, other in zip(got, wanted, strict=True):
            assert same_bytes(ours.latents, other.latents)
            assert ours.velocity is None or same_bytes(ours.velocity, other.velocity)
        assert same_bytes(static.buffers["latents"], naive.buffers["latents"])
        for row, frame in enumerate(first):
            for slot in range(static.ring.valid_frames(frame)):
                for name, tokens in static.slot_tokens(row, slot).items():
                    assert same_bytes(tokens, naive.slot_tokens(row, slot)[name]), (number, row, slot, name)
    assert last + chunk > config.workload.stream.cache_frames  # it did wrap
    assert static.buffers["latents"].isfinite().all()


@pytest.mark.shows("wan")
@pytest.mark.parametrize(
    ("chunk", "sink", "ring"),
    first_is_fast([(3, 1, 6), (2, 3, 5), (1, 0, 1), (3, 3, 3), (4, 5, 7)], 3),
)
def test_ring_agrees_with_a_shifting_cache(chunk, sink, ring, worst):
    """(b) 4 passes and the context pass, past two rings; both see the same latents in each pass."""
    config = small_config(chunk, sink, ring)
    weights, text = random_wan_weights(config.model), random_text(config.model, 1)
    static = EagerStream(config, weights, text)
    naive = ShiftingDit(config.model, config.workload.stream, weights, text[0])
    for number in range(chunks_of_two_rings(config.workload.stream)):
        first = number * chunk
        for done in static.run_chunk([first], [3]):
            velocity = naive.step(done.latents[0], done.timestep, first, commit=done.velocity is None)
            if done.velocity is not None:
                error = relative_error(done.velocity[0], velocity)
                worst("naive (b) velocity", error)
                assert error <= BAR, (number, done.timestep)
        _compare_slots(static, 0, naive, worst)
    assert first + chunk > sink + 2 * ring


def test_rows_at_different_chunks_agree_with_their_own_runs(worst):
    """(b) at B=2: row 1 starts anew, with another text, while row 0 stands at chunk 5."""
    config, alone = small_config(3, 1, 6, batch=2), small_config(3, 1, 6)
    weights = random_wan_weights(config.model)
    text, later_text = random_text(config.model, 2), random_text(config.model, 1, seed=9)
    both = EagerStream(config, weights, text)
    row_0, row_1 = EagerStream(alone, weights, text[:1]), EagerStream(alone, weights, later_text)
    naive = ShiftingDit(config.model, config.workload.stream, weights, later_text[0])
    for number in range(4):
        passes = both.run_chunk([3 * number] * 2, [11, 12])
        row_0.run_chunk([3 * number], [11], feed=[p.latents[:1] for p in passes])
    both.set_text(torch.cat((text[:1], later_text)))
    for number in range(4, 8):
        first = [3 * number, 3 * (number - 4)]
        passes = both.run_chunk(first, [11, 13])
        own = [
            stream.run_chunk([first[row]], [0], feed=[p.latents[row : row + 1] for p in passes])
            for row, stream in enumerate((row_0, row_1))
        ]
        for i, done in enumerate(passes):
            velocity = naive.step(done.latents[1], done.timestep, first[1], commit=done.velocity is None)
            if done.velocity is None:
                continue
            for row in range(2):
                error = relative_error(done.velocity[row], own[row][i].velocity[0])
                worst("B=2 row against its B=1 run", error)
                assert error <= BAR, (number, row)
            assert relative_error(done.velocity[1], velocity) <= BAR, number
        for row, stream in enumerate((row_0, row_1)):
            for frame in range(max(0, first[row] - 3), first[row] + 3):
                slot = both.ring.slot(frame)
                for name, tokens in both.slot_tokens(row, slot).items():
                    assert relative_error(tokens, stream.slot_tokens(0, slot)[name]) <= BAR
        _compare_slots(both, 1, naive, worst)


@pytest.mark.parametrize("scheme", FEW)
def test_a_row_does_not_touch_the_other(scheme):
    """Another seed, text and place in row 1 leave row 0's outputs and bytes as they are."""
    config = small_config(2, 1, 3, batch=2, scheme=scheme, passes=1)
    weights, text = random_wan_weights(config.model), random_text(config.model, 2)
    other_text = torch.cat((text[:1], random_text(config.model, 1, seed=5)))
    stream, changed = EagerStream(config, weights, text), EagerStream(config, weights, other_text)
    for number in range(5):
        stream.run_chunk([2 * number, 2 * number], [1, 2])
        changed.run_chunk([2 * number, 2 * max(0, number - 3)], [1, 99])
        assert same_bytes(stream.buffers["latents"][0], changed.buffers["latents"][0])
        assert not same_bytes(stream.buffers["latents"][1], changed.buffers["latents"][1])
        for name, cache in stream.cache_rows(0).items():
            assert same_bytes(cache, changed.cache_rows(0)[name])


@pytest.mark.parametrize("scheme", FEW)
def test_a_chunk_touches_its_own_slots_only_and_can_be_run_again(scheme):
    """Slots that the chunk does not own keep their bytes; a second run of a chunk gives equal bytes."""
    config = small_config(3, 1, 6, scheme=scheme, passes=1)
    stream = EagerStream(config, random_wan_weights(config.model), random_text(config.model, 1))
    for first in (0, 3, 6, 9):
        slots = range(stream.ring.valid_frames(first))  # behind them lies what nobody reads
        before = [{name: t.clone() for name, t in stream.slot_tokens(0, slot).items()} for slot in slots]
        stream.run_chunk([first], [4])
        written = set(stream.ring.write_slots(first))
        after = {name: cache.clone() for name, cache in stream.caches().items()}
        latents = stream.buffers["latents"].clone()
        for slot in slots:
            for name, tokens in stream.slot_tokens(0, slot).items():
                unchanged = same_bytes(before[slot][name], tokens)
                assert unchanged == (slot not in written), (first, name, slot)
        stream.run_chunk([first], [4])
        assert same_bytes(latents, stream.buffers["latents"])
        assert all(same_bytes(cache, after[name]) for name, cache in stream.caches().items())


def _compare_slots(static: EagerStream, row: int, naive: ShiftingDit, worst) -> None:
    """Compare the tokens of every frame that the shifting cache holds with those of its slot."""
    for layer, cached in enumerate(naive.cached):
        for entry in cached:
            tokens_of_slot = static.slot_tokens(row, static.ring.slot(entry.frame))
            for name, tokens in (("kv.k", entry.k), ("kv.v", entry.v)):
                error = relative_error(tokens_of_slot[name][layer], tokens)
                worst("naive (b) cached tokens", error)
                assert error <= BAR, (layer, entry.frame, name)

"""The closed form of the ring against a dictionary that evicts frames one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seko_runtime.video.ring import Ring

LAYOUTS = st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(1, 9), st.integers(0, 5)).filter(
    lambda sizes: sizes[1] >= sizes[2]
)


@given(LAYOUTS, st.integers(1, 30))
def test_the_closed_form_is_what_evicting_the_oldest_reusable_frame_gives(
    layout: tuple[int, int, int, int], chunks: int
) -> None:
    ring = Ring(*layout)
    pinned = ring.reference_frames + ring.sink_frames
    frame_of: dict[int, int] = {}  # slot -> frame
    for first in range(-ring.reference_frames, 0, ring.chunk_frames):
        slots = ring.write_slots(first)
        assert len({*slots}) == ring.chunk_frames
        assert max(slots) < ring.cache_frames
        frames = ring.latent_frames(first)
        frame_of |= {slot: frame for frame, slot in enumerate(slots, first) if frame < 0}
        if ring.repeats_references:  # each frame is seen equally often; all lie in the first slots
            assert {frames.count(frame) for frame in frame_of.values()} == {len(frames) // len(frame_of)}
            assert ring.valid_frames(first) == len(frames) == max(slots) + 1
        else:
            assert frames == list(range(first, first + ring.chunk_frames))
            assert ring.valid_frames(first) == len(frame_of)
    assert frame_of == {slot: slot - ring.reference_frames for slot in range(ring.reference_frames)}
    for chunk in range(chunks):
        first = chunk * ring.chunk_frames
        for frame, slot in zip(ring.latent_frames(first), ring.write_slots(first), strict=True):
            if len(frame_of) < ring.cache_frames:
                expected = len(frame_of)
            else:
                oldest = min(held_frame for held_slot, held_frame in frame_of.items() if held_slot >= pinned)
                expected = next(
                    held_slot for held_slot, held_frame in frame_of.items() if held_frame == oldest
                )
            assert slot == expected == ring.slot(frame)
            assert frame == first + ring.latent_frames(first).index(frame)
            frame_of[slot] = frame
        assert ring.valid_frames(first) == len(frame_of)
        assert set(frame_of) == set(
            range(len(frame_of))
        )  # valid slots are the first ones: a count describes them
        assert len(set(ring.write_slots(first))) == ring.chunk_frames


@pytest.mark.parametrize("sizes", [(-1, 3, 3), (0, 2, 3), (0, 3, 0), (0, 3, 3, -1)])
def test_a_layout_that_cannot_be_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="chunk_frames"):
        Ring(*sizes)


def test_a_negative_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="frame must be >= 0, got -1"):
        Ring(0, 3, 3).slot(-1)
    with pytest.raises(ValueError, match="frame must be >= -2, got -3"):
        Ring(0, 3, 3, 2).slot(-3)

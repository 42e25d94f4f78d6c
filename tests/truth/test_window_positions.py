"""RoPE at positions within the window: against a naive model that turns its list of frames anew at each read."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seko_export import BuildOptions
from seko_export.config.video import VideoBuild
from seko_export.families.layers.pieces import make_pieces
from seko_export.families.layers.ring_positions import window_positions
from seko_export.video.plan.predict import PlanRequest, predict
from seko_runtime.video.clocks import RowClocks
from seko_runtime.video.ring import Ring
from tests.support.asked import resolved
from tests.support.stacked import eager_session
from tests.support.tolerances import relative_error
from tests.truth.against_naive import hold_to_naive, naive_models
from tests.truth.eager_stream import EagerStream, random_text, random_wan_weights, small_config
from tests.truth.test_pass_caches import session_weights


def config_of(
    chunk: int, sink: int, ring: int, scheme: str = "fp32", layers: int = 2, **stream: object
) -> VideoBuild:
    """A small build whose positions are those within the window."""
    config = small_config(chunk, sink, ring, scheme=scheme, passes=2, layers=layers)
    return config.changed(stream=dataclasses.replace(config.workload.stream, window_positions=True, **stream))


@pytest.mark.parametrize(
    ("chunk", "sink", "ring", "stream"),
    [
        (3, 1, 6, {}),
        (2, 3, 5, {}),
        (1, 2, 4, {"pass_caches": True}),
        (2, 1, 5, {"layer_rings": (2, 5, 2)}),
    ],
)
def test_a_frames_position_is_its_place_in_the_window(chunk, sink, ring, stream, worst):
    config = config_of(chunk, sink, ring, layers=3, **stream)
    weights, text = random_wan_weights(config.model), random_text(config.model, 1)
    static = EagerStream(config, weights, text)
    hold_to_naive(static, naive_models(config, weights, text), worst, "positions within the window")


def test_a_long_stream_stays_where_it_was_trained():
    """Once the window is full, tables are those of the window's frames, however far the stream is."""
    config = config_of(3, 1, 6)
    near, far = (
        EagerStream(config, random_wan_weights(config.model), random_text(config.model, 1)) for _ in "ab"
    )
    for number in range(4):
        near.run_chunk([3 * number], [3])
        far.run_chunk([3 * number + (10**6 // 3) * 3 if number else 0], [3])
    piece = near.pieces["embed"]
    assert "valid_tokens" in {a.name for a in piece.inputs}
    slot_frames = near.buffers["kv.slot_frames"].view(1, -1), far.buffers["kv.slot_frames"].view(1, -1)
    positions = [window_positions(frames, torch.tensor([7])) for frames in slot_frames]
    assert sorted(positions[0][0].tolist()) == list(range(7))
    assert max(positions[1][0].tolist()) == 6


@given(st.integers(1, 3), st.integers(0, 3), st.integers(0, 4), st.integers(0, 9), st.integers(0, 9))
def test_positions_are_the_order_of_time_wherever_frames_lie(chunk, sink, spare, before, after):
    """Against a sorted list, also behind a cache that was rebuilt, where slots hold frames of two clocks."""
    ring = Ring(sink, chunk + spare, chunk)
    clocks, frame_of_slot = RowClocks(ring, 1), {}

    def write(frames: list[int], first: int) -> None:
        frame_of_slot.update(zip(ring.write_slots(first), frames, strict=True))
        slots = torch.zeros(1, ring.cache_frames, dtype=torch.int64)
        for slot, frame in frame_of_slot.items():
            slots[0, slot] = frame
        positions = window_positions(slots, torch.tensor([len(frame_of_slot)]))[0].tolist()
        order = sorted(frame_of_slot.values())
        assert [positions[slot] for slot in frame_of_slot] == [
            order.index(frame) for frame in frame_of_slot.values()
        ]

    for count in (before, after):
        for _ in range(count):
            write(clocks.next_frames([0])[0].tolist(), int(clocks.slot_first[0]))
            clocks.chunk_made([0])
        frame_of_slot.clear()
        for (entry,) in clocks.rebuild([0]):
            if entry.kept_slot is not None:
                write([entry.first_frame + i for i in range(chunk)], entry.slot_first)
        clocks.rebuilt([0])


@pytest.mark.parametrize("scheme", ["fp32", "fp4", "int8-fp32", "fp8-sink"])
def test_sessions_restart_and_rebuild(scheme):
    config = config_of(2, 1, 4, scheme)
    weights, text = session_weights(config), random_text(config.model, 1)
    with eager_session(config, weights, text, [5]) as session:
        chunks = [session.run_chunk().to_host() for _ in range(5)]
        session.set_text(text.numpy(), recache=True)
        assert np.isfinite(session.run_chunk().to_host()).all()
        session.restart_row(0)
        again = [session.run_chunk().to_host() for _ in range(5)]
    assert all(np.array_equal(*pair) for pair in zip(chunks, again, strict=True))
    exact = config.changed(kv_scheme="fp32")
    with eager_session(exact, weights, text, [5]) as session:
        wanted = [session.run_chunk().to_host() for _ in range(3)]
    for latents, truth in zip(chunks, wanted, strict=False):
        assert relative_error(torch.from_numpy(latents), torch.from_numpy(truth)) < 0.05


def test_the_options_take_them():
    layout = {"window_positions": True}
    config = resolved("tiny", layout=layout).config
    assert config.kv.keys_before_rope
    assert config.kv.name == "fp32-before-rope"
    assert "valid_tokens" in {a.name for a in make_pieces(config)["embed"].inputs}
    assert resolved("tiny", layout=layout, kernels="fused").config.target.fused
    options = BuildOptions(preset="self-forcing-1.3b", kv="fp4", no_vae=True, no_text=True, **layout)
    assert predict(PlanRequest(options, "h200"))["step_s"] > 0

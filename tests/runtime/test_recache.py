"""Prompts changed under way: the two clocks of a row, and caches rebuilt as if they had been made by the new prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seko_runtime.errors import EngineRunError
from seko_runtime.video.clocks import RowClocks
from seko_runtime.video.ring import Ring
from tests.support.rows import rows_of

from . import toy, toy_whole
from .toy_whole import open_whole, whole_weights

RINGS = st.builds(
    lambda sink, chunk, more: Ring(sink, chunk + more, chunk),
    st.integers(0, 5),
    st.integers(1, 4),
    st.integers(0, 7),
)


@settings(max_examples=200)
@given(RINGS, st.integers(0, 40))
def test_kept_are_the_sinks_chunks_and_the_last_that_fit_the_ring(ring: Ring, chunks: int) -> None:
    clocks = RowClocks(ring, 1)
    stored: dict[int, int] = {}
    for chunk in range(chunks):
        place = clocks.next_kept_slot(0)
        assert 0 <= place < clocks.kept_slots
        stored[place] = chunk
        clocks.chunk_made([0])
    stored[clocks.next_kept_slot(0)] = -1  # a failed try writes there, and harms nothing that is kept
    sink = -(-ring.sink_frames // ring.chunk_frames)
    last = ring.ring_frames // ring.chunk_frames
    wanted = sorted({*range(min(chunks, sink)), *range(max(0, chunks - last), chunks)} if chunks else set())
    steps = clocks.rebuild([0])
    if not chunks:
        assert steps == []
        return
    entries = [step[0] for step in steps]
    assert [stored[entry.kept_slot] for entry in entries] == wanted
    assert [entry.first_frame for entry in entries] == [chunk * ring.chunk_frames for chunk in wanted]
    assert [entry.slot_first for entry in entries] == [
        turn * ring.chunk_frames for turn in range(len(wanted))
    ]
    assert clocks.rebuilt([0]) == []
    assert clocks.slot_first.tolist() == [len(wanted) * ring.chunk_frames]
    assert clocks.first.tolist() == [chunks * ring.chunk_frames]


class Naive:
    """One row of the toy, written out: a cache by layer, frames, slots from the clock that it is told."""

    def __init__(self, seed: int, prompt: str) -> None:
        self.weights = whole_weights()
        self.seed = torch.tensor([seed])
        self.cache = torch.zeros(toy.LAYERS, toy.CACHE * toy.TOKENS, toy.CHANNELS)
        self.slot_first = 0
        self.ring = Ring(toy.SINK, toy.RING, toy.CHUNK)
        self.set(prompt)

    def set(self, prompt: str) -> None:
        ids = torch.from_numpy(toy_whole.WordIds().ids(prompt))
        self.mean = toy_whole.TextEncoder()(ids, self.weights["text.table"]).mean(1)

    def passes(self, latents: torch.Tensor, number: int) -> torch.Tensor:
        slots = torch.tensor([self.ring.write_slots(self.slot_first)])
        valid = torch.tensor([self.ring.valid_frames(self.slot_first) * toy.TOKENS])
        hidden = latents * 1.0
        for layer in range(toy.LAYERS):
            weight = self.weights[f"layers.{layer}.weight"]
            gain = self.weights["gain"][number]
            hidden = toy.Step()(hidden, weight, gain, self.mean, slots, valid, self.cache[layer])
        return hidden

    def context(self, latents: torch.Tensor) -> None:
        self.passes(latents, toy.PASSES)
        self.slot_first += toy.CHUNK

    def chunk(self, first_frame: int) -> torch.Tensor:
        frames = torch.tensor([[first_frame, first_frame + 1]])
        latents = toy.Begin()(self.seed, frames, self.weights["cell"])
        for number in range(toy.PASSES):
            latents = self.passes(latents, number)
        self.context(latents)
        return latents


@pytest.mark.shows("recache")
@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=4), st.integers(1, 4))
def test_a_rebuilt_cache_is_that_of_a_fresh_session_fed_with_the_kept_chunks(
    changes: list[tuple[int, bool]], more: int
) -> None:
    """To the byte, after any number of chunks and of changes, kept or rebuilt."""
    prompts = ["a blue ring", "a green square drifts", "a red disc bounces"]
    wanted_chunks: list[torch.Tensor] = []
    oracle = Naive(5, toy_whole.PROMPT)
    sink, last = 1, toy.RING // toy.CHUNK

    def step(session: Any) -> None:
        wanted = oracle.chunk(len(wanted_chunks) * toy.CHUNK)
        assert session.run_chunk().to_host().tobytes() == wanted.numpy().tobytes()
        wanted_chunks.append(wanted)

    with open_whole(seeds=[5]) as session:
        for turn, (chunks, recache) in enumerate(changes):
            for _ in range(chunks):
                step(session)
            prompt = prompts[turn % 3]
            session.set_prompt(prompt, recache=recache)
            if not recache:
                oracle.set(prompt)
                continue
            fresh = Naive(5, prompt)
            for index in sorted(
                {
                    *range(min(len(wanted_chunks), sink)),
                    *range(max(0, len(wanted_chunks) - last), len(wanted_chunks)),
                }
            ):
                fresh.context(wanted_chunks[index])
            fed = min(fresh.slot_first, toy.CACHE) * toy.TOKENS
            cache = session.cache_sample(1)["kv"]
            assert cache[:, :fed].tobytes() == fresh.cache[:, :fed].contiguous().numpy().tobytes()
            oracle = fresh
        for _ in range(more):
            step(session)


@settings(max_examples=15)
@given(
    st.lists(
        st.one_of(st.sampled_from(["chunk", "recache"]), st.integers(0, 2)),
        min_size=1,
        max_size=14,
    )
)
def test_rows_at_different_chunks_are_rebuilt_each_as_alone(actions: list[Any]) -> None:
    prompts = ["a blue ring", "a green square drifts", "a red disc bounces"]
    alone = [open_whole(seeds=[row], prompt=prompts[row]) for row in range(3)]
    try:
        with open_whole(3, prompt=prompts) as session:
            turn = 0
            for action in [*actions, "chunk", "chunk"]:
                if action == "chunk":
                    got = session.run_chunk().to_host()
                    for row, single in enumerate(alone):
                        assert np.array_equal(got[row], single.run_chunk().to_host()[0])
                elif action == "recache":
                    turn += 1
                    turned = [prompts[(row + turn) % 3] for row in range(3)]
                    session.set_prompt(turned, recache=True)
                    for single, prompt in zip(alone, turned, strict=True):
                        single.set_prompt(prompt, recache=True)
                else:
                    session.restart_row(action)
                    alone[action].restart_row(0)
    finally:
        for single in alone:
            single.close()


def test_a_row_without_chunks_has_a_clean_cache_after_the_others_are_rebuilt() -> None:
    with open_whole(2) as session:
        session.run_chunk()
        session.restart_row(1)
        session.set_prompt("a blue ring", recache=True)
        half = toy.CACHE * toy.TOKENS
        cache = session.cache_sample(1)["kv"]
        assert (cache[:, half:] == 0).all()
        assert (cache[:, : toy.CHUNK * toy.TOKENS] != 0).any()


def test_a_rebuild_that_fails_is_made_up_before_the_next_chunk() -> None:
    fail = [0]
    real = toy.Step()

    def step(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        out = real(*inputs)
        fail[0] -= 1
        if fail[0] == 0:
            raise RuntimeError("planted")
        return [out]

    def run(planted: int) -> list[bytes]:
        with open_whole(engines={"step": step}) as session:
            got = [session.run_chunk().to_host().tobytes() for _ in range(5)]
            fail[0] = planted
            if planted:
                with pytest.raises(EngineRunError, match="planted"):
                    session.set_prompt("a blue ring", recache=True)
            else:
                session.set_prompt("a blue ring", recache=True)
            return got + [session.run_chunk().to_host().tobytes() for _ in range(4)]

    assert run(3) == run(0)


def test_latents_and_video_stay_after_a_rebuild() -> None:
    with open_whole() as session:
        chunk = session.run_chunk()
        before = chunk.to_host().tobytes(), chunk.video().tobytes()
        session.set_prompt("a blue ring", recache=True)
        assert (chunk.to_host().tobytes(), chunk.video().tobytes()) == before


def test_frame_numbers_go_on_and_slots_begin_again() -> None:
    seen: list[tuple[list[int], list[int], int]] = []
    real = toy_whole.BeginGiven()

    def begin(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        seen.append((inputs[1][0].tolist(), [], 0))
        return [real(*inputs)]

    def step(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        frames = seen[-1][0]
        seen[-1] = (frames, inputs[4][0].tolist(), int(inputs[5]) // toy.TOKENS)
        return [toy.Step()(*inputs)]

    with open_whole(engines={"begin": begin, "step": step}) as session:
        for _ in range(5):
            session.run_chunk()
        session.set_prompt("a blue ring", recache=True)
        session.run_chunk()
    steps, fed = [*seen[:5], seen[-1]], seen[5:-1]
    assert [frames for frames, _, _ in steps] == [[2 * i, 2 * i + 1] for i in range(6)]
    assert seen[4][1:] == ([4, 1], 5)
    assert [slots for _, slots, _ in fed] == [[0, 1], [2, 3], [4, 1]]
    assert seen[-1][1:] == ([2, 3], 5)  # three chunks were fed: the next one is written as chunk 3


def test_an_endless_stream_counts_frames_past_any_table() -> None:
    with open_whole() as session:
        rows_of(session).streams.clocks.first += 1 << 40
        rows_of(session).streams.clocks.slot_first += 1 << 40
        assert session.run_chunk().frames.tolist() == [[1 << 40, (1 << 40) + 1]]

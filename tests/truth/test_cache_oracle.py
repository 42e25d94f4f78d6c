"""One truth for every cache: what is read is each token's own key and value, in every layout and scheme.

A dictionary remembers every token ever written, and a list which frame each slot holds. Rows join, leave, share calls
in any order, begin anew and have their caches rebuilt for another prompt, by the runtime's own clocks, past the wrap.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seko_export.config.model import ModelConfig
from seko_export.config.pool import PoolConfig
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.engines.piece import FlatModule
from seko_export.families.layers.pieces import make_pieces
from seko_export.families.layers.ring_positions import rows_of, token_index_of_call
from seko_export.families.layers.rotary import rotary_tables, rotate
from seko_kernels.formats import FP4, NUMBER_FORMATS, ROTARY_FACTOR_BITS
from seko_kernels.kv_formats import ChannelStatistics
from seko_kernels.kv_reference import decode, encode
from seko_kernels.reference import nvfp4_decode, nvfp4_encode
from seko_runtime.video.clocks import RowClocks
from seko_runtime.video.ring import Ring
from tests.truth.eager_stream import small_config
from tests.truth.naive_dit import SlotList

MODEL = ModelConfig("oracle", layers=1, dim=256, heads=2, ffn_dim=16, text_dim=8, text_tokens=2, freq_dim=8)
KEYS = (MODEL.heads, MODEL.head_dim)
SCHEMES = ("fp32", *NUMBER_FORMATS)


class Cache:
    """One layer's cache of a pool, written and read as the pieces do it, beside what says what it must give."""

    def __init__(self, scheme: str, stream: StreamConfig, sessions: int) -> None:
        base = small_config(1, 0, 1)
        pool = PoolConfig(sessions, tuple(range(1, sessions + 1)))
        self.config = VideoBuild(
            MODEL, VideoConfig(stream, base.workload.schedule, scheme, pool=pool), TargetConfig("cpu")
        )
        self.form, self.stream = self.config.kv, stream
        pieces = make_pieces(self.config)
        self.embeds = {rows: pieces[f"embed.{rows}"] for rows in pool.buckets}
        rows_of_state = self.config.workload.state_rows
        self.slot_frames = torch.zeros(rows_of_state * stream.cache_frames, dtype=torch.int64)
        self.caches = {
            c.name: torch.zeros(rows_of_state * self.config.row_tokens(c.part), *c.token_shape, dtype=c.dtype)
            for c in self.form.cache_tensors
        }
        reach, mean = torch.full(KEYS, 4.0), torch.randn(KEYS)
        self.scales = self.form.calibrate(*[ChannelStatistics(-reach, reach, mean)] * 2)
        self.written: list[dict[int, dict[str, Tensor]]] = [{} for _ in range(sessions)]  # by frame
        self.reads: dict[tuple[int, int, str, bool], Tensor] = {}  # `stored` of them
        self.slots = [SlotList(stream.sink_frames, stream.cache_frames) for _ in range(sessions)]
        self.places: list[dict[int, int]] = [
            {} for _ in range(sessions)
        ]  # slot clock's frame -> stream's frame

    def write(
        self, rows: Sequence[int], frames: np.ndarray, firsts: Sequence[int], live: Sequence[bool]
    ) -> None:
        """Embed and write random keys and values of a call; ``firsts`` is where the slot clocks stand."""
        ring = ring_of(self.stream)
        piece = self.embeds[len(rows)]
        inputs = {a.name: torch.zeros(a.shape, dtype=a.dtype) for a in piece.signature}
        inputs["frames"] = torch.from_numpy(frames)
        inputs["write_slots"] = torch.tensor([ring.write_slots(first) for first in firsts])
        inputs["rows"] = torch.tensor(rows)
        if "slot_frames" in inputs:
            inputs["slot_frames"] = self.slot_frames
        if "valid_tokens" in inputs:
            valid = [ring.valid_frames(first) * self.stream.frame_tokens for first in firsts]
            inputs["valid_tokens"] = torch.tensor(valid)
        outputs = dict(zip((a.name for a in piece.outputs), FlatModule(piece)(*inputs.values()), strict=True))
        self.tables = {name.removeprefix("places."): t for name, t in outputs.items() if "places" in name}
        index = outputs["token_index"]
        k, v = torch.randn(2, frames.size * self.stream.frame_tokens, *KEYS)
        turned = rotate(k.unflatten(0, (len(rows), -1)), outputs["cos"], outputs["sin"]).flatten(0, 1)
        self.form.write(self.caches, self.scales, index, k if self.form.keys_before_rope else turned, v)
        by_frame = [x.unflatten(0, (*frames.shape, -1)) for x in (k, v)]
        for place, row in enumerate(rows):
            first = firsts[place]  # what fills up a chunk of references is nobody's
            own = min(self.stream.chunk_frames, -first) if first < 0 else self.stream.chunk_frames
            for i in range(own if live[place] else 0):
                frame = int(frames[place, i])
                self.written[row][frame] = {"k": by_frame[0][place, i], "v": by_frame[1][place, i]}
                for side, exact in itertools.product("kv", (False, True)):
                    self.reads.pop((row, frame, side, exact), None)
                self.slots[row].place(firsts[place] + i)
                self.places[row][firsts[place] + i] = frame
        self.check(rows, index)

    def begin(self, row: int) -> None:
        """Write the frames before a row's stream, where there are any, as the runtime does."""
        chunk = self.stream.chunk_frames
        for first in range(-self.stream.reference_frames, 0, chunk):
            self.write([row], np.arange(first, first + chunk)[None], [first], [True])

    def clear(self, row: int) -> None:
        """Zero a row's part of every cache buffer, as the runtime does, and forget what it held."""
        for cache in (*self.caches.values(), self.slot_frames):
            cache.unflatten(0, (self.config.workload.state_rows, -1))[row] = 0
        self.forget(row)

    def forget(self, row: int) -> None:
        """Let a row's cache begin anew without touching a byte."""
        self.slots[row].frames.clear()
        self.places[row].clear()

    def check(self, rows: Sequence[int], index: Tensor) -> None:
        """Read the call's window as a block does and compare every slot that holds something."""
        at = torch.tensor(rows)
        caches = {
            n: rows_of(c, at, len(c) // self.config.workload.state_rows) for n, c in self.caches.items()
        }
        windows = self.form.expand(caches, self.scales, self.tables, torch.float32)
        own = token_index_of_call(index, at, self.stream)
        assert len(set(own.tolist())) == len(own)
        shape = (len(rows), self.stream.cache_frames, self.stream.frame_tokens)
        k, v = (x.unflatten(0, shape) for x in windows)
        for place, row in enumerate(rows):
            for slot, clock in enumerate(self.slots[row].frames):
                frame = self.places[row][clock]
                position = frame
                if self.stream.window_positions:
                    position = sorted(self.places[row][slot] for slot in self.slots[row].frames).index(frame)
                cos, sin = rotary_tables(torch.tensor([[position]]), MODEL, self.stream)
                stored = self.stored(row, frame, "k", slot)
                pair = stored.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
                # Two factors a product, each off by half a unit of its last bit, in two products of a pair.
                slack = 2 * 2.0**-ROTARY_FACTOR_BITS * pair * 1.01 if self.form.keys_before_rope else 1e-6
                assert ((k[place, slot] - rotate(stored[None], cos, sin)[0]).abs() <= slack).all(), (
                    row,
                    slot,
                )
                assert torch.equal(v[place, slot], self.stored(row, frame, "v", slot)), (row, slot)

    def stored(self, row: int, frame: int, side: str, slot: int) -> Tensor:
        """What a read gives of a frame's tokens in one slot, before RoPE: through the references of numbers alone."""
        exact = slot < self.stream.pinned_frames and getattr(self.form, "exact_sink", None) is not None
        place = (row, frame, side, exact)
        if place not in self.reads:
            x = self.written[row][frame][side]
            self.reads[place] = x if exact else self._through_numbers(side, x)
        return self.reads[place]

    def _through_numbers(self, side: str, x: Tensor) -> Tensor:
        numbers = getattr(self.form, "keys" if side == "k" else "values", None)
        if numbers is None:
            return x
        g, mean = self.scales[f"{side}_global_scale"], self.scales.get(f"{side}_mean")
        if numbers is FP4:
            read = nvfp4_decode(*nvfp4_encode(x, g, mean), g, torch.float32)
        else:
            read = decode(numbers, *encode(numbers, x, g, mean), g, torch.float32)
        return read if mean is None else read + mean


@st.composite
def layouts(draw: st.DrawFn) -> tuple[str, StreamConfig]:
    """Any chunk, sink and ring, also where a chunk wraps in the middle; any schemes and positions."""
    chunk, sink = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    ring, window = chunk + draw(st.integers(0, 4)), draw(st.booleans())
    reference = draw(st.integers(0, 4))
    stream = StreamConfig(32, 48, chunk, sink, ring, window_positions=window, reference_frames=reference)
    keys, values = draw(st.sampled_from(SCHEMES)), draw(st.sampled_from(SCHEMES))
    apart = stream.pinned_frames and (keys, values) != ("fp32", "fp32") and draw(st.booleans())
    return f"{keys}-{values}" + "-sink" * bool(apart), stream


def ring_of(stream: StreamConfig) -> Ring:
    """The runtime's slots of a stream."""
    return Ring(stream.sink_frames, stream.ring_frames, stream.chunk_frames, stream.reference_frames)


EVENTS = st.lists(st.sampled_from(["chunk"] * 6 + ["prompt", "leave"]), min_size=4, max_size=24)


@pytest.mark.slow
@settings(max_examples=30)
@given(layouts(), EVENTS, st.integers(1, 3), st.randoms())
def test_every_token_is_read_as_itself(layout, events, sessions, random):
    """Calls of any rows in any order; prompt switches rebuild caches, rows that leave are cleared for whoever joins."""
    torch.manual_seed(0)
    scheme, stream = layout
    cache = Cache(scheme, stream, sessions)
    clocks = RowClocks(ring_of(stream), sessions)
    for row in range(sessions):
        cache.begin(row)
    for event in events:
        rows = random.sample(range(sessions), random.randint(1, sessions))
        if event == "leave":
            clocks.restart(rows[0])
            cache.clear(rows[0])
            cache.begin(rows[0])
        elif event == "prompt":
            for row in rows:
                cache.forget(row)
                cache.begin(row)
            for entries in clocks.rebuild(rows):
                frames = np.array([[e.first_frame + i for i in range(stream.chunk_frames)] for e in entries])
                firsts = [entry.slot_first for entry in entries]
                cache.write(rows, frames, firsts, [entry.kept_slot is not None for entry in entries])
            for row in clocks.rebuilt(rows):
                cache.clear(row)
                cache.begin(row)
        else:
            for _ in range(random.randint(1, 6)):
                firsts = [int(clocks.slot_first[row]) for row in rows]
                cache.write(rows, clocks.next_frames(rows), firsts, [True] * len(rows))
                clocks.chunk_made(rows)

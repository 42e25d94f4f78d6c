"""Keys in the cache before RoPE: what is read is each token's own key, turned to its own frame, wherever it lies.

Truth is a dictionary from slot to frame and keys. Rows begin anew and caches are rebuilt under way, by the runtime's
own clocks: then the frames in a cache are no longer one after another.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seko_export.config import ModelConfig, StreamConfig
from seko_export.models.rotary import rotary_tables, rotate
from seko_export.pieces import BuildConfig, FlatModule, make_pieces
from seko_kernels.formats import ROTARY_FACTOR_BITS
from seko_kernels.kv_formats import ChannelStatistics
from seko_kernels.reference import nvfp4_decode, nvfp4_encode
from seko_runtime.clocks import RowClocks
from seko_runtime.ring import Ring
from tests.truth.eager_stream import same_bytes, small_config

MODEL = ModelConfig("keys", layers=1, dim=32, heads=2, ffn_dim=16, text_dim=8, text_tokens=2, freq_dim=8)
KEYS = (MODEL.heads, MODEL.head_dim)


class Cache:
    """One layer's cache, written and read as the pieces do it, beside the dictionaries that say what it must give."""

    def __init__(self, stream: StreamConfig) -> None:
        base = small_config(1, 0, 1)
        self.config = BuildConfig(MODEL, stream, base.schedule, "fp4", "cpu")
        self.form, self.stream = self.config.kv, stream
        self.piece = make_pieces(self.config)["embed"]
        self.inputs = {a.name: torch.zeros(a.shape, dtype=a.dtype) for a in self.piece.signature}
        tokens = stream.batch * stream.cache_tokens
        self.caches = {
            c.name: torch.zeros(tokens, *c.token_shape, dtype=c.dtype) for c in self.form.cache_tensors
        }
        reach = torch.full(KEYS, 4.0)
        mean = torch.randn(KEYS)
        self.scales = self.form.calibrate(*[ChannelStatistics(-reach, reach, mean)] * 2)
        self.held: list[dict[int, tuple[int, Tensor]]] = [{} for _ in range(stream.batch)]

    def write(self, frames: np.ndarray, slots: list[list[int]], live: list[bool]) -> None:
        """Run the embed piece and write random keys, as one chunk's pass does; rows that are not live are not kept."""
        self.inputs["frames"] = torch.from_numpy(frames)
        self.inputs["write_slots"] = torch.tensor(slots)
        *_, index, slot_rotary, patch_rotary = FlatModule(self.piece)(*self.inputs.values())
        self.places = {"slot_rotary": slot_rotary, "patch_rotary": patch_rotary}
        keys = torch.randn(frames.size * self.stream.frame_tokens, *KEYS)
        self.form.write(self.caches, self.scales, index, keys, keys)
        by_frame = keys.unflatten(0, (*frames.shape, -1))
        for row in range(self.stream.batch):
            if live[row]:
                for i, slot in enumerate(slots[row]):
                    self.held[row][slot] = (int(frames[row, i]), by_frame[row, i])

    def clear(self, row: int) -> None:
        """Zero a row's part of every cache buffer, as the runtime does, and forget what it held."""
        for cache in (*self.caches.values(), self.inputs["slot_frames"]):
            cache.unflatten(0, (self.stream.batch, -1))[row] = 0
        self.held[row].clear()

    def check(self) -> None:
        """Read the window and compare every frame that the dictionaries know."""
        k, v = self.form.window(self.caches, self.scales, self.places, torch.float32)
        shape = (self.stream.batch, self.stream.cache_frames, self.stream.frame_tokens)
        k, v = (x.unflatten(0, shape) for x in (k, v))
        for row, held in enumerate(self.held):
            for slot, (frame, keys) in held.items():
                g, mean = self.scales["k_global_scale"], self.scales["k_mean"]
                stored = nvfp4_decode(*nvfp4_encode(keys, g, mean), g, torch.float32) + mean
                cos, sin = rotary_tables(torch.tensor([[frame]]), MODEL, self.stream)
                wanted = rotate(stored[None], cos, sin)[0]
                pair = stored.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
                # Two factors a product, each off by half a unit of its last bit, in two products of a pair.
                assert ((k[row, slot] - wanted).abs() <= 2 * 2.0**-ROTARY_FACTOR_BITS * pair * 1.01).all(), (
                    row,
                    slot,
                )
                g = self.scales["v_global_scale"]
                assert torch.equal(v[row, slot], nvfp4_decode(*nvfp4_encode(keys, g), g, torch.float32))


EVENTS = st.lists(st.sampled_from(["chunk"] * 6 + ["rebuild", "restart"]), min_size=3, max_size=14)


@settings(max_examples=40, deadline=None)
@given(EVENTS, st.integers(1, 3), st.integers(0, 3), st.integers(0, 3), st.integers(1, 2), st.randoms())
def test_every_token_is_read_as_its_own_key_at_its_own_frame(events, chunk, sink, spare, batch, random):
    """Any sink, ring and chunk, rows at different chunks; also while and after a cache is rebuilt."""
    torch.manual_seed(0)
    stream = StreamConfig(32, 48, chunk, sink, chunk + spare, batch)
    ring, cache = Ring(sink, chunk + spare, chunk), Cache(stream)
    clocks = RowClocks(ring, batch)
    for event in events:
        if event == "restart":
            row = random.randrange(batch)
            clocks.restart(row)
            cache.clear(row)
        elif event == "rebuild":
            for held in cache.held:
                held.clear()
            for entries in clocks.rebuild(range(batch)):
                frames = np.array([[e.first_frame + i for i in range(chunk)] for e in entries])
                slots = [ring.write_slots(e.slot_first) for e in entries]
                cache.write(frames, slots, [e.place is not None for e in entries])
                cache.check()
            for row in clocks.rebuilt(range(batch)):
                cache.clear(row)
        else:
            slots = [ring.write_slots(int(first)) for first in clocks.slot_first]
            cache.write(clocks.frames(range(batch)), slots, [True] * batch)
            clocks.chunk_made(range(batch))
            cache.check()


def test_an_exact_format_has_no_new_inputs():
    """What only keys before RoPE need is in no signature, buffer or result of an exact build."""
    lossy, exact = small_config(3, 1, 6, scheme="fp4"), small_config(3, 1, 6)
    new = {"slot_frames", "places.slot_rotary", "places.patch_rotary"}
    for config, there in ((lossy, True), (exact, False)):
        for device in ("cpu", "cuda"):
            config = dataclasses.replace(config, device=device)
            if not there:
                config = dataclasses.replace(config, kv_scheme=config.exact_scheme)
            pieces = make_pieces(config).values()
            names = {a.name for piece in pieces for a in (*piece.inputs, *piece.outputs)}
            assert names & new == (new if there else set())
            mutating = {piece.name for piece in pieces if piece.mutates} - {"block", "block_full"}
            assert mutating == ({"embed"} if there else set())


def test_both_tables_make_up_the_chunks_own():
    """The one of the slots beside the one of the patches is the table of the frames that the slots hold, to the bit."""
    stream = StreamConfig(32, 48, 2, 1, 3, 2)
    cache = Cache(stream)
    cache.write(np.array([[7, 8], [1_000_000, 1_000_001]]), [[1, 2], [3, 1]], [True, True])
    frames = cache.inputs["slot_frames"].view(2, 4)
    assert frames.tolist() == [[0, 7, 8, 0], [0, 1_000_001, 0, 1_000_000]]
    slot, patch = cache.places["slot_rotary"], cache.places["patch_rotary"]
    table = torch.cat(
        (
            slot[:, None].expand(-1, len(patch), -1, -1),
            patch[None].expand(len(slot), -1, -1, -1),
        ),
        dim=2,
    ).unflatten(0, (2, 4))
    for part, wanted in zip(table.unbind(-1), rotary_tables(frames, MODEL, stream), strict=True):
        assert same_bytes(part.flatten(1, 2), wanted)

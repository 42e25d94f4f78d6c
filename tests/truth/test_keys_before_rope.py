"""What only a cache of keys before RoPE has: its inputs, and its tables. What is read of it: `test_cache_oracle.py`."""

from __future__ import annotations

import torch

from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig
from seko_export.engines.piece import FlatModule
from seko_export.families.layers.pieces import make_pieces
from seko_export.families.layers.rotary import rotary_tables
from tests.truth.eager_stream import same_bytes, small_config

MODEL = ModelConfig("keys", layers=1, dim=32, heads=2, ffn_dim=16, text_dim=8, text_tokens=2, freq_dim=8)


def test_an_exact_format_has_no_new_inputs():
    """What only keys before RoPE need is in no signature, buffer or result of an exact build."""
    lossy, exact = small_config(3, 1, 6, scheme="fp4"), small_config(3, 1, 6)
    new = {"slot_frames", "places.slot_rotary", "places.patch_rotary"}
    for config, there in ((lossy, True), (exact, False)):
        for device in ("cpu", "cuda"):
            config = config.changed(device=device)
            if not there:
                config = config.changed(kv_scheme=config.exact_scheme)
            pieces = make_pieces(config).values()
            names = {a.name for piece in pieces for a in (*piece.inputs, *piece.outputs)}
            assert names & new == (new if there else set())
            mutating = {piece.name for piece in pieces if piece.mutates} - {"block", "block_full"}
            assert mutating == ({"embed"} if there else set())


def test_both_tables_make_up_the_chunks_own():
    """The one of the slots beside the one of the patches is the table of the frames that the slots hold, to the bit."""
    base, stream = small_config(2, 1, 3, batch=2, scheme="fp4"), StreamConfig(32, 48, 2, 1, 3, 2)
    piece = make_pieces(base.changed(model=MODEL, stream=stream))["embed"]
    inputs = {a.name: torch.zeros(a.shape, dtype=a.dtype) for a in piece.signature}
    inputs["frames"] = torch.tensor([[7, 8], [1_000_000, 1_000_001]])
    inputs["write_slots"] = torch.tensor([[1, 2], [3, 1]])
    *_, slot, patch = FlatModule(piece)(*inputs.values())
    frames = inputs["slot_frames"].view(2, 4)
    assert frames.tolist() == [[0, 7, 8, 0], [0, 1_000_001, 0, 1_000_000]]
    table = torch.cat(
        (
            slot[:, None].expand(-1, len(patch), -1, -1),
            patch[None].expand(len(slot), -1, -1, -1),
        ),
        dim=2,
    ).unflatten(0, (2, 4))
    for part, wanted in zip(table.unbind(-1), rotary_tables(frames, MODEL, stream), strict=True):
        assert same_bytes(part.flatten(1, 2), wanted)

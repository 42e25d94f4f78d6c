"""Layers of two ranks against the same layer on one, for each kind of layer and cache, without processes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from torch import Tensor

from seko_export.config.build import BuildConfig
from seko_export.config.schedule import Schedule
from seko_export.engines.piece import FlatModule, Piece
from seko_export.families.layers.choice import CHUNK
from seko_export.families.layers.layer_pieces import BLOCK, WINDOW
from seko_export.families.layers.rank_split import RankSplit
from seko_export.families.registry import family_of, presets
from seko_export.goldens.calibration import layer_constants, uncalibrated_scales
from tests.parallel.in_threads import InThreads, Meeting
from tests.tolerances import STEP, relative_error

RANKS = 2
LAYOUT = {"height": 32, "width": 64, "chunk_frames": 2, "sink_frames": 0, "ring_frames": 4}
LINGBOT = presets()["lingbot-tiny"].model
CASES = {
    "plain": {"kv_scheme": "fp32"},
    "plain over FP4": {"kv_scheme": "fp4"},
    "plain over int8": {"kv_scheme": "int8"},
    "fused": {"kv_scheme": "fp32", "fused": True},
    "fused over FP4": {"kv_scheme": "fp4", "fused": True},
    "fused, fp8 attention": {"kv_scheme": "fp4", "fused": True, "attention": "fp8"},
    "resident window": {"kv_scheme": "fp4", "fused": True, "attention": "fp8", "resident_window": True},
    "camera": {"kv_scheme": "fp32", "model": LINGBOT},
    "camera in every pass": {"kv_scheme": "fp32", "model": replace(LINGBOT, camera="pass")},
    "camera, fused over FP4": {"kv_scheme": "fp4", "fused": True, "model": LINGBOT},
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_make_what_one_makes(case: str) -> None:
    tiny = presets()["tiny"]
    stream = replace(tiny.stream, **LAYOUT)
    config = BuildConfig(
        stream=stream, schedule=Schedule.warped(), device="cpu", **{"model": tiny.model} | CASES[case]
    )
    one = layer_engines(config)
    ranks = [layer_engines(replace(config, ranks=RANKS)) for _ in range(RANKS)]
    assert one
    assert [[*engines] for engines in ranks] == [[*one]] * RANKS
    state = tensors_of(config, one)
    shares = [{} for _ in range(RANKS)]
    for frame in (0, 2):  # the second chunk has a past
        whole = inputs_of_chunk(config, state, frame)
        for name, piece in one.items():
            made = run(piece, whole)
            meeting = Meeting(RANKS, Barrier(RANKS))
            with ThreadPoolExecutor(RANKS) as pool:
                jobs = [
                    pool.submit(run_rank, ranks[rank][name], whole, shares[rank], rank, meeting)
                    for rank in range(RANKS)
                ]
                parts = [job.result() for job in jobs]
            for output, expected in enumerate(made):
                split = RankSplit(RANKS, LAYOUT["chunk_frames"])
                for rank in range(RANKS):
                    own, part = expected, parts[rank][output]
                    if piece.key.variant != ("condition",):  # of frames, not of tokens
                        own = split.own_tokens(expected, torch.tensor([rank]))
                    assert part.shape == own.shape, name
                    assert relative_error(part, own) <= STEP[torch.float32], name
    for name in state:
        if name.startswith("caches."):
            joined = torch.cat([share[name] for share in shares], dim=1)
            assert joined.shape == state[name].shape
            assert (
                float((joined != state[name]).float().mean()) <= 0.001
                or relative_error(joined, state[name]) <= STEP[torch.float32]
            )


def layer_engines(config: BuildConfig) -> dict[str, Piece]:
    """Return what reads or writes the caches, and what a family's modules compute for them."""
    pieces = family_of(config).graph(config).pieces
    return {name: piece for name, piece in pieces.items() if piece.key.role in (CHUNK, WINDOW, BLOCK)}


def tensors_of(config: BuildConfig, engines: dict[str, Piece]) -> dict[str, Tensor]:
    """Return weights, constants and empty caches by argument; those that change are written in place."""
    generator = torch.Generator().manual_seed(0)
    scales = uncalibrated_scales(config) if config.kv_scheme != "fp32" else {}
    scales |= layer_constants(config, scales)
    known = {
        f"scales.{name.removeprefix('blocks.0.kv.')}": one for name, one in scales.items() if ".0." in name
    }
    for piece in engines.values():
        for one in piece.signature:
            if one.name.startswith(("caches.", "window.")):
                known.setdefault(one.name, torch.zeros(one.shape, dtype=one.dtype))
            elif one.name not in known and one.dtype == torch.float32:
                width = one.shape[-1] if one.name.startswith("weights.") else 1.0
                known[one.name] = torch.randn(one.shape, generator=generator) / width**0.5
    return known


def inputs_of_chunk(config: BuildConfig, state: dict[str, Tensor], frame: int) -> dict[str, Tensor]:
    """Return the state with the places of the chunk that begins with ``frame``."""
    s = config.stream
    slots = torch.arange(frame, frame + s.chunk_frames)
    tokens = slots[:, None] * s.frame_tokens + torch.arange(s.frame_tokens)
    valid = torch.tensor([(frame + s.chunk_frames) * s.frame_tokens])
    places = {"write_slots": slots[None], "token_index": tokens.flatten(), "valid_tokens": valid}
    places["frames"] = slots[None]
    return state | places


def run(piece: Piece, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Call a piece."""
    with torch.no_grad():
        return FlatModule(piece)(*(tensors[one.name] for one in piece.signature))


def run_rank(
    piece: Piece, whole: dict[str, Tensor], own: dict[str, Tensor], rank: int, meeting: Meeting
) -> tuple[Tensor, ...]:
    """Call a piece as one rank, with its tokens and heads; ``own`` keeps its caches."""
    piece.module.split = split = InThreads(RANKS, LAYOUT["chunk_frames"], rank, meeting)
    number = torch.tensor([rank])
    for one in piece.signature:
        if one.name.startswith(("caches.", "window.")):
            own.setdefault(one.name, torch.zeros(one.shape, dtype=one.dtype))
    shared = {name: tensor for name, tensor in whole.items() if not name.startswith(("caches.", "window."))}
    for one in piece.signature:
        if one.name in shared and shared[one.name].shape != one.shape:
            shared[one.name] = split.own_tokens(shared[one.name], number)
            assert shared[one.name].shape == one.shape, one.name
    shared["token_index"] = split.in_ranks_order(shared["token_index"], 1)
    return run(piece, shared | own | {"rank": number})


@pytest.fixture(autouse=True)
def _one_thread_each() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

"""Layers of two ranks against the same layer on one, for each kind of layer and cache, without processes.

Where the ranks do not divide a latent frame's tokens, each rank's padding is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from threading import Barrier

import pytest
import torch
from torch import Tensor

from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.engines.piece import FlatModule, Piece
from seko_export.families.layers.choice import CHUNK
from seko_export.families.layers.layer_pieces import BLOCK, WINDOW
from seko_export.families.layers.rank_split import RankSplit, rank_split
from seko_export.families.registry import family_of, presets
from seko_export.families.seko_talk import audio
from seko_export.families.wan_layout import picture_condition as condition
from seko_export.video.calibration import layer_constants, uncalibrated_scales
from seko_kernels.fused_reference import FP8
from tests.parallel.in_threads import InThreads, Meeting
from tests.support.tolerances import STEP, relative_error

RANKS = 2
LAYOUT = {"chunk_frames": 2, "sink_frames": 0, "ring_frames": 4}
SIZES = {"even": (32, 64), "padded": (48, 48)}  # 8 and 9 tokens of a latent frame
LINGBOT = presets()["lingbot-tiny"].model
TALK = replace(presets()["seko-talk-tiny"].model, speakers=2)
WHOLE = (condition.ROWS, audio.TOKENS, audio.KEYS, audio.VALUES)  # outputs that all ranks make alike
CASES = {
    "plain": {"kv_scheme": "fp32"},
    "plain over FP4": {"kv_scheme": "fp4"},
    "plain over int8": {"kv_scheme": "int8"},
    "fused": {"kv_scheme": "fp32", "fused": True},
    "fused over FP4": {"kv_scheme": "fp4", "fused": True},
    "fused, fp8 attention": {"kv_scheme": "fp4", "fused": True, "attention": "fp8"},
    "resident window": {"kv_scheme": "fp4", "fused": True, "attention": "fp8", "resident_window": True},
    "fp8 matmuls": {"kv_scheme": "fp4", "fused": True, "attention": "fp8", "fp8": True},
    "camera": {"kv_scheme": "fp32", "model": LINGBOT},
    "camera in every pass": {"kv_scheme": "fp32", "model": replace(LINGBOT, camera="pass")},
    "camera, fused over FP4": {"kv_scheme": "fp4", "fused": True, "model": LINGBOT},
    "voices": {"kv_scheme": "fp32", "model": TALK},
    "voices, fused over FP4": {"kv_scheme": "fp4", "fused": True, "model": TALK},
    "voices, fp8 attention": {"kv_scheme": "fp4", "fused": True, "attention": "fp8", "model": TALK},
}


@pytest.mark.parametrize(
    ("case", "size"),
    [
        *((case, "padded") for case in CASES),
        *((case, "even") for case in ("plain", "fused over FP4", "fp8 matmuls", "camera", "voices")),
    ],
)
def test_two_ranks_make_what_one_makes(case: str, size: str) -> None:
    tiny = presets()["seko-talk-tiny" if CASES[case].get("model") is TALK else "tiny"]
    height, width = SIZES[size]
    stream = replace(tiny.stream, height=height, width=width, **LAYOUT)
    config = VideoBuild(tiny.model, VideoConfig(stream, Schedule.warped(), "fp32"), TargetConfig("cpu"))
    config = config.changed(**CASES[case])
    single = layer_engines(config)
    several = config.changed(ranks=RANKS)
    split = rank_split(several)
    assert split.padding == (size == "padded")
    ranks = [layer_engines(several) for _ in range(RANKS)]
    assert single
    assert [[*engines] for engines in ranks] == [[*single]] * RANKS
    state = tensors_of(config, single)
    shares = [{} for _ in range(RANKS)]
    for frame in (0, 2):  # the second chunk has a past
        whole = inputs_of_chunk(config, state, frame)
        for name, piece in single.items():
            outputs = run(piece, whole)
            meeting = Meeting(RANKS, Barrier(RANKS))
            with ThreadPoolExecutor(RANKS) as pool:
                jobs = [
                    pool.submit(run_rank, ranks[rank][name], split, whole, shares[rank], rank, meeting)
                    for rank in range(RANKS)
                ]
                parts = [job.result() for job in jobs]
            for output, expected in enumerate(outputs):
                for rank in range(RANKS):
                    own, part, what = expected, parts[rank][output], piece.outputs[output].name
                    if what not in WHOLE:
                        own = split.own_tokens(by_token(what, expected), torch.tensor([rank]))
                        part = by_token(what, part).where(is_token(split, own, rank), 0)
                    assert part.shape == own.shape, name
                    same = torch.equal(part, own)  # zeros, where a tail added the residual
                    assert same or relative_error(part, own) <= STEP[torch.float32], name
    for name in state:
        if name.startswith("caches."):
            joined = torch.cat([share[name] for share in shares], dim=1)
            assert joined.shape == state[name].shape
            assert (
                float((joined != state[name]).float().mean()) <= 0.001
                or relative_error(joined, state[name]) <= STEP[torch.float32]
            )


def layer_engines(config: VideoBuild) -> dict[str, Piece]:
    """Return what reads or writes the caches, and what a family's modules compute for them."""
    pieces = family_of(config).graph(config).pieces
    return {name: piece for name, piece in pieces.items() if piece.key.role in (CHUNK, WINDOW, BLOCK)}


def tensors_of(config: VideoBuild, engines: dict[str, Piece]) -> dict[str, Tensor]:
    """Return weights, constants and empty caches by argument; those that change are written in place."""
    generator = torch.Generator().manual_seed(0)
    scales = uncalibrated_scales(config) if config.workload.kv_scheme != "fp32" else {}
    scales |= layer_constants(config, scales)
    known = {
        f"scales.{name.removeprefix('blocks.0.kv.')}": scale
        for name, scale in scales.items()
        if ".0." in name
    }
    for piece in engines.values():
        for spec in piece.signature:
            if spec.name.startswith(("caches.", "window.")):
                known.setdefault(spec.name, torch.zeros(spec.shape, dtype=spec.dtype))
            elif spec.name not in known and spec.dtype in (torch.float32, FP8):
                width = spec.shape[-1] if spec.name.startswith("weights.") else 1.0
                numbers = torch.randn(spec.shape, generator=generator) / width**0.5
                known[spec.name] = numbers.to(spec.dtype)
    return known


def inputs_of_chunk(config: VideoBuild, state: dict[str, Tensor], frame: int) -> dict[str, Tensor]:
    """Return the state with the places of the chunk that begins with ``frame``."""
    s = config.workload.stream
    slots = torch.arange(frame, frame + s.chunk_frames)
    tokens = slots[:, None] * s.frame_tokens + torch.arange(s.frame_tokens)
    valid = torch.tensor([(frame + s.chunk_frames) * s.frame_tokens])
    places = {"write_slots": slots[None], "token_index": tokens.flatten(), "valid_tokens": valid}
    places["frames"] = slots[None]
    return state | places


def run(piece: Piece, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Call a piece."""
    with torch.no_grad():
        return FlatModule(piece)(*(tensors[spec.name] for spec in piece.signature))


def run_rank(
    piece: Piece,
    split: RankSplit,
    whole: dict[str, Tensor],
    own: dict[str, Tensor],
    rank: int,
    meeting: Meeting,
) -> tuple[Tensor, ...]:
    """Call a piece as one rank, with its tokens and heads; ``own`` keeps its caches."""
    piece.module.split = InThreads(*astuple(split), rank, meeting)
    number = torch.tensor([rank])
    for spec in piece.signature:
        if spec.name.startswith(("caches.", "window.")):
            own.setdefault(spec.name, torch.zeros(spec.shape, dtype=spec.dtype))
    shared = {name: tensor for name, tensor in whole.items() if not name.startswith(("caches.", "window."))}
    for spec in piece.signature:
        if spec.name in shared and shared[spec.name].shape != spec.shape:
            tokens = split.own_tokens(by_token(spec.name, shared[spec.name]), number)
            tokens = tokens.where(is_token(split, tokens, rank), torch.nan)
            shared[spec.name] = by_token(spec.name, tokens)
            assert shared[spec.name].shape == spec.shape, spec.name
    shared["token_index"] = split.as_exchanged(shared["token_index"], 1)
    return run(piece, shared | own | {"rank": number})


def is_token(split: RankSplit, own: Tensor, rank: int) -> Tensor:
    """Return [1, T/R, ...] bool: what of a rank's tensor [1, T/R, ...] is no padding."""
    whole = torch.ones(1, split.chunk_frames * split.frame_tokens)
    real = split.own_tokens(whole, torch.tensor([rank])) == 1
    return real.reshape(1, -1, *(1,) * (own.dim() - 2))


def by_token(name: str, x: Tensor) -> Tensor:
    """Return a tensor with the tokens as axis 1; that of the voices' gate is axis 2, and goes back there."""
    return x.transpose(1, 2) if name.endswith(audio.GATE) else x


@pytest.fixture(autouse=True)
def _one_thread_each() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

"""What the collectives of a step take, under several settings of NCCL and by copies without it: a part of `ranks.py`.

Each rank's process makes the all-to-alls of the 1.3B and of the 14B model at 480x832, many in one CUDA graph. A setting
that cannot be had is named with its error. ``copies`` write into the other ranks' memory by torch's symmetric memory,
without multicast, and meet at a barrier.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from scripts.bench.rank_processes import SAID_BYTES, run_ranks
from scripts.bench.rows import append_row
from seko_runtime.format.manifest import CALL_GROUP

MODELS = {"1.3B": (12, 30), "14B": (40, 40)}  # heads of 128 channels, layers
TOKENS = 4680
WAYS = {"to heads": 3, "to tokens": 1}  # tensors that travel together
COPIES, BARRIER = "copies", "barrier"
REGISTERED = {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}
SETTINGS: dict[str, Mapping[str, str]] = {
    "default": {},
    COPIES: {},
    "64 channels": {"NCCL_MIN_P2P_NCHANNELS": "64", "NCCL_MAX_P2P_NCHANNELS": "64"},
    "16 channels": {"NCCL_MAX_P2P_NCHANNELS": "16"},
    "32 channels a peer": {"NCCL_NCHANNELS_PER_PEER": "32"},
    "chunks of 1 MB": {"NCCL_P2P_NVL_CHUNKSIZE": "1048576"},
    "buffers of 16 MB": {"NCCL_BUFFSIZE": "16777216", "NCCL_P2P_NVL_CHUNKSIZE": "2097152"},
    "read": {"NCCL_P2P_READ_ENABLE": "1"},
    "registered": REGISTERED,
    "registered, old addresses": {**REGISTERED, "NCCL_LEGACY_CUDA_REGISTER": "1"},
    "registered, expandable": {**REGISTERED, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "copy engines": {"NCCL_P2P_USE_CUDA_MEMCPY": "1"},
}
REPEATS = 20


def measured(options: argparse.Namespace) -> None:
    """Append a row with the milliseconds of a step's collectives under each setting."""
    ms: dict[str, Any] = {}
    for name, environment in SETTINGS.items():
        if options.trial and environment:
            continue
        begun = time.monotonic()
        spec = {"exchange": name}
        try:
            reports = run_ranks(options, "exchange", options.ranks, spec, environment)
            ms[name] = {what: max(report["ms"][what] for report in reports) for what in reports[0]["ms"]} | {
                "seconds": round(time.monotonic() - begun)
            }
        except Exception as fault:  # the other settings are worth their time
            ms[name] = str(fault)[-SAID_BYTES // 6 :]
        print(f"# {name}: {ms[name]}", flush=True)
    append_row(
        options.rows,
        f"sp{options.ranks}_exchange",
        f"all-to-alls of 4,680 tokens, {options.ranks} ranks",
        ms["default"]["14B"],
        "ms of a step of the 14B model",
        None,
        ms=ms,
    )


def exchanged(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the milliseconds of each model's collectives in a step, and the microseconds of each."""
    ranks, device = spec["ranks"], torch.device(spec["device"])
    ms: dict[str, float] = {}
    for model, (heads, layers) in MODELS.items():
        total = 0.0
        for way, tensors in WAYS.items():
            x = torch.randn(
                (ranks, TOKENS // ranks, tensors * heads // ranks * 128), dtype=torch.bfloat16, device=device
            )
            ways = copies(x, spec["rank"]) if spec["exchange"] == COPIES else {"": by_nccl(x)}
            us = {name: 1e3 * milliseconds(run, device) for name, run in ways.items()}
            ms |= {f"{model} {way} {name} us": round(took, 1) for name, took in us.items()}
            total += layers * min(took for name, took in us.items() if name != BARRIER) / 1e3
        ms[model] = round(total, 2)
    return {"ms": ms}


def by_nccl(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return an all-to-all of x as engines have it."""
    ones, collectives = [1] * len(x), torch.ops._c10d_functional

    def run() -> torch.Tensor:
        received: torch.Tensor = collectives.wait_tensor(
            collectives.all_to_all_single(x, ones, ones, CALL_GROUP)
        )
        return received

    return run


def copies(x: torch.Tensor, rank: int) -> dict[str, Callable[[], None]]:
    """Return all-to-alls of x into symmetric memory: by copies one after another, side by side, and by kernels."""
    from torch.distributed import _symmetric_memory as symmetric

    own = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
    world = dist.group.WORLD
    assert world is not None  # the ranks have met
    handle = symmetric.rendezvous(own, group=world)
    peers = [handle.get_buffer(peer, x.shape, x.dtype)[rank] for peer in range(len(x))]
    streams = [torch.cuda.Stream() for _ in peers]

    def in_turn() -> None:
        for peer, part in zip(peers, x, strict=True):
            peer.copy_(part)
        handle.barrier(channel=0)

    def beside(write: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        here = torch.cuda.current_stream()
        for stream, peer, part in zip(streams, peers, x, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                write(peer, part)
        for stream in streams:
            here.wait_stream(stream)
        handle.barrier(channel=0)

    return {
        "in turn": in_turn,
        "beside": lambda: beside(lambda peer, part: peer.copy_(part)),
        "kernels": lambda: beside(lambda peer, part: torch.neg(part, out=peer)),
        BARRIER: lambda: handle.barrier(channel=0),
    }


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call: on a GPU inside a graph of many."""
    for _ in range(3):
        run()
    if device.type != "cuda":
        begun = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begun)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            run()
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) / REPEATS)
    return statistics.median(times)

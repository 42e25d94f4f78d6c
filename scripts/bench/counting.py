"""What is counted and timed of a running stream: chunks, launches, memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from seko_export.tools.inspection import percentile


def chunk_times(run: Callable[[], object], chunks: int) -> list[float]:
    """Return the milliseconds of each of ``chunks`` calls: by events on a GPU, one call at a time."""
    times = []
    for _ in range(chunks):
        if torch.cuda.is_available():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            started = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - started))
    return times


def fill_chunks(stream: Any) -> int:
    """Return the chunks after which a stream's cache is full, and two more."""
    return -(-int(stream.cache_frames) // int(stream.chunk_frames)) + 2


def paced_times(session: Any, stream: Any, chunks: int) -> list[float]:
    """Return the milliseconds from chunk to chunk of a stream whose cache is full, with every frame on the host."""
    fill, times = fill_chunks(stream), []
    before = time.perf_counter()
    for _ in session.stream(chunks=fill + chunks):
        now = time.perf_counter()
        times.append(1e3 * (now - before))
        before = now
    return times[fill:]


def spread(times: list[float]) -> dict[str, float]:
    """Return median, p90, p99 and largest of some times."""
    tails = {name: percentile(times, share) for name, share in (("p90", 0.9), ("p99", 0.99))}
    return {"median": statistics.median(times), **tails, "max": max(times), "count": len(times)}


def launches_of(run: Callable[[], object]) -> dict[str, int]:
    """Count what the host sends to the GPU in one call, as the profiler sees the driver's calls; on a CPU nothing."""
    if not torch.cuda.is_available():
        run()
        return dict.fromkeys(("graphs", "kernels", "copies"), 0)
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events()]
    kernels = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
    return {
        "graphs": names.count("cudaGraphLaunch"),
        "kernels": sum(name in kernels for name in names),
        "copies": names.count("cudaMemcpyAsync"),
    }


def peak_bytes() -> int:
    """Return the most that was allocated on the GPU by torch, weights included; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0

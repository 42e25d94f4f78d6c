"""What is counted and timed of a running stream: chunks, host syncs, compiled graphs, memory, how busy the host is."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from seko_export.tools.inspection import percentile

_SYNC_WARNING = "called a synchronizing CUDA operation"
_SCALAR_READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")


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


def count_syncs(run: Callable[[], object]) -> int:
    """Return how often the host waited for the device in one call.

    On a GPU by torch's sync debug mode, which sees what torch itself does; on a CPU, where nothing waits, the reads of
    a tensor's value by the host are counted instead: what would wait on a GPU.
    """
    if not torch.cuda.is_available():
        with _ScalarReads() as reads:
            run()
        return reads.count
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return sum(_SYNC_WARNING in str(warning.message) for warning in caught)


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


def graphs_compiled() -> int:
    """Return how many graphs Dynamo has compiled in this process; each beyond a function's first is a recompile."""
    counters: Any = torch._dynamo.utils.counters
    return int(counters["stats"]["unique_graphs"])


def processor_ticks() -> tuple[int, int]:
    """Return how long all processors of the host have worked, and how long they have been there, in clock ticks."""
    user, nice, system, idle, iowait, *others = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    )
    busy = user + nice + system + sum(others)
    return busy, busy + idle + iowait


def busy_share(before: tuple[int, int]) -> float | None:
    """Return the share of the host's processors that worked since `processor_ticks` said ``before``; None: too short.

    A peer that launches each kernel from the host is as fast as that host is let alone.
    """
    (busy, there), (busy_before, there_before) = processor_ticks(), before
    return (busy - busy_before) / (there - there_before) if there > there_before else None


def peak_bytes() -> int:
    """Return the most that was allocated on the GPU by torch, weights included; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


class _ScalarReads(TorchDispatchMode):
    """Counts the ops that give a tensor's value to the host."""

    count = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: Dynamo refuses to run compiled code below a mode that might change what it computes."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func.overloadpacket.__name__ in _SCALAR_READS
        return func(*args, **(kwargs or {}))

"""Traces as torch's profiler writes them, made by hand: of a CPU, and of a GPU that was captured or not."""

from __future__ import annotations

from typing import Any

from seko_export.tools.profile_trace import CHUNK_RANGE


def event(
    name: str, category: str, begin: float, length: float, thread: int = 1, **args: Any
) -> dict[str, Any]:
    """One event as Kineto writes it, in microseconds."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 7,
        "tid": thread,
        "ts": begin,
        "dur": length,
        "args": args,
    }


def cpu_trace() -> dict[str, Any]:
    return {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
            event(CHUNK_RANGE, "user_annotation", 100, 50),
            event("seko::block", "user_annotation", 110, 20),
            event("aoti_torch_cpu_addmm_out", "cpu_op", 112, 10),
            event("aten::copy_", "cpu_op", 113, 2.5),
            event("seko::block", "user_annotation", 132, 8),
            event("strange", "cpu_op", 145, 1),
            event("aten::mm", "cpu_op", 200, 9),  # after the chunk
            event("PyTorch Profiler (0)", "Trace", 0, 900),
        ]
    }


def gpu_trace(*, captured: bool) -> dict[str, Any]:
    """Two kernels and a copy; launched as one graph, or each by a call inside an engine's range."""
    device = [
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 103, 1, 9, correlation=1),
        event("nvjet_tst_64x64_64x8_2x1_v_bz_TNT", "kernel", 110, 20, 9, correlation=2),
        event(
            "nvfp4_expand_kernel_0", "kernel", 125, 10, 10, correlation=2 if captured else 3
        ),  # another stream
        event("seko::block", "gpu_user_annotation", 110, 25, 9),  # a range's shadow on the device is no work
    ]
    copy = event("cudaMemcpyAsync", "cuda_runtime", 101, 1, correlation=1)
    if captured:
        host = [event("cudaGraphLaunch", "cuda_runtime", 104, 3, correlation=2)]
    else:
        host = [
            event("seko::embed", "user_annotation", 104, 2),
            event("cuLaunchKernelEx", "cuda_driver", 105, 1, correlation=2),
            event("seko::block", "user_annotation", 107, 2),
            event("cudaLaunchKernelExC_v11060", "cuda_runtime", 107.2, 1, correlation=3),
            event("cuLaunchKernelEx", "cuda_driver", 107.5, 0.5, correlation=3),  # of the call around it
        ]
    chunk = event(CHUNK_RANGE, "user_annotation", 100, 60)
    return {"traceEvents": [chunk, event("aten::copy_", "cpu_op", 100.5, 2), copy, *host, *device]}

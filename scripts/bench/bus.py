"""How fast a plain copy between the device and page-locked memory is: what moving and streaming are measured by."""

from __future__ import annotations

from collections.abc import Callable

import torch

PROBE_BYTES = 1 << 30


def copy_rates() -> dict[str, float]:
    """Return bytes a second of a plain copy between the device and page-locked memory, each way."""
    host = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(PROBE_BYTES, dtype=torch.uint8, device="cuda")
    ways = {
        "in": lambda: device.copy_(host, non_blocking=True),
        "out": lambda: host.copy_(device, non_blocking=True),
    }
    return {way: PROBE_BYTES / (1e-3 * min(elapsed_ms(work) for _ in range(5))) for way, work in ways.items()}


def elapsed_ms(work: Callable[[], object]) -> float:
    """Return the milliseconds that the device takes for what is queued by ``work``."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))

"""What the profiler sees of a chunk on a GPU: one launch of a graph."""

from __future__ import annotations

import torch

from seko_runtime import Session


def events_of_one_launch(session: Session) -> list[str]:
    """Names of what happens in a chunk once the graphs are captured, which one launch of one of them sets off."""
    for _ in range(5):
        session.run_chunk()
    torch.cuda.synchronize()
    # One cycle, so nothing accumulates; without it torch 2.11 warns that events are cleared between cycles.
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        session.run_chunk()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert names.count("cudaGraphLaunch") == 1
    assert not [name for name in names if name.startswith("cudaLaunchKernel")]
    return names

"""Settings of torch's allocator, with a CPU in place of the GPU."""

from __future__ import annotations

import pytest
import torch

from seko_runtime.backends.cuda_memory import ALLOCATOR_SETTINGS, let_blocks_grow


@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize("variable", [None, *sorted(ALLOCATOR_SETTINGS)])
def test_blocks_grow_unless_the_user_or_other_ranks_have_a_say(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, ranked: bool
) -> None:
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "max_split_size_mb:64")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: ranked)
    given: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    let_blocks_grow()
    assert given == ([] if ranked or variable else ["expandable_segments:True"])

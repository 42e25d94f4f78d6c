"""The process group that the compiler looks up while it compiles collectives. Nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from seko_runtime.format.manifest import RANK_GROUP


@contextmanager
def stand_in_group(ranks: int) -> Iterator[None]:
    """Register a group of that size under `RANK_GROUP` for the duration of the block; nothing for one rank.

    It is torch's own stand-in for tests, whose collectives return at once.
    """
    if ranks == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    registered: Any = torch._C._distributed_c10d  # torch has no public name for it
    try:
        registered._register_process_group(RANK_GROUP, dist.group.WORLD)
        yield
    finally:
        registered._unregister_process_group(RANK_GROUP)
        dist.destroy_process_group()

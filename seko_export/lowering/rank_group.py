"""A stand-in process group that the compiler looks up while it compiles collectives. The stand-in process group sends
nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from seko_runtime.format.manifest import CALL_GROUP, LANE_GROUP


@contextmanager
def stand_in_group(ranks: int) -> Iterator[None]:
    """Context manager in which a stand-in group of ``ranks`` members is registered under each group name; for one rank
    nothing is registered.

    The stand-in group is torch's own fake process group for tests. Its collectives return at once, with data of this
    process.
    """
    if ranks == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    registered: Any = torch._C._distributed_c10d  # torch has no public function for this
    try:
        for name in (CALL_GROUP, LANE_GROUP):
            registered._register_process_group(name, dist.group.WORLD)
        yield
    finally:
        for name in (CALL_GROUP, LANE_GROUP):
            registered._unregister_process_group(name)
        dist.destroy_process_group()

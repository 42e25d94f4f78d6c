"""The torch process group (NCCL or Gloo) through which compiled engines of several ranks exchange tensors."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from seko_runtime.format.manifest import CALL_GROUP

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def join_ranks(
    device: str,
    rank: int,
    ranks: int,
    meeting: Path,
    seconds: float,
    groups: Sequence[str] = (CALL_GROUP,),
) -> str:
    """Join the process group of an artifact's ranks (one process for each GPU), and run each kind of collective once.

    Engines find the process group by its name, `CALL_GROUP`. The process group contains all processes of the default
    group, since another artifact has other processes. Settings of NCCL are left to NCCL and the environment variables.

    A further group has the same members as the first group, but its own connections: its collectives need no fixed
    order relative to the collectives of the first group. On a GPU, a kernel of the first group and a kernel of a
    further group may wait for other ranks at the same time. The kernels of two groups cannot deadlock: they fit on the
    device together, and every rank queues the two groups' collectives on different CUDA streams.

    Parameters
    ----------
    device : str
        Device of this rank: ``cpu`` or ``cuda:N``.
    rank, ranks : int
        Rank of this process, and number of ranks.
    meeting : Path
        A file in a private folder, through which the processes find each other.
    seconds : float
        Largest number of seconds to wait for the other processes.
    groups : sequence of str
        Names by which engines find groups, `CALL_GROUP` first.

    Returns
    -------
    str
        Version of the communication library, which must be equal in all ranks.
    """
    place, patience = torch.device(device), datetime.timedelta(seconds=seconds)
    cuda = place.type == "cuda"
    if cuda:
        torch.cuda.set_device(place)
    else:
        os.environ.setdefault(GLOO_INTERFACE, "lo")  # all ranks are on one machine
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=ranks,
        timeout=patience,
        device_id=place if cuda else None,
    )
    registered: Any = torch._C._distributed_c10d  # torch has no public function for this
    # NCCL makes its connections at the first collective of each kind, which is not permitted during a capture.
    sent = torch.ones(ranks, 1, device=place)
    ones = [1] * ranks
    collectives = torch.ops._c10d_functional
    for name in groups:
        group = dist.group.WORLD if name == CALL_GROUP else dist.new_group(timeout=patience)
        registered._register_process_group(name, group)
        collectives.wait_tensor(collectives.all_to_all_single(sent, ones, ones, name))
        collectives.wait_tensor(collectives.all_gather_into_tensor(sent[:1], ranks, name))
    if cuda:
        torch.cuda.synchronize(place)
    return f"torch {torch.__version__}"


def share(tensor: torch.Tensor) -> None:
    """Queue a broadcast of rank 0's contiguous tensor, of any dtype, into ``tensor``; all ranks call this function."""
    dist.broadcast(tensor.view(torch.uint8), 0)

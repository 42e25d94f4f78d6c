"""The process group through which compiled engines of several ranks exchange tensors: torch's, NCCL or Gloo."""

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
    """Join the group of this artifact's processes, and run each kind of collective once.

    Engines find the group by `CALL_GROUP`. It is this process's whole world: groups of other artifacts are other
    processes. What NCCL uses on this machine is left to NCCL and the environment.

    A further group has the same members and connections of its own, so that what is sent in it needs no order with
    what is sent in the first. On a GPU both may wait for other ranks at the same time; that ends because the kernels of
    both fit on the device together, and what each waits for is queued on every rank, on another CUDA stream.

    Parameters
    ----------
    device : str
        ``cpu`` or ``cuda:N``.
    rank, ranks : int
        This process's number, and how many there are.
    meeting : Path
        A file in a private folder, through which they find each other.
    seconds : float
        How long to wait for the others.
    groups : sequence of str
        Names by which engines find groups, `CALL_GROUP` first.

    Returns
    -------
    str
        The library's version, in which all must agree.
    """
    place, patience = torch.device(device), datetime.timedelta(seconds=seconds)
    cuda = place.type == "cuda"
    if cuda:
        torch.cuda.set_device(place)
    else:
        os.environ.setdefault(GLOO_INTERFACE, "lo")  # they are on one machine
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=ranks,
        timeout=patience,
        device_id=place if cuda else None,
    )
    registered: Any = torch._C._distributed_c10d  # torch has no public name for it
    # NCCL makes its connections at the first use of each kind, which is not permitted during a capture.
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
    """Queue the copy of rank 0's contiguous tensor into this one, on all ranks; its dtype may be any."""
    dist.broadcast(tensor.view(torch.uint8), 0)

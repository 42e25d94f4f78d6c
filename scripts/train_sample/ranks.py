"""The processes of one training run on one host, a GPU each, as torchrun starts them; without it a world of one.

    torchrun --standalone --nproc-per-node 2 -m scripts.train_sample.train_vae ...

Every rank holds the whole model and works on draws of its own; gradients are averaged, so weights stay equal. Rank 0
alone reads the clock and writes files. In a world of one there is no process group, and nothing here does anything.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

# Of one collective over gradients; compiling is a rank's own work, so it counts only by how much ranks differ in it.
GRADIENTS_TIMEOUT = timedelta(seconds=60)
CONTROL_TIMEOUT = timedelta(
    minutes=10
)  # rank 0 may measure alone meanwhile; torchrun ends ranks whose peer died
# Between the seeds of two ranks. Far from every `seed * 1_000_003 + step` and, as a CPU's generator keeps 32 bits of
# a seed, small; 125_600 steps beside a multiple of that stride, so that other seeds do not meet it either.
_SEED_STRIDE = 200 * 1_000_003 + 125_000
_control: dist.ProcessGroup | None = None  # gloo: messages on the host, which wait for no device


class RanksDifferError(RuntimeError):
    """Weights that must be equal on every rank are not."""


@contextmanager
def joined(device: str) -> Iterator[str]:
    """Join the processes that torchrun started, until the block ends; yield this rank's device.

    Parameters
    ----------
    device : str
        ``cpu`` or ``cuda``; rank R works on GPU R of the visible ones.

    Raises
    ------
    ValueError
        If there are more ranks than visible GPUs, or ``device`` names one of them.
    """
    global _control
    count, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if count == 1:
        yield device
        return
    if device == "cuda":
        if count > torch.cuda.device_count():
            raise ValueError(
                f"{count} ranks, but {torch.cuda.device_count()} visible GPUs: start a rank for each"
            )
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    elif device != "cpu":
        raise ValueError(f"device {device!r} with {count} ranks; give cpu or cuda, each rank takes its own")
    dist.init_process_group("nccl" if device != "cpu" else "gloo", timeout=GRADIENTS_TIMEOUT)
    _control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    try:
        yield device
    except Exception:
        # At once, so that torchrun ends the others: an orderly exit waits for collectives that never come.
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    wait()
    dist.destroy_process_group()
    _control = None


def world() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this process's number, 0 in a world of one."""
    return dist.get_rank() if world() > 1 else 0


def is_first() -> bool:
    """Return whether this is the rank that writes files and prints."""
    return rank() == 0


def seed_offset() -> int:
    """Return what this rank adds to a seed whose draws must differ between ranks."""
    return rank() * _SEED_STRIDE


def share(count: int) -> range:
    """Return this rank's part of ``count`` pieces of work; the parts lie in order of rank and differ by at most one."""
    return range(count * rank() // world(), count * (rank() + 1) // world())


def agree(*numbers: float) -> list[float]:
    """Return rank 0's numbers; waits for no device."""
    if world() == 1:
        return list(numbers)
    told = torch.tensor(numbers, dtype=torch.float64)
    dist.broadcast(told, 0, group=_control)
    return [float(number) for number in told]


def gather(rows: list[T]) -> list[T]:
    """Return every rank's rows, in order of rank, on every rank; they must be picklable."""
    if world() == 1:
        return rows
    parts: list[list[T]] = [[] for _ in range(world())]
    dist.all_gather_object(parts, rows, group=_control)
    return [row for part in parts for row in part]


def wait() -> None:
    """Wait until every rank is here."""
    if world() > 1:
        dist.barrier(group=_control)


def mean_gradients(parameters: Iterable[Tensor]) -> None:
    """Exchange each gradient for its mean over the ranks, in one collective; the same ones must be there on each."""
    if world() == 1:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = _flat(gradients)
    dist.all_reduce(flat)
    _fill(gradients, flat.div_(world()))


def equalise(tensors: Iterable[Tensor]) -> None:
    """Give every rank the values of rank 0; all float32 on the rank's device."""
    held = [t.detach() for t in tensors]
    if world() == 1 or not held:
        return
    flat = _flat(held)
    dist.broadcast(flat, 0)
    _fill(held, flat)


def require_equal(tensors: Iterable[Tensor]) -> None:
    """Compare the bits of float32 tensors between ranks.

    Raises
    ------
    RanksDifferError
        If they differ: a gradient was not averaged, or a device does not repeat its sums.
    """
    if world() == 1:
        return
    # Sums of the bits as integers: exact in any order.
    sums = torch.stack([t.detach().view(torch.int32).sum(dtype=torch.int64) for t in tensors]).tolist()
    odd = sorted(
        {i for other in gather([sums]) for i, (a, b) in enumerate(zip(other, sums, strict=True)) if a != b}
    )
    if odd:
        raise RanksDifferError(
            f"{len(odd)} of {len(sums)} tensors differ between {world()} ranks, first number {odd[0]};"
            " what was saved is rank 0's"
        )


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def _fill(tensors: list[Tensor], flat: Tensor) -> None:
    parts = flat.split([t.numel() for t in tensors])
    torch._foreach_copy_(tensors, [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])

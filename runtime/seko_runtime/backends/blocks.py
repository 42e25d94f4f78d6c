"""Many tensors in one block of device memory: their offsets, and how the block is filled part by part."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from seko_runtime.format.safetensors_map import MappedTensor

ALIGNMENT = 256  # bytes, as of addresses from cudaMalloc
CALLS_IN_FLIGHT = 4  # host blocks: the host may be so many calls ahead of the device
UPLOAD_WINDOW = 8 << 20  # bytes of one staged copy
# threads that copy into pinned memory: a core copies about 8 GB/s, four saturate the PCIe bus
UPLOAD_THREADS = 4


def block_offsets(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return the aligned byte offset of each tensor in one block, and the block's size."""
    places: dict[str, int] = {}
    end = 0
    for name, size in sizes.items():
        places[name] = end
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return places, end


def upload_in_shares(total: int, upload: Callable[[Sequence[int]], None]) -> None:
    """Upload a block by several threads: each calls ``upload`` with the offsets of its share of the block's windows."""
    windows = range(0, total, UPLOAD_WINDOW)
    threads = min(UPLOAD_THREADS, len(windows))
    if threads:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(upload, [windows[first::threads] for first in range(threads)]))


def fill_window(
    window: NDArray[np.uint8], begin: int, end: int, spans: Sequence[tuple[int, MappedTensor]]
) -> None:
    """Copy the content of bytes ``begin`` to ``end`` of the block into ``window``; gaps between tensors are left
    unchanged.

    Parameters
    ----------
    window : numpy.ndarray
        Memory to fill, uint8, at least ``end - begin`` long.
    begin, end : int
        Range of bytes of the block.
    spans : Sequence[tuple[int, MappedTensor]]
        Offset of each tensor in the block, ascending.
    """
    first = max(bisect_right(spans, begin, key=itemgetter(0)) - 1, 0)
    for place, mapped in islice(spans, first, None):
        if place >= end:
            break
        low, high = max(place, begin), min(place + mapped.nbytes, end)
        if low < high:
            source = mapped.data[mapped.offset + low - place : mapped.offset + high - place]
            window[low - begin : high - begin] = np.frombuffer(source, np.uint8)

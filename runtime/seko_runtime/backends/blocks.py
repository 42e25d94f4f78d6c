"""Offsets of many tensors in one block of device memory."""

from __future__ import annotations

from collections.abc import Mapping

ALIGNMENT = 256  # bytes, as of addresses from cudaMalloc
CALLS_IN_FLIGHT = 4  # host blocks: the host may be so many calls ahead of the device


def block_offsets(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return the aligned byte offset of each tensor in one block, and the block's size."""
    places: dict[str, int] = {}
    end = 0
    for name, size in sizes.items():
        places[name] = end
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return places, end

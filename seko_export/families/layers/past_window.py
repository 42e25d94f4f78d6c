"""Expansion of a layer's cached keys and values from FP4 to 8 bits, for fp8 attention. The expansion runs in each pass,
or once a chunk (a resident window).

Cached frames are the same in all passes of a chunk, so one expansion to 8 bits (the resident window) serves all passes.
The resident window holds the rows of the current call; the next chunk fills it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from seko_export.config.stream import StreamConfig
from seko_export.families.layers.layer_ops import LayerOps
from seko_export.families.layers.rank_split import Ranked
from seko_export.families.layers.ring_positions import rows_of
from seko_kernels.fused_reference import FP8
from seko_kernels.scratch import KeyRotation, scratch_shapes


class PastWindow(NamedTuple):
    """Cached keys and values in the layout that the kernel `attention_fp8` reads, with P tokens for each row, with
    scales and values padded to whole tiles.

    Keys ``k`` are [B, P, H, D] int8 with a scale for each tile, ``k_scale`` [B, H, tiles] float32. Values ``v`` are [B,
    H, D, columns] e4m3.
    """

    k: Tensor
    k_scale: Tensor
    v: Tensor

    @classmethod
    def empty(
        cls, heads: int, size: int, stream: StreamConfig, batch: int, device: torch.device | None = None
    ) -> PastWindow:
        """Return an uninitialised `PastWindow` for ``batch`` rows and ``heads`` heads of ``size`` channels."""
        shapes = scratch_shapes(batch, heads, size, stream.cache_tokens - stream.chunk_tokens)
        return cls(
            torch.empty(shapes["k"], dtype=torch.int8, device=device),
            torch.empty(shapes["k_scale"], dtype=torch.float32, device=device),
            torch.empty(shapes["v"], dtype=FP8, device=device),
        )


def expand_past(
    ops: LayerOps,
    window: PastWindow,
    caches: Mapping[str, Tensor],
    scales: Mapping[str, Tensor],
    places: Mapping[str, Tensor],
    write_slots: Tensor,
    valid_tokens: Tensor,
    stream: StreamConfig,
) -> None:
    """Expand the cached tokens of an FP4 cache to 8 bits, without the slots of the present chunk, into ``window``.

    Parameters
    ----------
    ops : LayerOps
        Seko's ops, or stand-ins that count the cost of each op.
    window : PastWindow
        The expanded keys and values, written in place up to the number of filled tokens of each row.
    caches, scales, places, write_slots, valid_tokens
        The parameters of `fused_block.FusedLayer.forward` with the same names; here the caches have the call's rows
        only.
    stream : StreamConfig
        Layout of the video stream, with the sizes of the caches.
    """
    ops.fp8_expand(
        caches["k_codes"],
        caches["k_scales"],
        scales["k_global_scale"],
        caches["v_codes"],
        caches["v_scales"],
        scales["v_global_scale"],
        scales["v_fp8_scale"],
        write_slots,
        valid_tokens,
        stream.frame_tokens,
        *window,
        KeyRotation(scales["k_mean"], places["slot_rotary"], places["patch_rotary"]),
    )


class WindowExpand(Ranked):
    """The module that expands one layer's cached keys and values to 8 bits (the resident window) before the first pass
    of a chunk.

    Attributes
    ----------
    split : RankSplit or None
        How ranks share a chunk; the resident window then has this rank's heads only.
    """

    groups = ("caches", "scales", "places", "window")  # arguments that are mappings

    def __init__(self, stream: StreamConfig) -> None:
        super().__init__()
        self.stream, self.ops = stream, LayerOps()

    def forward(
        self,
        write_slots: Tensor,
        valid_tokens: Tensor,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        places: Mapping[str, Tensor],
        window: Mapping[str, Tensor],
        rows: Tensor | None = None,
        rank: Tensor | None = None,
    ) -> tuple[()]:
        """Fill the resident window ``window`` in place; `fused_block.FusedLayer.forward` documents the parameters."""
        if rows is not None:
            caches = {name: rows_of(cache, rows, self.stream.cache_tokens) for name, cache in caches.items()}
        if self.split is not None and rank is not None:
            scales = self.split.heads_of_each(scales, rank)
        out = PastWindow(**window)
        expand_past(self.ops, out, caches, scales, places, write_slots, valid_tokens, self.stream)
        return ()

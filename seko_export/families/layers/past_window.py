"""Expansion of a layer's cached keys and values from FP4 to 8 bits, for fp8 attention. The expansion runs in each pass,
or once a chunk (a resident window).

Cached frames are the same in all passes of a chunk, so one expansion to 8 bits (the resident window) serves all passes.
The resident window holds the rows of the current call; the next chunk fills it again.

A layer with an extra attention has a second resident window: the same cached frames, changed by the family's `Turn`.
Their magnitudes are not known when an artifact is built, so their scales come from the numbers themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig
from seko_export.families.layers.block import Recall, Turn, is_filled
from seko_export.families.layers.layer_ops import LayerOps
from seko_export.families.layers.rank_split import Ranked
from seko_export.families.layers.ring_positions import rows_of
from seko_export.families.layers.rotary import no_rotation
from seko_kernels.formats import E4M3_MAX
from seko_kernels.fused_reference import FP8, e4m3_cast, int8_tiles, largest_of_tiles, past_token_index
from seko_kernels.kv_formats import KvFormat
from seko_kernels.scratch import KeyRotation, scratch_shapes
from seko_kernels.sparse_past import PastLayout

_EXTRA = "extra_"  # prefix of the names of the second window's tensors
_MANTISSA, _EXPONENT = 0x7FFFFF, 0x7F800000  # bits of a float32
_LEAST = 2.0**-100


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


class TurnedWindow(NamedTuple):
    """A `PastWindow` of an extra attention, whose values have a scale for each row, too: ``v_scale`` [B, H] float32,
    powers of two. A cached value is ``v`` times the scale of its row and head."""

    k: Tensor
    k_scale: Tensor
    v: Tensor
    v_scale: Tensor

    @classmethod
    def empty(
        cls, heads: int, size: int, stream: StreamConfig, batch: int, device: torch.device | None = None
    ) -> TurnedWindow:
        """Return an uninitialised `TurnedWindow`; the parameters are those of `PastWindow.empty`."""
        scale = torch.empty((batch, heads), dtype=torch.float32, device=device)
        return cls(*PastWindow.empty(heads, size, stream, batch, device), scale)


class SparsePast(NamedTuple):
    """To how many tiles of cached keys queries attend, as `choose_past` takes it: where cached frames lie, and
    the number of tiles in a list."""

    layout: PastLayout
    length: int

    @classmethod
    def of(cls, stream: StreamConfig, share: float) -> SparsePast | None:
        """Return the sparse past of a build that attends to a share of the cached keys; None if that is all of
        them."""
        layout = PastLayout(
            stream.pinned_frames, stream.ring_frames, stream.chunk_frames, stream.frame_tokens
        )
        length = layout.tiles_of(share)
        return cls(layout, length) if length < layout.tiles else None


def window_tensors(window: PastWindow, turned: TurnedWindow | None) -> dict[str, Tensor]:
    """Return the tensors of a layer's resident windows by their names in the mapping ``window`` of engines."""
    extra = {} if turned is None else turned._asdict()
    return window._asdict() | {f"{_EXTRA}{name}": tensor for name, tensor in extra.items()}


def past_window(tensors: Mapping[str, Tensor]) -> PastWindow:
    """Return the window of self-attention among the tensors of `window_tensors`."""
    return PastWindow(*(tensors[name] for name in PastWindow._fields))


def turned_window(tensors: Mapping[str, Tensor]) -> TurnedWindow | None:
    """Return the window of an extra attention among the tensors of `window_tensors`; None if there is none."""
    if f"{_EXTRA}k" not in tensors:
        return None
    return TurnedWindow(*(tensors[f"{_EXTRA}{name}"] for name in TurnedWindow._fields))


def quantise_past(window: TurnedWindow, k: Tensor, v: Tensor, cached: Tensor) -> None:
    """Write cached keys and values to a window in 8 bits.

    Parameters
    ----------
    window : TurnedWindow
        The window, written in place.
    k, v : Tensor
        Keys and values of a row's past tokens in order, [B, P, H, D].
    cached : Tensor
        Whether each of the tokens is filled, [B, P] bool; others count as zeros.
    """
    empty = cached.logical_not().unflatten(1, (-1, 1, 1))  # [B, P, 1, 1]
    k, v = (x.float().masked_fill(empty, 0) for x in (k, v))
    codes, scale = int8_tiles(k, largest_of_tiles(k))
    window.k.copy_(F.pad(codes, (0, 0, 0, 0, 0, window.k.shape[1] - codes.shape[1])))
    window.k_scale.copy_(F.pad(scale, (0, window.k_scale.shape[2] - scale.shape[2])))
    v_scale = _power_of_two((v.abs().amax((1, 3)) / E4M3_MAX).clamp(min=_LEAST))  # [B, H]
    columns = F.pad(
        (v / v_scale.unsqueeze(1).unsqueeze(3)).permute(0, 2, 3, 1), (0, window.v.shape[3] - v.shape[1])
    )
    window.v.copy_(e4m3_cast(columns))
    window.v_scale.copy_(v_scale)


def at_slots(of_slots: Tensor, slots: Tensor) -> Tensor:
    """Return the entries [B, F, ...] of ``of_slots`` [B, S, ...] at each row's ``slots`` [B, F]."""
    row = torch.arange(len(slots), device=slots.device).unsqueeze(-1) * of_slots.shape[1]
    chosen: Tensor = of_slots.flatten(0, 1).index_select(0, (row + slots).flatten()).unflatten(0, slots.shape)
    return chosen


def _power_of_two(x: Tensor) -> Tensor:
    """Return the smallest powers of two that are at least x, float32 above the least normal number."""
    bits = (x.view(torch.int32) + _MANTISSA) & _EXPONENT
    return bits.view(torch.float32)


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
    """The module that expands one layer's cached keys and values to 8 bits (the resident windows) before the first pass
    of a chunk.

    Parameters
    ----------
    model, stream, kv, dtype
        The parameters of `fused_block.FusedLayer` with the same names.
    turn : Turn, optional
        How the layer's extra attention changes keys and values; None: the layer has none.

    Attributes
    ----------
    split : RankSplit or None
        How ranks share a chunk; the resident window then has this rank's heads only.
    """

    groups = (
        "caches",
        "scales",
        "places",
        "window",
        "conditioning",
        "recall",
    )  # arguments that are mappings

    def __init__(
        self,
        model: ModelConfig,
        stream: StreamConfig,
        kv: KvFormat,
        dtype: torch.dtype,
        turn: Turn | None = None,
    ) -> None:
        super().__init__()
        self.model, self.stream, self.kv, self.dtype, self.turn = model, stream, kv, dtype, turn
        self.ops = LayerOps()

    def forward(
        self,
        write_slots: Tensor,
        valid_tokens: Tensor,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        places: Mapping[str, Tensor],
        window: Mapping[str, Tensor],
        rows: Tensor | None = None,
        conditioning: Mapping[str, Tensor] | None = None,
        recall: Mapping[str, Tensor] | None = None,
        rank: Tensor | None = None,
    ) -> tuple[()]:
        """Fill the resident windows ``window`` in place; `fused_block.FusedLayer.forward` documents the parameters."""
        if rows is not None:
            caches = {name: rows_of(cache, rows, self.stream.cache_tokens) for name, cache in caches.items()}
        if self.split is not None and rank is not None:
            scales = self.split.heads_of_each(scales, rank)
        out = past_window(window)
        expand_past(self.ops, out, caches, scales, places, write_slots, valid_tokens, self.stream)
        extra = turned_window(window)
        if self.turn is not None and extra is not None:
            kept = Recall(recall or {}, write_slots, valid_tokens, rows)
            of_slots = self.turn.of_slots(conditioning or {}, kept)
            self._expand_turned(extra, caches, scales, of_slots, kept)
        return ()

    def _expand_turned(
        self,
        window: TurnedWindow,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        of_slots: Tensor,
        kept: Recall,
    ) -> None:
        """Fill the extra attention's window from the caches of the call's rows; ``of_slots`` [B, S, ...] is what the
        `Turn` takes."""
        s, turn, batch = self.stream, self.turn, len(kept.write_slots)
        if turn is None:
            raise TypeError("a window of an extra attention has a Turn")
        past = past_token_index(kept.write_slots, s.cache_tokens, s.frame_tokens)  # [B, P]
        frames = past.unflatten(1, (-1, s.frame_tokens)).select(2, 0) // s.frame_tokens  # slots, [B, S - F]
        of_past = at_slots(of_slots, frames)
        plain = no_rotation(batch, self.model, s, past.device)
        k, v = (
            turn.turned(of_past, at_slots(x.unflatten(0, (batch, -1)), past))
            for x in self.kv.expand(caches, scales, plain, self.dtype)  # each [B*N, H, D]
        )
        own = kept.write_slots.shape[1] * s.frame_tokens
        quantise_past(window, k, v, is_filled(kept.valid_tokens - own, past.shape[1]))

"""A sparse past: the tiles of cached keys to which a tile of queries attends, chosen by products of block means.

The kernels of `attention.attention_fp8` take the numbers of the chosen tiles as a list for each head and tile of
queries. All sizes are fixed when an artifact is built. `choose_past` is plain torch without a sort, which torch's
compiler fuses into few kernels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from seko_kernels.formats import KEY_TILE

# Queries that share a list of tiles: the queries of a program of the kernel for Hopper.
QUERY_TILE = 192


def query_tiles(queries: int, query_tile: int = QUERY_TILE) -> int:
    """Return the number of lists of a head: one for each tile of a chunk's queries."""
    return -(-queries // query_tile)


class PastLayout(NamedTuple):
    """Where the cached frames of a stream lie among the keys of `attention.attention_fp8`.

    The keys are those of the cache's slots in order, without the slots of the present chunk (`scratch.fp8_expand`). The
    slots of the ring are written one after another, so the chunk that was cached last lies in the slots before those of
    the present chunk; before the ring's first slot comes its last.

    Parameters
    ----------
    pinned_frames, ring_frames : int
        Number of slots that are never reused, which come first, and number of the ring's slots.
    chunk_frames : int
        Number of latent frames of a chunk, F.
    frame_tokens : int
        Number of tokens of a latent frame.
    key_tile : int
        Number of keys of a tile, a divisor of `KEY_TILE`; kernels take only `KEY_TILE`.
    """

    pinned_frames: int
    ring_frames: int
    chunk_frames: int
    frame_tokens: int
    key_tile: int = KEY_TILE

    @property
    def tiles(self) -> int:
        """Number of tiles of keys of a full cache."""
        cached = self.pinned_frames + self.ring_frames - self.chunk_frames
        return -(-cached * self.frame_tokens // self.key_tile)

    def tiles_of(self, share: float) -> int:
        """Return the number of tiles in a list, if queries attend to this share of a full cache.

        The list has room for all tiles that are taken whatever their keys are.
        """
        return min(self.tiles, max(math.ceil(share * self.tiles), self.most_always))

    @property
    def most_always(self) -> int:
        """Largest number of tiles that `always` takes in a row, over all places of the present chunk."""
        pinned, ring, chunk = self.pinned_frames, self.ring_frames, self.chunk_frames
        filling = (list(range(first, first + chunk)) for first in range(pinned + ring - chunk + 1))
        full = ([pinned + (first + n) % ring for n in range(chunk)] for first in range(ring))
        most = 0
        for slots, count in [
            *((own, own[0]) for own in filling),
            *((own, pinned + ring - chunk) for own in full),
        ]:
            past = [slot for slot in range(pinned + ring) if slot not in slots][:count]
            newest = {(slots[0] - pinned - back) % ring + pinned for back in range(1, chunk + 1)}
            taken = {(count * self.frame_tokens - 1) // self.key_tile} if count else set()
            for place, slot in enumerate(past):
                if slot in newest or slot < pinned:
                    first, end = place * self.frame_tokens, (place + 1) * self.frame_tokens
                    taken.update(range(first // self.key_tile, (end - 1) // self.key_tile + 1))
            most = max(most, len(taken))
        return most

    def always(self, write_slots: Tensor, cached: Tensor) -> Tensor:
        """Return which tiles every query of a row attends to.

        These are the tiles with a token of the sink's frames or of the chunk that was cached last, and the last tile,
        which may be partial.

        Parameters
        ----------
        write_slots : Tensor
            Cache slots of the present chunk, ``[B, F]`` int64.
        cached : Tensor
            Number of cached tokens of each row, ``[B]`` int64.

        Returns
        -------
        Tensor
            Whether the row always attends to the tile, ``[B, tiles]`` bool.
        """
        first = torch.arange(self.tiles, device=write_slots.device) * self.key_tile  # tokens [tiles]
        back = torch.arange(1, self.chunk_frames + 1, device=write_slots.device)
        slots = (
            write_slots.narrow(1, 0, 1) - self.pinned_frames - back
        ) % self.ring_frames + self.pinned_frames
        own = slots.unsqueeze(-1) == write_slots.unsqueeze(1)  # [B, F, F]
        before = write_slots.unsqueeze(1) < slots.unsqueeze(-1)
        # Of a cache that is filling, slots without a frame lie behind all cached tokens.
        begin = ((slots - before.sum(-1)) * self.frame_tokens).unsqueeze(-1)  # [B, F, 1]
        met = (
            (first < begin + self.frame_tokens)
            & (first + self.key_tile > begin)
            & own.any(-1, keepdim=True).logical_not()
        )
        sink = first < self.pinned_frames * self.frame_tokens
        last = first + self.key_tile >= cached.unsqueeze(-1)
        return (met.any(1) | sink | last) & (first < cached.unsqueeze(-1))


def choose_past(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    valid_tokens: Tensor,
    write_slots: Tensor,
    layout: PastLayout,
    count: int,
    query_tile: int = QUERY_TILE,
) -> Tensor:
    """Return the tiles of cached keys to which each tile of queries attends.

    These are the tiles of `PastLayout.always`, then those with the largest products of the mean query and the mean key;
    of equal products the first. Means are compared as sums, since all tiles but the last have the same number of keys,
    and a tile's queries are the same for all its products. Sums of keys are exact.

    Parameters
    ----------
    q : Tensor
        Queries after RoPE, ``[B, T, H, D]`` float32 or bfloat16.
    k : Tensor
        Cached keys, ``[B, N, H, D]`` int8; those behind the cached tokens have no effect.
    k_scale : Tensor
        Scale of each `KEY_TILE` keys, ``[B, H, tiles]`` float32; those behind the cached tokens have no effect.
    valid_tokens : Tensor
        Number of valid tokens of each row, ``[B]`` int64, including the T tokens of the chunk.
    write_slots : Tensor
        Cache slots of the present chunk, ``[B, F]`` int64.
    layout : PastLayout
        Where cached frames lie.
    count : int
        Number of tiles in a list, C, of `PastLayout.tiles_of`.
    query_tile : int
        Number of queries that share a list; kernels take only `QUERY_TILE`.

    Returns
    -------
    Tensor
        Numbers of the tiles, ``[B, H, query_tiles(T), C]`` int32, ascending. Of a row with n tiles, only the first
        ``min(C, n)`` numbers count; the last of these is n - 1.
    """
    tiles, tile, device = layout.tiles, layout.key_tile, q.device
    queries = F.pad(q, (0, 0, 0, 0, 0, query_tiles(q.shape[1], query_tile) * query_tile - q.shape[1]))
    of_queries = queries.unflatten(1, (-1, query_tile)).sum(2, dtype=torch.float32)  # [B, M, H, D]
    keys = F.pad(k, (0, 0, 0, 0, 0, tiles * tile - k.shape[1]))
    of_keys = keys.unflatten(1, (-1, tile)).sum(2, dtype=torch.int32).float()  # [B, tiles, H, D]
    scores = torch.matmul(of_queries.transpose(1, 2), of_keys.permute(0, 2, 3, 1))  # [B, H, M, tiles]
    if tile != KEY_TILE:
        k_scale = k_scale.repeat_interleave(KEY_TILE // tile, 2)
    scores = scores * k_scale.narrow(2, 0, tiles).unsqueeze(2)
    cached = valid_tokens - q.shape[1]
    number = torch.arange(tiles, device=device)
    filled = number * tile < cached.unsqueeze(-1)  # [B, tiles]
    always = layout.always(write_slots, cached)
    scores = torch.where(filled.unflatten(0, (-1, 1, 1)), scores, -torch.inf)
    scores = torch.where(always.unflatten(0, (-1, 1, 1)), torch.inf, scores)
    one, other = scores.unsqueeze(-1), scores.unsqueeze(-2)
    better = (other > one) | ((other == one) & (number < number.unsqueeze(-1)))
    taken = better.sum(-1, dtype=torch.int32) < count
    # A list's entry is the number of tiles up to which no more than so many were taken.
    upto = taken.cumsum(-1, dtype=torch.int32).unsqueeze(-2)
    place = torch.arange(count, dtype=torch.int32, device=device).unsqueeze(-1)
    return (upto <= place).sum(-1, dtype=torch.int32)


def attended(
    chosen: Tensor,
    cached: Tensor,
    queries: int,
    tokens: int,
    query_tile: int = QUERY_TILE,
    key_tile: int = KEY_TILE,
) -> Tensor:
    """Return the cached keys to which queries attend by the lists of `choose_past`.

    Parameters
    ----------
    chosen : Tensor
        Lists of tiles, ``[B, H, query_tiles(T), C]`` int32.
    cached : Tensor
        Number of cached tokens of each row, ``[B]`` int64.
    queries, tokens : int
        Numbers of queries T and of keys N.
    query_tile, key_tile : int
        Numbers of queries that share a list, and of keys of a tile.

    Returns
    -------
    Tensor
        Whether a query attends to a key, ``[B, H, T, N]`` bool; also of keys behind the row's cached tokens.
    """
    tiles = -(-tokens // key_tile)
    filled = torch.arange(chosen.shape[-1], device=chosen.device) * key_tile < cached.unsqueeze(-1)  # [B, C]
    entries = torch.where(filled[:, None, None], chosen, -1).unsqueeze(-1)
    taken = (entries == torch.arange(tiles, device=chosen.device)).any(-2)  # [B, H, M, tiles]
    of_queries = taken.repeat_interleave(query_tile, 2)[:, :, :queries]
    each: Tensor = of_queries.repeat_interleave(key_tile, 3)[..., :tokens]
    return each

"""Division of an attention's queries into tiles and parts of the keys that also fill a GPU's last wave. The module
computes sizes only.

A multiprocessor handles a tile of queries from the first key to the last. With 12 heads and 4,680 queries there are 444
tiles of 128 queries. On 132 multiprocessors 444 tiles are three whole waves, and a fourth wave in which two thirds of
the GPU are idle. Queries that fill whole waves are not split. For each remaining tile the keys are split into as many
parts as fill the GPU, and the parts' results are combined by their softmax weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# Cost of splitting (a further launch, short loops over keys, and the combination), in keys to which a tile could
# attend in the same time.
CUT_COST_KEYS = 5000
LEAST_GAIN = 0.03  # least gain, as a share of the time: less is not worth two more launches
# share of a wave: if two numbers of parts differ by less, the smaller one is taken, since it is better while a
# cache fills
NEAR = 0.02


class Waves(NamedTuple):
    """Division of an attention into whole tiles and parts of the keys.

    Parameters
    ----------
    whole : int
        Number of queries of each row that attend to all keys at once.
    splits : int
        Number of parts into which the keys are split for all other queries.
    """

    whole: int
    splits: int


def cut(
    pairs: int,
    queries: int,
    keys: int,
    tile: int,
    slots: int,
    splits: Iterable[int],
    cost_keys: int | None = None,
    wave_keys: int = 0,
) -> Waves | None:
    """Return the division of an attention into whole tiles and parts of the keys, or None if splitting the keys is not
    faster.

    Parameters
    ----------
    pairs : int
        Number of pairs of a row and a head.
    queries, keys : int
        Numbers of queries and keys of each pair of row and head.
    tile : int
        Number of queries in a tile.
    slots : int
        Number of tiles that the GPU computes at a time.
    splits : iterable of int
        Numbers of parts that are possible.
    cost_keys : int, optional
        Cost of splitting, as the number of keys to which a tile could attend in that time; default: `CUT_COST_KEYS`.
    wave_keys : int
        Cost of each wave of parts besides the cost of its keys, in the unit of ``cost_keys``.
    """
    tiles = -(-queries // tile)
    rounds = pairs * tiles // slots  # whole waves
    per_pair = rounds * slots // pairs
    left = pairs * (tiles - per_pair)
    waves = {number: -(-left * number // slots) for number in splits}
    if not rounds or not left or not waves:
        return None
    costs = {number: many * (1 / number + wave_keys / keys) for number, many in waves.items()}
    least = min(costs.values())
    best = min(number for number, cost in costs.items() if cost <= least + NEAR)
    cost = rounds + costs[best] + (CUT_COST_KEYS if cost_keys is None else cost_keys) / keys
    plain = -(-pairs * tiles // slots)
    return Waves(per_pair * tile, best) if cost <= (1 - LEAST_GAIN) * plain else None

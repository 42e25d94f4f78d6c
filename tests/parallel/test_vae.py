"""Pictures whose rows ranks share, without processes: threads that hand each other their tensors."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seko_export.media.row_split import RowSplit
from seko_export.media.wan_vae import layers
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.media.wan_vae.modules import VaeDecode, latent_statistics
from seko_export.media.wan_vae.rows import DecodeShare
from tests.parallel.in_threads import Meeting
from tests.tolerances import VAE, relative_error

CONFIG = WanVaeConfig(base_dim=4, num_res_blocks=1)
ROWS, COLUMNS = 6, 3  # of latents
T = TypeVar("T")


@dataclass(frozen=True)
class RowsInThreads(RowSplit):
    """`RowSplit` of one thread, whose collective is a dictionary and a barrier."""

    meeting: Meeting

    def _gathered(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.of_all(int(self.rank), x))


class Decoder(DecodeShare):
    """One rank's decoder, its collectives those of a meeting; video in -1..1, not yet bytes."""

    meeting: Meeting

    def decoded(self, latents: Tensor, rank: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        """Return the rank's rows of the video and its caches, [B, ...]."""
        return self.decode(latents, caches, RowsInThreads(self.ranks, rank, self.meeting))


def on_all(ranks: int, work: Callable[[Meeting, Tensor], T]) -> list[T]:
    """Return what each rank's thread gives, by rank."""
    meeting = Meeting(ranks, threading.Barrier(ranks))
    with ThreadPoolExecutor(ranks) as pool, torch.no_grad():
        jobs = [pool.submit(torch.no_grad()(work), meeting, torch.tensor([rank])) for rank in range(ranks)]
        return [job.result() for job in jobs]


@given(
    ranks=st.integers(2, 5),
    own=st.integers(1, 3),
    sizes=st.tuples(*(st.integers(1, 3) for _ in range(4))),
)
def test_each_rank_sees_one_row_of_each_neighbour_and_zeros_around_the_picture(
    ranks: int, own: int, sizes: tuple[int, int, int, int]
) -> None:
    batch, channels, frames, columns = sizes
    shape = (batch, channels, frames, ranks * own, columns)
    whole = torch.arange(1, math.prod(shape) + 1).reshape(shape)

    def seen(meeting: Meeting, rank: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        split = RowsInThreads(ranks, rank, meeting)
        rows = split.own_rows(whole)
        places = rows[:, :, 0].flatten(2).mT  # [B, P, C]
        return rows, split.with_neighbours(rows), split.every_place(places)

    made = on_all(ranks, seen)
    padded = F.pad(whole, (0, 0, 1, 1))
    for rank, (rows, halo, places) in enumerate(made):
        assert torch.equal(rows, whole[:, :, :, rank * own : (rank + 1) * own])
        assert torch.equal(halo, padded[:, :, :, rank * own : (rank + 1) * own + 2])
        assert torch.equal(places, whole[:, :, 0].flatten(2).mT)


@pytest.mark.parametrize("by_cudnn", [False, True])
@pytest.mark.parametrize(("ranks", "frames"), [(2, 1), (3, 3), (6, 2)])
def test_ranks_decode_the_rows_of_one(
    ranks: int, frames: int, by_cudnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three chunks, the caches carried: the video and every cache are the whole decoder's, in float32."""
    monkeypatch.setattr(layers, "by_cudnn", lambda _: by_cudnn)
    halves = {first: VaeDecode(CONFIG, first=first, frames=frames) for first in (True, False)}
    weights = weights_of(halves[True])
    for half in halves.values():
        half.load_state_dict(weights)
    generator = torch.Generator().manual_seed(1)
    chunks = [torch.randn(1, 16, frames, ROWS, COLUMNS, generator=generator) for _ in range(3)]

    def stream(meeting: Meeting, rank: Tensor) -> list[tuple[Tensor, ...]]:
        made: list[tuple[Tensor, ...]] = []
        for latents in chunks:
            share = Decoder(CONFIG, first=not made, frames=frames, dtype=torch.float32, ranks=ranks)
            share.meeting = meeting
            share.load_state_dict(weights)
            made.append(share.decoded(latents, rank, *(made[-1][1:] if made else ())))
        return made

    shares = on_all(ranks, stream)
    caches: tuple[Tensor, ...] = ()
    for number, latents in enumerate(chunks):
        with torch.no_grad():
            video, *kept = halves[number == 0](latents, *caches)
        caches = tuple(kept)
        found = [one[number] for one in shares]
        assert relative_error(torch.cat([one[0] for one in found], 3), video) <= VAE[torch.float32]
        for slot, whole in enumerate(caches):
            joined = torch.cat([one[1 + slot] for one in found], 2)
            assert all(one[1 + slot].is_contiguous() for one in found)
            assert joined.shape == whole.shape
            # Caches of the first chunks hold zeros where nothing came before.
            error = relative_error(joined, whole) if whole.any() else float(joined.abs().max())
            assert error <= VAE[torch.float32], slot


def weights_of(half: VaeDecode) -> dict[str, Tensor]:
    """Return random weights that keep activations near 1, and the latents' statistics."""
    generator = torch.Generator().manual_seed(0)
    made = dict(latent_statistics(CONFIG, torch.float32))
    for name, one in half.named_parameters():
        if name not in made:
            noise = torch.randn(one.shape, generator=generator)
            fan_in = math.prod(one.shape[1:])
            made[name] = 1 + 0.1 * noise if fan_in == 1 else noise * fan_in**-0.5
    return made

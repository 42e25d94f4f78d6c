"""Pictures whose rows ranks share, without processes: threads that hand each other their tensors."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.registry import presets
from seko_export.media.pieces import media_buffers, media_pieces
from seko_export.media.wan_vae import layers
from seko_export.media.wan_vae.config import VAE_PRESETS, WanVaeConfig
from seko_export.media.wan_vae.modules import VaeDecode, latent_statistics
from seko_export.media.wan_vae.own_convolution import (
    DoublingConvolution,
    OwnConvolution,
    use_own_convolutions,
)
from seko_export.media.wan_vae.rows import DecodeShare
from seko_kernels.tuned_conv import ConvTiles
from tests.parallel.in_threads import Meeting, RowsInThreads
from tests.support.tolerances import VAE, relative_error


@dataclass(frozen=True)
class WholeVaeConfig(WanVaeConfig):
    """Of a VAE that cannot decode a part."""

    kind: ClassVar[str] = "whole"
    shares_rows: ClassVar[bool] = False


CONFIG = WanVaeConfig(base_dim=4, num_res_blocks=1)
ROWS, COLUMNS = 6, 3  # of latents
TILES = ConvTiles(8, 16, filters=32, more_filters=16, channels=16, stages=3, warps=4)  # any
T = TypeVar("T")


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

    of_ranks = on_all(ranks, seen)
    padded = F.pad(whole, (0, 0, 1, 1))
    for rank, (rows, halo, places) in enumerate(of_ranks):
        assert torch.equal(rows, whole[:, :, :, rank * own : (rank + 1) * own])
        assert torch.equal(halo, padded[:, :, :, rank * own : (rank + 1) * own + 2])
        assert torch.equal(places, whole[:, :, 0].flatten(2).mT)


@pytest.mark.parametrize("by", ["torch", "cuDNN", "Seko's kernel"])
@pytest.mark.parametrize(("ranks", "frames"), [(2, 1), (3, 3), (6, 2)])
def test_ranks_decode_the_rows_of_one(
    ranks: int, frames: int, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three chunks, the caches carried: the video and every cache are the whole decoder's, in float32."""
    monkeypatch.setattr(layers, "by_cudnn", lambda _: by == "cuDNN")
    halves = {first: VaeDecode(CONFIG, first=first, frames=frames) for first in (True, False)}
    weights = weights_of(halves[True])
    for half in halves.values():
        half.load_state_dict(weights)
    generator = torch.Generator().manual_seed(1)
    chunks = [torch.randn(1, 16, frames, ROWS, COLUMNS, generator=generator) for _ in range(3)]

    def stream(meeting: Meeting, rank: Tensor) -> list[tuple[Tensor, ...]]:
        results: list[tuple[Tensor, ...]] = []
        for latents in chunks:
            share = Decoder(CONFIG, first=not results, frames=frames, dtype=torch.float32, ranks=ranks)
            share.meeting = meeting
            share.load_state_dict(weights)
            if by == "Seko's kernel":
                share.rows_of = lambda number: RowsInThreads(ranks, number, meeting)
                caches = results[-1][1:] if results else ()
                use_own_convolutions(
                    share, (latents[0], rank, *(cache[0] for cache in caches)), lambda _: TILES
                )
                kinds = {type(part) for part in share.modules()}
                assert kinds >= {OwnConvolution, DoublingConvolution}
            results.append(share.decoded(latents, rank, *(results[-1][1:] if results else ())))
        return results

    shares = on_all(ranks, stream)
    caches: tuple[Tensor, ...] = ()
    for number, latents in enumerate(chunks):
        with torch.no_grad():
            video, *new_caches = halves[number == 0](latents, *caches)
        caches = tuple(new_caches)
        parts = [share[number] for share in shares]
        assert relative_error(torch.cat([part[0] for part in parts], 3), video) <= VAE[torch.float32]
        for slot, whole in enumerate(caches):
            joined = torch.cat([part[1 + slot] for part in parts], 2)
            assert all(part[1 + slot].is_contiguous() for part in parts)
            assert joined.shape == whole.shape
            # Caches of the first chunks hold zeros where nothing came before.
            error = relative_error(joined, whole) if whole.any() else float(joined.abs().max())
            assert error <= VAE[torch.float32], slot


@pytest.mark.parametrize(
    ("ranks", "vae", "why"),
    [
        (4, VAE_PRESETS["wan-2.1"], None),
        (8, VAE_PRESETS["wan-2.1"], "8 ranks cannot share the 60 rows of the latents evenly"),
        (4, WholeVaeConfig(), "the VAE 'whole' has no decoder for a part of them"),
    ],
)
def test_a_build_shares_pictures_or_says_why_not(ranks: int, vae: WanVaeConfig, why: str | None) -> None:
    preset = presets()["wan-14b"]
    config = VideoBuild(
        preset.model,
        VideoConfig(preset.stream, Schedule.warped(), "bf16", vae=vae),
        TargetConfig("cuda", ranks=ranks),
    )
    assert config.no_shared_decoding == why
    assert config.decode_ranks == (1 if why else ranks)
    assert (config.changed(ranks=1).no_shared_decoding, config.changed(ranks=1).decode_ranks) == (None, 1)
    if vae.kind != "whole":
        buffers = {buffer.name: buffer for buffer in media_buffers(config)}
        pieces = {piece.name: piece for piece in media_pieces(config)}
        assert buffers["video"].shape[2] * config.decode_ranks == config.workload.stream.height
        assert buffers["video"].rank_axis == buffers["vae.cache.31"].rank_axis == (0 if why else 2)
        assert buffers["decode.latents"].shape[-2:] == (60, 104)
        for name, first in (("vae_decode_first", True), ("vae_decode", False)):
            taken = [spec.name for spec in pieces[name].inputs]
            assert ("rank" in taken) is (why is None)
            assert len(taken) == 1 + (why is None) + (0 if first else 32)


def weights_of(half: VaeDecode) -> dict[str, Tensor]:
    """Return random weights that keep activations near 1, and the latents' statistics."""
    generator = torch.Generator().manual_seed(0)
    weights = dict(latent_statistics(CONFIG, torch.float32))
    for name, parameter in half.named_parameters():
        if name not in weights:
            noise = torch.randn(parameter.shape, generator=generator)
            fan_in = math.prod(parameter.shape[1:])
            weights[name] = 1 + 0.1 * noise if fan_in == 1 else noise * fan_in**-0.5
    return weights

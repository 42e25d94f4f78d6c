"""The split of a chunk over ranks, without processes: threads that hand each other their tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seko_export.backends import export_backend
from seko_export.backends.base import refuse_uncarried
from seko_export.build_steps import too_few_devices
from seko_export.config.build import BuildConfig
from seko_export.config.schedule import Schedule
from seko_export.errors import UsageError
from seko_export.families.layers.rank_split import RankSplit
from seko_export.families.registry import presets
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import resolve_build
from tests.parallel.in_threads import InThreads, Meeting

B, F, N, H, D = 2, 3, 12, 6, 4  # rows, frames, tokens of a frame, heads, channels


def ranks_order(ranks: int) -> Tensor:
    """Return the tokens of a chunk [T], those of rank 0 first."""
    return RankSplit(ranks, F).in_ranks_order(torch.arange(F * N), 1)


def on_all(ranks: int, work: Callable[[RankSplit, Tensor], Tensor]) -> list[Tensor]:
    """Return what each rank's thread gives, by rank; ``work`` takes the split and the rank's number."""
    meeting = Meeting(ranks, threading.Barrier(ranks))
    with ThreadPoolExecutor(ranks) as pool:
        jobs = [
            pool.submit(work, InThreads(ranks, F, rank, meeting), torch.tensor([rank]))
            for rank in range(ranks)
        ]
        return [job.result() for job in jobs]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_their_heads_of_all_tokens_in_order(ranks: int) -> None:
    q, k = (torch.arange(B * F * N * H * D).reshape(B, F * N, H, D) * factor for factor in (1, -1))

    def heads(split: RankSplit, rank: Tensor) -> Tensor:
        return torch.stack(split.to_heads([split.own_tokens(one, rank) for one in (q, k)]))

    made = on_all(ranks, heads)
    order = ranks_order(ranks)
    assert torch.equal(torch.cat(made, dim=3), torch.stack((q, k))[:, :, order])
    assert all(one.shape[3] == H // ranks for one in made)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_heads_give_returns_to_the_tokens_it_is_of(ranks: int) -> None:
    y = torch.arange(B * F * N * H * D).reshape(B, F * N, H, D)

    def tokens(split: RankSplit, rank: Tensor) -> Tensor:
        share = y[:, ranks_order(ranks)].unflatten(2, (ranks, -1)).select(2, int(rank)).flatten(2)
        mine = split.to_tokens(share)
        assert torch.equal(mine, split.own_tokens(y.flatten(2), rank))
        return split.every_token(mine)

    assert all(torch.equal(one, y.flatten(2)) for one in on_all(ranks, tokens))


@given(
    ranks=st.integers(2, 5),
    frames=st.integers(1, 4),
    share=st.integers(1, 4),
    rows=st.integers(1, 3),
    start=st.integers(0, 99),
)
def test_what_is_cached_stands_where_the_token_index_says(
    ranks: int, frames: int, share: int, rows: int, start: int
) -> None:
    """A rank's own tokens, one rank after another, are what `in_ranks_order` makes of the whole chunk."""
    split = RankSplit(ranks, frames)
    index = start + torch.arange(rows * frames * ranks * share)
    by_row = index.unflatten(0, (rows, -1))
    own = [split.own_tokens(by_row, torch.tensor([rank])) for rank in range(ranks)]
    ordered = split.in_ranks_order(index, rows)
    assert torch.equal(ordered, torch.cat(own, dim=1).flatten())
    assert sorted(ordered.tolist()) == index.tolist()


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_one_row_is_sent_as_it_is_written_and_read_as_it_is_received(parts: int) -> None:
    """No copy is made but the one that puts the parts side by side; see `RankSplit.to_heads`."""
    seen: list[Tensor] = []

    @dataclass(frozen=True)
    class Alone(RankSplit):
        def _exchanged(self, x: Tensor) -> Tensor:
            seen.append(x)
            return x

    split = Alone(2, F)
    heads = split.to_heads([torch.randn(1, F * N // 2, H, D) for _ in range(parts)])
    y = torch.randn(1, F * N, H // 2 * D)
    split.to_tokens(y)
    assert all(one.is_contiguous() for one in seen)
    assert all(one.untyped_storage().data_ptr() == seen[0].untyped_storage().data_ptr() for one in heads)
    assert seen[1].data_ptr() == y.data_ptr()


def test_a_rank_has_the_same_part_of_every_frame_and_its_own_heads() -> None:
    split, rank = RankSplit(3, F), torch.tensor([1])
    tokens = split.own_tokens(torch.arange(F * N).expand(B, -1), rank)
    assert tokens[0].tolist() == [frame * N + at for frame in range(F) for at in range(4, 8)]
    assert split.own_heads(torch.arange(H), rank).tolist() == [2, 3]


def test_a_number_of_ranks_that_does_not_divide_is_refused_with_those_that_do() -> None:
    preset = presets()["self-forcing-1.3b"]  # 12 heads, 1,560 tokens of a frame
    with pytest.raises(UsageError, match=r"--ranks 5: .* 12 heads .* give one of 1,2,3,4,6"):
        BuildConfig(preset.model, preset.stream, Schedule.warped(), "bf16", "cuda", ranks=5)
    with pytest.raises(UsageError, match="--ranks 0"):
        resolve_build(BuildOptions(preset="tiny", target="cpu", ranks=0))


def test_backends_and_families_that_cannot_split_refuse() -> None:
    config = resolve_build(BuildOptions(preset="tiny", target="cpu", ranks=2)).config
    for name in ("compile", "onnx"):
        with pytest.raises(
            UsageError, match=f"--backend {name} has no engines for several ranks yet: leave --ranks"
        ):
            refuse_uncarried(export_backend(name), config)
    with pytest.raises(UsageError, match="of the family 'seko_talk' run on one GPU so far"):
        resolve_build(BuildOptions(preset="seko-talk-tiny", target="cpu", ranks=2))


def test_one_gpu_builds_for_several_and_does_not_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    preset = presets()["self-forcing-1.3b"]
    config = BuildConfig(preset.model, preset.stream, Schedule.warped(), "bf16", "cuda", ranks=2)
    for count, lacks in ((1, True), (2, False)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert too_few_devices(config) is lacks
        assert not too_few_devices(config.one_rank)
    assert not too_few_devices(replace(config, kv_scheme="fp32", device="cpu"))


def test_a_rank_holds_its_share_of_the_cache_and_goldens_are_of_one() -> None:
    config = resolve_build(BuildOptions(preset="tiny", target="cpu", ranks=2)).config
    assert [one.token_shape[0] for one in config.kv.cache_tensors] == [1, 1]
    assert config.as_batch.ranks == config.as_exact.ranks == 1

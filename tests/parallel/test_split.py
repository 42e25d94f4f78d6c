"""The split of a chunk over ranks, without processes: threads that hand each other their tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from seko_export.backends import export_backend
from seko_export.backends.base import check_capabilities
from seko_export.build_steps import too_few_devices
from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.errors import UsageError
from seko_export.families.layers.rank_split import RankSplit
from seko_export.families.registry import presets
from seko_export.families.seko_talk.family import SekoTalkFamily
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import resolve_build
from tests.parallel.in_threads import InThreads, Meeting

B, F, N, H, D = 2, 3, 12, 6, 4  # rows, frames, tokens of a frame, heads, channels


def on_all(split: RankSplit, work: Callable[[RankSplit, Tensor], Tensor]) -> list[Tensor]:
    """Return what each rank's thread gives, by rank; ``work`` takes the split and the rank's number."""
    ranks = split.ranks
    meeting = Meeting(ranks, threading.Barrier(ranks))
    with ThreadPoolExecutor(ranks) as pool:
        jobs = [
            pool.submit(work, InThreads(*astuple(split), rank, meeting), torch.tensor([rank]))
            for rank in range(ranks)
        ]
        return [job.result() for job in jobs]


@given(
    split=st.builds(RankSplit, st.integers(2, 5), st.integers(1, 4), st.integers(1, 13)),
    rows=st.integers(1, 3),
    share=st.integers(1, 2),
)
@example(split=RankSplit(3, F, N), rows=B, share=2)
@example(split=RankSplit(2, F, 9), rows=B, share=1)
@example(split=RankSplit(5, 1, 6), rows=1, share=1)  # two ranks have nothing but padding
def test_split_and_joined_is_as_before_and_padding_never_arrives(
    split: RankSplit, rows: int, share: int
) -> None:
    """Heads of all tokens, back to the tokens of all heads, then all tokens: with NaN as padding."""
    tokens, heads = split.chunk_frames * split.frame_tokens, split.ranks * share
    q = torch.arange(1.0, 1 + rows * tokens * heads * D).reshape(rows, tokens, heads, D)
    order = split.as_exchanged(torch.arange(tokens), 1)
    assert sorted(order.tolist()) == [*range(tokens)]

    def there_and_back(split: RankSplit, rank: Tensor) -> Tensor:
        real = split.own_tokens(torch.ones(rows, tokens, 1, 1), rank) == 1
        assert real.shape[1] == split.tokens
        own = split.own_tokens(q, rank)
        assert torch.equal(own == 0, ~real.expand_as(own))
        parts = split.to_heads([own.where(real, torch.nan), own.where(real, torch.nan).neg()])
        for factor, heads in zip((1, -1), parts, strict=True):
            assert torch.equal(
                heads, factor * q[:, order].unflatten(2, (split.ranks, -1)).select(2, int(rank))
            )
        mine = split.to_tokens(parts[0].flatten(2))
        assert torch.equal(mine, own.flatten(2))
        return split.every_token(mine.where(real.flatten(2), torch.nan))

    assert all(torch.equal(joined, q.flatten(2)) for joined in on_all(split, there_and_back))


@given(
    split=st.builds(RankSplit, st.integers(2, 5), st.integers(1, 4), st.integers(1, 13)),
    rows=st.integers(1, 3),
    start=st.integers(0, 99),
)
def test_what_is_cached_stands_where_the_token_index_says(split: RankSplit, rows: int, start: int) -> None:
    """The tokens that `to_heads` gives, of each row, are those that `as_exchanged` makes of the whole chunk."""
    index = start + torch.arange(rows * split.chunk_frames * split.frame_tokens)
    by_row = index.unflatten(0, (rows, -1))

    def cached(split: RankSplit, rank: Tensor) -> Tensor:
        own = split.own_tokens(by_row, rank)[..., None, None].expand(-1, -1, split.ranks, 1)
        return split.to_heads([own])[0].flatten()

    ordered = split.as_exchanged(index, rows)
    assert all(torch.equal(tokens, ordered) for tokens in on_all(split, cached))


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_one_row_is_sent_as_it_is_written_and_read_as_it_is_received(parts: int) -> None:
    """No copy is made but the one that puts the parts side by side; see `RankSplit.to_heads`."""
    seen: list[Tensor] = []

    @dataclass(frozen=True)
    class Alone(RankSplit):
        def _exchanged(self, x: Tensor) -> Tensor:
            seen.append(x)
            return x

    split = Alone(2, F, N)
    heads = split.to_heads([torch.randn(1, F * N // 2, H, D) for _ in range(parts)])
    y = torch.randn(1, F * N, H // 2 * D)
    split.to_tokens(y)
    assert all(part.is_contiguous() for part in seen)
    assert all(head.untyped_storage().data_ptr() == seen[0].untyped_storage().data_ptr() for head in heads)
    assert seen[1].data_ptr() == y.data_ptr()


def test_a_rank_has_the_same_part_of_every_frame_and_its_own_heads() -> None:
    split, rank = RankSplit(3, F, N), torch.tensor([1])
    tokens = split.own_tokens(torch.arange(F * N).expand(B, -1), rank)
    assert tokens[0].tolist() == [frame * N + at for frame in range(F) for at in range(4, 8)]
    assert split.own_heads(torch.arange(H), rank).tolist() == [2, 3]


def test_the_last_rank_has_padding_behind_every_frame() -> None:
    split = RankSplit(3, F, 7)
    assert (split.share, split.padding, split.tokens) == (3, 2, 3 * F)
    tokens = split.own_tokens(1 + torch.arange(F * 7).expand(B, -1), torch.tensor([2]))
    assert tokens[1].tolist() == [7, 0, 0, 14, 0, 0, 21, 0, 0]


def test_a_number_of_ranks_that_does_not_divide_is_refused_with_those_that_do() -> None:
    preset = presets()["self-forcing-1.3b"]  # 12 heads
    with pytest.raises(UsageError, match=r"--ranks 5: .* 12 heads .* give one of 1,2,3,4,6"):
        VideoBuild(
            preset.model, VideoConfig(preset.stream, Schedule.warped(), "bf16"), TargetConfig("cuda", ranks=5)
        )
    with pytest.raises(UsageError, match="--ranks 0"):
        resolve_build(BuildOptions(preset="tiny", target="cpu", ranks=0))


def test_backends_and_families_that_cannot_split_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve_build(BuildOptions(preset="tiny", target="cpu", ranks=2)).config
    for name in ("compile", "onnx"):
        with pytest.raises(
            UsageError, match=f"--backend {name} has no engines for several ranks yet: leave --ranks"
        ):
            check_capabilities(export_backend(name), config)
    of_talk = BuildOptions(preset="seko-talk-tiny", target="cpu", ranks=2)
    assert resolve_build(of_talk).config.target.ranks == 2
    monkeypatch.setattr(SekoTalkFamily, "splits_over_ranks", False)  # as of a family outside this package
    with pytest.raises(UsageError, match="of the family 'seko_talk' run on one GPU so far"):
        resolve_build(of_talk)


def test_one_gpu_builds_for_several_and_does_not_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    preset = presets()["self-forcing-1.3b"]
    config = VideoBuild(
        preset.model, VideoConfig(preset.stream, Schedule.warped(), "bf16"), TargetConfig("cuda", ranks=2)
    )
    for count, lacks in ((1, True), (2, False)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert too_few_devices(config) is lacks
        assert not too_few_devices(config.changed(ranks=1))
    assert not too_few_devices(config.changed(kv_scheme="fp32", device="cpu"))


def test_a_rank_holds_its_share_of_the_cache_and_goldens_are_of_one() -> None:
    config = resolve_build(BuildOptions(preset="tiny", target="cpu", ranks=2)).config
    assert [tensor.token_shape[0] for tensor in config.kv.cache_tensors] == [1, 1]
    assert config.as_batch.target.ranks == config.as_exact.target.ranks == 1

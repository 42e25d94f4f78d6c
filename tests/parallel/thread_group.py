"""An artifact of several ranks in threads of one process: eager engines and the ranks' own commands, no processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from seko_export.artifact.describe import describe
from seko_export.backends import EAGER
from seko_export.config.video import VideoBuild
from seko_export.engines.piece import Piece, dtype_name
from seko_export.families.layers.rank_split import rank_split
from seko_export.families.registry import graph_of
from seko_export.media.wan_vae.rows import DecodeShare
from seko_export.video.recording import eager_engine
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.format.manifest import Weight
from seko_runtime.parallel.channel import channel_pair, inherited_channel, pack
from seko_runtime.sessions.rank_place import ALONE, RankPlace
from seko_runtime.sessions.ranked_rows import RankCommands, rows_over_ranks
from seko_runtime.sessions.row_state import StateForm
from seko_runtime.video.contract import ENCODER_PROGRAMS, resolve_video, text_vocabulary
from seko_runtime.video.local_rows import LocalVideoRows
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.row_numbers import STATE_FORM
from seko_runtime.video.rows import VideoRows
from seko_runtime.video.text import PromptIds
from tests.parallel.in_threads import InThreads, Meeting, RowsInThreads
from tests.support.stacked import open_rows


class EagerRank:
    """What `RankCommands` needs of an open artifact: one rank's rows over a build's eager modules.

    Parameters
    ----------
    config, weights
        The build, and all weights that its programs use.
    tokenizer : Path, optional
        Where the build has a text encoder.
    rank, meeting
        Where the build has several ranks.
    """

    def __init__(
        self,
        config: VideoBuild,
        weights: Mapping[str, Tensor],
        tokenizer: Path | None = None,
        rank: int = 0,
        meeting: Meeting | None = None,
    ) -> None:
        self.manifest = manifest_of(config, weights)
        # Calling a piece puts weights into its module: each thread has its own.
        pieces = [replace(piece, module=deepcopy(piece.module)) for piece in graph_of(config).pieces.values()]
        split = rank_split(config)
        for piece in pieces:
            if split is not None and getattr(piece.module, "split", None) is not None:
                piece.module.split = InThreads(*astuple(split), rank, meeting)
            if isinstance(piece.module, DecodeShare):
                piece.module.rows_of = lambda number: RowsInThreads(config.target.ranks, number, meeting)
        place = ALONE
        if meeting is not None:
            place = RankPlace(rank, partial(meeting.share, rank), ENCODER_PROGRAMS)
        spared, not_held = place.spared(resolve_video(self.manifest))
        self._engines = {piece.name: eager_engine(piece) for piece in pieces if piece.name not in spared}
        ids, spec = None, self.manifest.workload.text
        if spec is not None:
            ids = PromptIds(spec, tokenizer.read_bytes(), text_vocabulary(self.manifest))
        self._weights = {name: weight for name, weight in weights.items() if name not in not_held}
        self._own = {"prompt_ids": ids, "rank": place}

    def open_rows(self, options: Mapping[str, Any]) -> LocalVideoRows:
        """Open the rows; options as `VideoOptions`."""
        return open_rows(self.manifest, self._engines, self._weights, CpuMemory(), **self._own, **options)


class ThreadGroup:
    """`RankGroup` of ranks that are threads: each runs its commands in a thread, and gets and answers them as
    messages."""

    def __init__(self, commands: Sequence[RankCommands]) -> None:
        self._commands = commands
        self._pool = ThreadPoolExecutor(len(commands))
        pairs = [channel_pair() for _ in commands]
        self._near = [near for near, _ in pairs]
        self._far = [inherited_channel(far.detach()) for _, far in pairs]

    def call(
        self,
        command: str,
        facts: Mapping[str, Any] | None = None,
        *,
        own: Sequence[Mapping[str, Any]] | None = None,
        ranks: Sequence[int] | None = None,
        **_: object,
    ) -> SimpleNamespace:
        """Run a command on ranks; see `RankGroup.call`."""
        asked = range(len(self._commands)) if ranks is None else ranks
        messages = {
            rank: pack({"command": command, "facts": {**(facts or {}), **(own[rank] if own else {})}})
            for rank in asked
        }
        jobs = {rank: self._pool.submit(self._answer, rank) for rank in asked}
        for rank, message in messages.items():
            self._near[rank].send(message)
        answers = {rank: self._near[rank].receive() for rank in asked}
        for job in jobs.values():
            job.result()
        return SimpleNamespace(results={rank: answer["answer"] for rank, answer in answers.items()})

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
        for channel in (*self._near, *self._far):
            channel.close()

    def _answer(self, rank: int) -> None:
        asked = self._far[rank].receive()
        try:
            with torch.no_grad():
                self._far[rank].send({"answer": self._commands[rank](asked["command"], asked["facts"])})
        except BaseException:
            self._far[rank].send({"answer": None})
            raise


@contextmanager
def rows_in_threads(
    interface: type, manifest: Any, open_rows: Sequence[Callable[[Mapping[str, Any]], Any]], form: StateForm
) -> Iterator[Any]:
    """Open rows in a thread for each function of ``open_rows``; yield the caller's side."""
    group = ThreadGroup([RankCommands(rank, interface, opens) for rank, opens in enumerate(open_rows)])
    try:
        rows = rows_over_ranks(interface, manifest, group, form, {})
        yield rows
        rows.close()
    finally:
        group.close()


@contextmanager
def ranks_in_threads(
    config: VideoBuild, weights: Mapping[str, Tensor], tokenizer: Path | None
) -> Iterator[VideoRows]:
    """Open the rows of a build of several ranks; yield the caller's side."""
    meeting = Meeting(config.target.ranks, threading.Barrier(config.target.ranks))
    members = [EagerRank(config, weights, tokenizer, rank, meeting) for rank in range(config.target.ranks)]
    with rows_in_threads(
        VideoRows, manifest_of(config, weights), [member.open_rows for member in members], STATE_FORM
    ) as rows:
        yield rows


def manifest_of(config: VideoBuild, weights: Mapping[str, Tensor]) -> VideoManifest:
    """Return the manifest of a build without files."""
    table = tuple(
        Weight(name, tuple(weight.shape), dtype_name(weight.dtype)) for name, weight in weights.items()
    )
    return describe(config, EAGER, table, {})


def random_weights(config: VideoBuild) -> dict[str, Tensor]:
    """Return random weights by the artifact's names, scaled so that every one shows, and the schedule's tables."""
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {}
    for piece in graph_of(config).pieces.values():
        for name, shape in names_of(piece):
            if name not in weights:
                noise = torch.randn(shape, generator=generator)
                fan_in = noise[0].numel()
                near_constant = 1 + 0.1 * noise if "norm" in name and "weight" in name else 0.1 * noise
                weights[name] = (
                    noise / fan_in**0.5 if fan_in > 1 and "modulation" not in name else near_constant
                )
    return weights | config.workload.schedule.tables(config.as_batch.workload.stream)


def names_of(piece: Piece) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of a piece's weights, of every layer."""
    for layer in piece.served or (0,):
        for parameter in piece.parameters:
            yield parameter.ref.removeprefix("weight:").replace("{layer}", str(layer)), parameter.shape

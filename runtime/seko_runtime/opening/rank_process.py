"""What each process of an artifact of several ranks runs: opens the artifact as its rank, and answers the caller.

python -m seko_runtime.opening.rank_process DESCRIPTOR
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from seko_runtime.errors import SessionClosedError, UsageError
from seko_runtime.opening.artifact import open_rank
from seko_runtime.opening.opened import OpenArtifact
from seko_runtime.parallel.worker import Handler, serve
from seko_runtime.video.chunk import Chunk
from seko_runtime.video.ranked_streams import FORWARDED, split_names, state_of_message, state_to_message
from seko_runtime.video.streams import CLOSED, Streams

_Facts = Mapping[str, Any]
JOIN_S = 300.0  # for all processes to open the artifact and find each other


def begin(rank: int, facts: _Facts) -> tuple[Handler, _Facts]:
    """Join the group and open the artifact; return the handler of commands, and what all ranks must agree on."""
    from seko_runtime.backends.rank_group import join_ranks

    device = facts["devices"][rank]
    library = join_ranks(device, rank, facts["ranks"], Path(facts["meeting"]), JOIN_S)
    artifact = open_rank(
        facts["path"], device, trust=facts["trust"], copy_weights=facts["copy_weights"], rank=rank
    )
    found = {"digest": artifact.digest, "ranks": artifact.manifest.ranks, "library": library}
    return RankCommands(rank, artifact), found


class RankCommands:
    """Answers the commands of `RankedArtifact` and `RankedStreams`; only rank 0 sends what all have."""

    def __init__(self, rank: int, artifact: OpenArtifact) -> None:
        self._rank, self._artifact = rank, artifact
        self._streams: Streams | None = None
        self._chunks: dict[int | None, Chunk] = {}  # the last of each row, and of all rows of a call
        self._known: dict[str, Callable[..., object]] = {
            name: getattr(self, f"_{name}")
            for name in (
                *("open_session", "open_pool", "run_chunk", "read_latents", "video_frames", "stats", "close"),
                *("store", "load", "layout", "cache_sample", "forwarded"),
                *("golden_text", "golden_inputs", "chunk_error", "backend_stats", "end"),
            )
        }

    def __call__(self, command: str, facts: _Facts) -> object:
        """Answer one command."""
        if command not in self._known:
            raise UsageError(f"{command!r} is no command of a rank")
        return self._known[command](**facts)

    @property
    def _open(self) -> Streams:
        if self._streams is None:
            raise SessionClosedError(CLOSED)
        return self._streams

    def _open_session(self, **facts: Any) -> object:
        return self._begun(self._artifact.open_session(**facts)._streams)

    def _open_pool(self, **facts: Any) -> object:
        return self._begun(self._artifact._pool_streams(**facts))

    def _begun(self, streams: Streams) -> object:
        self._streams = streams
        return {"decodes_beside": streams.decodes_beside}

    def _forwarded(self, method: str, given: list[Any], named: _Facts) -> object:
        if method not in FORWARDED:
            raise UsageError(f"{method!r} is not called on a rank")
        return getattr(self._open, method)(*given, **named)

    def _run_chunk(self, rows: list[int], inputs: Any) -> object:
        chunk = self._open.run_chunk(rows, inputs)
        made = [chunk, *(self._open.row_chunk(chunk, place, row) for place, row in enumerate(rows))]
        self._chunks |= {one.row: one for one in made}
        return [[one.index, one.frames, one.serial, one.pictures, one.row, one.heard_at] for one in made]

    def _read_latents(self, row: int | None, serial: int, index: int) -> object:
        return self._open.read_latents(replace(self._chunks[row], serial=serial, index=index))

    def _video_frames(self, row: int, number: int) -> object:
        return self._open.decoder().video_frames(row, number)

    def _cache_sample(self, step: int) -> object:
        sample = self._open.cache_sample(step)
        if self._rank:
            return {name: sample[name] for name in split_names(self._artifact.manifest)}
        return sample

    def _store(self, row: int) -> object:
        state = self._open.store(row)
        keep = None if self._rank == 0 else split_names(self._artifact.manifest)
        return state_to_message(state, keep)

    def _load(self, row: int, state: _Facts, shares: _Facts) -> None:
        self._open.load(row, state_of_message(state, shares))

    def _layout(self) -> object:
        return {name: [list(one.shape), one.dtype] for name, one in self._open.layout().items()}

    def _stats(self) -> object:
        return asdict(self._open.stats)

    def _close(self) -> None:
        if self._streams is not None:
            self._streams.close()
        self._streams = None
        self._chunks.clear()

    def _golden_text(self) -> object:
        return self._artifact.golden_text()

    def _golden_inputs(self, chunk: int | None) -> object:
        return self._artifact.golden_inputs(chunk)

    def _chunk_error(self, **facts: Any) -> object:
        return asdict(self._artifact.chunk_error(**facts))

    def _backend_stats(self) -> object:
        return dict(self._artifact.stats)

    def _end(self) -> None:
        self._close()
        self._artifact.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]), begin)

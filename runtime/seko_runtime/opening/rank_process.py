"""What each process of an artifact of several ranks runs: opens the artifact as its rank, and answers the caller.

python -m seko_runtime.opening.rank_process DESCRIPTOR
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from seko_runtime.errors import SessionClosedError
from seko_runtime.opening.artifact import open_rank
from seko_runtime.opening.opened import OpenArtifact
from seko_runtime.parallel.channel import inherited_channel
from seko_runtime.parallel.worker import Handler, serve
from seko_runtime.video.chunk import Chunk
from seko_runtime.video.ranked_streams import split_axes, state_of_message, state_to_message
from seko_runtime.video.streams import CLOSED, Streams

_Facts = Mapping[str, Any]
JOIN_S = 300.0  # for all processes to open the artifact and find each other


def begin(rank: int, facts: _Facts) -> tuple[Handler, _Facts]:
    """Join the group and open the artifact; return the handler of commands, and what all ranks must agree on."""
    artifact, found = joined(rank, facts)
    return RankCommands(rank, artifact), found


def joined(rank: int, facts: _Facts) -> tuple[OpenArtifact, _Facts]:
    """Return this rank's artifact, opened, and what all ranks must agree on; ``facts`` of `rank_facts`."""
    from seko_runtime.backends.rank_group import join_ranks

    device = facts["devices"][rank]
    meeting = Path(facts["meeting"])
    library = join_ranks(device, rank, facts["ranks"], meeting, JOIN_S, facts["groups"])
    artifact = open_rank(
        facts["path"], device, trust=facts["trust"], copy_weights=facts["copy_weights"], rank=rank
    )
    return artifact, {"digest": artifact.digest, "ranks": artifact.manifest.ranks, "library": library}


class RankCommands:
    """Answers the commands of `RankedArtifact` and `RankedStreams`: each is a method, its facts are the arguments."""

    def __init__(self, rank: int, artifact: OpenArtifact) -> None:
        self._rank, self._artifact = rank, artifact
        self._streams: Streams | None = None
        self._chunks: dict[int | None, Chunk] = {}  # the last of each row, and of all rows of a call

    def __call__(self, command: str, facts: _Facts) -> object:
        """Answer one command."""
        answer: object = getattr(self, f"_on_{command}")(**facts)
        return answer

    @property
    def _open(self) -> Streams:
        if self._streams is None:
            raise SessionClosedError(CLOSED)
        return self._streams

    def _on_open_session(self, **facts: Any) -> object:
        self._streams = self._artifact.open_session(**facts)._streams
        return self._streams.decodes_beside

    def _on_open_pool(self, **facts: Any) -> object:
        self._streams = self._artifact._pool_streams(**facts)
        return self._streams.decodes_beside

    def _on_call(self, method: str, args: list[Any], named: _Facts, of_artifact: bool = False) -> object:
        found = getattr(self._artifact if of_artifact else self._open, method)
        return found(*args, **named) if callable(found) else found

    def _on_run_chunk(self, rows: list[int], inputs: Any) -> object:
        chunk = self._open.run_chunk(rows, inputs)
        made = [chunk, *(self._open.row_chunk(chunk, place, row) for place, row in enumerate(rows))]
        self._chunks |= {one.row: one for one in made}
        return [[one.index, one.frames, one.serial, one.pictures, one.row, one.heard_at] for one in made]

    def _on_read_latents(self, row: int | None, serial: int, index: int) -> object:
        return self._open.read_latents(replace(self._chunks[row], serial=serial, index=index))()

    def _on_video_frames(self, row: int, number: int) -> object:
        decoder = self._open.decoder()
        decoder.finished(row, number)()
        return decoder.video_frames(row, number)

    def _on_store(self, row: int) -> object:
        state = self._open.store(row)
        names = split_axes(self._artifact.manifest) if self._rank else None
        return state_to_message(state, names)

    def _on_load(self, row: int, state: _Facts, shares: _Facts) -> None:
        self._open.load(row, state_of_message(state, shares))

    def _on_close(self) -> None:
        if self._streams is not None:
            self._streams.close()
        self._streams = None
        self._chunks.clear()

    def _on_end(self) -> None:
        self._on_close()
        self._artifact.close()


if __name__ == "__main__":
    serve(inherited_channel(int(sys.argv[1])), begin)
    os._exit(0)  # libraries of collectives may wait for each other in their own ends

"""What each process of an artifact of several ranks runs: opens the artifact as its rank, and answers the caller.

python -m seko_runtime.opening.rank_process DESCRIPTOR
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from seko_runtime.errors import StaleChunkError, UsageError
from seko_runtime.opening.artifact import open_rank
from seko_runtime.opening.opened import OpenArtifact
from seko_runtime.parallel.worker import Handler, serve
from seko_runtime.video.chunk import Chunk
from seko_runtime.video.decoding import FRAME_BLOCKS
from seko_runtime.video.session import Session

_Facts = Mapping[str, Any]
_Arrays = Mapping[str, NDArray[Any]]
_Answer = tuple[Mapping[str, Any], _Arrays]
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
    """Answers the commands of `RankedArtifact` and `RankedSession`; only rank 0 sends what all have."""

    def __init__(self, rank: int, artifact: OpenArtifact) -> None:
        self._rank, self._artifact = rank, artifact
        self._session: Session | None = None
        self._chunks: deque[Chunk] = deque(maxlen=FRAME_BLOCKS)  # as long as their frames may be read
        self._known: dict[str, Callable[[_Facts, _Arrays], _Answer]] = {
            name: getattr(self, f"_{name}")
            for name in (
                *("open_session", "run_chunk", "set_prompt", "set_text", "set_inputs", "restart_row"),
                *("read_latents", "video_frames", "cache_sample", "stats", "close_session"),
                *("golden_text", "golden_inputs", "chunk_error", "backend_stats", "end"),
            )
        }

    def __call__(self, command: str, facts: _Facts, arrays: _Arrays) -> _Answer:
        """Answer one command."""
        if command not in self._known:
            raise UsageError(f"{command!r} is no command of a rank")
        return self._known[command](facts, arrays)

    @property
    def _open(self) -> Session:
        if self._session is None:
            raise UsageError("no session is open")
        return self._session

    def _open_session(self, facts: _Facts, arrays: _Arrays) -> _Answer:
        named = dict(facts)
        inputs = named.pop("inputs")
        if inputs is not None:
            named["inputs"] = {name: arrays[f"inputs.{name}"] for name in inputs}
        named |= {name: one for name, one in arrays.items() if not name.startswith("inputs.")}
        self._session = self._artifact.open_session(**named)
        self._chunks.clear()
        return {"decodes_beside": self._session.decodes_beside}, {}

    def _run_chunk(self, facts: _Facts, arrays: _Arrays) -> _Answer:
        del facts
        chunk = self._open.run_chunk(dict(arrays) or None)
        self._chunks.append(chunk)
        said = {
            "index": chunk.index,
            "serial": chunk.serial,
            "pictures": [list(one) for one in chunk.pictures],
        }
        return said, {"frames": chunk.frames} if self._rank == 0 else {}

    def _set_prompt(self, facts: _Facts, _: _Arrays) -> _Answer:
        self._open.set_prompt(facts["prompt"], recache=facts["recache"])
        return {}, {}

    def _set_text(self, facts: _Facts, arrays: _Arrays) -> _Answer:
        self._open.set_text(arrays["text"], recache=facts["recache"])
        return {}, {}

    def _set_inputs(self, _: _Facts, arrays: _Arrays) -> _Answer:
        self._open.set_inputs(dict(arrays))
        return {}, {}

    def _restart_row(self, facts: _Facts, arrays: _Arrays) -> _Answer:
        self._open.restart_row(facts["row"], seed=facts["seed"], **arrays)
        return {}, {}

    def _read_latents(self, facts: _Facts, _: _Arrays) -> _Answer:
        chunk = next((one for one in self._chunks if one.serial == facts["serial"]), None)
        if chunk is None:
            raise StaleChunkError("this chunk was overwritten by later ones; call to_host() before them")
        return {}, {"latents": chunk.to_host()}

    def _video_frames(self, facts: _Facts, _: _Arrays) -> _Answer:
        row, number = facts["row"], facts["number"]
        for chunk in self._chunks:
            for place, one in enumerate(chunk.pictures):
                if one == (row, number):
                    return {}, {"frames": chunk.video_rows()[place]}
        raise StaleChunkError(
            f"the frames of chunk {number} of row {row} were overwritten: read them earlier"
        )

    def _cache_sample(self, facts: _Facts, _: _Arrays) -> _Answer:
        return {}, self._open.cache_sample(facts["step"])

    def _stats(self, _: _Facts, __: _Arrays) -> _Answer:
        return asdict(self._open.stats), {}

    def _close_session(self, _: _Facts, __: _Arrays) -> _Answer:
        if self._session is not None:
            self._session.close()
        self._session = None
        self._chunks.clear()
        return {}, {}

    def _golden_text(self, _: _Facts, __: _Arrays) -> _Answer:
        return {}, {"text": self._artifact.golden_text()}

    def _golden_inputs(self, facts: _Facts, _: _Arrays) -> _Answer:
        return {}, self._artifact.golden_inputs(facts["chunk"])

    def _chunk_error(self, facts: _Facts, arrays: _Arrays) -> _Answer:
        cache = {
            name.removeprefix("cache."): one for name, one in arrays.items() if name.startswith("cache.")
        }
        error = self._artifact.chunk_error(
            facts["number"], arrays["latents"], cache if facts["cache"] else None, arrays.get("video")
        )
        return asdict(error), {}

    def _backend_stats(self, _: _Facts, __: _Arrays) -> _Answer:
        return dict(self._artifact.stats), {}

    def _end(self, _: _Facts, __: _Arrays) -> _Answer:
        self._artifact.close()
        return {}, {}


if __name__ == "__main__":
    serve(int(sys.argv[1]), begin)

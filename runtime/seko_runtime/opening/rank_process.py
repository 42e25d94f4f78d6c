"""The program of one rank's process (one process for each GPU): the process opens the artifact as that rank, and
answers the caller's commands.

Usage: python -m seko_runtime.opening.rank_process DESCRIPTOR
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seko_runtime.opening.artifact import open_rank
from seko_runtime.opening.workloads import workload_of
from seko_runtime.parallel.channel import inherited_channel
from seko_runtime.parallel.worker import Handler, serve
from seko_runtime.sessions.artifact import OpenArtifact
from seko_runtime.sessions.ranked_rows import RankCommands

_Facts = Mapping[str, Any]
JOIN_S = 300.0  # seconds for all processes to open the artifact and join the process group


def begin(rank: int, facts: _Facts) -> tuple[Handler, _Facts]:
    """Join the process group and open the artifact; return the handler of commands, and facts that must be equal in all
    ranks."""
    artifact, begun = joined(rank, facts)
    answer = commands_of(rank, artifact)

    def handle(command: str, asked: _Facts) -> object:
        if command != "end":
            return answer(command, asked)
        answer.close()
        return artifact.close()

    return handle, begun


def joined(rank: int, facts: _Facts) -> tuple[OpenArtifact[Any], _Facts]:
    """Open the artifact as this rank; return the artifact and the facts that must be equal in all ranks. The parameter
    ``facts`` is the result of `rank_facts`."""
    from seko_runtime.backends.rank_group import join_ranks

    device = facts["devices"][rank]
    meeting = Path(facts["meeting"])
    library = join_ranks(device, rank, facts["ranks"], meeting, JOIN_S, facts["groups"])
    artifact = open_rank(
        facts["path"], device, trust=facts["trust"], copy_weights=facts["copy_weights"], rank=rank
    )
    return artifact, {"digest": artifact.digest, "ranks": artifact.manifest.ranks, "library": library}


def commands_of(rank: int, artifact: OpenArtifact[Any]) -> RankCommands:
    """Return the handler of commands for a rank's open artifact."""
    workload = workload_of(artifact.manifest.workload.kind)
    return RankCommands(rank, workload.rows, artifact.engines.open_rows, artifact.engines.stats)


if __name__ == "__main__":
    serve(inherited_channel(int(sys.argv[1])), begin)
    os._exit(0)  # exit without clean-up: NCCL and Gloo may wait for other ranks when they shut down

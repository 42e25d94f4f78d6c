"""The command `seko-export profile`, which opens an artifact and profiles it. Each of several ranks is profiled in its
own process.

Usage: python -m seko_export.tools.profile_ranks DESCRIPTOR
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seko_export.errors import UsageError
from seko_export.tools.profiling import check_trace_goal, kineto_settings, profile_opened
from seko_runtime import open_artifact, read_manifest
from seko_runtime.backends.host import check_device
from seko_runtime.opening.rank_process import joined
from seko_runtime.opening.ranked_engines import rank_facts
from seko_runtime.parallel.channel import inherited_channel
from seko_runtime.parallel.group import RankGroup
from seko_runtime.parallel.worker import Handler, serve
from seko_runtime.video.artifact import video_artifact

PROCESS = "seko_export.tools.profile_ranks"
LONGEST_S = 1800.0


def profile_artifact(path: Path, chunks: int, *, top: int, trace: Path | None = None) -> dict[str, Any]:
    """Profile chunks of an artifact whose cache is full. For an artifact of several ranks (GPUs) all ranks run, and the
    figures are those of rank 0.

    Parameters
    ----------
    path : Path
        Folder of the artifact.
    chunks, top, trace
        The arguments of `profile_opened` with these names.

    Returns
    -------
    dict
        The result of `profile_opened`, and ``ranks``, the number of processes.

    Raises
    ------
    ArtifactError
        If the artifact is damaged or cannot be opened; the subclass tells the cause.
    DiskError
        If ``trace`` cannot be written.
    MachineError
        If the profiler records nothing of the GPU.
    UsageError
        If ``trace`` is inside the artifact's folder, which must hold only files that the manifest lists, or is no
        regular file; if an artifact of several ranks is for a CPU.
    RankLostError
        If one of several processes dies, hangs or fails while the others do not.
    """
    if trace is not None:
        check_trace_goal(trace, path)
    manifest, _ = read_manifest(path)
    with kineto_settings():
        if manifest.ranks == 1:
            with open_artifact(path) as artifact:
                return profile_opened(video_artifact(artifact), chunks, top=top, trace=trace) | {"ranks": 1}
        if manifest.target.device == "cpu":
            raise UsageError(
                "profile of several ranks needs GPUs: on a CPU, Gloo and a compiled engine can block each other while "
                "torch's profiler runs; profile a build without --ranks"
            )
        facts = rank_facts(path, manifest, check_device(manifest.target, "auto"))
        group = RankGroup(PROCESS, manifest.ranks, facts, seconds=LONGEST_S)
        try:
            trace_path = None if trace is None else str(trace.absolute())
            own = [{"trace": None if rank else trace_path} for rank in range(manifest.ranks)]
            asked = {"chunks": chunks, "top": top}
            answers = group.call("profile", asked, own=own, seconds=LONGEST_S)
        finally:
            group.close()
    return dict(answers.results[0]) | {"ranks": manifest.ranks}


def begin(rank: int, facts: Mapping[str, Any]) -> tuple[Handler, object]:
    """Join the process group. Return a handler, which profiles this rank when the main process sends a command, and the
    facts about this rank."""
    artifact, facts_of_rank = joined(rank, facts)

    def answer(command: str, asked: Mapping[str, Any]) -> object:
        if command == "end":
            return artifact.close()
        trace = asked["trace"]
        return profile_opened(
            video_artifact(artifact),
            asked["chunks"],
            top=asked["top"],
            trace=None if trace is None else Path(trace),
        )

    return answer, facts_of_rank


if __name__ == "__main__":
    serve(inherited_channel(int(sys.argv[1])), begin)
    os._exit(0)  # libraries of collectives may wait for each other in their own ends

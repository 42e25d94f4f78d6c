"""The engines of an artifact that several processes replay together: the calling process's side.

The other processes run the module `rank_process`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from seko_runtime.backends.host import check_device
from seko_runtime.errors import EnvironmentLacksError, RankLostError, UsageError
from seko_runtime.format.manifest import CALL_GROUP, LANE_GROUP, Manifest
from seko_runtime.opening.checked_artifact import place_golden, read_file
from seko_runtime.parallel.group import RankGroup
from seko_runtime.sessions.artifact import OpenArtifact, OpenedFiles
from seko_runtime.sessions.engines import Wrap
from seko_runtime.sessions.ranked_rows import CALL_S, STATS, rows_over_ranks
from seko_runtime.sessions.rows import Rows
from seko_runtime.sessions.workload import RuntimeWorkload

PROCESS = "seko_runtime.opening.rank_process"


def open_ranked(
    workload: RuntimeWorkload[Any],
    path: str | Path,
    manifest: Manifest,
    digest: str,
    device: str,
    *,
    trust: str | Path | None,
    copy_weights: bool,
) -> OpenArtifact[Any]:
    """Open an artifact of several ranks, in one process for each rank (GPU).

    Parameters
    ----------
    workload : RuntimeWorkload
        The artifact's workload.
    path, trust, copy_weights
        The arguments of `open_artifact` with these names.
    manifest, digest
        The artifact's manifest and its digest. Every process must find the same digest.
    device : str
        Device of rank 0, such as ``cuda:N``; rank i then has device N + i.

    Raises
    ------
    RankLostError
        If the process of a rank is lost, or finds another artifact.
    EnvironmentLacksError
        If the machine has too few GPUs.
    """
    device = check_device(manifest.target, device)
    facts = rank_facts(path, manifest, device, trust=trust, copy_weights=copy_weights)
    name = workload.golden_file(manifest)
    golden = {} if name is None else place_golden(workload, manifest, {name: read_file(path, manifest, name)})
    group = RankGroup(PROCESS, manifest.ranks, facts, seconds=CALL_S)
    answers = [group.begun.results[rank] for rank in range(manifest.ranks)]
    for rank, begun in enumerate(answers):
        if begun != answers[0] or begun["digest"] != digest:
            group.close()
            raise RankLostError(
                f"rank {rank} of {manifest.ranks} found {begun}, expected the digest {digest} and what rank 0 has, "
                f"{answers[0]}: the artifact or the installation changed meanwhile; open it again"
            )
    engines = RankedEngines(workload, manifest, group)
    return workload.artifact(OpenedFiles(manifest, digest, device, golden), engines)


class RankedEngines:
    """The engines of an open artifact in the processes of several ranks, with the interface `Engines`.

    Only one session or pool of an artifact with several ranks can be open at a time. If two sessions or pools were
    open, ranks might start their collectives in different orders.

    Parameters
    ----------
    workload, manifest
        The artifact's workload and manifest.
    group : RankGroup
        The processes of the ranks; closing the engines ends these processes.
    """

    def __init__(self, workload: RuntimeWorkload[Any], manifest: Manifest, group: RankGroup) -> None:
        self._workload, self._manifest, self._group = workload, manifest, group
        self._last: Rows[Any, Any] | None = None

    @property
    def processes(self) -> tuple[int, ...]:
        """Ids of the ranks' processes, in the order of the ranks."""
        return self._group.processes

    def open_rows(self, options: Mapping[str, Any]) -> Rows[Any, Any]:
        """Open the rows of a pool in all processes; UsageError if a session or pool is open already."""
        if self._last is not None and not self._last.closed:
            raise UsageError(
                "an artifact of several ranks has one session or pool at a time: close the open one"
            )
        manifest = self._workload.pool_manifest(self._manifest, options)
        self._last = rows_over_ranks(self._workload.rows, manifest, self._group, self._workload.form, options)
        return self._last

    def wrap(self, wrap: Wrap) -> NoReturn:
        """Raise a UsageError, because engines and graphs are in other processes."""
        del wrap
        self._refuse()

    def without_capture(self) -> NoReturn:
        """Raise a UsageError, because engines and graphs are in other processes."""
        self._refuse()

    def stats(self) -> Mapping[str, int]:
        """Return the counters of rank 0's backend."""
        counters: Mapping[str, int] = self._group.call(STATS, ranks=(0,), seconds=CALL_S).results[0]
        return counters

    def close(self) -> None:
        """End the processes of all ranks."""
        self._group.close()

    def _refuse(self) -> NoReturn:
        raise UsageError("an artifact of several ranks cannot do this yet; build it without --ranks")


def rank_facts(
    path: str | Path,
    manifest: Manifest,
    device: str,
    *,
    trust: str | Path | None = None,
    copy_weights: bool = False,
) -> dict[str, Any]:
    """Return the settings with which a rank's process opens the artifact; EnvironmentLacksError if there are too few
    GPUs."""
    return {
        "path": str(Path(path).absolute()),
        "devices": rank_devices(manifest, device),
        "groups": rank_groups(manifest),
        "trust": None if trust is None else str(Path(trust).absolute()),
        "copy_weights": copy_weights,
    }


def rank_groups(manifest: Manifest) -> list[str]:
    """Return the names of the process groups that the engines use."""
    shares_beside = any(buffer.rank_axis and buffer.role == "lane" for buffer in manifest.buffers)
    return [CALL_GROUP, LANE_GROUP] if shares_beside else [CALL_GROUP]


def rank_devices(manifest: Manifest, device: str) -> list[str]:
    """Return the device of each rank, in the order of the ranks.

    Raises
    ------
    EnvironmentLacksError
        If this machine has too few GPUs.
    """
    if manifest.target.device == "cpu":
        return ["cpu"] * manifest.ranks
    from seko_runtime.backends.cuda_driver import device_count

    first, count = int(device.partition(":")[2] or 0), device_count()
    if first + manifest.ranks > count:
        raise EnvironmentLacksError(
            f"this artifact makes its chunks on {manifest.ranks} GPUs from cuda:{first} on, this machine has {count}: "
            "open it where there are enough, or rebuild it with fewer --ranks"
        )
    return [f"cuda:{first + rank}" for rank in range(manifest.ranks)]

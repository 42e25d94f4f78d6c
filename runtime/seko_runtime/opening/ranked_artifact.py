"""An artifact that several processes replay together, as the calling process sees it. They run `rank_process`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from seko_runtime.backends.host import check_device
from seko_runtime.errors import (
    DeviceMissingError,
    RankLostError,
    UsageError,
)
from seko_runtime.format.manifest import CALL_GROUP, LANE_GROUP
from seko_runtime.opening.golden import ChunkError
from seko_runtime.opening.opened import OpenArtifact, Opening
from seko_runtime.parallel.group import RankGroup
from seko_runtime.parallel.torchrun import meeting_of_torchrun
from seko_runtime.parallel.worker import serve
from seko_runtime.video.call_lock import CallLock
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.ranked_streams import CALL_S, RankedSession, RankedStreams

PROCESS = "seko_runtime.opening.rank_process"


def _of_first(method: str) -> Callable[..., Any]:
    """Return a method that gives what rank 0's artifact has under that name."""

    def call(self: RankedArtifact, *args: object) -> Any:
        facts = {"method": method, "args": args, "named": {}, "of_artifact": True}
        # Patient: goldens are read from the disk.
        return self._group.call("call", facts, ranks=(0,), seconds=CALL_S, patient=True).results[0]

    return call


class RankedArtifact(OpenArtifact):
    """`OpenArtifact` of several ranks. Its engines and tensors are in the processes of a `RankGroup`.

    One session or pool at a time is open: the collectives of two would meet in another order on each rank.

    Parameters
    ----------
    path, device, trust, copy_weights
        As `open_artifact` takes them. ``cuda:N`` is rank 0's device; the others have the next ones.
    manifest, digest
        The artifact's; every process must find the same.
    """

    def __init__(
        self,
        path: str | Path,
        manifest: VideoManifest,
        digest: str,
        device: str,
        *,
        trust: str | Path | None,
        copy_weights: bool,
    ) -> None:
        meeting = meeting_of_torchrun(manifest.ranks)
        if meeting is not None and meeting.rank:
            serve(meeting.connect(CALL_S), import_module(PROCESS).begin)
            raise SystemExit(0)
        self.manifest, self.digest = manifest, digest
        self.device = check_device(manifest.target, device)
        self._last: RankedStreams | None = None
        self._sessions, self._pools, self._closed = [], [], False
        self._call_lock = CallLock("the artifact is closed; open it again with open_artifact()", waits=True)
        facts = rank_facts(path, manifest, self.device, trust=trust, copy_weights=copy_weights)
        self._group = RankGroup(PROCESS, manifest.ranks, facts, seconds=CALL_S, meeting=meeting)
        found = [self._group.begun.results[rank] for rank in range(manifest.ranks)]
        for rank, one in enumerate(found):
            if one != found[0] or one["digest"] != digest:
                self._group.close()
                raise RankLostError(
                    f"rank {rank} of {manifest.ranks} found {one}, expected the digest {digest} and what rank 0 has, "
                    f"{found[0]}: the artifact or the installation changed meanwhile; open it again"
                )

    @property
    def processes(self) -> tuple[int, ...]:
        """The ids of its processes, by rank."""
        return self._group.processes

    def _opened(self, asked: Opening) -> RankedSession:
        session = RankedSession(self._streams("open_session", asked._asdict()))
        self._sessions = [session]
        return session

    def _pool_streams(
        self, steps: int | None, shift: float | None, prompt_cache: int, overlap: bool
    ) -> RankedStreams:
        facts = {"steps": steps, "shift": shift, "prompt_cache": prompt_cache, "overlap": overlap}
        return self._streams("open_pool", facts)

    def _streams(self, command: str, facts: Mapping[str, Any]) -> RankedStreams:
        if self._last is not None and not self._last.closed:
            raise UsageError(
                "an artifact of several ranks has one session or pool at a time: close the open one"
            )
        self._last = RankedStreams(self.manifest, self._group, command, facts)
        return self._last

    golden_text = _of_first("golden_text")
    golden_inputs = _of_first("golden_inputs")
    stats = property(_of_first("stats"))

    def chunk_error(self, *args: Any) -> ChunkError:
        """Compare a chunk with the recorded one; see `OpenArtifact.chunk_error`."""
        return ChunkError(**_of_first("chunk_error")(self, *args))

    def _not_yet(self, *_: Any, **__: Any) -> Any:
        raise UsageError("an artifact of several ranks cannot do this yet; build it without --ranks")

    wrap_engines = without_capture = _not_yet  # engines and graphs are in other processes

    def _release(self) -> None:
        self._group.close()


def rank_facts(
    path: str | Path,
    manifest: VideoManifest,
    device: str,
    *,
    trust: str | Path | None = None,
    copy_weights: bool = False,
) -> dict[str, Any]:
    """Return what the processes of an artifact need to open it; DeviceMissingError if there are too few GPUs."""
    return {
        "path": str(Path(path).absolute()),
        "devices": rank_devices(manifest, device),
        "groups": rank_groups(manifest),
        "trust": None if trust is None else str(Path(trust).absolute()),
        "copy_weights": copy_weights,
    }


def rank_groups(manifest: VideoManifest) -> list[str]:
    """Return the names of the process groups that the engines take."""
    return [CALL_GROUP, LANE_GROUP] if manifest.shares_decoding else [CALL_GROUP]


def rank_devices(manifest: VideoManifest, device: str) -> list[str]:
    """Return each rank's device, from rank 0's on.

    Raises
    ------
    DeviceMissingError
        If this machine has too few.
    """
    if manifest.target.device == "cpu":
        return ["cpu"] * manifest.ranks
    from seko_runtime.backends.cuda_driver import device_count

    first, count = int(device.partition(":")[2] or 0), device_count()
    if first + manifest.ranks > count:
        raise DeviceMissingError(
            f"this artifact makes its chunks on {manifest.ranks} GPUs from cuda:{first} on, this machine has {count}: "
            "open it where there are enough, or rebuild it with fewer --ranks"
        )
    return [f"cuda:{first + rank}" for rank in range(manifest.ranks)]

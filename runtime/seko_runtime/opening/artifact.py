"""Opens an artifact: every check in order, then weights and engines, here or in a process for each of its ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from seko_runtime.arguments import flag, shown, whole_number
from seko_runtime.backends import open_backend, runtime_backend
from seko_runtime.backends.base import Backend
from seko_runtime.backends.memory import Engine
from seko_runtime.errors import ArtifactError, EnvironmentLacksError, SekoRuntimeError, UsageError
from seko_runtime.host.faults import machine_faults, of_machine, told
from seko_runtime.opening.checked_artifact import CheckedArtifact, check_artifact, read_manifest
from seko_runtime.opening.golden import relative_error
from seko_runtime.opening.opened import OpenArtifact
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.rank_place import ALONE, RankPlace

__all__ = [
    "CheckedArtifact",
    "OpenArtifact",
    "check_artifact",
    "open_artifact",
    "read_manifest",
    "relative_error",
]


@machine_faults()
def open_artifact(
    path: str | Path,
    device: str = "auto",
    *,
    trust: str | Path | None = None,
    copy_weights: bool = False,
    ranks: int | None = None,
) -> OpenArtifact:
    """Check an artifact and load it; see `seko_runtime.open_artifact`."""
    if ranks is not None:
        ranks = whole_number(ranks, "ranks", 1)
    copy_weights = flag(copy_weights, "copy_weights")
    manifest, digest = read_manifest(path, trust=trust)
    check_ranks(manifest, ranks)
    if manifest.ranks > 1:
        from seko_runtime.opening.ranked_artifact import RankedArtifact  # with what starts processes

        return RankedArtifact(path, manifest, digest, device, trust=trust, copy_weights=copy_weights)
    return open_rank(path, device, trust=trust, copy_weights=copy_weights)


@machine_faults()
def open_rank(
    path: str | Path,
    device: str = "auto",
    *,
    trust: str | Path | None = None,
    copy_weights: bool = False,
    rank: int = 0,
) -> OpenArtifact:
    """Check an artifact and load it in this process, as one of its ranks; parameters as `open_artifact`."""
    checked = check_artifact(path, device, trust=trust, copy_weights=copy_weights)
    place = _place(checked.manifest, rank)
    backend = open_backend(checked.manifest.backend, checked.device)
    try:
        memory = backend.memory()
        spared_engines, spared_weights = place.spared(checked.programs)
        weights = memory.upload(
            {name: one for name, one in checked.weights.items() if name not in spared_weights}
        )
        engines = _loaded(backend, checked, spared_engines)
    except BaseException:
        backend.close()
        raise
    return OpenArtifact(checked, backend, engines, weights, memory, place)


def _place(manifest: VideoManifest, rank: int) -> RankPlace:
    """Return the place of the process with this rank, which has joined the others."""
    if manifest.ranks == 1:
        return ALONE
    from seko_runtime.backends.rank_group import share  # with torch's process groups

    return RankPlace(rank, share)


def _loaded(backend: Backend, checked: CheckedArtifact, spared: Collection[str]) -> Mapping[str, Engine]:
    """Load all engines but the spared; what a library raises that its backend does not know is an error of ours."""
    manifest = checked.manifest
    wanted = replace(manifest, engines=tuple(one for one in manifest.engines if one.name not in spared))
    try:
        return backend.load_engines(wanted, checked.files)
    except SekoRuntimeError:
        raise
    except Exception as fault:
        raise of_machine(fault) or ArtifactError(
            f"the engines cannot be loaded: {told(fault)}; rebuild the artifact"
        ) from fault


def check_ranks(manifest: VideoManifest, ranks: int | None) -> None:
    """Refuse a number of ranks that an artifact was not built for.

    Raises
    ------
    UsageError
        If it was built for another number.
    EnvironmentLacksError
        If this runtime's backend replays no artifacts of several ranks.
    """
    built = manifest.ranks
    if ranks is not None and ranks != built:
        raise UsageError(
            f"ranks is {shown(ranks)}, this artifact was built for {built}: rebuild it with --ranks {shown(ranks)}"
        )
    if built > 1 and not runtime_backend(manifest.backend).several_ranks:
        raise EnvironmentLacksError(
            f"this runtime replays {manifest.backend} engines on one GPU, this artifact has {built} ranks; update it"
        )

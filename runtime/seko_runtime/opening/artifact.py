"""Opening of an artifact: all checks in order, then weights and engines, in this process or in a process for each rank
(GPU)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from seko_runtime.arguments import flag, shown, whole_number
from seko_runtime.backends import open_backend, runtime_backend
from seko_runtime.backends.base import Backend
from seko_runtime.backends.cuda_start import CudaStart
from seko_runtime.backends.memory import Engine, Memory
from seko_runtime.errors import (
    ArtifactError,
    DeviceMemoryError,
    EnvironmentLacksError,
    SekoRuntimeError,
    UsageError,
)
from seko_runtime.format.manifest import Manifest
from seko_runtime.format.safetensors_map import MappedTensor
from seko_runtime.host.collection import without_collections
from seko_runtime.host.faults import fault_text, machine_faults, of_machine
from seko_runtime.host.part_times import part
from seko_runtime.host.releasing import release_after_error
from seko_runtime.opening.checked_artifact import (
    CheckedArtifact,
    ReadArtifact,
    check_artifact,
    read_artifact,
    read_manifest,
)
from seko_runtime.sessions.artifact import OpenArtifact, OpenedFiles
from seko_runtime.sessions.engines import LocalEngines
from seko_runtime.sessions.loaded import Loaded
from seko_runtime.sessions.rank_place import ALONE, RankPlace
from seko_runtime.sessions.workload import RuntimeWorkload

__all__ = ["CheckedArtifact", "check_artifact", "open_artifact", "open_rank", "read_manifest"]


@machine_faults()
@without_collections()
def open_artifact(
    path: str | Path,
    device: str = "auto",
    *,
    trust: str | Path | None = None,
    copy_weights: bool = False,
    ranks: int | None = None,
) -> OpenArtifact[Any]:
    """Check an artifact and load it; see `seko_runtime.open_artifact`."""
    if ranks is not None:
        ranks = whole_number(ranks, "ranks", 1)
    copy_weights = flag(copy_weights, "copy_weights")
    with CudaStart(device) as start, read_artifact(path, trust=trust, begin=start.begin) as read:
        manifest = read.manifest
        check_ranks(manifest, ranks)
        if manifest.ranks == 1:
            return _opened(read, device, copy_weights, ALONE)
    # imported here, because only artifacts of several ranks need to start processes
    from seko_runtime.opening.ranked_engines import open_ranked

    return open_ranked(
        read.workload, path, manifest, read.digest, device, trust=trust, copy_weights=copy_weights
    )


@machine_faults()
@without_collections()
def open_rank(
    path: str | Path,
    device: str = "auto",
    *,
    trust: str | Path | None = None,
    copy_weights: bool = False,
    rank: int = 0,
) -> OpenArtifact[Any]:
    """Check an artifact and load it in this process, as one of the ranks (one process for each GPU) that run the
    artifact together. The parameters are those of `open_artifact`."""
    with CudaStart(device) as start, read_artifact(path, trust=trust, begin=start.begin) as read:
        return _opened(read, device, copy_weights, _place(read.workload, read.manifest, rank))


def _opened(read: ReadArtifact, device: str, copy_weights: bool, place: RankPlace) -> OpenArtifact[Any]:
    """Hash the files while the weights go to the device; then load the engines while the last copies run.

    The weights of a failed check are freed. No native code is loaded before the hashes of all files were compared.
    """
    examined = read.examined(device, copy_weights=copy_weights)
    manifest, workload = read.manifest, read.workload
    with ExitStack() as undo:
        with part("import"):
            backend = open_backend(manifest.backend, examined.device)
        undo.callback(release_after_error, backend.close)
        spared_engines, spared_weights = place.spared(examined.programs)
        with part("device"):
            memory = backend.memory()
            undo.callback(release_after_error, memory.close)
            on_host = manifest.host_weights - spared_weights
            if examined.device != "cpu":
                check_device_room(manifest, spared_weights, memory)
            upload = memory.begin_upload(examined.weight_places(spared_weights | on_host))
            undo.callback(release_after_error, upload.close)
            kept = None
            if on_host:
                elsewhere = {weight.name for weight in manifest.weights} - on_host
                kept = memory.begin_host_upload(examined.weight_places(elsewhere))

        def take(file: str, offset: int, data: memoryview) -> None:
            upload.take(file, offset, data)
            if kept is not None:
                kept.take(file, offset, data)

        checked = examined.verified(take)
        with part("tokenizer"):
            tokens = workload.tokens(manifest, checked.files)
        with part("engines"):
            engines = _loaded(backend, checked, spared_engines)

        def placed(names: Collection[str]) -> dict[str, MappedTensor]:
            return {name: weight for name, weight in checked.weights.items() if name in names}

        with part("upload"):
            weights = upload.finish(placed(checked.weights.keys() - spared_weights - on_host))
            if kept is not None:
                weights |= kept.finish(placed(on_host))
        undo.pop_all()
    # Only parts of `checked` are kept: on a GPU the host's bytes of the weights are not needed any more, and their
    # maps are closed.
    loaded = Loaded(
        manifest,
        checked.programs,
        dict(engines),
        weights,
        backend.memory,
        tokens,
        checked.digest,
        place,
    )
    files = OpenedFiles(manifest, checked.digest, checked.device, checked.golden)
    return workload.artifact(files, LocalEngines(loaded, backend, memory, workload.open_rows))


def check_device_room(manifest: Manifest, spared: Collection[str], memory: Memory) -> None:
    """Refuse an artifact that is too large for a GPU's free memory, before anything of it is copied. Its build counted
    what it takes at least; a rank that leaves weights to the first takes less, of which only its weights are known."""
    without = {*spared, *manifest.host_weights}
    weights = sum(weight.nbytes for weight in manifest.weights if weight.name not in without)
    needed, free = max(weights, 0 if spared else manifest.least_bytes or 0), memory.free_bytes()
    if needed > free:
        raise DeviceMemoryError(
            f"{manifest.name} takes at least {needed / 1e9:.1f} GB of GPU memory, {free / 1e9:.1f} are free: close "
            "what else runs there, or rebuild with --fit"
        )


def _place(workload: RuntimeWorkload[Any], manifest: Manifest, rank: int) -> RankPlace:
    """Join the process group of the ranks, and return the `RankPlace` of this process."""
    if manifest.ranks == 1:
        return ALONE
    # imported here, because it imports torch's process groups
    from seko_runtime.backends.rank_group import share

    return RankPlace(rank, share, workload.first_rank_programs)


def _loaded(backend: Backend, checked: CheckedArtifact, spared: Collection[str]) -> Mapping[str, Engine]:
    """Load the engines that this rank uses. An exception of a library that the backend does not handle becomes an
    error of the runtime."""
    manifest = checked.manifest
    wanted = replace(
        manifest, engines=tuple(engine for engine in manifest.engines if engine.name not in spared)
    )
    try:
        return backend.load_engines(wanted, checked.files)
    except SekoRuntimeError:
        raise
    except Exception as fault:
        raise of_machine(fault) or ArtifactError(
            f"the engines cannot be loaded: {fault_text(fault)}; rebuild the artifact"
        ) from fault


def check_ranks(manifest: Manifest, ranks: int | None) -> None:
    """Refuse a number of ranks (GPUs) for which an artifact was not built.

    Raises
    ------
    UsageError
        If the artifact was built for another number of ranks.
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

"""The steps of a build and their order. Each step of a build is implemented in another module."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import torch
from torch import Tensor

from seko_export.artifact.describe import describe
from seko_export.artifact.manifest_json import manifest_json
from seko_export.artifact.sbom import write_sbom
from seko_export.artifact.writer import hash_files, write_weights
from seko_export.backends import export_backend
from seko_export.backends.base import BuildContext, ExportBackend
from seko_export.backends.workers import compiled_in_background, kernels_compiled_in_background
from seko_export.checkpoints.load import Checkpoint
from seko_export.checkpoints.sources import AS_STORED, LoadOptions, MergedLora
from seko_export.config.build import BuildConfig
from seko_export.errors import MachineError, NumericError
from seko_export.families.model_files import load_checkpoint
from seko_export.families.registry import family_of, graph_of
from seko_export.host import environment
from seko_export.host.child_process import last_line, waiting_child
from seko_export.host.gpu_memory import lacks_gpu_memory, release_gpu_memory
from seko_export.host.progress import Progress, silent
from seko_export.media.sources import MediaSources
from seko_export.workloads.base import BuildResult
from seko_export.workloads.registry import workload_of
from seko_runtime.format.manifest import ENGINES_FOLDER, MANIFEST_FILE, Manifest, Weight
from seko_runtime.format.whole_files import check_alone, check_folder_place, sync_folder, whole_folder
from seko_runtime.host.faults import fault_text


def build_artifact(
    config: BuildConfig,
    checkpoint: Path | None,
    output_path: Path,
    *,
    media: MediaSources | None = None,
    backend: str = "aoti",
    load_options: LoadOptions = AS_STORED,
    compiler_cache: bool = True,
    goldens: bool = True,
    replace: bool = False,
    progress: Progress = silent,
) -> BuildResult:
    """Build one artifact in a hidden folder, verify the artifact in a separate process, then rename the folder to
    ``output_path``.

    Parameters
    ----------
    config : BuildConfig
        Model, workload and target of the build.
    checkpoint : Path or None
        File or folder of the checkpoint, in a form that the model's family reads (`Family.load`); None: random weights.
    output_path : Path
        Folder of the new artifact.
    media : MediaSources, optional
        Files of the models around the main model, such as text encoder and VAE, for a build that includes them.
    backend : str
        Name of the backend, one of `backends.BACKENDS`.
    load_options : LoadOptions
        Options for reading the checkpoint: its entry, further files, LoRAs, or the seed of random weights.
    compiler_cache : bool
        Whether an artifact of the backend ``compile`` includes the compiler's cache. Without the cache every machine
        compiles the engines when it first opens the artifact.
    goldens : bool
        Whether results for later comparison (goldens) are recorded. Only a build for GPUs that are not in this machine
        can be without goldens. The scales of a quantised cache are then not calibrated, so the build must have random
        weights.
    replace : bool
        Whether to replace an artifact at ``output_path``.
    progress : callable
        Function that is called at every step of the build, to show progress.

    Returns
    -------
    BuildResult

    Raises
    ------
    ExportError
        If the build fails; the subclass tells the cause, and no partial artifact is left behind.
    """
    started, maker, workload = time.monotonic(), export_backend(backend), workload_of(config)
    maker.check_build(config)
    check_folder_place(output_path, replace=replace)
    check_alone(output_path)  # else the two would meet at their ends
    media = media or MediaSources()
    family = family_of(config)
    source = load_checkpoint(checkpoint, config.model, load_options)
    around = workload.open_media(config, media)

    # the process that verifies imports meanwhile what the backend needs; torch, where its engines are code for the host
    library = "torch" if maker.host_code else "seko_runtime"
    runs_here = not config.target.archs and not too_few_devices(config)
    with (
        whole_folder(output_path, replace=replace) as folder,
        waiting_child(*workload.verify(folder), imports=library) if runs_here else nullcontext() as verify,
    ):
        # a C++ compiler that does not serve is found before what takes long, beside the reading of the checkpoint
        probing = environment.probing_compiler() if maker.host_code else nullcontext()
        with (
            probing as probed,
            kernels_compiled_in_background(
                maker, workload.kernel_compiler(config) if goldens else None
            ) as wait_for_kernels,
            compiled_in_background(config, maker, folder, progress) as wait_for_engines,
        ):
            for note in (*source.notes, *_on_codes(source, config), *workload.notes(config)):
                progress(note, 0, 1)
            progress("reading the checkpoint", 0, 1)  # first, as it finds damaged weights
            tensors = dict(family.weights(graph_of(config).pieces, source, around))
            tensors |= workload.tables(config)
            tensors |= family.tables(config, source)
            least_bytes = None  # counted before all that a failure would cost
            if config.target.device != "cpu" and not maker.capabilities.unmeasured:
                least_bytes = workload.least_bytes(config)
            if probed is not None:
                progress("probing the compiler", 0, 1)
                probed()
            recording, scales, engine_s = None, dict[str, Tensor](), dict[str, float]()
            if goldens:
                record = partial(workload.record, config, tensors, source, media, progress, wait_for_kernels)
                try:
                    recording = record()
                except Exception as fault:
                    if not lacks_gpu_memory(fault):
                        raise
                    lack = fault_text(fault)
                if recording is None:  # the processes that compile engines hold GPU memory, too
                    progress(f"goldens are recorded again when all engines are compiled: {lack}", 0, 1)
                    release_gpu_memory()
                    engine_s = wait_for_engines()
                    recording = record()
                recording.write(folder)
                scales |= recording.scales
            else:
                scales |= workload.uncalibrated(config)
            progress("writing the weights", 0, 1)
            weights = write_weights(folder, (tensors | scales).items())
            write_sbom(folder, config.model.name, _cuda(config), maker.packages, source.adapters)
            # kernels of a backend that nothing was measured with have no tiles of their own for a GPU
            workload.write_files(folder, config, media, measured=not maker.capabilities.unmeasured)
            engine_s = engine_s or wait_for_engines()
        if maker.build_engines is not None and maker.form is not None:
            forms, engines = folder / maker.form[0], folder / ENGINES_FOLDER
            engine_s = maker.build_engines(config, forms, engines, progress)
        table = recording.table if recording else None
        manifest = _write_manifest(folder, config, maker, weights, table, source.adapters, least_bytes)
        if maker.finish is not None and maker.finish(
            BuildContext(folder, config, manifest, progress, compiler_cache)
        ):
            manifest = _write_manifest(folder, config, maker, weights, table, source.adapters, least_bytes)
        report = None
        if verify is None:
            if not config.target.archs:
                progress(f"not verified: that takes {config.target.ranks} GPUs, there are fewer here", 0, 1)
            digest = hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).hexdigest()
        else:
            progress("verifying in a new process", 0, 1)
            with ThreadPoolExecutor(1) as beside:  # the end, which tells what fails, waits less
                beside.submit(sync_folder, folder)
                report = _verify(verify)
            digest = str(report["digest"])
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    result = BuildResult(
        artifact=output_path,
        digest=digest,
        build_s=time.monotonic() - started,
        engine_bytes=sum(size for name, size in sizes.items() if name.startswith("engines/")),
        weight_bytes=sum(size for name, size in sizes.items() if name.startswith("weights/")),
        engine_s=engine_s,
        device=config.target.device,
        kernels="fused" if config.target.fused else "plain",
        attention=config.target.attention,
    )
    return workload.result(result, config, manifest, recording, report)


def _on_codes(source: Checkpoint, config: BuildConfig) -> Iterator[str]:
    """Yield a sentence for each quantised format in the checkpoint, which says how the build treats its weights."""
    dtype = str(config.target.dtype).removeprefix("torch.")
    for name, count in source.quantised.items():
        taken = (
            "those that --fp8 computes in fp8 are taken byte for byte, others"
            if config.target.fp8 and name.startswith("e4m3")
            else "they"
        )
        yield f"{count} weights of the checkpoint are in {name}: {taken} are expanded to {dtype}"


def too_few_devices(config: BuildConfig) -> bool:
    """Return whether this machine has too few GPUs to run a build for several ranks. One GPU is enough to compile such
    a build."""
    return (
        config.target.device == "cuda"
        and not config.target.archs
        and torch.cuda.device_count() < config.target.ranks
    )


def _cuda(config: BuildConfig) -> str | None:
    return torch.version.cuda if config.target.device == "cuda" else None


def _write_manifest(
    folder: Path,
    config: BuildConfig,
    backend: ExportBackend,
    weights: tuple[Weight, ...],
    table: Any,
    adapters: tuple[MergedLora, ...],
    least_bytes: int | None,
) -> Manifest:
    """Write `manifest.json` for the files that are in the folder now."""
    manifest = describe(config, backend, weights, hash_files(folder), table, adapters, least_bytes)
    (folder / MANIFEST_FILE).write_bytes(manifest_json(manifest))
    return manifest


def _verify(verify: Callable[[], CompletedProcess[str]]) -> dict[str, Any]:
    """Open the artifact with the runtime alone and replay its recorded results, in a process that may crash without
    harm."""
    done = verify()
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        fault = MachineError if done.returncode == MachineError.exit_code else NumericError
        raise fault(f"the new artifact does not verify (exit code {done.returncode}): {last_line(done)}")
    report: dict[str, Any] = json.loads(lines[-1])
    return report

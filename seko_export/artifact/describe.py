"""The manifest of a build, made from the build's configuration and engines."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from seko_export.backends.base import ExportBackend
from seko_export.backends.onnx_form.functional import functional_graph
from seko_export.checkpoints.sources import MergedLora
from seko_export.config.build import BuildConfig
from seko_export.engines.kernel_table import KERNEL_TABLE
from seko_export.engines.piece import engine_spec
from seko_export.families.registry import graph_of
from seko_export.host import environment
from seko_export.workloads.registry import workload_of
from seko_runtime.format.manifest import GPU_SEPARATOR, FileEntry, Manifest, Pool, Target, Weight


def describe(
    config: BuildConfig,
    backend: ExportBackend,
    weights: tuple[Weight, ...],
    files: Mapping[str, FileEntry],
    golden: Any = None,
    adapters: tuple[MergedLora, ...] = (),
    least_bytes: int | None = None,
) -> Manifest:
    """Return the manifest of an artifact.

    Parameters
    ----------
    config : BuildConfig
        Configuration of the build.
    backend : ExportBackend
        The backend that compiled the engines.
    weights : tuple of Weight
        The table of weights that `write_weights` returned.
    files : mapping of str to FileEntry
        Hash and size of every file of the artifact, by path.
    golden : optional
        The manifest's description of the recorded results that `verify` replays (`workloads.base.Recording`).
    adapters : tuple of MergedLora
        LoRAs that are merged into the weights; the object ``model`` of the manifest lists them as ``loras``.
    least_bytes : int, optional
        Bytes of a GPU without which the artifact cannot run (`ExportWorkload.least_bytes`); None: not counted.

    Returns
    -------
    Manifest
        The manifest, of the workload's own class.
    """
    workload, machine = workload_of(config), config.target
    graph = graph_of(config)
    if backend.functional:
        graph = functional_graph(graph)
    extra_files = {"kernels": KERNEL_TABLE, **backend.extra_files}
    if backend.program_file is not None:
        extra_files |= {
            f"{backend.name}_{program}": backend.program_file.format(program)
            for program in workload.whole_programs
        }
    buckets = config.workload.buckets
    cpu = machine.device == "cpu"
    target = (
        environment.Target(machine.device, GPU_SEPARATOR.join(machine.archs))
        if machine.archs
        else environment.local_target(machine.device)
    )
    on_host = {name for piece in graph.pieces.values() if piece.on_host for name in piece.weights}
    manifest: Manifest = workload.manifest(
        name=workload.artifact_name(config, target.arch),
        backend=backend.name,
        target=Target(
            device=target.device,
            arch=target.arch,
            torch=str(torch.__version__).split("+")[0],
            cuda=None if cpu else torch.version.cuda,
            cpu_flags=environment.cpu_flags() if backend.fits_one_cpu else (),
            host_arch=platform.machine(),
        ),
        producer=environment.producer(),
        model={
            **workload.describe_model(config),
            **({"loras": [*map(asdict, adapters)]} if adapters else {}),
        },
        workload=workload.describe(config, golden),
        state_rows=config.workload.state_rows,
        buffers=graph.buffers,
        weights=tuple(replace(weight, on_host=weight.name in on_host) for weight in weights),
        engines=tuple(engine_spec(piece, backend.suffix) for piece in graph.pieces.values()),
        programs=graph.programs,
        pool=None if buckets is None else Pool(buckets),
        ranks=machine.ranks,
        inputs=graph.inputs,
        least_bytes=least_bytes,
        files=dict(files),
        extra={key: file for key, file in extra_files.items() if file in files} | backend.versions(config),
    )
    return replace(manifest, controls=workload.controls(config, manifest))

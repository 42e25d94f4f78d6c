"""The exporter: builds artifacts from checkpoints on a build machine. Inference machines do not need this package.

    from seko_export import BuildOptions, build
    result = build(BuildOptions(preset="tiny", fp4_kv=True, target="cpu"), "artifacts/tiny")

Importing `seko_export` imports neither torch nor the compiler. The functions of `seko_export` import torch and the
compiler when they are called.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seko_export.host.progress import Progress, silent
from seko_export.options.declaration import BuildOptions

if TYPE_CHECKING:
    from seko_export.workloads.base import BuildResult

__all__ = ["BuildOptions", "build", "inspect", "plan"]


def build(
    options: BuildOptions,
    output: str | Path,
    *,
    replace: bool = False,
    room_check: bool = True,
    compiler_cache: bool = True,
    progress: Progress = silent,
    note: Callable[[str], None] = warnings.warn,
) -> BuildResult:
    """Build one artifact, replay its goldens in a separate process, then rename its folder to ``output``.

    Parameters
    ----------
    options : BuildOptions
        The options of `seko-export build`, as an object.
    output : str or Path
        Folder of the new artifact.
    replace : bool
        Whether to replace an existing artifact at ``output``.
    room_check : bool
        Whether to refuse, before any work, a build that needs more memory or disk space than is free.
    compiler_cache : bool
        Whether an artifact of the backend ``compile`` includes the compiler's cache. Without the cache every machine
        compiles the engines when it first opens the artifact.
    progress : callable
        Function that is called at every step of the build, to show progress.
    note : callable
        Function that is called with a sentence about every size that was assumed, or about random weights. Default: a
        warning.

    Returns
    -------
    BuildResult
        The result of the build. Its class is the workload's subclass of `BuildResult`.

    Raises
    ------
    ExportError
        If the build fails; the subclass tells the cause, and no partial artifact is left behind.
    """
    from seko_export.options.checks import check_build

    output_path = Path(output)
    # Without torch, and before it is loaded.
    check_build(options, output_path, force=replace)

    from seko_export.backends import export_backend
    from seko_export.backends.workers import start_worker_server

    start_worker_server(export_backend(options.backend))

    from seko_export.build_steps import build_artifact
    from seko_export.options.asked import workload_asked
    from seko_export.roofline.room import check_room, room_of

    resolved = workload_asked(options).resolve_options(options)
    if room_check:
        room = room_of(resolved.config)
        progress(check_room(room, output_path), 0, 1)
    for sentence in resolved.notes:
        note(sentence)
    if resolved.checkpoint is None:
        note("no checkpoint named: using seeded random weights (noise, not video)")
    return build_artifact(
        resolved.config,
        resolved.checkpoint,
        output_path,
        media=resolved.media,
        backend=options.backend,
        load_options=dataclasses.replace(resolved.load_options, seed=options.random_weights or 0),
        compiler_cache=compiler_cache,
        goldens=not options.no_goldens,
        replace=replace,
        progress=progress,
    )


def plan(
    options: BuildOptions, gpu: str, *, steps: int | None = None, fps: int | None = None
) -> dict[str, Any]:
    """Estimate memory and time of a build on a GPU that need not be present; see `ExportWorkload.plan` of the model's
    workload.

    Parameters
    ----------
    options : BuildOptions
        The options of `seko-export plan`, as an object.
    gpu : str
        Name of a GPU in `seko_export.roofline.gpus.GPUS`.
    steps : int, optional
        Number of denoise passes of a chunk, or of solver steps of a patch of sound.
    fps : int, optional
        Frame rate of playback, in video frames per second.

    Raises
    ------
    UsageError
        If the GPU, preset or another name in the options is unknown, or the options contradict each other.
    """
    from seko_export.options.asked import workload_asked
    from seko_export.options.checks import check_options
    from seko_export.roofline.gpus import find_gpu

    find_gpu(gpu)
    check_options(options)  # both before torch is loaded
    return workload_asked(options).plan(options, gpu, steps=steps, fps=fps)


def inspect(path: str | Path, *, gpu: str | None = None) -> dict[str, Any]:
    """Return a description of a finished artifact, a checkpoint, a LoRA or a VAE, as `seko-export inspect --json`
    prints it.

    Parameters
    ----------
    path : str or Path
        File or folder of the artifact, checkpoint or LoRA.
    gpu : str, optional
        Name of a GPU in `seko_export.roofline.gpus.GPUS`. If ``gpu`` is set, the description has the GPU memory in
        bytes that a build of the checkpoint needs on this GPU.

    Raises
    ------
    ArtifactError, CheckpointError
        If the file or folder is damaged, or is not an artifact, checkpoint or LoRA; the subclass tells the cause. If
        the path does not exist, the error is a `CheckpointNotFoundError`.
    """
    from seko_export.checkpoints.errors import check_exists
    from seko_export.errors import UsageError

    path = Path(path)
    check_exists(str(path), path, "give the path of an artifact's folder or of a checkpoint")

    from seko_export.options.asked import workload_asked
    from seko_export.roofline.gpus import find_gpu
    from seko_export.tools.inspection import inspect_artifact, is_checkpoint

    if is_checkpoint(path):
        if gpu is not None:
            find_gpu(gpu)
        return workload_asked(BuildOptions(path)).inspect(path, gpu)
    if gpu is not None:
        raise UsageError(
            f"--gpu {gpu} is for checkpoints; {path} is an artifact, whose bytes are in its report"
        )
    return inspect_artifact(path)

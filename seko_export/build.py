"""One build, from options to a verified artifact: the order of the steps, nothing of how each is done."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seko_export.artifact.describe import describe, engine_suffix
from seko_export.artifact.manifest_json import manifest_json
from seko_export.artifact.sbom import write_sbom
from seko_export.artifact.writer import hash_files, write_weights
from seko_export.backends import aoti, tensorrt
from seko_export.backends import compile as compile_backend
from seko_export.backends import onnx as onnx_backend
from seko_export.backends.workers import compiled_beside
from seko_export.checkpoints.load import Checkpoint, load_checkpoint
from seko_export.config.build import BuildConfig
from seko_export.engines.kernel_table import write_kernel_table
from seko_export.errors import ExportError, NumericError, UsageError
from seko_export.families.wan.pieces import make_pieces
from seko_export.families.wan.weights import model_weights
from seko_export.goldens import record as golden
from seko_export.host import environment
from seko_export.host.progress import Progress, silent
from seko_export.media.pieces import TOKENIZER_FILE
from seko_export.options.resolve import FUSED_BACKEND
from seko_export.options.sources import MediaSources, prompt_ids
from seko_runtime.format.manifest import Golden, Manifest, Weight
from seko_runtime.format.trust import TRUST_VARIABLE
from seko_runtime.format.whole_files import check_goal, whole_folder

ENGINE_MAKERS = {
    "aoti": aoti.compile_piece,
    "compile": compile_backend.export_piece,
    "onnx": onnx_backend.export_piece,
    "tensorrt": onnx_backend.export_piece,  # the form that plans are built of
}
BACKENDS = tuple(ENGINE_MAKERS)
STREAMING_BACKEND = "aoti"
CAN_BUILD = {"onnx": onnx_backend.check_can_build, "tensorrt": tensorrt.check_can_build}


@dataclass(frozen=True)
class BuildResult:
    """What a build made, in the words of its JSON line.

    Parameters
    ----------
    artifact : Path
        The folder.
    digest : str
        SHA-256 of the manifest.
    build_s : float
        Wall time, seconds.
    kv : dict
        ``scheme``, ``pool_bytes``, ``bf16_pool_bytes``, ``bits_per_number``; for a lossy scheme also
        ``error_vs_exact``, relative, a golden chunk each.
    engine_bytes, weight_bytes : int
        Sizes on disk.
    engine_s : dict
        Seconds of each engine's own process.
    golden_error : float
        Worst relative error of the engines against the eager model over the golden chunks.
    golden_cache_error : float
        Worst error of a token in the cache after them, as `seko_runtime.opening.golden.cache_error`.
    golden_video_error : float or None
        Root mean square difference of their video frames, the worst chunk's, in levels of 255; None without a VAE.
    kernels : str
        What the layers run in: ``fused`` or ``plain``.
    attention : str
        Over the cache: ``torch`` or ``fp8``.
    """

    artifact: Path
    digest: str
    build_s: float
    kv: dict[str, Any]
    engine_bytes: int
    weight_bytes: int
    engine_s: dict[str, float]
    golden_error: float
    golden_cache_error: float
    golden_video_error: float | None = None
    kernels: str = "plain"
    attention: str = "torch"

    def report(self) -> dict[str, object]:
        """Return the JSON line."""
        return asdict(self) | {"artifact": str(self.artifact)}


def build_artifact(
    config: BuildConfig,
    checkpoint: Path,
    goal: Path,
    *,
    media: MediaSources | None = None,
    backend: str = "aoti",
    use_ema: bool = True,
    compiler_cache: bool = True,
    replace: bool = False,
    progress: Progress = silent,
) -> BuildResult:
    """Build one artifact and verify it in a process of its own before it gets its name.

    Parameters
    ----------
    config : BuildConfig
        Model, layout, schedule, cache format, device.
    checkpoint : Path
        Any format that `load_checkpoint` reads.
    goal : Path
        The artifact's folder.
    media : MediaSources, optional
        Files of VAE and text encoder, for a build that has them.
    backend : str
        One of `BACKENDS`.
    use_ema : bool
        Whether a Self-Forcing ``.pt`` gives its averaged weights.
    compiler_cache : bool
        Whether a ``compile`` artifact carries the compiler's cache, without which every box compiles at open.
    replace : bool
        Whether an artifact at ``goal`` gives way.
    progress : callable
        Told of every step.

    Returns
    -------
    BuildResult

    Raises
    ------
    ExportError
        Of the class that fits the cause; nothing is left behind.
    """
    started = time.monotonic()
    if backend not in BACKENDS:
        raise UsageError(f"--backend {backend!r} is not known: expected one of {', '.join(BACKENDS)}")
    if config.stream.stream_cache and backend != STREAMING_BACKEND:
        raise UsageError(
            f"--stream-cache is for packages of --backend {STREAMING_BACKEND}, not of {backend}; leave it out"
        )
    if backend in CAN_BUILD:
        CAN_BUILD[backend](config)
    if config.fused and backend != FUSED_BACKEND:
        raise UsageError(
            f"fused kernels are built into packages of --backend {FUSED_BACKEND}, not of {backend}"
        )
    check_goal(goal, replace=replace)
    source = load_checkpoint(checkpoint, config.model, use_ema=use_ema)
    media = media or MediaSources()
    around = media.open(config)
    ids = None if media.tokenizer is None else prompt_ids(media.tokenizer, config, golden.GOLDEN_PROMPT)

    with whole_folder(goal, "building", replace=replace) as folder:
        plans = backend == "tensorrt"
        place, suffix = (
            (tensorrt.FORMS, tensorrt.FORM_SUFFIX) if plans else ("engines", engine_suffix(backend))
        )
        with compiled_beside(
            config, ENGINE_MAKERS[backend], folder / place, progress, suffix
        ) as wait_for_engines:
            if backend in ("aoti", "compile"):  # the others compile no C++
                progress("probing the compiler", 0, 1)
                environment.probe_compiler()
            progress("reading the checkpoint", 0, 1)
            tensors = dict(model_weights(make_pieces(config), source, around))
            tensors |= config.schedule.tables(config.as_batch.stream)
            record = golden.record(
                config.as_batch, tensors | _exact_weights(config, tensors, source), progress, ids
            )
            tensors |= record.scales
            progress("writing the weights", 0, 1)
            weights = write_weights(folder, tensors.items())
            golden.write(folder, record)
            cuda = torch.version.cuda if config.device == "cuda" else None
            write_sbom(folder, config.model.name, cuda, tensorrt.PACKAGES if plans else ())
            if media.tokenizer is not None:
                (folder / TOKENIZER_FILE).parent.mkdir()
                shutil.copyfile(media.tokenizer, folder / TOKENIZER_FILE)
            engine_s = wait_for_engines()
        write_kernel_table(
            folder, config, environment.resolve_target("cpu" if config.device == "cpu" else "auto")
        )
        if plans:
            engine_s = tensorrt.build_plans(
                folder / place, folder / "engines", tensorrt.local_arch(), progress
            )
        manifest = _write_manifest(folder, config, backend, weights, record.table)
        if backend == "compile" and compiler_cache:
            progress("compiling for the cache", 0, 1)
            _fill_compiler_cache(folder)
            manifest = _write_manifest(folder, config, backend, weights, record.table)
        if backend == "onnx":
            progress("writing whole passes", 0, 1)
            onnx_backend.write_passes(folder, manifest)
            manifest = _write_manifest(folder, config, backend, weights, record.table)
        progress("verifying in a new process", 0, 1)
        report = _verify(folder)
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    return BuildResult(
        artifact=goal,
        digest=report["digest"],
        build_s=time.monotonic() - started,
        kv=asdict(manifest.kv) | ({"error_vs_exact": record.error_vs_exact} if record.exact else {}),
        engine_bytes=sum(size for name, size in sizes.items() if name.startswith("engines/")),
        weight_bytes=sum(size for name, size in sizes.items() if name.startswith("weights/")),
        engine_s=engine_s,
        golden_error=report["worst"]["golden"],
        golden_cache_error=max(row["cache"] for row in report["errors"]),
        golden_video_error=max(
            (row["video"] for row in report["errors"] if row.get("video") is not None), default=None
        ),
        kernels="fused" if config.fused else "plain",
        attention=config.attention,
    )


def _exact_weights(config: BuildConfig, known: Mapping[str, Tensor], source: Checkpoint) -> dict[str, Tensor]:
    """Return the layers' weights that only the exact track takes: those that the artifact holds in fp8."""
    pieces = {name: piece for name, piece in make_pieces(config.as_exact).items() if piece.layers}
    made = model_weights(pieces, source) if config.fp8 else ()
    return {name: tensor for name, tensor in made if name not in known}


def _write_manifest(
    folder: Path, config: BuildConfig, backend: str, weights: tuple[Weight, ...], table: Golden
) -> Manifest:
    """Write `manifest.json` over what the folder holds now."""
    manifest = describe(config, backend, weights, hash_files(folder), table)
    (folder / "manifest.json").write_bytes(manifest_json(manifest))
    return manifest


def _verify(folder: Path) -> dict[str, Any]:
    """Open the artifact with the runtime alone and replay its goldens, in a process that may crash."""
    done = _run_child("seko_runtime", "verify", str(folder), "--json")
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        detail = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise NumericError(f"the new artifact does not verify (exit code {done.returncode}): {detail}")
    report: dict[str, Any] = json.loads(lines[-1])
    return report


def _fill_compiler_cache(folder: Path) -> None:
    """Let a child process compile what `torch.compile` would at open; its cache goes into the artifact."""
    done = _run_child("seko_export.backends.compile", str(folder))
    if done.returncode:
        detail = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ExportError(f"the compiler's cache was not made (exit code {done.returncode}): {detail}")


def _run_child(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module; strings hash alike in every child, so that sets keep their order and equal builds their bytes."""
    command = [sys.executable, "-m", module, *arguments]
    environ = os.environ | {"PYTHONHASHSEED": "0", aoti.CACHE_VARIABLE: aoti.private_cache()}
    environ.pop(TRUST_VARIABLE, None)  # what is being built cannot be signed yet
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ)

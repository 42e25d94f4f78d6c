"""The steps of a build and their order. Each step is implemented elsewhere."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seko_export.artifact.describe import describe
from seko_export.artifact.manifest_json import manifest_json
from seko_export.artifact.sbom import write_sbom
from seko_export.artifact.writer import hash_files, write_tokenizer, write_weights
from seko_export.backends import export_backend
from seko_export.backends.base import ExportBackend, Unfinished
from seko_export.backends.workers import compiled_beside
from seko_export.checkpoints.load import Checkpoint
from seko_export.config.video import VideoBuild
from seko_export.engines.kernel_table import write_kernel_table
from seko_export.engines.key import ENGINES_FOLDER
from seko_export.errors import NumericError
from seko_export.families.model_files import load_checkpoint
from seko_export.families.registry import family_of, graph_of
from seko_export.goldens import record as golden
from seko_export.goldens.calibration import uncalibrated_scales
from seko_export.host import environment
from seko_export.host.child_process import last_line, run_child
from seko_export.host.progress import Progress, silent
from seko_export.options.build_files import MediaSources, prompt_ids
from seko_runtime.format.manifest import MANIFEST_FILE, Weight
from seko_runtime.format.whole_files import check_goal, whole_folder
from seko_runtime.video.manifest import Golden, VideoManifest


@dataclass(frozen=True)
class BuildResult:
    """The result of a build; its fields are the keys of the command's JSON line.

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
        ``error_vs_exact``, the relative error of each golden chunk.
    engine_bytes, weight_bytes : int
        Sizes on disk.
    engine_s : dict
        Seconds that each engine took to compile.
    golden_error : float or None
        Largest relative error of the engines against the eager model over the golden chunks; None of a build for GPUs
        that are not here, or for more ranks than there are GPUs, whose engines have not run.
    golden_cache_error : float or None
        Largest error of a token in the cache afterwards, as in `seko_runtime.video.golden.cache_error`.
    golden_video_error : float or None
        Root mean square difference of the video frames in the worst chunk, in levels of 255; None without a VAE.
    golden_rounding : float or None
        How far rounding alone moves the eager model, to compare ``golden_error`` with: its relative error against
        itself with other last bits, over the golden chunks, or with an exact cache over the first one. None without
        goldens.
    device : str
        ``cpu`` or ``cuda``.
    kernels : str
        Which kernels the layers use: ``fused`` or ``plain``.
    attention : str
        Attention over the cache: ``torch``, ``bf16`` or ``fp8``.
    """

    artifact: Path
    digest: str
    build_s: float
    kv: dict[str, Any]
    engine_bytes: int
    weight_bytes: int
    engine_s: dict[str, float]
    golden_error: float | None
    golden_cache_error: float | None
    golden_video_error: float | None = None
    golden_rounding: float | None = None
    device: str = "cpu"
    kernels: str = "plain"
    attention: str = "torch"

    def report(self) -> dict[str, object]:
        """Return the JSON line."""
        return asdict(self) | {"artifact": str(self.artifact)}


def build_artifact(
    config: VideoBuild,
    checkpoint: Path,
    goal: Path,
    *,
    media: MediaSources | None = None,
    backend: str = "aoti",
    use_ema: bool = True,
    compiler_cache: bool = True,
    goldens: bool = True,
    replace: bool = False,
    progress: Progress = silent,
) -> BuildResult:
    """Build one artifact, verify it in a separate process, then give it its name.

    Parameters
    ----------
    config : VideoBuild
        Model, layout, schedule, cache format, device.
    checkpoint : Path
        Any format that `load_checkpoint` reads.
    goal : Path
        The artifact's folder.
    media : MediaSources, optional
        Files of VAE and text encoder, for a build that includes them.
    backend : str
        One of `BACKENDS`.
    use_ema : bool
        Whether to take the averaged weights of a Self-Forcing ``.pt``.
    compiler_cache : bool
        Whether a ``compile`` artifact includes the compiler's cache. Without it every machine compiles at the first
        open.
    goldens : bool
        Whether they are recorded; only a build for GPUs that are not here can be without. The scales of a quantised
        cache are then not calibrated, which is for random weights alone.
    replace : bool
        Whether to replace an artifact at ``goal``.
    progress : callable
        Called at every step.

    Returns
    -------
    BuildResult

    Raises
    ------
    ExportError
        A subclass for the cause; no partial artifact is left behind.
    """
    started, maker = time.monotonic(), export_backend(backend)
    maker.check_build(config)
    check_goal(goal, replace=replace)
    media = media or MediaSources()
    source = load_checkpoint(checkpoint, config.model, use_ema=use_ema, companion=media.audio_adapter)
    around = media.open(config)
    ids = None if media.tokenizer is None else prompt_ids(media.tokenizer, config, golden.GOLDEN_PROMPT)

    with whole_folder(goal, "building", replace=replace) as folder:
        with compiled_beside(config, maker, folder, progress) as wait_for_engines:
            if maker.host_code:
                progress("probing the compiler", 0, 1)
                environment.probe_compiler()
            if config.no_shared_decoding is not None:
                progress(f"each rank decodes whole pictures: {config.no_shared_decoding}", 0, 1)
            progress("reading the checkpoint", 0, 1)
            tensors = dict(family_of(config).weights(graph_of(config).pieces, source, around))
            tensors |= config.workload.schedule.tables(config.as_batch.workload.stream)
            tensors |= family_of(config).tables(config, source)
            record, scales = None, dict[str, Tensor]()
            if goldens:
                eager = tensors | _exact_weights(config, tensors, source)
                record = golden.record(config.as_batch, eager, progress, ids)
                golden.write(folder, record)
                scales = record.scales
            elif not config.lossless:
                scales = uncalibrated_scales(config)
            progress("writing the weights", 0, 1)
            weights = write_weights(folder, (tensors | scales).items())
            write_sbom(folder, config.model.name, _cuda(config), maker.packages)
            write_tokenizer(folder, media.tokenizer)
            engine_s = wait_for_engines()
        if not maker.capabilities.unmeasured:  # whose kernels have no tiles of their own for a GPU
            write_kernel_table(folder, config)
        if maker.build_engines is not None and maker.form is not None:
            forms, engines = folder / maker.form[0], folder / ENGINES_FOLDER
            engine_s = maker.build_engines(config, forms, engines, progress)
        table = record.table if record else None
        manifest = _write_manifest(folder, config, maker, weights, table)
        if maker.finish is not None and maker.finish(Unfinished(folder, manifest, progress, compiler_cache)):
            manifest = _write_manifest(folder, config, maker, weights, table)
        report = None
        if config.target.archs or too_few_devices(config):
            if not config.target.archs:
                progress(f"not verified: that takes {config.target.ranks} GPUs, there are fewer here", 0, 1)
            digest = hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).hexdigest()
        else:
            progress("verifying in a new process", 0, 1)
            report = _verify(folder)
            digest = str(report["digest"])
    return _result(config, goal, manifest, record, digest, report, engine_s, time.monotonic() - started)


def _result(
    config: VideoBuild,
    goal: Path,
    manifest: VideoManifest,
    record: golden.Record | None,
    digest: str,
    report: Mapping[str, Any] | None,
    engine_s: dict[str, float],
    build_s: float,
) -> BuildResult:
    """Return the result of a build; ``report`` is the JSON line of `verify`, None for GPUs that are not here."""
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    errors = [] if report is None else report["errors"]
    videos = [row["video"] for row in errors if row.get("video") is not None]
    return BuildResult(
        artifact=goal,
        digest=digest,
        build_s=build_s,
        kv=asdict(manifest.workload.kv)
        | ({"error_vs_exact": record.error_vs_exact} if record and record.exact else {}),
        engine_bytes=sum(size for name, size in sizes.items() if name.startswith("engines/")),
        weight_bytes=sum(size for name, size in sizes.items() if name.startswith("weights/")),
        engine_s=engine_s,
        golden_error=None if report is None else report["worst"]["golden"],
        golden_cache_error=max((row["cache"] for row in errors), default=None),
        golden_video_error=max(videos, default=None),
        golden_rounding=None if record is None else record.rounding,
        device=config.target.device,
        kernels="fused" if config.target.fused else "plain",
        attention=config.target.attention,
    )


def too_few_devices(config: VideoBuild) -> bool:
    """Return whether a build for several ranks can be made here, but not run: one GPU is enough to compile it."""
    return (
        config.target.device == "cuda"
        and not config.target.archs
        and torch.cuda.device_count() < config.target.ranks
    )


def _cuda(config: VideoBuild) -> str | None:
    return torch.version.cuda if config.target.device == "cuda" else None


def _exact_weights(config: VideoBuild, known: Mapping[str, Tensor], source: Checkpoint) -> dict[str, Tensor]:
    """Return the layers' weights that only the exact model needs, because the artifact holds them in fp8."""
    pieces = {name: piece for name, piece in graph_of(config.as_exact).pieces.items() if piece.layers}
    made = family_of(config).weights(pieces, source) if config.target.fp8 else ()
    return {name: tensor for name, tensor in made if name not in known}


def _write_manifest(
    folder: Path,
    config: VideoBuild,
    backend: ExportBackend,
    weights: tuple[Weight, ...],
    table: Golden | None,
) -> VideoManifest:
    """Write `manifest.json` for the files that are in the folder now."""
    manifest = describe(config, backend, weights, hash_files(folder), table)
    (folder / MANIFEST_FILE).write_bytes(manifest_json(manifest))
    return manifest


def _verify(folder: Path) -> dict[str, Any]:
    """Open the artifact with the runtime alone and replay its goldens, in a process that may crash without harm."""
    done = run_child("seko_runtime", "verify", str(folder), "--json")
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise NumericError(
            f"the new artifact does not verify (exit code {done.returncode}): {last_line(done)}"
        )
    report: dict[str, Any] = json.loads(lines[-1])
    return report

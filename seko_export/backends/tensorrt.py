"""Engines as TensorRT plans: each piece's ONNX form, made side by side, then built one after another on the GPU."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from seko_export.artifact.describe import engine_suffix
from seko_export.backends.onnx_form.translate import require_onnx
from seko_export.errors import TensorRtMissingError, UsageError
from seko_export.host.environment import user_cache
from seko_export.host.progress import Progress
from seko_export.host.tensorrt_library import require_tensorrt

if TYPE_CHECKING:
    from seko_export.config.build import BuildConfig

# What a plan is made with besides: TensorRT as pip installs it, by either name, and what the forms are made with.
PACKAGES = ("tensorrt", "tensorrt-cu13", "tensorrt-cu13-libs", "tensorrt-cu13-bindings", "onnx", "onnxscript")
FORMS = "forms"  # folder of the forms inside of a build; gone when the plans are there
FORM_SUFFIX = ".onnx"


def check_can_build(config: BuildConfig) -> None:
    """Refuse a build that cannot be, before anything is read.

    Raises
    ------
    UsageError
        If the build is not for a GPU, has another cache than FP4, one a pass or a kind of layers, or a pool.
    OnnxMissingError, TensorRtMissingError
        If a package is missing, that which verifies included.
    """
    if config.device != "cuda":
        raise UsageError(
            "--backend tensorrt builds for GPUs, and this build is for a CPU: take another backend"
        )
    if config.kv_scheme != "fp4":
        raise UsageError(
            f"--backend tensorrt writes caches in place by plugins, and --kv {config.kv_scheme} has none: give "
            "--fp4-kv, or take --backend aoti"
        )
    if config.stream.pass_caches or config.stream.layer_rings or config.stream.window_positions:
        raise UsageError(
            "--backend tensorrt has one cache for all passes and one ring for all layers: leave --pass-caches, "
            "--layer-rings and --window-positions out, or take another backend"
        )
    if config.stream.reference_frames:
        raise UsageError("--backend tensorrt has no reference frames yet: leave --reference-frames out")
    if config.pool is not None:
        raise UsageError("--backend tensorrt has no pools yet: leave --sessions out, or take another backend")
    require_onnx()
    require_tensorrt()
    if importlib.util.find_spec("tensorrt_lean") is None:
        raise TensorRtMissingError(
            "--backend tensorrt verifies what it builds with the lean runtime (package tensorrt_lean), which is not "
            "installed; pip install 'seko-runtime[tensorrt]'"
        )


def build_plans(forms: Path, engines: Path, arch: str, progress: Progress) -> dict[str, float]:
    """Build a plan of every form; one at a time, since the builder times kernels on the GPU.

    Parameters
    ----------
    forms : Path
        Folder of the forms; removed at the end.
    engines : Path
        Folder to make, with a plan each.
    arch : str
        ``sm_NN`` of this machine's GPU.
    progress : callable
        Told of the builder's phases.

    Returns
    -------
    dict of str to float
        Seconds of each plan.

    Raises
    ------
    PlanError
        If TensorRT refuses one of them.
    """
    import onnx

    from seko_export.backends.tensorrt_plans.builder import build_plan
    from seko_export.backends.tensorrt_plans.form import plan_form

    engines.mkdir()
    seconds = {}
    for path in sorted(forms.glob(f"*{FORM_SUFFIX}")):
        started = time.monotonic()
        form = plan_form(onnx.load(path))
        if form.narrowed:
            told = f"engine {path.stem}: {form.narrowed} values of float64 become float32, TensorRT's widest"
            progress(told, 0, 1)
        cache = timing_cache_file(path.stem, arch)
        plan = build_plan(
            form, int(arch.removeprefix("sm_")), cache.read_bytes() if cache.is_file() else b"", progress
        )
        (engines / f"{path.stem}{engine_suffix('tensorrt')}").write_bytes(plan.content)
        _write_whole(cache, plan.timing_cache)
        path.unlink()
        seconds[path.stem] = time.monotonic() - started
    forms.rmdir()
    return seconds


def timing_cache_file(piece: str, arch: str) -> Path:
    """Return where this user's timings of a piece on a kind of GPU are kept: one file a version of TensorRT."""
    return user_cache() / "tensorrt" / f"{require_tensorrt()}-{arch}" / f"{piece}.timing"


def local_arch() -> str:
    """Return ``sm_NN`` of the GPU that plans are built on."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def _write_whole(path: Path, content: bytes) -> None:
    """Replace a file at once: two builds may keep their timings at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)

"""The backend ``tensorrt``: the ONNX forms are made at the same time, then the GPU builds one plan after another."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from seko_export.backends.base import Capabilities, ExportBackend
from seko_export.backends.onnx import export_piece
from seko_export.backends.onnx_form.translate import require_onnx
from seko_export.engines.key import engine_file
from seko_export.errors import TensorRtMissingError
from seko_export.host.environment import user_cache
from seko_export.host.progress import Progress
from seko_export.host.tensorrt_library import require_tensorrt

if TYPE_CHECKING:
    pass

# What a plan is made with besides: TensorRT as pip installs it, by either name, and what the forms are made with.
PACKAGES = ("tensorrt", "tensorrt-cu13", "tensorrt-cu13-libs", "tensorrt-cu13-bindings", "onnx", "onnxscript")
FORMS = "forms"  # folder of the forms inside of a build; gone when the plans are there
FORM_SUFFIX, PLAN_SUFFIX = ".onnx", ".plan"
TENSORRT = "tensorrt"  # in the manifest's `extra`: the version whose builder made the plans


def check_can_build() -> None:
    """Refuse a build if a package is missing.

    Raises
    ------
    OnnxMissingError, TensorRtMissingError
        If a package is missing, also one that only the verification needs.
    """
    require_onnx()
    require_tensorrt()
    if importlib.util.find_spec("tensorrt_lean") is None:
        raise TensorRtMissingError(
            "--backend tensorrt verifies what it builds with the lean runtime (package tensorrt_lean), which is not "
            "installed; in Seko's folder, pip install './runtime[tensorrt]'"
        )


def build_plans(forms: Path, engines: Path, progress: Progress) -> dict[str, float]:
    """Build a plan of every ONNX form, one at a time, since the builder times kernels on the GPU.

    Parameters
    ----------
    forms : Path
        Folder of the ONNX forms; removed at the end.
    engines : Path
        Folder to make; receives one plan for each form.
    progress : callable
        Called with the builder's phases.

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
    arch, seconds = local_arch(), {}
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
        (engines / engine_file(path.stem, PLAN_SUFFIX, "")).write_bytes(plan.content)
        _write_whole(cache, plan.timing_cache)
        path.unlink()
        seconds[path.stem] = time.monotonic() - started
    forms.rmdir()
    return seconds


def timing_cache_file(piece: str, arch: str) -> Path:
    """Return the file that keeps this user's kernel timings for a GPU model and a version of TensorRT."""
    return user_cache() / "tensorrt" / f"{require_tensorrt()}-{arch}" / f"{piece}.timing"


def local_arch() -> str:
    """Return ``sm_NN`` of the GPU that builds the plans."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def _write_whole(path: Path, content: bytes) -> None:
    """Replace a file atomically: two builds may write their timings at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)


BACKEND = ExportBackend(
    "tensorrt",
    Capabilities(
        devices=("cuda",),
        kv_schemes=("fp4",),  # written in place by plugins
        pools=False,
        pass_caches=False,
        layer_rings=False,
        window_positions=False,
        reference_frames=False,
    ),
    export_piece,  # the form that plans are built of
    suffix=PLAN_SUFFIX,
    check=check_can_build,
    functional=True,
    packages=PACKAGES,
    versions=lambda: {TENSORRT: require_tensorrt()},
    form=(FORMS, FORM_SUFFIX),
    build_engines=build_plans,
)

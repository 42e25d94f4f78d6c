"""Engines as ONNX files of standard ops, and whole passes beside them. For CPUs: any ONNX runtime runs them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from seko_export.backends.onnx_form.translate import piece_model, require_onnx
from seko_export.errors import OnnxMissingError, UsageError
from seko_kernels.kv_formats import ExactKv
from seko_kernels.lossy_kv import Nvfp4Kv

if TYPE_CHECKING:
    from seko_export.config.build import BuildConfig
    from seko_runtime.format.manifest import Manifest


def check_can_build(config: BuildConfig) -> None:
    """Refuse a build that cannot be, before anything is read.

    Raises
    ------
    OnnxMissingError
        If a package is missing, that which verifies included.
    UsageError
        If the build is for a GPU, has a pool, or a cache that the form has no functions for.
    """
    require_onnx()
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        raise OnnxMissingError(
            "--backend onnx verifies what it builds with the package onnxruntime, which is not installed; "
            "pip install 'seko-export[onnx]'"
        ) from None
    if config.device != "cpu":
        raise UsageError(
            f"--backend onnx builds for CPUs, and this build is for {config.device}: give --target cpu"
        )
    if not isinstance(config.kv, ExactKv | Nvfp4Kv):
        raise UsageError(
            f"--backend onnx has functions for exact and fp4 caches alone, and this build has {config.kv_scheme}: give "
            "--kv bf16 or --kv fp4, or take another backend"
        )
    if config.stream.pass_caches:
        raise UsageError("--backend onnx has no caches of each pass yet: leave --pass-caches out")
    if config.stream.layer_rings:
        raise UsageError("--backend onnx has no layers of different rings yet: leave --layer-rings out")
    if config.stream.reference_frames:
        raise UsageError("--backend onnx has no reference frames yet: leave --reference-frames out")
    if config.stream.window_positions:
        raise UsageError(
            "--backend onnx has no positions within the window yet: leave --window-positions out"
        )
    if config.pool is not None:
        raise UsageError("--backend onnx has no pools yet: leave --sessions out, or take another backend")


def export_piece(config: BuildConfig, name: str, path: str) -> float:
    """Translate one piece and save it.

    Runs in a child process, as the other backends' makers do.

    Parameters
    ----------
    config : BuildConfig
        The whole build.
    name : str
        Which piece.
    path : str
        Path of the ``.onnx`` to write.

    Returns
    -------
    float
        Seconds it took, without the start of the process.

    Raises
    ------
    LoweringError
        If the piece has no ONNX form.
    """
    from seko_export.families.wan.pieces import make_pieces

    started = time.monotonic()
    model = piece_model(make_pieces(config)[name])
    Path(path).write_bytes(model.SerializeToString(deterministic=True))
    return time.monotonic() - started


def write_passes(folder: Path, manifest: Manifest) -> None:
    """Write each pass of an artifact as one file that refers to the artifact's weights; see `onnx_form.passes`."""
    from seko_export.artifact.describe import PASS_FILES
    from seko_export.backends.onnx_form.passes import write_pass

    for program, file in PASS_FILES.items():
        write_pass(folder, manifest, program, file)

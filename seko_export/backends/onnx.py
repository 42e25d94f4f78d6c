"""The backend ``onnx``: engines as ONNX files of standard ops, plus one file for each whole pass. They run in any
ONNX runtime on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from seko_export.backends.base import Capabilities, ExportBackend, Unfinished
from seko_export.backends.onnx_form.translate import piece_model, require_onnx
from seko_export.errors import MachineError

if TYPE_CHECKING:
    from seko_export.config.video import VideoBuild
    from seko_export.engines.piece import Piece


PASS_FILES = {"denoise": "denoise.onnx", "context": "context.onnx"}  # one whole pass in a file each


def check_can_build() -> None:
    """Refuse a build if a package is missing.

    Raises
    ------
    MachineError
        If a package is missing, also one that only the verification needs.
    """
    require_onnx()
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        raise MachineError(
            "--backend onnx verifies what it builds with the package onnxruntime, which is not installed; "
            "in Seko's folder, pip install -e '.[onnx]'"
        ) from None


def export_piece(config: VideoBuild, piece: Piece, path: Path) -> None:  # noqa: ARG001
    """Translate one piece to ONNX and save it."""
    path.write_bytes(piece_model(piece).SerializeToString(deterministic=True))


def finish(artifact: Unfinished) -> bool:
    """Write each pass as one ONNX file that refers to the artifact's weights; see `onnx_form.passes`."""
    from seko_export.backends.onnx_form.passes import write_pass

    artifact.progress("writing whole passes", 0, 1)
    for program, file in PASS_FILES.items():
        write_pass(artifact.folder, artifact.manifest, program, file)
    return True


BACKEND = ExportBackend(
    "onnx",
    Capabilities(
        devices=("cpu",),
        kv_schemes=("bf16", "fp4"),
        pools=False,
        pass_caches=False,
        layer_rings=False,
        window_positions=False,
        reference_frames=False,
    ),
    export_piece,
    suffix=".onnx",
    check=check_can_build,
    functional=True,
    extra_files={f"onnx_{program}": file for program, file in PASS_FILES.items()},
    finish=finish,
)

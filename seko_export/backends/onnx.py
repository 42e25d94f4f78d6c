"""The backend ``onnx``: engines as ONNX files of standard ops, plus one file for each whole pass. The ONNX files run in
any ONNX runtime on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from seko_export.backends.base import BuildContext, Capabilities, ExportBackend
from seko_export.backends.onnx_form import LACKING
from seko_export.backends.onnx_form.translate import piece_model, require_onnx
from seko_export.errors import MachineError
from seko_export.workloads.registry import workload_of

if TYPE_CHECKING:
    from seko_export.config.build import BuildConfig
    from seko_export.engines.piece import Piece


PROGRAM_FILE = "{}.onnx"  # name of the file of one whole program, such as a pass


def check_can_build() -> None:
    """Refuse a build if a package is missing.

    Raises
    ------
    MachineError
        If a package is missing, including packages that only the verification needs.
    """
    require_onnx()
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        raise MachineError(
            "--backend onnx verifies what it builds with the package onnxruntime, which is not installed; "
            "in Seko's folder, pip install -e '.[onnx]'"
        ) from None


def export_piece(config: BuildConfig, piece: Piece, path: Path) -> None:  # noqa: ARG001
    """Translate one engine to ONNX and save it."""
    path.write_bytes(piece_model(piece).SerializeToString(deterministic=True))


def finish(artifact: BuildContext) -> bool:
    """Write each of the workload's whole programs as one ONNX file, which refers to the artifact's weights; see
    `onnx_form.passes`.
    """
    from seko_export.backends.onnx_form.passes import write_program

    artifact.progress("writing whole passes", 0, 1)
    workload = workload_of(artifact.config)
    programs = workload.resolve(artifact.manifest)
    whole = [program for program in workload.whole_programs if program in programs]
    for program in whole:
        write_program(artifact.folder, artifact.manifest, programs[program][0], PROGRAM_FILE.format(program))
    return bool(whole)


BACKEND = ExportBackend(
    "onnx",
    Capabilities(
        devices=("cpu",),
        kv_schemes=("bf16", "fp4"),
        pools=False,
        lacks=LACKING,
        workloads=("video",),  # others are pools
    ),
    export_piece,
    suffix=".onnx",
    check=check_can_build,
    functional=True,
    program_file=PROGRAM_FILE,
    finish=finish,
)

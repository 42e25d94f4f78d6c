"""The backend ``aoti``: one AOTInductor package for each engine, each compiled in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from seko_export.backends.base import Capabilities, ExportBackend

if TYPE_CHECKING:
    from seko_export.config.build import BuildConfig
    from seko_export.engines.piece import Piece


def compile_piece(config: BuildConfig, piece: Piece, package: Path) -> None:
    """Compile one engine into a ``.pt2`` package; see `compile_package`, which raises the same errors."""
    from seko_export.backends.aoti_compiler import compile_package

    compile_package(config, piece, package)


BACKEND = ExportBackend(
    "aoti",
    Capabilities(fused_kernels=True, convolutions=True, offloading=True, ranks=True),
    compile_piece,
    compiler="seko_export.backends.aoti_compiler",
    host_code=True,
    fits_one_cpu=True,  # host code of a GPU engine is compiled for this processor, too
    named_kernels="TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE=1",
)

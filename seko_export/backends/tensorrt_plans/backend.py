"""The backends ``tensorrt`` and ``tensorrt-rtx``: engines as plans, built by one of TensorRT's two libraries.

The ONNX forms of all engines are made in parallel. The plans are then built one after another.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from seko_export.backends.base import Capabilities, ExportBackend
from seko_export.backends.onnx_form import LACKING
from seko_export.backends.onnx_form.kept_ops import MANY
from seko_export.backends.onnx_form.translate import NEWEST_OPSET, piece_model, require_onnx
from seko_export.engines.key import engine_file
from seko_export.host.environment import user_cache
from seko_export.host.progress import Progress
from seko_export.host.tensorrt_library import DATA_CENTRE, RTX, TensorRt
from seko_runtime.format.manifest import PLUGINS_KEY
from seko_runtime.format.private_files import read_private, write_private

if TYPE_CHECKING:
    from onnx import ModelProto

    from seko_export.backends.tensorrt_plans.exact_caches import CacheRows
    from seko_export.config.video import VideoBuild
    from seko_export.engines.piece import Piece
    from seko_export.families.base import ModelGraph

FORMS = "forms"  # folder of the ONNX forms during a build, removed when the plans are built
FORM_SUFFIX, PLAN_SUFFIX = ".onnx", ".plan"
PTX_FOLDER = "ptx"  # folder with each kernel's PTX as a file, to read or assemble
CACHES_KEY = "tensorrt_caches"  # key in the manifest's `extra` that names how caches are written


def plan_backend(library: TensorRt) -> ExportBackend:
    """Return the backend that builds plans with one of TensorRT's libraries."""
    from seko_export.backends.tensorrt_plans.plugin_library import PLUGIN_FILE

    return ExportBackend(
        library.backend,
        Capabilities(
            devices=("cuda",),
            cross_targets=library.targets,
            unmeasured=True,
            fused_kernels=True,  # 8-bit attention needs fused layers, whose other kernels TensorRT makes
            attentions=("torch", "fp8"),
            fp8_matmuls=False,
            resident_window=False,
            past_share=False,
            # formats whose caches TensorRT's own layer or plugins write in place
            kv_schemes=("bf16", "fp4"),
            pools=False,
            workloads=("video",),  # their layers and plugins write its caches
            lacks=LACKING,
        ),
        export_form,
        suffix=PLAN_SUFFIX,
        check=partial(check_can_build, library),
        functional=True,
        host_code=True,
        packages=(*library.packages, "onnx", "onnxscript", "triton"),
        extra_files={PLUGINS_KEY: PLUGIN_FILE},
        versions=lambda config: {library.backend: library.require(), CACHES_KEY: cache_writers(config)},
        form=(FORMS, FORM_SUFFIX),
        build_engines=partial(build_plans, library),
    )


def check_can_build(library: TensorRt) -> None:
    """Refuse a build if a package or the C++ headers for the plugin are missing.

    Raises
    ------
    MachineError
        If a package or header is missing, including packages that only the verification needs.
    """
    from seko_export.backends.tensorrt_plans.plugin_library import tensorrt_headers

    require_onnx()
    library.require()
    tensorrt_headers(library)


def export_form(config: VideoBuild, piece: Piece, path: Path) -> None:  # noqa: ARG001
    """Translate one engine to the ONNX form from which its TensorRT plan is built.

    The ONNX model has no bodies for functions that Seko's kernels or TensorRT's attention replace, because exporting
    these bodies takes minutes.
    """
    path.write_bytes(form_of(piece).SerializeToString(deterministic=True))


def form_of(piece: Piece) -> ModelProto:
    """Return the ONNX form of an engine from which its TensorRT plan is built.

    TensorRT's own attention computes only the attention of engines that run once per layer. TensorRT refuses the head
    widths of other attentions, such as a VAE's.
    """
    from seko_export.backends.tensorrt_plans.form import REPLACED

    return piece_model(piece, NEWEST_OPSET, (*REPLACED, *(MANY if piece.layers else ())))


def build_plans(
    library: TensorRt, config: VideoBuild, forms: Path, engines: Path, progress: Progress
) -> dict[str, float]:
    """Build a plan from every form, one at a time, because a builder may time kernels on the GPU.

    Parameters
    ----------
    library : TensorRt
        The TensorRT library that builds the plans.
    config : VideoBuild
        The configuration of the build.
    forms : Path
        Folder of the ONNX forms, which is removed at the end.
    engines : Path
        Folder to make, with the plans, the plugin library, and the PTX of every kernel.
    progress : callable
        Function that is called with the phases of the builder, to show progress.

    Returns
    -------
    dict of str to float
        Seconds that each plan took, by the engine's name.

    Raises
    ------
    LoweringError
        If TensorRT refuses the form of an engine.
    """
    import onnx

    from seko_export.backends.tensorrt_plans.builder import PlanBuilder
    from seko_export.backends.tensorrt_plans.form import plan_form
    from seko_export.backends.tensorrt_plans.kernels import with_kernels
    from seko_export.backends.tensorrt_plans.plugin_library import PLUGIN_FILE, compile_plugin_library
    from seko_export.families.registry import graph_of

    (engines / PTX_FOLDER).mkdir(parents=True)
    plugins = engines.parent / PLUGIN_FILE
    progress("compiling the plugin library", 0, 1)
    compile_plugin_library(library, plugins)
    builder = PlanBuilder(library, plugins)
    names = config.target.archs or (local_arch(),)
    archs, rows, seconds = [int(name.removeprefix("sm_")) for name in names], cache_rows(config), {}
    caches = kv_caches(graph_of(config))
    paths = sorted(forms.glob(f"*{FORM_SUFFIX}"))
    for number, path in enumerate(paths):
        progress(f"building plans with {library.title}", number, len(paths))
        started = time.monotonic()
        form = plan_form(onnx.load(path), rows, caches[path.stem])
        if form.narrowed:
            note = f"engine {path.stem}: {form.narrowed} values of float64 become float32, TensorRT's widest"
            progress(note, 0, 1)
        with_code = with_kernels(form, archs)
        for name, ptx in with_code.ptx.items():
            (engines / PTX_FOLDER / name).write_text(ptx, encoding="ascii")
        timings = timing_cache_file(library, path.stem, names)
        plan = builder.build(with_code.model, form.aliases, archs, read_private(timings), progress)
        (engines / engine_file(path.stem, PLAN_SUFFIX, "")).write_bytes(plan.content)
        if plan.timing_cache:
            write_private(timings, plan.timing_cache)
        path.unlink()
        seconds[path.stem] = time.monotonic() - started
    forms.rmdir()
    return seconds


def kv_caches(graph: ModelGraph) -> dict[str, tuple[str, ...]]:
    """Return, for each engine, the KV caches of layers that it writes."""
    caches = {
        f"buffer:{buffer.name}" for buffer in graph.buffers if buffer.role == "cache" and buffer.row_axis
    }
    return {
        name: tuple(
            a.name for a in piece.inputs if a.name in piece.mutates and a.ref.partition("[")[0] in caches
        )
        for name, piece in graph.pieces.items()
    }


def cache_rows(config: VideoBuild) -> CacheRows | None:
    """Return the layout of exact caches, if no chunk crosses the end of the ring; None if a chunk may cross the end."""
    from seko_export.backends.tensorrt_plans.exact_caches import CacheRows

    stream = config.workload.stream
    whole = stream.sink_frames % stream.chunk_frames == 0 and stream.ring_frames % stream.chunk_frames == 0
    if not config.lossless or not whole:
        return None
    return CacheRows(stream.batch, stream.cache_tokens, stream.chunk_tokens)


def cache_writers(config: VideoBuild) -> str:
    """Return words that describe how the engines of a build write their caches."""
    if not config.lossless:
        return "plugins nvfp4_write_keys and nvfp4_write"
    return "plugin cache_write" if cache_rows(config) is None else "TensorRT's cache update layer"


def timing_cache_file(library: TensorRt, piece: str, archs: tuple[str, ...]) -> Path:
    """Return the path of the file with this user's kernel timings for an engine and GPU. Each version of TensorRT has
    its own file."""
    return user_cache() / library.backend / f"{library.require()}-{'-'.join(archs)}" / f"{piece}.timing"


def local_arch() -> str:
    """Return the compute capability ``sm_NN`` of the GPU on which plans are built."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


TENSORRT = plan_backend(DATA_CENTRE)
TENSORRT_RTX = plan_backend(RTX)

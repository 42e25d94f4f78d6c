"""Building of a TensorRT plan from an ONNX form: parse, check, configure, build. Only this module of the exporter calls
TensorRT's builder."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx import ModelProto, TensorProto, ValueInfoProto

from seko_export.errors import LoweringError, MachineError
from seko_export.host.environment import compiler_command
from seko_export.host.progress import Progress
from seko_export.host.tensorrt_library import TensorRt
from seko_export.host.workshop import workshop
from seko_kernels.tensorrt import PLUGIN_NAME, PLUGIN_NAMESPACE, PLUGIN_VERSION

if TYPE_CHECKING:
    import tensorrt as trt

_DTYPES: dict[int, str] = {
    TensorProto.FLOAT: "FLOAT",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.FLOAT16: "HALF",
    TensorProto.INT8: "INT8",
    TensorProto.UINT8: "UINT8",
    TensorProto.INT32: "INT32",
    TensorProto.INT64: "INT64",
    TensorProto.BOOL: "BOOL",
}


@dataclass(frozen=True)
class Plan:
    """A TensorRT plan that was built.

    Parameters
    ----------
    content : bytes
        The serialised TensorRT plan.
    timing_cache : bytes
        The kernel times that the builder measured, for the next build; empty if the builder measures no times.
    """

    content: bytes
    timing_cache: bytes


class PlanBuilder:
    """A builder of TensorRT plans in this process.

    Parameters
    ----------
    library : TensorRt
        The TensorRT library that builds the plans.
    plugins : Path
        The library of the C++ plugin, which is loaded into this process.
    """

    def __init__(self, library: TensorRt, plugins: Path) -> None:
        self._library = library
        if library.missing_link is not None:
            _make_link(*library.missing_link)
        self._trt: Any = library.load()
        registry = self._trt.get_plugin_registry()
        creator = (PLUGIN_NAME, PLUGIN_VERSION, PLUGIN_NAMESPACE)
        # The library is loaded once a process, which may build several artifacts: TensorRT refuses a library whose
        # plugins are registered already.
        if registry.get_creator(*creator) is None and registry.load_library(str(plugins)) is None:
            raise LoweringError(f"{library.title} does not load the plugin library {plugins}; rebuild it")

    def build(
        self,
        model: ModelProto,
        aliases: Mapping[str, str],
        archs: Sequence[int],
        timing_cache: bytes,
        progress: Progress,
    ) -> Plan:
        """Build one TensorRT plan from an ONNX form.

        Parameters
        ----------
        model : ModelProto
            The ONNX form with kernels, which `with_kernels` returned.
        aliases : mapping of str to str
            For each output that shares the memory of an input: the output's name, and the input's name.
        archs : sequence of int
            Target GPUs of the plan. A builder that times kernels builds for the GPU of this machine.
        timing_cache : bytes
            Kernel times of an earlier build on this GPU by this TensorRT version; may be empty.
        progress : callable
            Function that is called with the phases of the builder, to show progress.

        Returns
        -------
        Plan
            The plan, with the dtypes of the form and without TF32.

        Raises
        ------
        LoweringError
            If TensorRT refuses the form, reads another signature from it, or fails to build a plan; with TensorRT's
            message.
        """
        if TYPE_CHECKING:
            import tensorrt as trt
        else:
            trt = self._trt
        name, version = model.graph.name, f"{self._library.title} {trt.__version__}"
        logger = make_logger(trt)
        builder = trt.Builder(logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        if not parser.parse(model.SerializeToString(deterministic=True)):
            faults = [parser.get_error(number) for number in range(parser.num_errors)]
            said = "; ".join(
                f"{fault.node_operator()} {fault.node_name()}: {fault.desc()}" for fault in faults
            )
            raise LoweringError(f"{version} cannot read engine {name!r}: {said or logger.worst()}")
        check_signature(network, model)
        check_aliases(network, model, aliases)
        config = builder.create_builder_config()
        config.clear_flag(trt.BuilderFlag.TF32)  # TF32 is on by default
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
        config.progress_monitor = make_monitor(trt, name, progress)
        timings = configure(self._library, trt, config, archs, timing_cache)
        serialized = builder.build_serialized_network(network, config)
        if serialized is None:
            raise LoweringError(f"{version} did not build engine {name!r}: {logger.worst()}")
        return Plan(bytes(serialized), b"" if timings is None else bytes(timings.serialize()))


def configure(
    library: TensorRt, module: Any, config: trt.IBuilderConfig, archs: Sequence[int], timing_cache: bytes
) -> trt.ITimingCache | None:
    """Set the options in which the builders of TensorRT and TensorRT for RTX differ; return the timing cache, or None
    if the library has no timing cache.

    A TensorRT library with `targets` builds for named GPUs and measures nothing. A TensorRT library without `targets`
    makes version-compatible plans for TensorRT's lean runtime. The lean runtime, which is native code, is not included
    in these plans. The builder keeps measured kernel times in the timing cache.
    """
    if library.targets:
        rtx: Any = config  # TensorRT's own type stubs
        rtx.num_compute_capabilities = len(archs)
        for place, arch in enumerate(archs):
            rtx.set_compute_capability(getattr(module.ComputeCapability, f"SM{arch}"), place)
        return None
    flags: type[trt.BuilderFlag] = module.BuilderFlag
    config.set_flag(flags.VERSION_COMPATIBLE)
    config.set_flag(flags.EXCLUDE_LEAN_RUNTIME)
    cache = config.create_timing_cache(timing_cache)
    if not config.set_timing_cache(cache, False):  # a timing cache of another GPU
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def check_signature(network: trt.INetworkDefinition, model: ModelProto) -> None:
    """Compare the tensors that TensorRT read with the tensors of the ONNX form: names, order, shapes, dtypes.

    Raises
    ------
    LoweringError
        If the tensors differ; the message names the first difference.
    """
    inputs = [network.get_input(place) for place in range(network.num_inputs)]
    outputs = [network.get_output(place) for place in range(network.num_outputs)]
    for verb, tensors, wanted in (
        ("takes", inputs, model.graph.input),
        ("gives", outputs, model.graph.output),
    ):
        theirs, ours = [*map(_described, tensors)], [*map(_wanted, wanted)]
        if theirs != ours:
            first = next((t, o) for t, o in zip([*theirs, None], [*ours, None], strict=False) if t != o)
            raise LoweringError(
                f"TensorRT's network of {model.graph.name!r} {verb} {first[0]}, the form says {first[1]}; this version "
                "of its parser changes signatures: take another one"
            )


def check_aliases(network: trt.INetworkDefinition, model: ModelProto, aliases: Mapping[str, str]) -> None:
    """Check that each aliased output comes from a layer that writes in place, and that the layer takes the aliased
    input.

    Raises
    ------
    LoweringError
        If an aliased output comes from another layer; the message names the first of these outputs.
    """
    layers = [network.get_layer(place) for place in range(network.num_layers)]
    makers = {layer.get_output(place).name: layer for layer in layers for place in range(layer.num_outputs)}
    nodes = {name: node for node in model.graph.node for name in node.output}
    for output, source in aliases.items():
        node, layer = nodes[output], makers.get(output)
        layer_type = "" if layer is None else layer.type.name
        plugin = node.op_type == PLUGIN_NAME
        fields = {attribute.name: [*attribute.ints] for attribute in node.attribute}
        place = fields["aliases"][[*node.output].index(output)] if plugin else 0
        taken = None if layer is None or place < 0 else layer.get_input(place)
        expected = "PLUGIN_V3" if plugin else "KVCACHE_UPDATE"
        if layer_type.replace("_", "") != expected.replace("_", "") or taken is None or taken.name != source:
            raise LoweringError(
                f"TensorRT's network of {model.graph.name!r} makes {output} by {layer_type or 'no layer'} out of "
                f"{'nothing' if taken is None else taken.name}, expected {expected} in the memory of {source}"
            )


def make_logger(trt: Any) -> Any:
    """Return a TensorRT logger that keeps error messages. Its class is defined in this function, because the base class
    is in the library ``trt``."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(msg.strip())

        def worst(self) -> str:
            return self.errors[0] if self.errors else "it gave no reason"

    return Logger()


def make_monitor(trt: Any, engine: str, progress: Progress) -> Any:
    """Return a TensorRT progress monitor that reports the outermost phase of a build. Its class is defined in this
    function, because the base class is in the library ``trt``."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._phase, self._steps = "", 1

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if not parent_phase:
                self._phase, self._steps = phase_name, max(num_steps, 1)
                progress(f"building the plan of {engine}: {phase_name}", 0, self._steps)

        def phase_finish(self, phase_name: str) -> None:
            if phase_name == self._phase:
                progress(f"building the plan of {engine}: {phase_name}", self._steps, self._steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name == self._phase:
                progress(f"building the plan of {engine}: {phase_name}", step + 1, self._steps)
            return True

    return Monitor()


@cache
def _make_link(package: str, link: str, file: str) -> None:
    """Make a library loadable under the name with which TensorRT's parser opens it when it finds a plugin.

    Without this function the process crashes. The function links an empty library with that name, which depends on the
    real library, and loads it before TensorRT's parser looks for the name.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return  # another installation, in which the loader finds both names
    folder = Path(spec.origin).parent
    with workshop("seko-rtx-") as place:
        shim = place / link
        command = [
            *(compiler_command(), "-shared", "-x", "c", "/dev/null", "-o", str(shim)),
            *(f"-Wl,-soname,{link}", "-Wl,--no-as-needed", f"-Wl,-rpath,{folder}"),
            *("-L", str(folder), f"-l:{file}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MachineError(f"{compiler_command()} cannot link {file}: {done.stderr.strip()[-300:]}")
        ctypes.CDLL(str(shim))


def _described(tensor: trt.ITensor) -> tuple[str, tuple[int, ...], str]:
    return tensor.name, tuple(tensor.shape[axis] for axis in range(len(tensor.shape))), tensor.dtype.name


def _wanted(value: ValueInfoProto) -> tuple[str, tuple[int, ...], str]:
    tensor = value.type.tensor_type
    return value.name, tuple(axis.dim_value for axis in tensor.shape.dim), _DTYPES[tensor.elem_type]

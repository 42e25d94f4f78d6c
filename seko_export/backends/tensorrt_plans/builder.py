"""Builds one plan: parse, check, configure, build. The only file that calls TensorRT's builder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnx import ModelProto, TensorProto, ValueInfoProto

from seko_export.backends.tensorrt_plans.form import PlanForm
from seko_export.backends.tensorrt_plans.registration import register_plugins
from seko_export.errors import PlanError
from seko_export.host.progress import Progress

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
    """TensorRT's serialised engine, and the timings of its build.

    Parameters
    ----------
    content : bytes
        The serialised plan.
    timing_cache : bytes
        Kernel timings that the builder measured, reused by the next build.
    """

    content: bytes
    timing_cache: bytes


def build_plan(form: PlanForm, arch: int, timing_cache: bytes, progress: Progress) -> Plan:
    """Build one plan for the GPU of this machine.

    Parameters
    ----------
    form : PlanForm
        From `plan_form`.
    arch : int
        Its compute capability, such as 90.
    timing_cache : bytes
        Timings of an earlier build on this GPU with this TensorRT; empty if there are none.
    progress : callable
        Called with the builder's phases.

    Returns
    -------
    Plan
        Version compatible, without an embedded runtime, with the form's dtypes, TF32 off.

    Raises
    ------
    PlanError
        If TensorRT refuses the form, parses a different signature, or fails to build; the message quotes TensorRT.
    """
    import tensorrt as trt

    register_plugins(form.plugins.values(), form.compute, arch)
    name = form.model.graph.name
    logger = make_logger()
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(form.model.SerializeToString(deterministic=True)):
        faults = [parser.get_error(number) for number in range(parser.num_errors)]
        said = "; ".join(f"{fault.node_operator()} {fault.node_name()}: {fault.desc()}" for fault in faults)
        raise PlanError(f"TensorRT {trt.__version__} cannot read engine {name!r}: {said or logger.worst()}")
    check_signature(network, form.model)
    config = builder.create_builder_config()
    config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    config.set_flag(trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)  # native code in a plan; the box has its own
    config.clear_flag(trt.BuilderFlag.TF32)  # on by default
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    config.progress_monitor = make_monitor(name, progress)
    cache = config.create_timing_cache(timing_cache)
    if not config.set_timing_cache(cache, False):
        progress(f"the timing cache is another GPU's; building {name} without it", 0, 1)
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    made = builder.build_serialized_network(network, config)
    if made is None:
        raise PlanError(f"TensorRT {trt.__version__} did not build engine {name!r}: {logger.worst()}")
    return Plan(bytes(made), bytes(cache.serialize()))


def check_signature(network: trt.INetworkDefinition, model: ModelProto) -> None:
    """Compare the network that TensorRT parsed with the ONNX form: names, order, shapes, dtypes.

    Raises
    ------
    PlanError
        At the first difference.
    """
    inputs = [network.get_input(place) for place in range(network.num_inputs)]
    outputs = [network.get_output(place) for place in range(network.num_outputs)]
    for verb, found, wanted in (("takes", inputs, model.graph.input), ("gives", outputs, model.graph.output)):
        theirs, ours = [*map(_described, found)], [*map(_wanted, wanted)]
        if theirs != ours:
            first = next((t, o) for t, o in zip([*theirs, None], [*ours, None], strict=False) if t != o)
            raise PlanError(
                f"TensorRT's network of {model.graph.name!r} {verb} {first[0]}, the form says {first[1]}; this version "
                "of its parser changes signatures: take 11.4"
            )


def make_logger() -> Any:
    """Return a TensorRT logger that collects errors and warnings. The class is made here because its base needs the
    library.
    """
    import tensorrt as trt

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(msg.strip())

        def worst(self) -> str:
            return self.errors[0] if self.errors else "it gave no reason"

    return Logger()


def make_monitor(engine: str, progress: Progress) -> Any:
    """Return a TensorRT progress monitor that reports the outermost phase. Made here because its base needs the
    library.
    """
    import tensorrt as trt

    class Monitor(trt.IProgressMonitor):
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


def _described(tensor: trt.ITensor) -> tuple[str, tuple[int, ...], str]:
    return tensor.name, tuple(tensor.shape[axis] for axis in range(len(tensor.shape))), tensor.dtype.name


def _wanted(value: ValueInfoProto) -> tuple[str, tuple[int, ...], str]:
    tensor = value.type.tensor_type
    return value.name, tuple(axis.dim_value for axis in tensor.shape.dim), _DTYPES[tensor.elem_type]

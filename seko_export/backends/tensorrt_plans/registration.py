"""Registers Seko's plugins with `tensorrt.plugin`: inputs, outputs, and the precompiled kernel.

TensorRT reads the functions' annotations as objects, so their signatures are made at run time.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from seko_export.errors import PlanError
from seko_kernels.plugins import Plugin, compile_plugin

if TYPE_CHECKING:
    import tensorrt as trt
    import tensorrt.plugin as trtp

_DTYPES = {"float32": "FLOAT", "bfloat16": "BF16", "int8": "INT8", "int64": "INT64"}
_registered: dict[str, tuple[object, ...]] = {}  # TensorRT's registry is one a process, and forgets nothing


def register_plugins(wanted: Iterable[Plugin], compute: str, arch: int) -> None:
    """Register plugins with TensorRT, each with its kernel for an architecture.

    Parameters
    ----------
    wanted : iterable of Plugin
        The plugins of a form.
    compute : str
        The dtype of their ``float``.
    arch : int
        Compute capability, such as 90.

    Raises
    ------
    PlanError
        If one is already registered in this process with another meaning.
    """
    import tensorrt.plugin as trtp

    for plugin in wanted:
        meaning = (
            plugin.constants(dict.fromkeys(plugin.inputs, (1,) * 5)),
            plugin.outputs[0].dtype,
            compute,
            arch,
        )
        known = _registered.setdefault(plugin.identifier, meaning)
        if known is not meaning:
            if known != meaning:
                raise PlanError(
                    f"plugin {plugin.identifier} is registered in this process for {known}, and asked for "
                    f"as {meaning}; build the other model in another process"
                )
            continue
        trtp.register(plugin.identifier)(_description(plugin))
        trtp.aot_impl(plugin.identifier)(_implementation(plugin, compute, arch))


def trt_dtype(name: str) -> trt.DataType:
    """Return TensorRT's dtype for a dtype name of the manifest."""
    import tensorrt as trt

    found: trt.DataType = getattr(trt.DataType, _DTYPES[name])
    return found


def _description(plugin: Plugin) -> Callable[..., Any]:
    """Return the function that describes a plugin's outputs: shapes as expressions, and which inputs are written in
    place.
    """
    import tensorrt.plugin as trtp

    def describe(*inputs: trtp.TensorDesc) -> tuple[trtp.TensorDesc, ...]:
        inputs_by_name = dict(zip(plugin.inputs, inputs, strict=True))
        shapes = {name: tuple(one.shape_expr) for name, one in inputs_by_name.items()}
        return tuple(
            inputs_by_name[output.alias].aliased()
            if output.alias
            else trtp.from_shape_expr(output.shape(shapes), trt_dtype(output.dtype))
            for output in plugin.outputs
        )

    tensors = [_parameter(name, trtp.TensorDesc) for name in plugin.inputs]
    results = types.GenericAlias(tuple, (trtp.TensorDesc,) * len(plugin.outputs))
    return _with_signature(describe, tensors, results)


def _implementation(plugin: Plugin, compute: str, arch: int) -> Callable[..., Any]:
    """Return the function that gives TensorRT a plugin's kernel: PTX, launch and scalars."""
    import tensorrt.plugin as trtp

    def implement(
        *arguments: Any,
    ) -> tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        inputs_by_name: dict[str, trtp.TensorDesc] = dict(zip(plugin.inputs, arguments[:-2], strict=True))
        _check_dtypes(plugin, inputs_by_name, compute)
        kernel = compile_plugin(
            plugin, {name: tuple(one.shape) for name, one in inputs_by_name.items()}, compute, arch
        )
        launch = plugin.launch(
            {name: tuple(one.shape_expr) for name, one in inputs_by_name.items()}, trtp.cdiv
        )
        params = trtp.KernelLaunchParams()
        params.grid_x, params.grid_y = launch.grid
        params.block_x, params.shared_mem = kernel.threads, kernel.shared_bytes
        scalars = trtp.SymIntExprs(len(launch.scalars))
        for place, value in enumerate(launch.scalars):
            scalars[place] = trtp.SymInt32(value)  # a plain number would become a kind that TensorRT refuses
        return kernel.name, kernel.ptx, params, scalars

    tensors = [_parameter(name, trtp.TensorDesc) for name in plugin.inputs]
    parameters = [*tensors, _parameter("outputs", tuple[trtp.TensorDesc]), _parameter("tactic", int)]
    results = tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymIntExprs]
    return _with_signature(implement, parameters, results)


def _check_dtypes(plugin: Plugin, inputs_by_name: dict[str, trtp.TensorDesc], compute: str) -> None:
    for name, dtype in plugin.inputs.items():
        wanted = trt_dtype(compute if dtype == "float" else dtype)
        if inputs_by_name[name].dtype != wanted:
            raise PlanError(
                f"TensorRT gives plugin {plugin.identifier} its {name} as {inputs_by_name[name].dtype}, "
                f"expected {wanted}; this version of TensorRT changes dtypes of a strongly typed network: take 11.4"
            )


def _parameter(name: str, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)


def _with_signature(
    function: Callable[..., Any], parameters: Sequence[inspect.Parameter], results: object
) -> Callable[..., Any]:
    function.__signature__ = inspect.Signature(parameters, return_annotation=results)  # type: ignore[attr-defined]
    return function

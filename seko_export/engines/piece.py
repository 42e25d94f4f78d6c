"""Pieces: engines before they are compiled. A piece is a torch module with a signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from seko_export.engines.key import EngineKey, engine_file
from seko_runtime.format.manifest import Call, EngineSpec, TensorSpec

OF_LAYER, OF_PLACE = "[{layer}]", "[{place}]"  # index of a buffer reference: the layer's entry
# prefix of a parameter's name in an engine's signature, because an input may have the same name
_WEIGHTS = "weights."


@dataclass(frozen=True)
class Argument:
    """One tensor in an engine's signature, with a reference to the buffer, weight or value that the runtime passes for
    the tensor.

    Parameters
    ----------
    name : str
        Name of the tensor within the engine; ``group.name`` is the entry ``name`` of the mapping argument ``group``.
    ref : str
        Reference to the tensor as in the manifest's programs: ``weight:``, ``buffer:`` or ``value:``. `Piece.call`
        replaces ``{layer}`` by a layer's number in the model, and ``{place}`` by the layer's number in its layer group.
    shape, dtype
        Shape and dtype of the tensor as the engine sees it.
    """

    name: str
    ref: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def spec(self) -> TensorSpec:
        """The manifest's entry for the argument: name, shape and dtype."""
        return TensorSpec(self.name, self.shape, dtype_name(self.dtype))


@dataclass(frozen=True)
class Piece:
    """An engine before it is compiled: a module on the meta device with its inputs and outputs.

    Parameters
    ----------
    key : EngineKey
        Key of the engine to which the piece is compiled.
    module : nn.Module
        The torch module, on the meta device. Its parameters are the engine's first inputs, in ``named_parameters``
        order.
    prefix : str
        Prefix of the module's parameter names in the artifact; may contain ``{layer}``.
    layers : int
        Number of the model's layers, for each of which the engine is called; 0 if the engine is called once, and not
        for each layer.
    inputs, outputs : tuple of Argument
        The engine's inputs after the parameters, and its outputs.
    mutates : tuple of str
        Names of the inputs that are written in place.
    positional : bool
        Whether the module takes all inputs by position, for example a varying number of caches.
    only : tuple of int or None
        The layers that the engine serves; None for all layers.
    among : tuple of int
        Numbers of the layers in the engine's layer group, if there are several groups. A layer's index in ``among`` is
        its index in the group's caches.
    large : bool
        Whether compilation takes long, because the engine has many kernels. Large engines are compiled first, and each
        by several processes.
    recorded : bool
        Whether the recorded results (goldens) cover the engine. The build compares an engine that they do not cover
        with the engine's module.
    on_host : bool
        Whether the engine's weights stay on the host, from where the runtime copies them for each call.
    """

    key: EngineKey
    module: nn.Module
    prefix: str
    layers: int
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    mutates: tuple[str, ...] = ()
    positional: bool = False
    only: tuple[int, ...] | None = None
    among: tuple[int, ...] = ()
    large: bool = False
    recorded: bool = True
    on_host: bool = False

    @property
    def name(self) -> str:
        """Name of the engine in the manifest."""
        return self.key.name

    @property
    def served(self) -> tuple[int, ...]:
        """Numbers of the layers that the engine serves."""
        return tuple(range(self.layers)) if self.only is None else self.only

    @property
    def parameters(self) -> tuple[Argument, ...]:
        """The weights of the piece, as the first inputs of its engine."""
        return tuple(
            Argument(f"{_WEIGHTS}{name}", f"weight:{self.prefix}{name}", tuple(p.shape), p.dtype)
            for name, p in self.module.named_parameters()
        )

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the artifact's weights that the engine takes, for all layers that it serves."""
        names = [argument.ref.removeprefix("weight:") for argument in self.parameters]
        return tuple(name.format(layer=layer) for layer in self.served or (0,) for name in names)

    @property
    def signature(self) -> tuple[Argument, ...]:
        """Every input of the engine, in order."""
        return self.parameters + self.inputs

    def call(self, layer: int = 0) -> Call:
        """Return a program's call of this engine, for one layer if the engine is called for each layer."""
        place = self.among.index(layer) if self.among else layer

        def filled(arguments: tuple[Argument, ...]) -> tuple[str, ...]:
            return tuple(a.ref.format(layer=layer, place=place) for a in arguments)

        return Call(self.name, filled(self.signature), filled(self.outputs))

    def calls(self) -> tuple[Call, ...]:
        """Return the calls of this engine: one call for each layer that it serves, or a single call."""
        return tuple(self.call(layer) for layer in self.served or (0,))

    def example_inputs(self, device: str) -> tuple[Tensor, ...]:
        """Return example inputs for tracing and compiling: zeros, which are also valid as indices."""
        return tuple(torch.zeros(a.shape, dtype=a.dtype, device=device) for a in self.signature)


class FlatModule(nn.Module):
    """A piece as a function of a flat list of tensors. In this form a piece is traced, compiled and called."""

    def __init__(self, piece: Piece) -> None:
        super().__init__()
        # kept outside of the submodules, because its parameters are inputs here
        object.__setattr__(self, "_inner", piece.module)
        self._parameter_names = tuple(a.name.removeprefix(_WEIGHTS) for a in piece.parameters)
        self._input_names = tuple(a.name for a in piece.inputs)
        self._groups: tuple[str, ...] = getattr(piece.module, "groups", ())
        self._positional = piece.positional

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Call the piece with its parameters and inputs in the order of its signature; return its outputs as a
        tuple."""
        split = len(self._parameter_names)
        weights = dict(zip(self._parameter_names, tensors[:split], strict=True))
        module: nn.Module = self.__dict__["_inner"]
        if self._positional:
            return _as_tuple(torch.func.functional_call(module, weights, tensors[split:]))
        groups: dict[str, dict[str, Tensor]] = {group: {} for group in self._groups}
        plain: dict[str, Tensor] = {}
        for name, tensor in zip(self._input_names, tensors[split:], strict=True):
            group, _, entry = name.rpartition(".")
            (groups[group] if group else plain)[entry] = tensor
        return _as_tuple(torch.func.functional_call(module, weights, (), plain | groups))


def engine_spec(piece: Piece, suffix: str) -> EngineSpec:
    """Return the manifest's entry for the engine of a piece; ``suffix`` is the suffix of the engine's file."""
    return EngineSpec(
        name=piece.name,
        file=engine_file(piece.name, suffix),
        inputs=tuple(a.spec for a in piece.signature),
        outputs=tuple(a.spec for a in piece.outputs),
        mutates=piece.mutates,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the manifest's name of a dtype, which is torch's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Return the module that ``make`` creates, on the meta device, where parameters take no memory."""
    with torch.device("meta"):
        return make().eval().requires_grad_(False)


def shared_on_meta(make: partial[Any]) -> nn.Module:
    """Return the module that ``make`` creates, on the meta device. All builds of a process share the module of equal
    arguments, which is never changed, so that `plan` counts it once."""
    return _shared(make.func, make.args, tuple(sorted(make.keywords.items())))


@lru_cache(maxsize=64)
def _shared(
    make: Callable[..., nn.Module], arguments: tuple[Any, ...], options: tuple[tuple[str, Any], ...]
) -> nn.Module:
    return on_meta(partial(make, *arguments, **dict(options)))


def _as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)

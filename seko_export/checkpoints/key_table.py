"""A family's description of its checkpoints, as data: key names, shapes, dimensions, files. A description of
checkpoints reads no file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from seko_export.checkpoints.model_parts import part_of
from seko_export.checkpoints.sources import Companion, Layout, OpenedFiles, shown
from seko_export.config.build import ModelIdentity
from seko_export.config.model import ModelConfig

Shapes = Mapping[str, tuple[int, ...]]

# No leading zero, so that each layer has one spelling; no number that no file could hold.
LAYER = re.compile(r"blocks\.(0|[1-9][0-9]{0,5})\.(.+)", re.ASCII)


def linear_shapes(module: str, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
    """Return name and shape of a linear layer's weight and bias."""
    return {f"{module}.weight": (out_features, in_features), f"{module}.bias": (out_features,)}


def norm_shapes(module: str, width: int) -> dict[str, tuple[int, ...]]:
    """Return name and shape of a layer norm's weight and bias."""
    return {f"{module}.weight": (width,), f"{module}.bias": (width,)}


def translate(name: str, outer: Mapping[str, str], layer: Mapping[str, str]) -> str:
    """Translate a key from one naming to another; layers are ``blocks.N.`` in both namings.

    Parameters
    ----------
    name : str
        The key to translate.
    outer, layer : mapping of str to str
        Other name of each key outside the layers, and of each key inside a layer (without ``blocks.N.``).

    Raises
    ------
    KeyError
        If the mapping has no such key.
    """
    match = LAYER.fullmatch(name)
    if match is None:
        return outer[name]
    return f"blocks.{match[1]}.{layer[match[2]]}"


def layer_of(name: str) -> int | None:
    """Return the layer number of a key ``blocks.N.``, or None for a key outside the layers."""
    match = LAYER.fullmatch(name)
    return int(match[1]) if match else None


def layer_by_layer(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return shapes in the order of the layers, keys outside the layers first."""
    return dict(sorted(shapes.items(), key=lambda item: -1 if (at := layer_of(item[0])) is None else at))


def _within_layer(name: str) -> str:
    """Return the part of a key after ``blocks.N.``, with a mark; return any other key unchanged."""
    match = LAYER.fullmatch(name)
    return f"blocks.*.{match[2]}" if match else name


@dataclass(frozen=True)
class Naming:
    """A naming: one convention for the key names of a checkpoint.

    Parameters
    ----------
    name : str
        Name of the naming in reports, such as ``wan`` or ``diffusers``.
    to_ours, to_theirs : callable
        Functions that translate a key to the exporter's name, and back. Both functions raise a KeyError for an
        unknown key.
    signs : tuple of str
        Parts of keys that identify this naming. If empty, any file may use the naming.
    container : str or None
        Format of the files in which this naming occurs, ``pt`` or ``safetensors``; None for both.
    """

    name: str
    to_ours: Callable[[str], str]
    to_theirs: Callable[[str], str]
    signs: tuple[str, ...] = ()
    container: str | None = None

    def fits(self, opened: OpenedFiles) -> bool:
        """Return whether the keys of a file look like this naming."""
        if self.container not in (None, opened.container):
            return False
        return not self.signs or any(sign in source.key for source in opened.sources for sign in self.signs)

    def translated(self, key: str) -> str | None:
        """Return the exporter's name of a key, or None for an unknown key."""
        try:
            return self.to_ours(key)
        except KeyError:
            return None

    def shapes_in(self, opened: OpenedFiles) -> dict[str, tuple[int, ...]]:
        """Return the exporter's name and the stored shape of every key that this naming knows."""
        named = ((self.translated(source.key), source.shape) for source in opened.sources)
        return {name: shape for name, shape in named if name is not None}


@dataclass(frozen=True)
class Dimension:
    """A field of `ModelConfig` that is read from one axis of one tensor, as ``shape[axis] // per``."""

    field: str
    key: str
    axis: int
    per: int = 1


def plain_spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return mean and standard deviation of a random weight. Both are chosen so that activations stay near 1 at any
    depth.

    Biases have deviation 0.02, norm weights are 1 + 0.1 N(0, 1), and matrices have deviation 1/sqrt(fan in). No random
    weight is always zero, so every weight affects the output.
    """
    if name.endswith(".bias"):
        return 0.0, 0.02
    if len(shape) == 1:
        return 1.0, 0.1
    return 0.0, math.prod(shape[1:]) ** -0.5


@dataclass(frozen=True)
class KeyTable:
    """The checkpoints of one model family: names and shapes of their keys, and their files.

    Parameters
    ----------
    formats : str
        The supported formats in words, for error messages.
    shapes : callable
        Function that yields name and shape of every tensor of a model, by the exporter's names, in the order of the
        layers.
    namings : tuple of Naming
        Namings of keys: the first naming that fits a file is used; the last naming should fit any file.
    lora_namings : tuple of Naming
        Further namings that LoRAs use; they need not name every weight of the model.
    dimensions : tuple of Dimension
        Dimensions of the model that are read from shapes. The dimension ``layers`` follows from the keys.
    landmark : str
        A key (exporter's name) that every checkpoint contains. In a foreign file, the text before this key is a prefix
        to remove.
    subfolders : tuple of str
        Subfolders that may hold the model, as in a diffusers pipeline.
    entries : tuple of str
        Entries of a `.pt` that may hold the weights; see `Layout`.
    prefixes : tuple of str
        Prefixes that may precede every key of a file.
    layer_of : callable
        Function that returns the layer number of a key; None outside the layers. Default: keys ``blocks.N.``.
    telltales : tuple of pairs
        Parts of keys, each with the kind of checkpoint that it reveals, for hints. A part begins where a name of a key
        begins.
    relatives : tuple of pairs
        Parts of keys that several related models have, each with a hint. The hint is shown if no telltale matches.
    models : mapping of str to ModelConfig
        The models of the presets, by name, from which the preset that matches a file is found.
    companions : tuple of Companion
        Further files with weights of a model, such as an adapter.
    spread : callable
        Function that returns mean and standard deviation of a random weight by name and shape.
    """

    formats: str
    shapes: Callable[[Any], dict[str, tuple[int, ...]]]
    namings: tuple[Naming, ...]
    dimensions: tuple[Dimension, ...]
    landmark: str
    lora_namings: tuple[Naming, ...] = ()
    subfolders: tuple[str, ...] = ("transformer",)
    entries: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    layer_of: Callable[[str], int | None] = layer_of
    telltales: tuple[tuple[tuple[str, ...], str], ...] = ()
    relatives: tuple[tuple[tuple[str, ...], str], ...] = ()
    models: Mapping[str, ModelConfig] = field(default_factory=dict)
    companions: tuple[Companion, ...] = ()
    spread: Callable[[str, tuple[int, ...]], tuple[float, float]] = plain_spread

    def layout(self, entry: str | None = None, first: str | None = None) -> Layout:
        """Return the file layout of the family's weights.

        Parameters
        ----------
        entry : str, optional
            The only entry of a `.pt` that may be read.
        first : str, optional
            The entry to read if the file has it, such as the entry of a preset.
        """
        entries = (
            self.entries if first is None else (first, *(name for name in self.entries if name != first))
        )
        return Layout(
            self.formats, self.subfolders, entries, entry, self.companions, self.prefixes, "--entry"
        )

    def naming_of(self, opened: OpenedFiles) -> Naming:
        """Return the naming that a file uses: the first naming that fits the keys; if no naming fits, the last one."""
        return next((naming for naming in self.namings if naming.fits(opened)), self.namings[-1])

    def dimensions_of(self, shapes: Shapes) -> dict[str, int]:
        """Read a model's dimensions from shapes, as far as the keys are present.

        Parameters
        ----------
        shapes : Mapping[str, tuple[int, ...]]
            Stored shape of each tensor by the exporter's name.

        Returns
        -------
        dict[str, int]
            Value of each field of `ModelConfig`. ``layers`` counts the layers that have a key, so that no more layers
            are expected than the file has keys.
        """
        sizes = {
            dimension.field: shapes[dimension.key][dimension.axis] // dimension.per
            for dimension in self.dimensions
            if len(shapes.get(dimension.key, ())) > dimension.axis
        }
        layers = {layer for layer in map(self.layer_of, shapes) if layer is not None}
        return sizes | ({"layers": len(layers)} if layers else {})

    def foreign_keys(self, opened: OpenedFiles) -> tuple[str, ...]:
        """Return the keys of a file that occur in no preset's model, whatever their layer."""
        naming = self.naming_of(opened)
        known = {_within_layer(name) for model in self.models.values() for name in self.shapes(model)}
        named_keys = ((source.key, naming.translated(source.key) or source.key) for source in opened.sources)
        return tuple(key for key, name in named_keys if _within_layer(name) not in known)

    def preset_of(self, dimensions: Mapping[str, int]) -> str | None:
        """Return the name of the preset with the given dimensions; None if no preset has them."""
        same = (
            name
            for name, model in self.models.items()
            if self.dimensions_of(self.shapes(model)) == dimensions
        )
        return next(same, None)

    def hints(self, opened: OpenedFiles, wanted: ModelIdentity | None = None) -> list[str]:
        """Return hints, as sentences, on what kind of file a file is that lacks the weights of the family or the keys
        ``wanted``."""
        keys = [source.key for source in opened.sources]
        telltales, related = (
            [hint for parts, hint in pairs if any(f".{part}" in f".{key}" for part in parts for key in keys)]
            for pairs in (self.telltales, self.relatives)
        )
        part = part_of(keys, with_transformer=self.landmark in keys)
        hints = telltales or ([part] if part else related)
        prefixes = {key.removesuffix(self.landmark) for key in keys if key.endswith(f".{self.landmark}")}
        if prefixes and not hints:
            hints.append(f"the keys carry the prefix {shown(min(prefixes))!r}; save them without it")
        if wanted is None:
            return hints
        dimensions = self.dimensions_of(self.naming_of(opened).shapes_in(opened))
        expected = self.dimensions_of(self.shapes(wanted))
        differing = [name for name in expected if name in dimensions and dimensions[name] != expected[name]]
        if differing:
            sizes = ", ".join(f"{name} {dimensions[name]} (expected {expected[name]})" for name in differing)
            preset = self.preset_of(dimensions)
            known = f": the dimensions of --preset {preset}" if preset else ""
            hints.append(f"the file's model has {sizes}{known}")
        return hints

"""The keys of a build's engines: role, layer group, bucket and variant. `EngineKey` makes an engine's name and file
name from the engine's key; no code parses these names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from seko_runtime.format.manifest import ENGINES_FOLDER


@dataclass(frozen=True)
class EngineKey:
    """Key of an engine: it identifies one engine of a build.

    Parameters
    ----------
    role : str
        Task of the engine: ``embed``, ``block``, ``head``, ``vae_decode`` ...
    layer_group : str
        Layer group of the engine's layers, `LayerGroup.name`. Empty for the group with the largest ring, and for
        engines that are not layers.
    bucket : int or None
        Number of rows of the pool calls for which the engine is compiled; None without a pool.
    variant : tuple of str
        Words that distinguish engines of one role: ``full`` (every row's cache is full), ``context`` (the context
        pass), ``last`` (the last layer of the context pass), ``wide`` (layers without fp8).
    """

    role: str
    layer_group: str = ""
    bucket: int | None = None
    variant: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The engine's name in the manifest."""
        stem = "_".join(part for part in (self.role, *self.variant, self.layer_group) if part)
        return stem if self.bucket is None else f"{stem}.{self.bucket}"


def engine_file(name: str, suffix: str, folder: str = ENGINES_FOLDER) -> str:
    """Return the path of an engine's file, relative to the artifact's folder; ``suffix`` begins with a dot."""
    return str(PurePosixPath(folder, f"{name}{suffix}"))

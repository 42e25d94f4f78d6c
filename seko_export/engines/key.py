"""Which engine of a build is which. An engine's name and file are made from its key here, and never read back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

ENGINES_FOLDER = "engines"


@dataclass(frozen=True)
class EngineKey:
    """One engine among those of a build.

    Parameters
    ----------
    role : str
        What the engine does: ``embed``, ``block``, ``head``, ``vae_decode`` ...
    layer_group : str
        The layers that it is for, where layers have rings of several sizes: `LayerGroup.name`. Empty for those with the
        largest ring, and for engines that are of no layer.
    bucket : int or None
        Rows of the pool's calls that it is compiled for; None without a pool.
    variant : tuple of str
        Which of several engines of one role: ``full`` (every row's cache is full), ``context`` (for the context pass),
        ``last`` (the last layer of that pass), ``wide`` (layers that fp8 leaves out).
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

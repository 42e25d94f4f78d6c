"""The result of resolving a build's options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from seko_export.config.build import BuildConfig
from seko_export.media.sources import MediaSources

Build = TypeVar("Build", bound=BuildConfig)


@dataclass(frozen=True)
class ResolvedBuild(Generic[Build]):
    """A build's configuration and input files, resolved from its options.

    Parameters
    ----------
    config : BuildConfig
        The build.
    checkpoint : Path or None
        The model's weights; None: random ones will be made.
    media : MediaSources
        Files of the text encoder, VAE and other models around the main model.
    notes : tuple of str
        Sentences on sizes that were assumed.
    first_entry : str or None
        The entry of a `.pt` that the preset's authors run.
    """

    config: Build
    checkpoint: Path | None
    media: MediaSources
    notes: tuple[str, ...] = ()
    first_entry: str | None = None

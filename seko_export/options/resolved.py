"""What a build's options mean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from seko_export.config.build import BuildConfig
from seko_export.media.sources import MediaSources

Build = TypeVar("Build", bound=BuildConfig)


@dataclass(frozen=True)
class ResolvedBuild(Generic[Build]):
    """The meaning of a build's options.

    Parameters
    ----------
    config : BuildConfig
        The build.
    checkpoint : Path or None
        The model's weights; None: random ones will be made.
    media : MediaSources
        Files beside them.
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

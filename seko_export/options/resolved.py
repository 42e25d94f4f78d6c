"""The result of resolving the options of a build."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from seko_export.checkpoints.sources import AS_STORED, LoadOptions
from seko_export.config.build import BuildConfig
from seko_export.media.sources import MediaSources

Build = TypeVar("Build", bound=BuildConfig)


@dataclass(frozen=True)
class ResolvedBuild(Generic[Build]):
    """The configuration and input files of a build, resolved from its options.

    Parameters
    ----------
    config : BuildConfig
        The configuration of the build.
    checkpoint : Path or None
        File or folder with the model's weights; None: random weights will be made.
    media : MediaSources
        Files of the text encoder, VAE and other models around the main model.
    notes : tuple of str
        Sentences for the user about sizes that were assumed.
    load_options : LoadOptions
        Options for reading the checkpoint. `LoadOptions.first_entry` is the entry that the preset's authors use for
        generation.
    """

    config: Build
    checkpoint: Path | None
    media: MediaSources
    notes: tuple[str, ...] = ()
    load_options: LoadOptions = AS_STORED

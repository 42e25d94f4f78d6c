"""The options of a build of a speech model, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from seko_export.config.pool import with_commas
from seko_export.families.speech.config import SpeechModel
from seko_export.options.declaration import BuildOptions, option

DEFAULT_POSITIONS, DEFAULT_STEPS = 2048, 10
DEFAULT_READ_LENGTHS, DEFAULT_PREFILL = (256, 1024, 4096, 16_384), (64, 256, 1024)
DEFAULT_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
_option = partial(option, group="Speech (sizes of its sessions and calls)", workload=SpeechModel.workload)


@dataclass(frozen=True)
class SpeechOptions(BuildOptions):
    """The options of a build of a speech model."""

    positions: int | None = _option(
        "Largest number of positions of a speech session: tokens of the prompt and patches of sound together. "
        f"Default: {DEFAULT_POSITIONS}.",
        plan=True,
        common=True,
    )
    read_lengths: tuple[int, ...] | None = _option(
        "Numbers of cache positions that an engine call of speech can read; each number needs engines of its own. "
        f"The last number is --positions. Default: --positions and those of {with_commas(DEFAULT_READ_LENGTHS)} "
        "that are below --positions; with fused kernels, whose steps read only filled positions, --positions and "
        f"those of {with_commas(DEFAULT_READ_LENGTHS[-2:])} that are below --positions.",
        plan=True,
    )
    prefill: tuple[int, ...] | None = _option(
        "Numbers of prompt tokens that an engine call of speech can take; each number needs engines of its own, "
        f"and longer prompts take several calls. Default: those of {with_commas(DEFAULT_PREFILL)} that are at most "
        "--positions.",
        plan=True,
    )
    steps: int | None = _option(
        f"Number of solver steps for a patch of sound. Default: {DEFAULT_STEPS}.",
    )

    @classmethod
    def of(cls, options: BuildOptions) -> SpeechOptions:
        """Return options of any workload as options of speech."""
        return options if isinstance(options, cls) else cls(**vars(options))

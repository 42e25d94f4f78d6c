"""Options of a session or pool, for all of its rows."""

from __future__ import annotations

from dataclasses import dataclass

from seko_runtime.arguments import flag

PROMPT_CACHE = 8  # entries; one of Wan 1.3B takes 90 MiB on the device


@dataclass(frozen=True)
class VideoOptions:
    """Options of an artifact's rows.

    Parameters
    ----------
    steps : int, optional
        Denoise passes; default: the artifact's.
    shift : float, optional
        Warp of their timesteps; default: the artifact's.
    prompt_cache : int
        Capacity of the prompt cache.
    overlap : bool
        Whether decoding runs at the same time as the chunks, if the device can.

    Raises
    ------
    UsageError
        If ``overlap`` is neither True nor False. Other options are checked where they are used.
    """

    steps: int | None = None
    shift: float | None = None
    prompt_cache: int = PROMPT_CACHE
    overlap: bool = True

    def __post_init__(self) -> None:
        flag(self.overlap, "overlap")

"""Options of a session or pool, for all of its rows."""

from __future__ import annotations

from dataclasses import dataclass

from seko_runtime.arguments import flag

PROMPT_CACHE = 8  # prompts in the cache; a prompt of Wan 1.3B takes 90 MiB on the device


@dataclass(frozen=True)
class VideoOptions:
    """Options of the rows of a video artifact.

    Parameters
    ----------
    steps : int, optional
        Denoise passes; default: the artifact's.
    shift : float, optional
        Warp of the timesteps; default: the artifact's.
    prompt_cache : int
        Number of prompts that the prompt cache holds.
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

"""Options of a pool of video sessions."""

from __future__ import annotations

from dataclasses import dataclass

from seko_runtime.arguments import flag

PROMPT_CACHE = 8  # prompts in the cache; a prompt of Wan takes 4 MiB on the device


@dataclass(frozen=True)
class VideoOptions:
    """Options of a pool of video sessions, chosen when the pool is opened.

    Parameters
    ----------
    steps : int, optional
        Number of denoise passes for each chunk; default: the number that the artifact was built with.
    shift : float, optional
        Warp of the timesteps (see `warped_timesteps`); default: the warp that the artifact was built with.
    prompt_cache : int
        Largest number of encoded prompts that the pool keeps for reuse.
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

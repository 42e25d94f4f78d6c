"""The timesteps of a chunk's passes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seko_export.config.stream import StreamConfig
from seko_export.errors import UsageError
from seko_runtime.errors import UsageError as SessionUsageError
from seko_runtime.video.schedule import MAX_PASSES, schedule_tables, sigmas_of, warped_timesteps

if TYPE_CHECKING:  # presets with their own schedule are read before torch is imported
    from torch import Tensor


# Update rules after a pass: fresh noise, a step of Euler's method, or Euler's method with latents rounded to
# bfloat16.
SAMPLERS = ("renoise", "euler", "euler-bf16")


@dataclass(frozen=True)
class Schedule:
    """The timesteps of the passes of one chunk.

    Parameters
    ----------
    timesteps : tuple of float
        Timestep of each denoise pass, 0..1000, descending. Self-Forcing: 1000, 750, 500, 250 warped with shift 5.
    context_timestep : float
        Timestep of the context pass, which writes the clean K and V, and of conditioning frames in every pass.
    shift : float or None
        Shift of the warp from which the timesteps result, if any. A session with another number of passes uses it.
    own_sigmas : tuple of float
        Noise level of each pass, for a model whose timesteps are rounded. If empty: timesteps / 1000.
    renoise_sigmas : tuple of float
        Noise level to which the result of each pass except the last is renoised. If empty: the noise level of the next
        pass.
    sampler : str
        Update rule from a pass's result to the next pass's latents, one of `SAMPLERS`.
    """

    timesteps: tuple[float, ...]
    context_timestep: float = 0.0
    shift: float | None = None
    own_sigmas: tuple[float, ...] = ()
    renoise_sigmas: tuple[float, ...] = ()
    sampler: str = SAMPLERS[0]

    def __post_init__(self) -> None:
        if not self.timesteps or any(not 0.0 < t <= 1000.0 for t in self.timesteps):
            raise UsageError(f"timesteps must lie in (0, 1000], got {self.timesteps}")
        if len(self.timesteps) > MAX_PASSES:
            raise UsageError(f"{len(self.timesteps)} denoise passes, expected at most {MAX_PASSES}")
        if any(a <= b for a, b in zip(self.timesteps, self.timesteps[1:], strict=False)):
            raise UsageError(f"timesteps must fall, got {self.timesteps}")
        if not 0.0 <= self.context_timestep <= 1000.0:
            raise UsageError(f"context_timestep must lie in [0, 1000], got {self.context_timestep}")
        if self.shift is not None and not (self.shift > 0 and math.isfinite(self.shift)):
            raise UsageError(f"shift must be positive, got {self.shift}")
        if self.sampler not in SAMPLERS:
            raise UsageError(f"sampler is {self.sampler!r}, expected one of {', '.join(SAMPLERS)}")
        passes = len(self.timesteps)
        for name, levels, wanted in (
            ("own_sigmas", self.own_sigmas, passes),
            ("renoise_sigmas", self.renoise_sigmas, passes - 1),
        ):
            if levels and (len(levels) != wanted or not all(0.0 < level <= 1.0 for level in levels)):
                raise UsageError(f"{name} must be {wanted} noise levels in (0, 1], got {levels}")

    @classmethod
    def warped(cls, steps: tuple[float, ...] = (1000.0, 750.0, 500.0, 250.0), shift: float = 5.0) -> Schedule:
        """Return the schedule that results from `warped_timesteps`, the formula that sessions use for another number of
        passes."""
        try:
            return cls(warped_timesteps(steps, shift), shift=shift)
        except SessionUsageError:
            raise UsageError(f"shift must be positive, got {shift}") from None

    @property
    def sigmas(self) -> tuple[float, ...]:
        """Noise level of each denoise pass."""
        return self.own_sigmas or sigmas_of(self.timesteps)

    def tables(self, stream: StreamConfig) -> dict[str, Tensor]:
        """Return the constants of which each program reads the entry of its pass, with the names and shapes of
        `schedule_tables`."""
        import torch

        tables = schedule_tables(
            self.timesteps,
            self.context_timestep,
            stream.batch,
            stream.chunk_frames,
            sigmas=self.own_sigmas,
            renoise_sigmas=self.renoise_sigmas,
        )
        return {name: torch.from_numpy(table) for name, table in tables.items()}

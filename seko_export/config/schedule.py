"""The timesteps of a chunk's passes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from seko_export.config.stream import StreamConfig
from seko_export.errors import UsageError
from seko_runtime.controls.strengths import EARLIER, MOTION, trained_level
from seko_runtime.errors import UsageError as SessionUsageError
from seko_runtime.video.manifest import MAX_PASSES
from seko_runtime.video.schedule import (
    LAST_TIME,
    UNIPC,
    Passes,
    schedule_tables,
    sigmas_of,
    unipc_passes,
    warped_timesteps,
)

if TYPE_CHECKING:  # presets with their own schedule are read before torch is imported
    from torch import Tensor


USUAL_STEPS = (1000.0, 750.0, 500.0, 250.0)  # Self-Forcing's, before the warp
# Update rules after a pass: fresh noise, a step of Euler's method, Euler's method with latents rounded to bfloat16, or
# UniPC of order 2.
RENOISE, EULER, EULER_BF16 = "renoise", "euler", "euler-bf16"
SAMPLERS = (RENOISE, EULER, EULER_BF16, UNIPC)


@dataclass(frozen=True)
class Schedule:
    """The timesteps of the passes of one chunk.

    Parameters
    ----------
    timesteps : tuple of float
        Timestep of each denoise pass, 0..1000, descending. Self-Forcing: 1000, 750, 500, 250 warped with shift 5.
    context_timestep : float
        Timestep of the context pass, which writes the keys and values of the clean chunk. Conditioning frames have this
        timestep in every pass.
    shift : float or None
        Shift of the warp that produced the timesteps; None if no warp produced the timesteps. A session with another
        number of passes uses the same shift.
    own_sigmas : tuple of float
        Noise level of each pass, for a model whose timesteps are rounded. If empty: timesteps / 1000.
    renoise_sigmas : tuple of float
        Noise level to which the result of each pass except the last is renoised. If empty: the noise level of the next
        pass.
    sampler : str
        Update rule from a pass's result to the next pass's latents, one of `SAMPLERS`.
    first_timesteps : tuple of float
        Timestep of each pass of a stream's first chunk. Empty: the timesteps of any chunk.
    first_sigmas : tuple of float
        Noise level of each pass of the first chunk. Empty: first_timesteps / 1000.
    """

    timesteps: tuple[float, ...]
    context_timestep: float = 0.0
    shift: float | None = None
    own_sigmas: tuple[float, ...] = ()
    renoise_sigmas: tuple[float, ...] = ()
    sampler: str = RENOISE
    first_timesteps: tuple[float, ...] = ()
    first_sigmas: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.timesteps:
            raise UsageError("timesteps must lie in (0, 1000], got ()")
        for name, times in (("timesteps", self.timesteps), ("first_timesteps", self.first_timesteps)):
            if any(not 0.0 < time <= 1000.0 for time in times):
                raise UsageError(f"{name} must lie in (0, 1000], got {times}")
            if any(a <= b for a, b in pairwise(times)):
                raise UsageError(f"{name} must fall, got {times}")
        if len(self.every_timestep) > MAX_PASSES:
            raise UsageError(f"{len(self.every_timestep)} denoise passes, expected at most {MAX_PASSES}")
        if not 0.0 <= self.context_timestep <= 1000.0:
            raise UsageError(f"context_timestep must lie in [0, 1000], got {self.context_timestep}")
        if self.shift is not None and not (self.shift > 0 and math.isfinite(self.shift)):
            raise UsageError(f"shift must be positive, got {self.shift}")
        if self.sampler not in SAMPLERS:
            raise UsageError(f"sampler is {self.sampler!r}, expected one of {', '.join(SAMPLERS)}")
        if self.sampler == UNIPC and self.renoise_sigmas:
            raise UsageError(
                f"renoise_sigmas {self.renoise_sigmas}: the sampler {UNIPC} adds no noise; leave them out"
            )
        passes = len(self.timesteps)
        for name, levels, wanted in (
            ("own_sigmas", self.own_sigmas, passes),
            ("renoise_sigmas", self.renoise_sigmas, passes - 1),
            ("first_sigmas", self.first_sigmas, len(self.first_timesteps)),
        ):
            if levels and (len(levels) != wanted or not all(0.0 < level <= 1.0 for level in levels)):
                raise UsageError(f"{name} must be {wanted} noise levels in (0, 1], got {levels}")

    @classmethod
    def warped(
        cls, steps: tuple[float, ...] = USUAL_STEPS, shift: float = 5.0, first_steps: tuple[float, ...] = ()
    ) -> Schedule:
        """Return the schedule of `warped_timesteps`, the formula that sessions use for their own number of passes.
        ``first_steps`` are the steps of a stream's first chunk, if the first chunk has passes of its own."""
        return cls(_warped(steps, shift), shift=shift, first_timesteps=_warped(first_steps, shift))

    @classmethod
    def trained(cls, timesteps: tuple[float, ...], shift: float) -> Schedule:
        """Return a schedule with the given timesteps. Each pass has the noise level of the training timestep that is
        nearest to the timestep of the pass.

        The timesteps of training are the 1000 warped whole numbers 1 to 1000; schedulers of CausVid and Self-Forcing
        look up a pass's noise level among the noise levels of these timesteps.
        """
        _warped(timesteps, shift)  # which refuses an impossible shift
        return cls(timesteps, shift=shift, own_sigmas=tuple(trained_level(time, shift) for time in timesteps))

    @classmethod
    def unipc(cls, steps: int = 4, shift: float = 5.0) -> Schedule:
        """Return the schedule of Wan's UniPC scheduler; see `unipc_passes`."""
        passes = unipc_passes(steps, shift)
        return cls(tuple(passes.timesteps), shift=shift, own_sigmas=passes.levels, sampler=UNIPC)

    @property
    def every_timestep(self) -> tuple[float, ...]:
        """Timesteps of a chunk's passes. If a stream's first chunk has passes of its own, the timesteps of these passes
        follow."""
        return self.timesteps + self.first_timesteps

    @property
    def sigmas(self) -> tuple[float, ...]:
        """Noise level of each denoise pass."""
        return self.own_sigmas or sigmas_of(self.timesteps)

    def passes_of(self, chunk: int) -> int:
        """Number of denoise passes of a chunk; ``chunk`` is the chunk's number in the stream, and the first chunk has
        number 0."""
        return len(self.timesteps if chunk else self.first_timesteps or self.timesteps)

    def scaled_passes(self, stream: StreamConfig) -> int:
        """Return the number of passes whose times and noise levels the strength of an input video scales."""
        return 0 if stream.strength is None else 1 if stream.motion_strength else len(self.timesteps)

    @property
    def least_strength(self) -> float:
        """Smallest strength with which the first pass of StreamDiffusionV2 is not at a later time than the second one,
        however much the video moves."""
        following = self.timesteps[1] if len(self.timesteps) > 1 else 0.0
        return following / LAST_TIME + EARLIER / LAST_TIME + MOTION

    def tables(self, stream: StreamConfig) -> dict[str, Tensor]:
        """Return the schedule's constants, with the names and shapes of `schedule_tables`. Each constant has an entry
        for each pass, from which the programs read."""
        import torch

        if stream.rolling:
            return self._rolling_tables(stream)
        tables = schedule_tables(
            Passes(self.timesteps, self.own_sigmas, self.renoise_sigmas),
            self.context_timestep,
            stream.batch,
            stream.chunk_frames,
            first=Passes(self.first_timesteps, self.first_sigmas) if self.first_timesteps else None,
            sampler=self.sampler,
            scaled=self.scaled_passes(stream),
        )
        return {name: torch.from_numpy(table) for name, table in tables.items()}

    def _rolling_tables(self, stream: StreamConfig) -> dict[str, Tensor]:
        """Return the tables of passes over several chunks. They have an entry for a pass of any later chunk, then one
        for each pass of the first chunk, in which one chunk after the other enters the window; and in each entry a
        number for each frame of the window, [W]."""
        import torch

        times, levels = self.first_timesteps, self.first_sigmas or sigmas_of(self.first_timesteps)
        after, count = (*levels[1:], 0.0), len(self.first_timesteps)
        rows: dict[str, list[list[float]]] = {
            name: [] for name in ("timestep", "sigma", "sigma_next", "draw", "entered")
        }
        for newest in (count - 1, *range(count)):  # number of the window's newest chunk
            steps = [newest - chunk for chunk in range(count)]  # passes that each chunk has behind it
            inside = [step >= 0 for step in steps]
            at = [max(0, step) for step in steps]
            rows["timestep"].append([times[step] for step in at])
            rows["sigma"].append([levels[step] for step in at])
            rows["sigma_next"].append([after[step] for step in at])
            rows["draw"].append([step + 1 for step in at])
            rows["entered"].append([float(there) for there in inside])
        whole = {"draw": torch.int64, "entered": torch.int64}
        tables = {
            f"rolling.{name}": torch.tensor(values, dtype=torch.float64)
            .to(whole.get(name, torch.float32))
            .repeat_interleave(stream.chunk_frames, 1)
            for name, values in rows.items()
        }
        return tables | {
            "schedule.first_draw": torch.zeros(1, dtype=torch.int64),
            "schedule.context_timestep": torch.tensor([self.context_timestep]),
        }


def _warped(steps: tuple[float, ...], shift: float) -> tuple[float, ...]:
    try:
        return warped_timesteps(steps, shift)
    except SessionUsageError:
        raise UsageError(f"shift must be positive, got {shift}") from None

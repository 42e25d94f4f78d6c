"""Timesteps and noise levels of a chunk's passes, as tables. Exporter and sessions share the formulas. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import real_number, whole_number
from seko_runtime.errors import UsageError
from seko_runtime.video.manifest import Schedule, VideoManifest

MAX_PASSES = 1024  # largest number of denoise passes in a manifest
LAST_TIME = 1000.0  # timestep of pure noise
# prefix of the names of weights that a build computed for its timesteps, with an entry for each pass
OF_TIMES = "of_times."


def warped_timesteps(steps: int | Sequence[float], shift: float) -> tuple[float, ...]:
    """Return the descending timesteps of the denoise passes: ``1000 * shift*s / (1 + (shift-1)*s)`` for ``s = step /
    1000``.

    Parameters
    ----------
    steps : int or sequence of float
        Timesteps before the warp, in (0, 1000]; a number n stands for n evenly spaced timesteps 1000 * (1 - i/n).
    shift : float
        Strength of the warp: above 1 more passes are at high noise; 1 changes nothing. Self-Forcing uses 5.

    Raises
    ------
    UsageError
        If there are no steps or too many, or a number is out of range.
    """
    # A shift smaller than the rounding error of 1 would make the formula's divisor 0.
    shift = real_number(shift, "shift", "a positive shift")
    if 1.0 + (shift - 1.0) <= 0:
        raise UsageError(f"shift is {shift}, expected a positive shift")
    if not isinstance(steps, Sequence) or isinstance(steps, str | bytes):
        steps = whole_number(steps, "steps", 1, MAX_PASSES)
        steps = tuple(LAST_TIME * (1 - i / steps) for i in range(steps))
    parts = tuple(step / 1000.0 for step in steps)
    times = (1000.0 * shift * s / (1.0 + (shift - 1.0) * s) for s in parts)
    # by rounding, 1 + (shift - 1) may be slightly below shift
    return tuple(min(time, LAST_TIME) for time in times)


def schedule_tables(
    timesteps: Sequence[float],
    context_timestep: float,
    batch: int,
    chunk_frames: int,
    *,
    sigmas: Sequence[float] = (),
    renoise_sigmas: Sequence[float] = (),
) -> dict[str, NDArray[np.generic]]:
    """Return the schedule's constants, of which each program reads the entry of its pass: P denoise passes and the
    context pass.

    Parameters
    ----------
    timesteps : sequence of float
        Timesteps of the P denoise passes, in (0, 1000], descending.
    context_timestep : float
        Timestep of the context pass and of conditioning frames, 0..1000.
    batch, chunk_frames : int
        Number B of streams in a call, and number F of latent frames in a chunk.
    sigmas : sequence of float
        Noise levels of the P denoise passes; default: `sigmas_of` the timesteps.
    renoise_sigmas : sequence of float
        P - 1 noise levels to which the passes except the last are renoised; default: the noise levels of the next
        passes.

    Returns
    -------
    dict of str to numpy.ndarray
        ``schedule.timestep`` [P+1, B, F] float32; ``schedule.sigma`` and ``schedule.sigma_next`` [P, 1] float32, of
        which the last ``sigma_next`` is 0; ``schedule.draw`` [P, 1] int64, the number of the noise that a pass adds;
        ``schedule.first_draw`` [1] int64; ``schedule.context_timestep`` [1] float32.

    Raises
    ------
    UsageError
        If the timesteps are not descending, or a timestep is out of range.
    """
    falling = all(a > b for a, b in pairwise(timesteps))
    if not timesteps or not falling or not all(0.0 < time <= LAST_TIME for time in timesteps):
        raise UsageError(f"timesteps must fall and lie in (0, 1000], got {tuple(timesteps)[:8]}")
    if not 0.0 <= context_timestep <= LAST_TIME:
        raise UsageError(f"context_timestep must lie in [0, 1000], got {context_timestep}")
    own = tuple(sigmas or sigmas_of(timesteps))
    after = tuple(renoise_sigmas or own[1:])
    if (len(own), len(after)) != (len(timesteps), len(timesteps) - 1):
        raise UsageError(
            f"{len(own)} sigmas and {len(after)} renoise_sigmas, expected {len(timesteps)} and one less"
        )
    times = np.array([*timesteps, context_timestep], np.float32)
    return {
        "schedule.timestep": np.tile(times[:, None, None], (1, batch, chunk_frames)),
        "schedule.sigma": np.array(own, np.float32)[:, None],
        "schedule.sigma_next": np.array([*after, 0.0], np.float32)[:, None],
        "schedule.draw": np.arange(1, len(timesteps) + 1, dtype=np.int64)[:, None],
        "schedule.first_draw": np.zeros(1, np.int64),
        "schedule.context_timestep": np.array([context_timestep], np.float32),
    }


def sigmas_of(timesteps: Sequence[float]) -> tuple[float, ...]:
    """Return the noise level of each timestep."""
    return tuple(time / 1000.0 for time in timesteps)


def rescheduled(
    manifest: VideoManifest, steps: int | None, shift: float | None
) -> tuple[VideoManifest, dict[str, NDArray[np.generic]]]:
    """Return a manifest with another number of denoise passes, and the tables that replace the weights of the same
    names.

    Parameters
    ----------
    manifest : VideoManifest
        The artifact's manifest.
    steps : int or None
        Number of denoise passes; default: the number that the artifact was built with.
    shift : float or None
        Warp of the timesteps (see `warped_timesteps`); default: the warp that the artifact was built with.

    Raises
    ------
    UsageError
        If ``shift`` is neither passed nor in the artifact; if the engines do not read timesteps from a table, or read
        other tables that were computed for the artifact's timesteps; or if the artifact has a KV cache for each pass
        and the number of passes differs.
    """
    old = manifest.workload.schedule
    shift = old.shift if shift is None else shift
    if shift is None:
        raise UsageError("this artifact does not say the shift of its schedule; give shift beside steps")
    shift = real_number(shift, "shift", "a positive shift")
    passes = old.denoise_passes if steps is None else whole_number(steps, "steps", 1, MAX_PASSES)
    timesteps = warped_timesteps(passes, shift)
    if not manifest.has_context and len(timesteps) != old.denoise_passes:
        raise UsageError(
            f"steps is {len(timesteps)}, but this artifact has a cache for each of its {old.denoise_passes} passes"
        )
    chunk_frames = manifest.workload.stream.chunk_frames
    tables = schedule_tables(timesteps, old.context_timestep, manifest.call_rows, chunk_frames)
    own = {weight.name for weight in manifest.weights} & set(tables)
    if "schedule.timestep" not in own:
        raise UsageError("this artifact has no table schedule.timestep, so its passes cannot be changed")
    computed = sorted(weight.name for weight in manifest.weights if weight.name.startswith(OF_TIMES))
    if computed and timesteps != old.timesteps:
        raise UsageError(
            f"{', '.join(computed)} was computed for the times of this artifact's passes, so they cannot be changed; "
            "leave out steps and shift"
        )
    weights = tuple(
        replace(weight, shape=tables[weight.name].shape) if weight.name in own else weight
        for weight in manifest.weights
    )
    schedule = Schedule(
        len(timesteps), timesteps, sigmas_of(timesteps), old.context_timestep, old.sampler, shift
    )
    workload = replace(manifest.workload, schedule=schedule)
    return replace(manifest, workload=workload, weights=weights), {name: tables[name] for name in own}

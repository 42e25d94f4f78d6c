"""Timesteps and noise levels of a chunk's passes, as tables. The exporter and sessions of the runtime share the
formulas of this module. Numpy only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import real_number, whole_number
from seko_runtime.errors import UsageError
from seko_runtime.video.manifest import MAX_PASSES, VideoManifest

LAST_TIME = 1000.0  # timestep of pure noise
UNIPC = "unipc"  # name of the sampler whose passes `unipc_passes` and `unipc_weights` describe
UNIPC_LARGEST = 0.999  # noise level of UniPC's first pass, before the warp
# prefix of the names of weights that a build computed for its timesteps, with an entry for each pass
OF_TIMES = "of_times."


def warped_timesteps(steps: int | Sequence[float], shift: float) -> tuple[float, ...]:
    """Return the descending timesteps of the denoise passes, which are ``1000 * shift*s / (1 + (shift-1)*s)`` for ``s =
    step / 1000``.

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


@dataclass(frozen=True)
class Passes:
    """The denoise passes of a chunk.

    Parameters
    ----------
    timesteps : sequence of float
        P timesteps in (0, 1000], descending.
    sigmas : sequence of float
        Noise levels of the P denoise passes; default: `sigmas_of` the timesteps.
    renoise_sigmas : sequence of float
        P - 1 noise levels to which the passes except the last are renoised; default: the noise levels of the next
        passes.
    """

    timesteps: Sequence[float]
    sigmas: Sequence[float] = ()
    renoise_sigmas: Sequence[float] = ()

    @property
    def levels(self) -> tuple[float, ...]:
        """Noise level before each denoise pass."""
        return tuple(self.sigmas or sigmas_of(self.timesteps))

    @property
    def next_levels(self) -> tuple[float, ...]:
        """Noise level after each denoise pass; 0 after the last pass."""
        return (*(self.renoise_sigmas or self.levels[1:]), 0.0)

    def check(self) -> None:
        """Raise a UsageError if the timesteps are not descending or out of range, or the lists differ in length."""
        falling = all(a > b for a, b in pairwise(self.timesteps))
        if not self.timesteps or not falling or not all(0.0 < time <= LAST_TIME for time in self.timesteps):
            raise UsageError(f"timesteps must fall and lie in (0, 1000], got {tuple(self.timesteps)[:8]}")
        passes = len(self.timesteps)
        if (len(self.levels), len(self.next_levels)) != (passes, passes):
            raise UsageError(
                f"{len(self.levels)} sigmas and {len(self.next_levels) - 1} renoise_sigmas, expected {passes} and one "
                "less"
            )


def schedule_tables(
    passes: Passes,
    context_timestep: float,
    batch: int,
    chunk_frames: int,
    *,
    first: Passes | None = None,
    sampler: str = "",
    scaled: int = 0,
) -> dict[str, NDArray[np.generic]]:
    """Return the tables of constants that the programs index by the number of a pass.

    A table of passes has P entries: those of ``passes``, then those of ``first``. The table of timesteps has a further
    entry at its end, the timestep of the context pass.

    Parameters
    ----------
    passes : Passes
        Denoise passes of a chunk.
    context_timestep : float
        Timestep of the context pass and of conditioning frames, 0..1000.
    batch, chunk_frames : int
        Number of rows B and of latent frames in a chunk F.
    first : Passes, optional
        Denoise passes of a stream's first chunk; default: the passes of any chunk.
    sampler : str
        Name of the update rule between passes.
    scaled : int
        Number of passes, from a chunk's first one on, whose times and noise levels a session scales: all passes of
        ``passes``, and then also all of ``first``, or fewer. 0: none, and there is no table of them.

    Returns
    -------
    dict of str to numpy.ndarray
        The tables by name. ``schedule.timestep`` is [P+1, B, F] float32. ``schedule.sigma`` and ``schedule.sigma_next``
        are [P, 1] float32; the ``sigma_next`` of a chunk's last pass is 0. The noise generator takes a draw number:
        ``schedule.first_draw`` [1] int64 is 0, for the noise from which a chunk starts, and ``schedule.draw`` [P, 1]
        int64 counts from 1, for the noise that is added after each pass of a chunk.
        ``schedule.context_timestep`` is [1] float32. With the sampler `UNIPC` there is also ``schedule.solver`` [P, 8]
        float32, of `unipc_weights`. With ``scaled`` there is ``schedule.scaled`` [P+1, 2] float32: 1 if a session
        scales the pass, and 1 if it scales the next one, otherwise 0; the last entry is the context pass's, zeros.

    Raises
    ------
    UsageError
        If timesteps are not descending, or out of range.
    """
    chunks = [passes] if first is None else [passes, first]
    for chunk in chunks:
        chunk.check()
    if not 0.0 <= context_timestep <= LAST_TIME:
        raise UsageError(f"context_timestep must lie in [0, 1000], got {context_timestep}")
    times = [time for chunk in chunks for time in chunk.timesteps]
    sigmas = [level for chunk in chunks for level in chunk.levels]
    next_sigmas = [level for chunk in chunks for level in chunk.next_levels]
    draws = [number + 1 for chunk in chunks for number in range(len(chunk.timesteps))]
    every_time = np.array([*times, context_timestep], np.float32)
    tables: dict[str, NDArray[np.generic]] = {
        "schedule.timestep": np.tile(every_time[:, None, None], (1, batch, chunk_frames)),
        "schedule.sigma": np.array(sigmas, np.float32)[:, None],
        "schedule.sigma_next": np.array(next_sigmas, np.float32)[:, None],
        "schedule.draw": np.array(draws, np.int64)[:, None],
        "schedule.first_draw": np.zeros(1, np.int64),
        "schedule.context_timestep": np.array([context_timestep], np.float32),
    }
    if scaled:
        # by pass: whether a session scales it, and whether it scales the next one
        each = [
            [float(scaled >= len(passes.timesteps) or n < scaled) for n in range(len(c.timesteps))]
            for c in chunks
        ]
        own = [level for chunk in each for level in chunk]
        following = [level for chunk in each for level in (*chunk[1:], 0.0)]
        tables["schedule.scaled"] = np.array([*zip(own, following, strict=True), (0.0, 0.0)], np.float32)
    if sampler == UNIPC:
        weights = [unipc_weights(chunk.levels) for chunk in chunks]
        tables["schedule.solver"] = np.concatenate(weights).astype(np.float32)
    return tables


def unipc_passes(steps: int, shift: float) -> Passes:
    """Return the passes of Wan's UniPC scheduler. The noise levels are evenly spaced below 1 and then warped, and the
    timesteps are rounded down to whole numbers.

    Raises
    ------
    UsageError
        If a number is out of range.
    """
    steps = whole_number(steps, "steps", 1, MAX_PASSES)
    spaced = tuple(LAST_TIME * UNIPC_LARGEST * (1 - i / steps) for i in range(steps))
    levels = sigmas_of(warped_timesteps(spaced, shift))
    return Passes(tuple(float(int(LAST_TIME * level)) for level in levels), levels)


def unipc_weights(sigmas: Sequence[float]) -> NDArray[np.float64]:
    """Return the weights of UniPC's sums, of order 2 in the form bh2, [P, 8].

    UniPC (arXiv 2302.04867) predicts clean latents and integrates exactly in the logarithm of the signal-to-noise
    ratio; latents are ``(1 - sigma) * clean + sigma * noise``. Pass i of UniPC gets latents x. The pass first corrects
    x, then predicts the latents of the next pass. The corrected latents and the predicted latents are weighted sums.
    The weights depend only on the noise levels. The corrected latents are ``w0*x + w1*(corrected latents of pass i-1) +
    w2*clean[i-1] + w3*clean[i-2] + w4*clean[i]``. The next latents are ``w5*corrected + w6*clean[i] + w7*clean[i-1]``.

    The first pass corrects nothing. The first pass and the last pass predict with order 1.

    Parameters
    ----------
    sigmas : sequence of float
        P noise levels in (0, 1], descending; after the last pass the level is 0.
    """
    levels = [*sigmas, 0.0]
    logs = [_log_ratio(level) for level in levels]
    weights = np.zeros((len(sigmas), 8))
    weights[0, 0] = 1.0
    for at in range(len(sigmas)):
        if at:
            alpha, width = 1.0 - levels[at], logs[at] - logs[at - 1]
            order = min(2, at)
            ratio = 0.0 if order == 1 else width / (logs[at - 2] - logs[at - 1])
            before, now = _corrector(order, width, ratio)
            weights[at, 1] = levels[at] / levels[at - 1]
            weights[at, 2:5] = _sum(alpha, width, [before * ratio, now])
        alpha, width = 1.0 - levels[at + 1], logs[at + 1] - logs[at]
        second = 0 < at < len(sigmas) - 1
        ratio = width / (logs[at - 1] - logs[at]) if second else 0.0
        weights[at, 5] = levels[at + 1] / levels[at]
        weights[at, 6], weights[at, 7], _ = _sum(alpha, width, [0.5 * ratio, 0.0])
    return weights


def _log_ratio(sigma: float) -> float:
    """Return log((1 - sigma) / sigma), which is infinite at 0 and 1."""
    if sigma in (0.0, 1.0):
        return math.inf if sigma == 0.0 else -math.inf
    return math.log((1.0 - sigma) / sigma)


def _sum(alpha: float, width: float, differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the weights of clean latents m0, m1 and m2 in ``-alpha * B * (m0 + d1*(m1 - m0) + d2*(m2 - m0))``, where B
    is expm1(-width)."""
    scale = -alpha * math.expm1(-width)
    older, newer = differences
    return scale * (1.0 - older - newer), scale * older, scale * newer


def _corrector(order: int, width: float, ratio: float) -> tuple[float, float]:
    """Return two weights: that of the difference to the previous pass, which is scaled by ``ratio``, and that of the
    difference to this pass."""
    if order == 1:
        return 0.0, 0.5
    step = -width
    base = math.expm1(step)
    first = base / step - 1.0
    right = first / base, (first / step - 0.5) * 2.0 / base
    # rho0 + rho1 = right[0] and rho0 / ratio + rho1 = right[1]
    now = (right[0] - ratio * right[1]) / (1.0 - ratio)
    return right[0] - now, now


def sigmas_of(timesteps: Sequence[float]) -> tuple[float, ...]:
    """Return the noise level of each timestep."""
    return tuple(time / 1000.0 for time in timesteps)


def rescheduled(
    manifest: VideoManifest, steps: int | None, shift: float | None
) -> tuple[VideoManifest, dict[str, NDArray[np.generic]]]:
    """Return a manifest with another number of denoise passes, and the new tables by name. The new tables replace the
    weights with the same names. If neither ``steps`` nor ``shift`` is given, nothing changes and there is no table.

    Parameters
    ----------
    manifest : VideoManifest
        The artifact's manifest.
    steps : int or None
        Number of denoise passes; default: the artifact's number. The number of passes of a first chunk with passes of
        its own does not change.
    shift : float or None
        Warp of the timesteps (see `warped_timesteps`); default: the warp that the artifact was built with.

    Raises
    ------
    UsageError
        If ``shift`` is neither given nor in the artifact; if the engines do not read timesteps from a table, or read
        other tables that were computed for the artifact's timesteps; if the artifact has a cache for each pass and
        the number of passes differs; or if ``shift`` is given and the first chunk has passes of its own.
    """
    if steps is None and shift is None:
        return manifest, {}
    old = manifest.workload.schedule
    if 0 < old.scaled_passes < old.denoise_passes:
        raise UsageError(
            "the time of this artifact's first pass follows its input video, so its passes cannot be changed; leave "
            "out steps and shift"
        )
    if old.first_timesteps and shift is not None:
        raise UsageError(
            f"the first chunk of this artifact has passes of its own, at {', '.join(map(str, old.first_timesteps))}, "
            "so shift cannot be changed; leave out shift"
        )
    shift = old.shift if shift is None else shift
    if shift is None:
        raise UsageError("this artifact does not say the shift of its schedule; give shift beside steps")
    shift = real_number(shift, "shift", "a positive shift")
    passes = old.denoise_passes if steps is None else whole_number(steps, "steps", 1, MAX_PASSES)
    changed = unipc_passes(passes, shift) if old.sampler == UNIPC else Passes(warped_timesteps(passes, shift))
    timesteps = tuple(changed.timesteps)
    if manifest.pass_caches and len(timesteps) != old.denoise_passes:
        raise UsageError(
            f"steps is {len(timesteps)}, but this artifact has a cache for each of its {old.denoise_passes} passes"
        )
    chunk_frames = manifest.workload.stream.chunk_frames
    first = Passes(old.first_timesteps, old.first_sigmas) if old.first_timesteps else None
    scaled = len(timesteps) if old.scaled_passes >= old.denoise_passes else old.scaled_passes
    tables = schedule_tables(
        changed,
        old.context_timestep,
        manifest.call_rows,
        chunk_frames,
        first=first,
        sampler=old.sampler,
        scaled=scaled,
    )
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
    schedule = replace(
        old,
        denoise_passes=len(timesteps),
        timesteps=timesteps,
        sigmas=changed.levels,
        shift=shift,
        scaled_passes=scaled,
    )
    workload = replace(manifest.workload, schedule=schedule)
    return replace(manifest, workload=workload, weights=weights), {name: tables[name] for name in own}

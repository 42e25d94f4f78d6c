"""The schedule of a video build, from the options about passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from seko_export.config.schedule import Schedule
from seko_export.errors import UsageError
from seko_export.options.declaration import BuildOptions, Group, declared, flag
from seko_runtime.errors import UsageError as SessionUsageError
from seko_runtime.video.schedule import UNIPC, warped_timesteps

_FIELDS = {"sigmas": "own_sigmas"}  # options that are spelled differently from the field of `Schedule`


def asked_schedule(options: BuildOptions, usual: Schedule) -> Schedule:
    """Return the schedule that the options ask for. Values that the options leave out are those of the usual schedule.

    New timesteps have noise levels of their own, so with ``--timesteps`` the usual noise levels are left out.

    Raises
    ------
    UsageError
        If an option does not fit the others, or the usual schedule.
    """
    asked: dict[str, Any] = {
        field.name: getattr(options, field.name)
        for field, option in declared()
        if option.group is Group.PASSES and getattr(options, field.name) is not None
    }
    if not asked:
        return usual
    lists = [name for name in ("timesteps", "first_timesteps") if name in asked]
    if options.shift is not None and not lists:
        raise UsageError(
            f"--shift {options.shift} warps --timesteps or --first-timesteps: give one of them, too"
        )
    own_levels = options.timesteps is not None or options.renoise_sigmas is not None
    if options.sampler == UNIPC and usual.renoise_sigmas and not own_levels:
        raise UsageError(
            f"--sampler {UNIPC} adds no noise, and the model's own passes are renoised to {usual.renoise_sigmas}: give "
            "--timesteps, too"
        )
    try:
        if options.shift is not None:
            asked |= {name: warped_timesteps(asked[name], options.shift) for name in lists}
        if options.timesteps is not None:
            usual = replace(usual, own_sigmas=(), renoise_sigmas=(), shift=options.shift)
        else:  # the shift of the first chunk alone
            asked.pop("shift", None)
        if options.first_timesteps is not None:
            usual = replace(usual, first_sigmas=())
        return replace(usual, **{_FIELDS.get(name, name): value for name, value in asked.items()})
    except (UsageError, SessionUsageError) as fault:
        raise UsageError(_of_options(str(fault), [*asked])) from None


def _of_options(fault: str, asked: list[str]) -> str:
    """Return an error of `Schedule` for the user of the options ``asked``: a field at the error's start is spelled as
    its option. All options stand before the error, unless the error names the only one."""
    field, _, rest = fault.partition(" ")
    option = next((name for name in asked if _FIELDS.get(name, name) == field), None)
    sentence = fault if option is None else f"{flag(option)} {rest}"
    return sentence if asked == [option] else f"{', '.join(map(flag, asked))}: {sentence}"

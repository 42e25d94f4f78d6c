"""`--fit`: the options that a build takes to fit into a GPU's memory, in the order of what they cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from seko_export.config.video import VideoBuild
from seko_export.errors import UsageError
from seko_export.options.declaration import BuildOptions
from seko_export.roofline.gpus import GPUS, room_of
from seko_export.video.plan.memory import peak_bytes

_SIZE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?([MG])i?B", re.IGNORECASE)
_UNITS = {"m": 10**6, "g": 10**9}

ConfigOf = Callable[[BuildOptions], VideoBuild]


@dataclass(frozen=True)
class Saving:
    """An option that makes a build smaller: its spelling, its fields, what it costs, and whether it makes passes
    faster, so that it stays where a later one made it needless."""

    option: str
    fields: Mapping[str, Any]
    costs: str
    speeds: bool = False


# From what costs nothing but a moment at a prompt, to what slows every pass.
SAVINGS = (
    Saving("--offload-text", {"offload_text": True}, "a new prompt waits for the encoder's layers"),
    Saving("--decode-frames 1", {"decode_frames": 1}, "a chunk is decoded in several calls"),
    Saving("--fp4-kv", {"fp4_kv": True}, "cached frames are rounded to 4.5 bits a number", speeds=True),
    Saving("--fp8", {"fp8": True}, "matmuls are rounded to fp8", speeds=True),
    Saving("--camera pass", {"camera": "pass"}, "every pass computes what each layer adds for the camera"),
    Saving("--offload-cache", {"offload_cache": True}, "every pass copies the cache, layer by layer"),
    Saving("--offload-layers", {"offload_layers": True}, "every pass copies the layers' weights"),
)
RESIDENT = Saving(
    "--resident-window", {"resident_window": True}, "there is room for it, and passes are faster"
)
NO_VAE = "--no-vae"


@dataclass(frozen=True)
class Fitted:
    """Options with which a build fits, its bytes, and a sentence on each option that was added."""

    options: BuildOptions
    peak_bytes: int
    notes: tuple[str, ...]


def memory_of(text: str, arch: str | None) -> int:
    """Return the bytes that ``--fit`` names: a size, or the GPU of a name. A GiB counts as a GB, see `roofline.gpus`.

    Parameters
    ----------
    text : str
        Such as ``24GB``, ``24 GiB`` or ``rtx4090``.
    arch : str, optional
        The architecture for which the build is, ``sm_NN``; None for a CPU.

    Raises
    ------
    UsageError
        If the text is neither, or the GPU has another architecture.
    """
    size = _SIZE.fullmatch(text.strip())
    if size is not None:
        number, unit = size.groups()
        return int(float(number) * _UNITS[unit.lower()])
    gpu = GPUS.get(text)
    if gpu is None:
        raise UsageError(f"--fit {text[:80]!r}: expected memory, such as 24GB, or one of {', '.join(GPUS)}")
    if gpu.arch != arch:
        built = "a CPU" if arch is None else arch
        raise UsageError(
            f"--fit {text}: that is {gpu.arch}, and this build is for {built}; give its memory, "
            f"--fit {gpu.memory_bytes // 10**9}GB, or build on such a GPU"
        )
    return gpu.memory_bytes


def fit(options: BuildOptions, memory_bytes: int, config_of: ConfigOf) -> Fitted:
    """Return the options of a build with those of `SAVINGS` that it takes to fit, and with a resident window if that
    fits, too. Options that the user gave stay.

    Parameters
    ----------
    options : BuildOptions
        The options, of which ``fit`` is not used.
    memory_bytes : int
        The GPU's memory.
    config_of : callable
        Function that returns the configuration of options, with the media that count.

    Raises
    ------
    UsageError
        If the build does not fit with all of them; the message says what would.
    """
    plain = replace(options, fit=None)
    peak = _Peaks(plain, memory_bytes, config_of)
    chosen = _needed(plain, peak)
    if not peak.fits(_with(plain, chosen)):
        raise UsageError(_refusal(options, chosen, peak))
    if not _asked(plain, RESIDENT) and not any("offload_cache" in saving.fields for saving in chosen):
        chosen = (*chosen, RESIDENT) if peak.fits(_with(plain, (*chosen, RESIDENT))) else chosen
    found = _with(plain, chosen)
    notes = [f"--fit {options.fit}: {_known(peak(found)) / 1e9:.1f} of {peak.room / 1e9:.1f} GB"]
    notes += [f"--fit adds {saving.option}: {saving.costs}" for saving in chosen]
    return Fitted(found, _known(peak(found)), tuple(notes))


def what_fits(options: BuildOptions, memory_bytes: int, config_of: ConfigOf) -> list[dict[str, Any]]:
    """Return what makes a build fit that does not: the options that ``--fit`` would add and, where they are not enough,
    a smaller ring or no VAE. The parameters are those of `fit`.

    Returns
    -------
    list of dict
        At most one entry: ``options`` to add, as the command line spells them, and the build's ``peak_bytes`` with
        them. Empty if nothing is enough.
    """
    plain = replace(options, fit=None)
    peak = _Peaks(plain, memory_bytes, config_of)
    chosen = _needed(plain, peak)
    words, found = [saving.option for saving in chosen], _with(plain, chosen)
    if not peak.fits(found):
        smaller = _first_smaller(options, found, peak)
        if smaller is None:
            return []
        words, found = [*words, smaller[0]], smaller[1]
    return [{"options": " ".join(words), "peak_bytes": _known(peak(found))}]


class _Peaks:
    """The bytes of builds, each computed once, and the room that they have on a GPU; None for a build that cannot have
    its options. The ``plain`` build can, or its own error is raised."""

    def __init__(self, plain: BuildOptions, memory_bytes: int, config_of: ConfigOf) -> None:
        config = config_of(plain)
        self.room, self._config_of = room_of(memory_bytes, config.target.device), config_of
        self._known: dict[BuildOptions, int | None] = {plain: peak_bytes(config)}

    def __call__(self, options: BuildOptions) -> int | None:
        if options not in self._known:
            try:
                self._known[options] = peak_bytes(self._config_of(options))
            except UsageError:
                self._known[options] = None
        return self._known[options]

    def fits(self, options: BuildOptions) -> bool:
        needed = self(options)
        return needed is not None and needed <= self.room


def _needed(plain: BuildOptions, peak: _Peaks) -> tuple[Saving, ...]:
    """Return the savings with which a build fits; all that save something, if it does not."""
    chosen: tuple[Saving, ...] = ()
    least = _known(peak(plain))
    for saving in (saving for saving in SAVINGS if not _asked(plain, saving)):
        if least <= peak.room:
            break
        bytes_with = peak(_with(plain, (*chosen, saving)))
        if bytes_with is not None and bytes_with < least:
            chosen, least = (*chosen, saving), bytes_with
    for saving in reversed([saving for saving in chosen[:-1] if not saving.speeds]):
        fewer = tuple(other for other in chosen if other is not saving)
        chosen = fewer if peak.fits(_with(plain, fewer)) else chosen
    return chosen


def _refusal(options: BuildOptions, chosen: Sequence[Saving], peak: _Peaks) -> str:
    """Return the sentence on a build that does not fit, with the first smaller one that does."""
    smallest = _with(replace(options, fit=None), chosen)
    with_all = f" with {', '.join(saving.option for saving in chosen)}" if chosen else ""
    missing = (
        f"--fit {options.fit}: this build needs {_known(peak(smallest)) / 1e9:.1f} GB{with_all}, and there are "
        f"{peak.room / 1e9:.1f} for tensors"
    )
    smaller = _first_smaller(options, smallest, peak)
    if smaller is None:
        return f"{missing}; neither a smaller ring nor leaving out the VAE is enough: take a smaller model or picture"
    words, found = smaller
    tiny = ", and a tiny decoder as --vae takes little more" if words == NO_VAE else ""
    return f"{missing}; {words} would fit, with {_known(peak(found)) / 1e9:.1f} GB{tiny}"


def _first_smaller(
    options: BuildOptions, smallest: BuildOptions, peak: _Peaks
) -> tuple[str, BuildOptions] | None:
    """Return the first smaller stream that fits: its option, and ``smallest`` with it."""
    rings: list[tuple[str, dict[str, Any]]] = []
    if options.ring_frames is None and not options.layer_rings:
        rings = [(f"--ring-frames {frames}", {"ring_frames": frames}) for frames in (15, 12, 9, 6)]
    none: dict[str, Any] = {
        "vae": None,
        "no_vae": True,
        "vae_kind": None,
        "vae_encoder": None,
        "vae_fp8": False,
    }
    for words, fields in [*rings, (NO_VAE, none)]:
        found = replace(smallest, **fields)
        if peak.fits(found):
            return words, found
    return None


def _asked(options: BuildOptions, saving: Saving) -> bool:
    """Return whether the user's options already decide what a saving would."""
    if "fp4_kv" in saving.fields:
        return options.fp4_kv or options.kv is not None
    return any(getattr(options, name) != getattr(BuildOptions, name) for name in saving.fields)


def _with(options: BuildOptions, savings: Sequence[Saving]) -> BuildOptions:
    return replace(options, **{name: value for saving in savings for name, value in saving.fields.items()})


def _known(counted: int | None) -> int:
    assert counted is not None, "a build that was resolved cannot be counted"
    return counted

"""Exact detectors on frames: which shapes are there, of which colour, and how they move. Nothing is learnt.

A pixel is a mixture of the background and at most one shape's colour (antialiasing and blur mix, too), so each
pixel is given to the colour whose mixing line it lies nearest to. Shape comes from the harmonics of that colour's
mask around its centre, motion from the paths of centre, angle and area.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from scripts.train_sample.captions import Description, Figure, parse
from scripts.train_sample.shapes import (
    BACKGROUNDS,
    COLOURS,
    SIDE,
    SIZES,
    background_pictures,
    colour_table,
)

LEAST_ALPHA = 0.35  # a fainter mixture says too little about its colour
LEAST_AREA = 40.0  # pixels; the smallest triangle has 147, a pulsing one at its smallest 76
LEAST_PRESENCE = 0.6  # share of the frames in which a shape has to be there
STILL = 2.0  # pixels of root-mean-square movement below which a shape stays in its place
PULSING = 0.12  # relative swing of the area; 28 % in radius give 0.4, rounding and blur 0.03
SPINNING = math.radians(1.5)  # a frame; scenes spin at 3.4 to 6.9 degrees
LARGEST_ORBIT = 26.0  # pixels; scenes draw up to 22
# Harmonics 3 and 4. A sharp square has 0.43, a sharp triangle 0.56; blur takes from that (a VAE at 26 dB half of a
# small square's), so the marks stand lower. A disc has nearly none.
_IDEAL = {"disc": (0.0, 0.0), "square": (0.0, 0.32), "triangle": (0.42, 0.0)}
CLIP_LATENTS = 15  # latent frames of a judged clip: 57 video frames, 3.6 s
ATTRIBUTES = ("count", "background", "colour", "shape", "motion", "size")


@dataclass(frozen=True)
class Verdict:
    """Which attributes of a description a clip shows, and whether it shows all of them."""

    right: dict[str, bool]
    seen: Description | None

    @property
    def followed(self) -> bool:
        """All attributes that the description names are there."""
        return all(self.right.values())


def judge(video: Tensor, wanted: Description) -> Verdict:
    """Compare a clip with what was asked for.

    Parameters
    ----------
    video : Tensor
        [3, T, 96, 96] in -1..1, at least 17 frames at 16 fps.
    wanted : Description
        The prompt, parsed.

    Returns
    -------
    Verdict
        ``colour`` says that the set of colours is the one wanted; shape, motion and size are right if they are
        for every wanted figure.
    """
    seen = look(video)
    by_colour = {f.colour: f for f in seen.figures}
    pairs = [(f, by_colour.get(f.colour)) for f in wanted.figures]
    right = {
        "count": len(seen.figures) == len(wanted.figures),
        "background": seen.background == wanted.background,
        "colour": sorted(by_colour) == sorted(f.colour for f in wanted.figures),
        **{
            name: all(got is not None and getattr(got, name) == getattr(f, name) for f, got in pairs)
            for name in ("shape", "motion")
        },
        "size": all(f.size is None or (got is not None and got.size == f.size) for f, got in pairs),
    }
    return Verdict(right, seen)


def verdicts_of(clips: Iterable[Tensor], prompts: Sequence[str]) -> list[Verdict]:
    """Judge a clip [3, T, 96, 96] for each prompt."""
    return [judge(clip, parse(prompt)) for clip, prompt in zip(clips, prompts, strict=True)]


def summary(verdicts: Sequence[Verdict]) -> dict[str, float | int]:
    """Return the share of clips that show each attribute, and all of them."""
    total = len(verdicts)
    shares = {name: sum(v.right[name] for v in verdicts) / total for name in ATTRIBUTES}
    return {"clips": total, "followed": sum(v.followed for v in verdicts) / total, **shares}


def look(video: Tensor) -> Description:
    """Describe a clip [3, T, 96, 96] in -1..1: background, and each colour that is there with shape and motion."""
    picture = ((video.float() + 1) / 2).permute(1, 0, 2, 3)  # [T, 3, 96, 96]
    backs = background_pictures(picture.device)
    # The median over the pixels: shapes cover less than half of the frame.
    still = picture.median(dim=0).values
    back = int((still - backs).abs().sum(1).flatten(1).median(dim=1).values.argmin())
    alpha, owner = _mixture(picture, backs[back])
    figures = []
    for index, colour in enumerate(COLOURS):
        mask = torch.where(owner == index, alpha, 0.0)  # [T, 96, 96]
        area = mask.sum((1, 2))
        there = area > LEAST_AREA
        if float(there.float().mean()) >= LEAST_PRESENCE:
            figures.append(_figure(colour, mask, there))
    return Description(tuple(figures), list(BACKGROUNDS)[back])


def _mixture(picture: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
    """Return [T, 96, 96] each: the share of a shape's colour in the pixel, 0..1, and which colour (-1: none)."""
    span = colour_table(picture.device)[:, :, None, None] - back  # [8, 3, 96, 96]
    offset = picture - back  # [T, 3, 96, 96]
    far = offset.square().sum(1)  # [T, 96, 96]
    best = torch.full_like(far, math.inf)
    alpha, owner = torch.zeros_like(far), torch.full(far.shape, -1, device=far.device)
    for index, line in enumerate(span):
        along, length = (offset * line).sum(1), line.square().sum(0)
        share = (along / length).clamp(0, 1)
        miss = far - share * (2 * along - share * length)  # |offset - share * line| squared
        closer = miss < best
        best = torch.where(closer, miss, best)
        alpha, owner = torch.where(closer, share, alpha), torch.where(closer, index, owner)
    return alpha, torch.where(alpha < LEAST_ALPHA, -1, owner)


def _figure(colour: str, mask: Tensor, there: Tensor) -> Figure:
    """Measure one colour's mask [T, 96, 96] in the frames where it is ``there`` [T]."""
    when = there.nonzero()[:, 0]
    mask = mask[when]
    area = mask.sum((1, 2))  # [T']
    axis = torch.arange(SIDE, device=mask.device) + 0.5
    centre = torch.stack(
        [_round_mean(mask.sum(1), axis), _round_mean(mask.sum(2), axis)], dim=1
    )  # [T', 2] x, y
    dx = torch.remainder(axis - centre[:, :1] + SIDE / 2, SIDE) - SIDE / 2
    dy = torch.remainder(axis - centre[:, 1:] + SIDE / 2, SIDE) - SIDE / 2
    z = torch.complex(dx[:, None, :].expand_as(mask), dy[:, :, None].expand_as(mask))
    square = z.real.square() + z.imag.square()
    length = square.sqrt()
    # Mixtures far from the middle are not the shape: generated frames may hold specks.
    mask = torch.where(length < 2.2 * (area / math.pi).sqrt()[:, None, None].clamp_min(6.0), mask, 0.0)
    twice = z * z
    harmonics = {
        k: (mask * power).sum((1, 2)) / (mask * size).sum((1, 2)).clamp_min(1e-6)
        for k, power, size in ((3, twice * z, square * length), (4, twice * twice, square * square))
    }
    inner = length < 0.3 * (area / math.pi).sqrt()[:, None, None]
    fill = float(((mask * inner).sum((1, 2)) / inner.sum((1, 2)).clamp_min(1)).median())
    three, four = (float(harmonics[k].abs().median()) for k in (3, 4))
    shape = "ring" if fill < 0.6 else min(_IDEAL, key=lambda name: math.dist(_IDEAL[name], (three, four)))
    fold = {"triangle": 3, "square": 4}.get(shape)
    angle = None if fold is None else harmonics[fold].angle() / fold
    named_size = _size(float(area.sqrt().mean()) ** 2, shape)
    return Figure(colour, shape, _motion(when, centre, area, angle, fold), named_size)


def _round_mean(weight: Tensor, axis: Tensor) -> Tensor:
    """Return the mean place [T] on a torus of 96 pixels of weights [T, 96], exact for what spans less than half."""
    turn = 2 * math.pi * axis / SIDE
    middle = torch.atan2((weight * turn.sin()).sum(1), (weight * turn.cos()).sum(1)) * SIDE / (2 * math.pi)
    offset = torch.remainder(axis - middle[:, None] + SIDE / 2, SIDE) - SIDE / 2
    return middle + (weight * offset).sum(1) / weight.sum(1)


def _size(area: float, shape: str) -> str:
    """Return the size whose range of radii is nearest, for a mean area in pixels."""
    per_square = {
        "disc": math.pi,
        "square": 2.56,
        "triangle": 1.25**2 * 3 * math.sqrt(3) / 4,
        "ring": 0.75 * math.pi,
    }
    radius = math.sqrt(area / per_square[shape])
    return min(SIZES, key=lambda name: abs(math.log(radius / (sum(SIZES[name]) / 2))))


def _motion(when: Tensor, centre: Tensor, area: Tensor, angle: Tensor | None, fold: int | None) -> str:
    """Name the motion from frame numbers [T'], centres [T', 2], areas [T'] and angles [T'] up to a turn / fold."""
    t = when.double()
    path = _unwrap(centre.double(), SIDE)  # [T', 2]
    if float((path - path.mean(0)).square().sum(1).mean().sqrt()) < STILL:
        if float(area.std() / area.mean()) > PULSING:
            return "pulse"
        if angle is not None and fold is not None:
            slope = _line(t, _unwrap(angle.double()[:, None], 2 * math.pi / fold))[0]
            if abs(float(slope)) > SPINNING:
                return "spin"
        return "still"
    slope, miss = _line(t, path)
    if miss < 1.5 and float(slope.abs().min()) < 0.25 * float(slope.abs().max()):
        return "drift"
    circle = _circle_miss(t, path)
    return "orbit" if circle < 0.3 and circle < _zigzag_miss(t, path) else "bounce"


def _unwrap(x: Tensor, period: float) -> Tensor:
    """Undo jumps along axis 0 of what is known up to ``period``."""
    step = torch.remainder(x.diff(dim=0) + period / 2, period) - period / 2
    return torch.cat((x[:1], x[:1] + step.cumsum(0)))


def _line(t: Tensor, x: Tensor) -> tuple[Tensor, float]:
    """Return the slopes of x [T, D] over t and the root-mean-square distance from the lines."""
    tc, xc = t - t.mean(), x - x.mean(0)
    slope = (tc[:, None] * xc).sum(0) / tc.square().sum()
    return slope, float((xc - tc[:, None] * slope).square().sum(1).mean().sqrt())


def _circle_miss(t: Tensor, path: Tensor) -> float:
    """Return the distance from the best circle at constant speed, relative to the path's extent.

    Centre, radius and phase by least squares at each of many speeds. A straight line is an arc of a large circle,
    so circles that no scene draws do not count.
    """
    z = torch.complex(path[:, 0], path[:, 1])
    rates = torch.linspace(1 / 120, 1 / 12, 150).to(t)
    turn = torch.exp(2j * math.pi * torch.cat((rates, -rates))[:, None] * t)  # [R, T']
    mean_turn, mean_z = turn.mean(1), z.mean()
    spread = (1 - mean_turn.abs().square()).clamp_min(1e-9)
    radius = ((turn.conj() * z).mean(1) - mean_turn.conj() * mean_z) / spread
    centre = mean_z - radius * mean_turn
    miss = (z - centre[:, None] - radius[:, None] * turn).abs().square().mean(1)
    drawn = radius.abs() < LARGEST_ORBIT
    extent = (z - mean_z).abs().square().mean()
    return float((miss / extent).masked_fill(~drawn, math.inf).min().sqrt())


def _zigzag_miss(t: Tensor, path: Tensor) -> float:
    """Return the distance from the best triangle wave along each axis, relative to the path's extent."""
    rates = torch.logspace(math.log10(1 / 130), math.log10(1 / 7), 90).to(t)
    cycles = rates[:, None, None] * t + torch.linspace(0, 1, 21).to(t)[:-1, None]  # [R, P, T']
    wave = 4 * (torch.remainder(cycles, 1.0) - 0.5).abs() - 1
    wave = wave - wave.mean(-1, keepdim=True)
    power = wave.square().mean(-1).clamp_min(1e-9)
    centred = path - path.mean(0)
    missed = 0.0
    for axis in range(2):
        x = centred[:, axis]
        missed += float((x.square().mean() - (wave * x).mean(-1).square() / power).min().clamp_min(0))
    return math.sqrt(missed / float(centred.square().sum(1).mean()))


def save_sheet(path: Path, clips: Sequence[Tensor]) -> None:
    """Draw clips [3, T, H, W] in -1..1, a line each, their pictures beside one another."""
    lines = torch.cat([torch.cat(list(clip.unbind(1)), 2) for clip in clips], 1).float().clamp(-1, 1)
    picture = ((lines + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).save(path)

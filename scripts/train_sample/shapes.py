"""Scenes of one to three moving shapes, drawn at random and rendered at any time; captions are not here.

A scene is a closed-form function of time, so a clip of any length can start anywhere in an endless stream. Each
shape lives in a lane of its own (one, two or three lanes a frame), so shapes never hide each other. The motions:

- drift: along the lane at a constant speed; what leaves at one side enters at the other;
- bounce: diagonally, turning back sharply at the lane's borders (a triangle wave along each axis);
- orbit: on a circle at a constant speed;
- spin: in its place, turning at a constant rate (squares and triangles: a turning disc looks still);
- pulse: in its place, its size swinging by 28 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

SIDE = 96  # pixels
FPS = 16
MOST = 3  # shapes in a scene
SHAPES = ("disc", "square", "triangle", "ring")
MOTIONS = ("drift", "bounce", "orbit", "spin", "pulse")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (225, 45, 45),
    "orange": (250, 145, 30),
    "yellow": (250, 235, 70),
    "green": (50, 205, 75),
    "cyan": (70, 225, 235),
    "blue": (60, 105, 250),
    "purple": (185, 75, 225),
    "white": (245, 245, 245),
}
# Top and bottom colour; equal for a plain one.
BACKGROUNDS: dict[str, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    "dark": ((16, 16, 20), (16, 16, 20)),
    "dark blue": ((22, 30, 84), (22, 30, 84)),
    "dark green": ((14, 58, 34), (14, 58, 34)),
    "dark red": ((84, 20, 26), (84, 20, 26)),
    "grey": ((100, 100, 104), (100, 100, 104)),
    "grey gradient": ((30, 30, 34), (140, 140, 144)),
    "blue gradient": ((14, 18, 50), (60, 84, 150)),
    "green gradient": ((10, 34, 24), (60, 120, 84)),
    "purple gradient": ((30, 14, 44), (110, 76, 130)),
}
SIZES: dict[str, tuple[float, float]] = {"small": (8.5, 9.6), "medium": (12.0, 13.6), "large": (16.5, 19.5)}
PULSE_DEPTH = 0.28
COUNT_ODDS = (0.45, 0.35, 0.20)  # of one, two, three shapes, as they are judged
MORE_SHAPES = (0.25, 0.35, 0.40)  # scenes of three shapes fail most, so more of them are trained on
REACH = (1.0, 0.8 * math.sqrt(2), 1.25, 1.0)  # of each shape, in radii
HELD_OUT_SHARE = 10  # one combination in ten is never trained on


@dataclass(frozen=True)
class Scenes:
    """B scenes of up to three shapes: attributes, then the numbers of their motion; time is in video frames.

    Parameters
    ----------
    count, background : Tensor
        [B] int64.
    shape, colour, size, motion : Tensor
        [B, 3] int64, indices into the tables above; meaningless from ``count`` on.
    sideways : Tensor
        [B] bool, lanes are columns instead of rows.
    rgb : Tensor
        [B, 3, 3] float32, the shape's own colour, near its name's.
    radius, angle : Tensor
        [B, 3] float64, pixels and radians, at time 0.
    centre, swing, swing_rate, swing_phase : Tensor
        [B, 3, 2] float64, along and across the lane: pixels; amplitude of the triangle wave; cycles a frame; cycles.
    drift, orbit, orbit_rate, orbit_phase, spin_rate, pulse, pulse_rate, pulse_phase : Tensor
        [B, 3] float64: pixels a frame; pixels; cycles a frame; cycles; radians a frame; share; cycles a frame; cycles.
    """

    count: Tensor
    background: Tensor
    shape: Tensor
    colour: Tensor
    size: Tensor
    motion: Tensor
    sideways: Tensor
    rgb: Tensor
    radius: Tensor
    angle: Tensor
    centre: Tensor
    swing: Tensor
    swing_rate: Tensor
    swing_phase: Tensor
    drift: Tensor
    orbit: Tensor
    orbit_rate: Tensor
    orbit_phase: Tensor
    spin_rate: Tensor
    pulse: Tensor
    pulse_rate: Tensor
    pulse_phase: Tensor

    def __len__(self) -> int:
        return self.count.shape[0]

    def __getitem__(self, index: Tensor | slice) -> Scenes:
        return Scenes(*(getattr(self, f.name)[index] for f in fields(self)))

    def join(self, other: Scenes) -> Scenes:
        """Return these scenes and then the others."""
        return Scenes(*(torch.cat((getattr(self, f.name), getattr(other, f.name))) for f in fields(self)))


def draw_scenes(
    count: int,
    seed: int,
    device: str = "cpu",
    *,
    held_out: bool = False,
    count_odds: Sequence[float] = COUNT_ODDS,
) -> Scenes:
    """Draw scenes, all of them from the training combinations or all from the held-out ones.

    Parameters
    ----------
    count : int
        Scenes to draw.
    seed : int
        Equal seeds give equal scenes on one kind of device.
    device : str
        Where the tensors live.
    held_out : bool
        Which side of the split.
    count_odds : sequence of float
        Of one, two and three shapes, 1 in all.

    Returns
    -------
    Scenes
        ``count`` scenes.
    """
    generator = torch.Generator(device).manual_seed(seed)
    scenes: Scenes | None = None
    while scenes is None or len(scenes) < count:
        # One draw in ten is held out: enough candidates for a good chance to be done in one round.
        drawn = _draw(count * (14 if held_out else 1) + 16, generator, device, count_odds)
        drawn = drawn[is_held_out(drawn) == held_out]
        scenes = drawn if scenes is None else scenes.join(drawn)
    return scenes[slice(0, count)]


def render(scenes: Scenes, times: Tensor) -> Tensor:
    """Draw every scene at its times, antialiased by signed distances.

    Parameters
    ----------
    scenes : Scenes
        B scenes.
    times : Tensor
        [T] or [B, T], video frames since the start of the stream, on the scenes' device.

    Returns
    -------
    Tensor
        [B, 3, T, 96, 96] float32 in -1..1.
    """
    device, batch = scenes.count.device, len(scenes)
    t = times.to(torch.float64).expand(batch, -1)[:, None, :]  # [B, 1, T]
    along, across, radius, angle = (x.float() for x in _poses(scenes, t))  # each [B, 3, T]
    flat = scenes.sideways[:, None, None]
    x, y = torch.where(flat, across, along), torch.where(flat, along, across)
    grid = torch.arange(SIDE, device=device, dtype=torch.float32) + 0.5
    dx = _wrap(grid - x[..., None])[..., None, :]  # [B, 3, T, 1, 96]
    dy = _wrap(grid - y[..., None])[..., :, None]
    cos, sin = angle.cos()[..., None, None], angle.sin()[..., None, None]
    picture = background_pictures(device)[scenes.background][:, :, None]  # [B, 3, 1, 96, 96]
    picture = picture.expand(-1, -1, t.shape[-1], -1, -1)
    for i in range(MOST):
        px = dx[:, i] * cos[:, i] + dy[:, i] * sin[:, i]  # [B, T, 96, 96], the shape's own axes
        py = dy[:, i] * cos[:, i] - dx[:, i] * sin[:, i]
        distance = signed_distance(px, py, radius[:, i, :, None, None], scenes.shape[:, i])
        shown = (scenes.count > i)[:, None, None, None]
        alpha = ((0.5 - distance).clamp(0, 1) * shown)[:, None]  # [B, 1, T, 96, 96]
        colour = scenes.rgb[:, i][:, :, None, None, None]
        picture = picture + alpha * (colour - picture)
    return picture * 2 - 1


def background_pictures(device: torch.device | str) -> Tensor:
    """Return every background [9, 3, 96, 96] float32 in 0..1."""
    ends = torch.tensor(list(BACKGROUNDS.values()), device=device, dtype=torch.float32) / 255  # [9, 2, 3]
    down = torch.linspace(0, 1, SIDE, device=device)
    rows = ends[:, 0, :, None] * (1 - down) + ends[:, 1, :, None] * down  # [9, 3, 96]
    return rows[..., None].expand(-1, -1, -1, SIDE)


def colour_table(device: torch.device | str) -> Tensor:
    """Return the named shape colours [8, 3] float32 in 0..1."""
    return torch.tensor(list(COLOURS.values()), device=device, dtype=torch.float32) / 255


def is_held_out(scenes: Scenes) -> Tensor:
    """Return [B] bool: the scene's combination of (colour, shape, motion) triples and background is held out."""
    triple = (scenes.colour * len(SHAPES) + scenes.shape) * len(MOTIONS) + scenes.motion
    there = torch.arange(MOST, device=triple.device) < scenes.count[:, None]
    return held_out_combinations(torch.where(there, triple + 1, 0), scenes.background)


def held_out_combinations(triples: Tensor, backgrounds: Tensor) -> Tensor:
    """Return [B] bool for combinations, by a hash.

    Parameters
    ----------
    triples : Tensor
        [B, 3] int64 in any order, ``(colour * 4 + shape) * 5 + motion + 1``, 0 for a shape that is not there.
    backgrounds : Tensor
        [B] int64.
    """
    base, word, key = len(COLOURS) * len(SHAPES) * len(MOTIONS) + 1, 0xFFFFFFFF, backgrounds
    for triple in triples.sort(dim=1).values.unbind(1):
        key = key * base + triple
    key = (key * 2654435761) & word
    key = key ^ (key >> 15)
    key = (key * 2246822519) & word
    return (key ^ (key >> 13)) % HELD_OUT_SHARE == 0


def _draw(count: int, generator: torch.Generator, device: str, count_odds: Sequence[float]) -> Scenes:
    n = (count, MOST)

    def uniform(low: float | Tensor, high: float | Tensor, *shape: int) -> Tensor:
        unit = torch.rand(shape or n, generator=generator, device=device, dtype=torch.float64)
        return low + (high - low) * unit

    def choice(options: int, *shape: int) -> Tensor:
        return torch.randint(options, shape or n, generator=generator, device=device)

    def sign(*shape: int) -> Tensor:
        return choice(2, *shape) * 2.0 - 1.0

    odds = torch.tensor(count_odds, device=device, dtype=torch.float64).cumsum(0)
    shapes = 1 + (uniform(0, 1, count)[:, None] >= odds[:-1]).sum(1)  # [B]
    shape, background = choice(len(SHAPES)), choice(len(BACKGROUNDS), count)
    colour = uniform(0, 1, count, len(COLOURS)).argsort(1)[:, :MOST]  # all different
    turnable = (shape == 1) | (shape == 2)
    motion = choice(len(MOTIONS))
    # Unturnable shapes would show no spin: they get one of the other four.
    motion = torch.where(
        (motion == 3) & ~turnable, torch.tensor([0, 1, 2, 4], device=device)[choice(4)], motion
    )
    size = choice(len(SIZES)).minimum(MOST - shapes[:, None])  # three shapes are small, two at most medium
    bounds = torch.tensor(list(SIZES.values()), device=device, dtype=torch.float64)[size]  # [B, 3, 2]
    radius = uniform(bounds[..., 0], bounds[..., 1])
    rgb = colour_table(device)[colour] + uniform(-0.03, 0.03, count, MOST, 3).float()

    reach = radius * torch.tensor(REACH, device=device, dtype=torch.float64)[shape]
    drifts, bounces, orbits, spins, pulses = ((motion == i).to(torch.float64) for i in range(len(MOTIONS)))
    lane = SIDE / shapes[:, None].to(torch.float64)  # height of a lane
    room = torch.stack((SIDE / 2 - reach - 1, lane / 2 - reach - 0.5), dim=-1)  # free half ranges
    swing = bounces[..., None] * room * uniform(0.8, 1.0, *n, 2)
    # The second speed must not copy the first: equal periods would draw a diamond, close to a circle.
    speed = torch.stack((uniform(1.5, 2.5), uniform(0.8, 1.2) * (lane / 24).clamp(1, 1.6)), dim=-1)
    rate = speed / (4 * swing.clamp_min(1e-3))
    rate[..., 1] = torch.where(
        (rate[..., 1] / rate[..., 0] - 1).abs() < 0.35, rate[..., 0] * 1.5, rate[..., 1]
    )
    orbit = orbits * uniform(5.0, 22.0).minimum(room[..., 1])
    orbit_rate = (uniform(1.3, 2.2) / (2 * math.pi * orbit.clamp_min(1.0))).clamp_max(1 / 18)
    pulse = pulses * PULSE_DEPTH
    used = swing + orbit[..., None] + (pulse * reach)[..., None]
    free = (room - used).clamp_min(0.0)
    order = uniform(0, 1, count, MOST).masked_fill(torch.arange(MOST, device=device) >= shapes[:, None], 2.0)
    middle = torch.stack(
        ((order.argsort(1).argsort(1) + 0.5) * lane, torch.zeros_like(lane.expand(n))), -1
    ).flip(-1)
    middle[..., 0] = SIDE / 2
    free[..., 0] = torch.where(motion == 0, SIDE / 2, free[..., 0])
    return Scenes(
        count=shapes,
        background=background,
        shape=shape,
        colour=colour,
        size=size,
        motion=motion,
        sideways=choice(2, count).bool(),
        rgb=rgb.clamp(0, 1),
        radius=radius,
        angle=uniform(0, 2 * math.pi),
        centre=middle + free * uniform(-1, 1, *n, 2),
        swing=swing,
        swing_rate=rate * bounces[..., None],
        swing_phase=uniform(0, 1, *n, 2),
        drift=drifts * uniform(0.9, 1.8) * sign(),
        orbit=orbit,
        orbit_rate=orbit_rate * sign(),
        orbit_phase=uniform(0, 1),
        spin_rate=spins * uniform(0.06, 0.12) * sign(),
        pulse=pulse,
        pulse_rate=uniform(1 / 28, 1 / 16),
        pulse_phase=uniform(0, 1),
    )


def _poses(s: Scenes, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return place along and across the lane, radius and angle, each [B, 3, T] float64, at t [B, 1, T]."""
    turn = 2 * math.pi * (s.orbit_rate[..., None] * t + s.orbit_phase[..., None])
    place = [
        s.centre[..., axis, None]
        + s.swing[..., axis, None]
        * _triangle(s.swing_rate[..., axis, None] * t + s.swing_phase[..., axis, None])
        + s.orbit[..., None] * (turn.cos(), turn.sin())[axis]
        for axis in range(2)
    ]
    beat = (2 * math.pi * (s.pulse_rate[..., None] * t + s.pulse_phase[..., None])).sin()
    along = torch.remainder(place[0] + s.drift[..., None] * t, SIDE)
    return (
        along,
        place[1],
        s.radius[..., None] * (1 + s.pulse[..., None] * beat),
        s.angle[..., None] + s.spin_rate[..., None] * t,
    )


def _triangle(cycles: Tensor) -> Tensor:
    """Return the triangle wave of period 1 between -1 and 1."""
    return 4 * (torch.remainder(cycles, 1.0) - 0.5).abs() - 1


def _wrap(offset: Tensor) -> Tensor:
    """Return the offset on the torus, in -48..48."""
    return torch.remainder(offset + SIDE / 2, SIDE) - SIDE / 2


def signed_distance(x: Tensor, y: Tensor, r: Tensor, shape: Tensor) -> Tensor:
    """Return [B, T, 96, 96] pixels outside the border, negative inside; r [B, T, 1, 1], shape [B]."""
    length = torch.sqrt(x * x + y * y)
    square = torch.maximum(x.abs(), y.abs()) - 0.8 * r
    # An equilateral triangle is three half planes at 120 degrees, each at half the circumradius.
    half = math.sqrt(3) / 2
    triangle = torch.maximum(torch.maximum(half * x - 0.5 * y, -half * x - 0.5 * y), y) - 0.5 * REACH[2] * r
    ring = (length - 0.75 * r).abs() - 0.25 * r
    shape = shape[:, None, None, None]
    return torch.where(
        shape == 0, length - r, torch.where(shape == 1, square, torch.where(shape == 2, triangle, ring))
    )

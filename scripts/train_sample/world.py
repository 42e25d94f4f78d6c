"""Small worlds for a camera: a plane tiled with shapes, seen from above, and walks over it.

A world goes on without end and repeats itself, so its first picture and the camera's poses say all that is to be seen.
The camera looks down: `w` and `s` move the view up and down the plane, `a` and `d` sideways, `j` and `l` turn it, `i`
and `k` (pitch) zoom in and out. Poses come from the product's own keyboard. Captions are in the words of `captions.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scripts.train_sample.shapes import BACKGROUNDS, COLOURS, SHAPES, SIDE, colour_table, signed_distance
from seko_runtime.controls.camera import CameraControl
from seko_runtime.controls.poses import VIDEO_PER_LATENT

PLAIN = [name for name in BACKGROUNDS if "gradient" not in name]
STEP = 8.0  # pixels that a latent frame of `w` or `d` moves the view
LARGEST_ZOOM = 1.5  # at the highest pitch; its inverse at the lowest
HIGHEST_PITCH = math.radians(85)
LONGEST_PRESS = 6  # latent frames
STILL, TWO_FIGURES = 0.1, 0.4  # shares: of presses without a key; of worlds with two kinds of figures


@dataclass(frozen=True)
class Worlds:
    """B worlds.

    Parameters
    ----------
    background : Tensor
        [B] int64, in `PLAIN`.
    shape, colour : Tensor
        [B, 2] int64, of the tiles in turn, like a chessboard's; equal in worlds with one kind of figure.
    period, radius, angle : Tensor
        [B] float32: side of a tile and radius of its figure in pixels at zoom 1; the tiles' turn in radians.
    offset : Tensor
        [B, 2] float32, pixels right and ahead: where the camera begins.
    """

    background: Tensor
    shape: Tensor
    colour: Tensor
    period: Tensor
    radius: Tensor
    angle: Tensor
    offset: Tensor

    def __len__(self) -> int:
        return len(self.background)

    def looking_like(self, other: Worlds) -> Worlds:
        """Return the same tiles with the figures and the background of another world."""
        return Worlds(
            other.background, other.shape, other.colour, self.period, self.radius, self.angle, self.offset
        )

    def where(self, taken: Tensor, other: Worlds) -> Worlds:
        """Return these worlds where ``taken`` [B] bool holds, and the others elsewhere."""

        def chosen(name: str) -> Tensor:
            mine = getattr(self, name)
            return torch.where(taken.view(-1, *[1] * (mine.dim() - 1)), mine, getattr(other, name))

        return Worlds(*(chosen(field.name) for field in fields(self)))


def draw_worlds(count: int, generator: torch.Generator, *, two_figures: float = TWO_FIGURES) -> Worlds:
    """Draw worlds on the generator's device."""
    device = generator.device

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator, device=device)

    def choice(options: int, *shape: int) -> Tensor:
        return torch.randint(options, (count, *shape), generator=generator, device=device)

    shape, colour = choice(len(SHAPES), 2), choice(len(COLOURS), 2)
    two = uniform(0, 1, 1) < two_figures
    period = uniform(36, 52)
    return Worlds(
        background=choice(len(PLAIN)),
        shape=torch.where(two, shape, shape[:, :1]),
        colour=torch.where(two, colour, colour[:, :1]),
        period=period,
        radius=period * uniform(0.26, 0.36),
        angle=torch.where(uniform(0, 1) < 0.5, 0.0, uniform(-math.pi / 4, math.pi / 4)),
        offset=uniform(0, 104, 2),
    )


def render(worlds: Worlds, views: Tensor) -> Tensor:
    """Draw every world from its camera, antialiased by signed distances.

    Parameters
    ----------
    worlds : Worlds
        B worlds.
    views : Tensor
        [B, T, 4] from `views_of`.

    Returns
    -------
    Tensor
        [B, 3, T, 96, 96] float32 in -1..1.
    """
    device = views.device
    # each [B, T, 1, 1]
    right, ahead, yaw, zoom = (channel[..., None, None] for channel in views.float().unbind(-1))
    grid = torch.arange(SIDE, device=device) + 0.5 - SIDE / 2
    x, y = grid / zoom, -grid[:, None] / zoom  # right and ahead of the camera, in the world's pixels

    def per_world(values: Tensor) -> Tensor:
        return values[:, None, None, None]

    east = right + x * yaw.cos() + y * yaw.sin()  # [B, T, 96, 96]
    north = ahead - x * yaw.sin() + y * yaw.cos()
    turn, period = per_world(worlds.angle), per_world(worlds.period)
    u = (east * turn.cos() + north * turn.sin() + per_world(worlds.offset[:, 0])) / period
    v = (north * turn.cos() - east * turn.sin() + per_world(worlds.offset[:, 1])) / period
    odd = torch.remainder(u.floor() + v.floor(), 2).bool()
    u, v = ((coordinate - coordinate.floor() - 0.5) * period for coordinate in (u, v))
    radius = worlds.radius[:, None, None, None]
    first_away, second_away = (signed_distance(u, -v, radius, worlds.shape[:, kind]) for kind in (0, 1))
    away = torch.where(odd, second_away, first_away)
    alpha = (0.5 - away * zoom).clamp(0, 1)[:, None]  # [B, 1, T, 96, 96]
    rgb = colour_table(device)[worlds.colour]  # [B, 2, 3]
    first, second = (rgb[:, kind, :, None, None, None] for kind in (0, 1))
    behind = torch.tensor([BACKGROUNDS[name][0] for name in PLAIN], device=device) / 255
    back = behind[worlds.background][:, :, None, None, None]
    return (back + alpha * (torch.where(odd[:, None], second, first) - back)) * 2 - 1


def captions_of(worlds: Worlds) -> list[str]:
    """Return a sentence for each world."""
    texts = []
    for back, shape, colour in zip(
        worlds.background.tolist(), worlds.shape.tolist(), worlds.colour.tolist(), strict=True
    ):
        figures = list(
            dict.fromkeys(f"a {list(COLOURS)[c]} {SHAPES[s]}" for c, s in zip(colour, shape, strict=True))
        )
        texts.append(f"{' and '.join(figures)} on a {PLAIN[back]} background")
    return texts


def draw_keys(frames: int, rng: random.Random) -> list[frozenset[str]]:
    """Return the keys of each step of a walk of so many latent frames: one or two are held for a while, or none."""
    rows: list[frozenset[str]] = []
    while len(rows) < VIDEO_PER_LATENT * frames:
        visible = (
            frozenset() if rng.random() < STILL else frozenset(rng.sample("wasdjlik", rng.choice((1, 1, 2))))
        )
        rows += [visible] * VIDEO_PER_LATENT * rng.randint(1, LONGEST_PRESS)
    return rows[: VIDEO_PER_LATENT * frames]


def walk(keys: Sequence[frozenset[str]] | str, frames: int) -> NDArray[np.float32]:
    """Return the poses [F, 3, 4] of the first ``frames`` latent frames, each in the one before."""
    camera = CameraControl.without_artifact(SIDE, SIDE, frames)
    text = (
        keys if isinstance(keys, str) else ",".join(f"{''.join(sorted(step)) or 'none'}-1" for step in keys)
    )
    camera.take({"keys": text})
    return camera.next_chunk()["camera"]


def views_of(poses: Tensor) -> Tensor:
    """Return what the camera sees in each video frame.

    Parameters
    ----------
    poses : Tensor
        [B, F, 3, 4] framewise, the first the identity.

    Returns
    -------
    Tensor
        [B, 4F - 3, 4] float64: place right and ahead in pixels, yaw in radians, zoom. Between two latent frames the
        camera moves evenly.
    """
    poses = poses.double()
    turn, place = (
        torch.eye(3, dtype=torch.float64, device=poses.device).expand(len(poses), 3, 3),
        poses.new_zeros(len(poses), 3),
    )
    states = []
    for pose in poses.unbind(1):
        place = place + (turn @ pose[:, :, 3:]).squeeze(-1)
        turn = turn @ pose[:, :, :3]
        yaw = torch.atan2(-turn[:, 2, 0], turn[:, 0, 0])
        pitch = torch.asin(-turn[:, 1, 2].clamp(-1, 1))
        states.append(torch.stack((STEP * place[:, 0], STEP * place[:, 2], yaw, pitch), -1))
    state = torch.stack(states, 1)  # [B, F, 4]
    spin = state[:, 1:, 2] - state[:, :-1, 2]
    spin = torch.remainder(spin + math.pi, 2 * math.pi) - math.pi
    step = torch.cat(
        (state[:, 1:, :2] - state[:, :-1, :2], spin[..., None], state[:, 1:, 3:] - state[:, :-1, 3:]), -1
    )
    share = torch.arange(1, VIDEO_PER_LATENT + 1, device=poses.device) / VIDEO_PER_LATENT
    between = state[:, :-1, None] + step[:, :, None] * share[:, None]  # [B, F - 1, 4, 4]
    views = torch.cat((state[:, :1], between.flatten(1, 2)), 1)
    zoom = LARGEST_ZOOM ** (views[..., 3:] / HIGHEST_PITCH)
    return torch.cat((views[..., :3], zoom), -1)

"""Judgement of a trained world sample: whether streams with the product's sampler follow camera and prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from scripts.train_sample.camera_dit import CameraDit
from scripts.train_sample.judge import save_sheet
from scripts.train_sample.progress import autocast
from scripts.train_sample.rollout import Conditions, LatentStream
from scripts.train_sample.shapes import SIDE
from scripts.train_sample.text import PromptTexts
from scripts.train_sample.train_vae import FrozenVae
from scripts.train_sample.world import STEP, captions_of
from scripts.train_sample.world_pool import OWN_ROWS, Walks, draw_walks, picture_rows, rows_at
from seko_export.families.wan_layout.picture_sizes import TABLE_FRAMES
from seko_runtime.controls.poses import VIDEO_PER_LATENT

SEED = 987_654  # of worlds and walks that training does not draw
REACH = 14  # pixels that a view is looked for to each side
PANS = {"w": (0, 1), "s": (0, -1), "a": (1, 0), "d": (-1, 0)}  # which way the picture moves: right, down
FOCAL_LENGTH = 500.0  # pixels, as the keyboard's camera has it
SWITCH_CHUNK = 2
SHEET_KEYS = ("w", "d", "l", "i", "wj", "k", "d", "w")


@torch.no_grad()
def walked(
    dit: CameraDit,
    table: Tensor,
    poses: Tensor,
    texts: list[Tensor],
    sigmas: tuple[float, ...],
    generator: torch.Generator,
) -> Tensor:
    """Generate chunks on the model's own cache, as the product does; a new text rebuilds the cache.

    Parameters
    ----------
    dit : CameraDit
        The model.
    table : Tensor
        [B, 20, F, h, w], the condition, of the first 30 frames where there are more.
    poses : Tensor
        [B, F, 3, 4] framewise.
    texts : list of Tensor
        Of each chunk, [B, text tokens, text_dim].
    sigmas, generator
        Noise levels of the passes; of the noise.

    Returns
    -------
    Tensor
        [B, 16, F, h, w] latents.
    """
    device, size = poses.device, dit.stream.chunk_frames
    intrinsics = torch.tensor([FOCAL_LENGTH, FOCAL_LENGTH, SIDE / 2, SIDE / 2], device=device)
    stream = LatentStream(dit, sigmas, generator, texts[0])
    made = []
    for chunk, text in enumerate(texts):
        if text is not texts[max(0, chunk - 1)]:
            stream.set_text(text, recache=True)
        frames = torch.arange(chunk * size, (chunk + 1) * size, device=device).expand(len(poses), -1)
        part = poses[:, chunk * size : (chunk + 1) * size]
        with autocast(device.type):
            camera = dit.camera_tokens(part, intrinsics.expand(len(poses), size, 4)).flatten(1, 2)
        rows = table[:, :, frames[0].clamp(max=TABLE_FRAMES - 1)]
        made.append(stream.make(Conditions(frames, rows, camera))[-1])
    return torch.cat(made, 2)


def shown(
    dit: CameraDit, vae: FrozenVae, texts: PromptTexts, walks: Walks, sigmas: tuple[float, ...], device: str,
    poses: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the model's video [B, 3, T, 96, 96] of walks, or of other ``poses`` over the same pictures."""
    size, rows = dit.stream.chunk_frames, min(walks.poses.shape[1], TABLE_FRAMES)  # those that are read
    picture = walks.video(size)[:, :, 0]
    own = picture_rows(vae, picture, min(rows, OWN_ROWS))
    tail = picture_rows(vae, picture[:1], rows) if rows > OWN_ROWS else own[:1]
    table = rows_at(own, tail, torch.arange(rows, device=device).expand(len(own), -1))
    before, after = texts(captions_of(walks.before)), texts(captions_of(walks.after))
    chunks = walks.poses.shape[1] // size
    switch = int(walks.switch.max())  # one place for all rows
    said = [after if switch and chunk >= switch else before for chunk in range(chunks)]
    generator = torch.Generator(device).manual_seed(SEED)
    frames = walked(dit, table, walks.poses if poses is None else poses, said, sigmas, generator)
    return torch.cat([vae.decode(part) for part in frames.split(16)])


def shifts(before: Tensor, after: Tensor) -> Tensor:
    """Return by how many pixels [B, 2] (right, down) each picture's middle moved, from two pictures [B, 3, 96, 96]."""
    side = SIDE - 2 * REACH
    middle = after[:, :, REACH : REACH + side, REACH : REACH + side]
    offsets = []
    for picture, seen in zip(middle, before, strict=True):
        windows = seen.unfold(1, side, 1).unfold(2, side, 1)  # [3, places, places, side, side]
        cost = (windows - picture[:, None, None]).abs().mean((0, 3, 4))  # [places, places]
        at = int(cost.argmin())
        place = [at // cost.shape[1], at % cost.shape[1]]
        fine = []
        for axis in (0, 1):
            line = cost[:, place[1]] if axis == 0 else cost[place[0]]
            i = min(max(place[axis], 1), len(line) - 2)
            low, here, high = (float(line[i + d]) for d in (-1, 0, 1))
            bend = low - 2 * here + high
            fine.append(i + (0.5 * (low - high) / bend if bend > 0 else 0.0))
        offsets.append([REACH - fine[1], REACH - fine[0]])
    return torch.tensor(offsets, dtype=torch.float64)


def psnr(picture: Tensor, other: Tensor) -> Tensor:
    """Return [B, T] dB of videos in -1..1."""
    return -10 * ((picture - other).square().mean((1, 3, 4)) / 4).clamp_min(1e-6).log10()


def pan_errors(video: Tensor, keys: list[str], first: int) -> tuple[Tensor, Tensor]:
    """Return measured shifts a latent frame [B, 2], and those commanded, from video frame ``first`` on."""
    measured = torch.stack(
        [
            shifts(video[:, :, at], video[:, :, at + VIDEO_PER_LATENT])
            for at in range(first, video.shape[2] - VIDEO_PER_LATENT, 2 * VIDEO_PER_LATENT)
        ]
    ).mean(0)
    asked = torch.tensor([PANS[key] for key in keys], dtype=torch.float64) * STEP
    return measured, asked


def judge_world(
    dit: CameraDit, vae: FrozenVae, texts: PromptTexts, sigmas: tuple[float, ...], device: str, *,
    walks: int, chunks: int, long_chunks: int,
) -> dict[str, float]:  # fmt: skip
    """Return how well held-out walks are followed.

    ``pan_within_15``: share of walks with one key held whose measured shift is within 15 % of the commanded one.
    ``pan_still``: the same of the streams of cameras at rest, which has to be 0. ``psnr``: mean dB against the world
    that was to be seen, of mixed walks; ``psnr_still``: of the same pictures if nothing moved. ``switched``: share of
    walks that look, at their end, more like the new prompt's world than like the old one's. ``alive``: share of streams
    whose spread of colours after ``long_chunks`` is half to twice the picture's.
    """
    size = dit.stream.chunk_frames
    report: dict[str, float] = {"walks": walks}
    names = [list(PANS)[i % len(PANS)] for i in range(walks)]
    keys = [f"{key}-{VIDEO_PER_LATENT * chunks * size}" for key in names]
    pans = draw_walks(walks, chunks, size, SEED, device, switched=0.0, keys=keys)
    first = VIDEO_PER_LATENT * size
    rest = torch.eye(3, 4, device=device).expand_as(pans.poses)
    for name, poses in (("pan_within_15", None), ("pan_still", rest)):
        video = shown(dit, vae, texts, pans, sigmas, device, poses)
        measured, asked = pan_errors(video.float(), names, first)
        off = (measured - asked).norm(dim=1) / STEP
        report[name] = float((off <= 0.15).double().mean())
        report[f"{name}_mean_error"] = round(float(off.mean()), 4)
    mixed = draw_walks(walks, chunks, size, SEED + 1, device, switched=0.0)
    video, truth = shown(dit, vae, texts, mixed, sigmas, device), mixed.video(size)
    report["psnr"] = round(float(psnr(video, truth).mean()), 2)
    report["psnr_end"] = round(float(psnr(video, truth)[:, -4:].mean()), 2)
    report["psnr_still"] = round(float(psnr(truth[:, :, :1].expand_as(truth), truth).mean()), 2)
    changed = draw_walks(walks, chunks, size, SEED + 2, device, switched=1.0)
    changed = changed.switching_at(min(SWITCH_CHUNK, chunks - 1))
    video = shown(dit, vae, texts, changed, sigmas, device)
    new, old = (
        psnr(video, changed.video(size, look))[:, -4:].mean(1) for look in (changed.after, changed.before)
    )
    report["switched"] = float((new > old).double().mean())
    long = draw_walks(min(walks, 16), long_chunks, size, SEED + 3, device, switched=0.0)
    video = shown(dit, vae, texts, long, sigmas, device)
    spread = [video[:, :, at].std((2, 3)).mean(1) for at in (0, -1)]
    share = spread[1] / spread[0]
    report["alive"] = float(((share > 0.5) & (share < 2)).double().mean())
    report["alive_seconds"] = round(video.shape[2] / dit.stream.fps, 1)
    return report


def draw_world_sheet(
    path: Path, dit: CameraDit, vae: FrozenVae, texts: PromptTexts, sigmas: tuple[float, ...], device: str, *,
    chunks: int, keys: Sequence[str] = SHEET_KEYS,
) -> None:  # fmt: skip
    """Draw walks: for each key, what was to be seen above what the model shows, a picture each latent frame or two; the
    last two change their prompt.
    """
    size = dit.stream.chunk_frames
    held = [f"{key}-{VIDEO_PER_LATENT * chunks * size}" for key in keys]
    plain, changed = (
        draw_walks(len(held[part]), chunks, size, SEED + 4, device, switched=share, keys=held[part])
        for share, part in ((0.0, slice(0, -2)), (1.0, slice(-2, None)))
    )
    lines = []
    for walks in (plain, changed.switching_at(min(SWITCH_CHUNK, chunks - 1))):
        video, truth = shown(dit, vae, texts, walks, sigmas, device), walks.video(size)
        for pair in zip(truth, video, strict=True):
            lines += [clip[:, :: 2 * VIDEO_PER_LATENT] for clip in pair]
    save_sheet(path, lines)

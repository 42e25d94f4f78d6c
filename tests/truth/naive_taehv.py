"""A tiny decoder and the encoder beside it, a frame at a time, in float64: what TAEHV's authors wrote, as functions.

Shares no code with the exporter. Source: github.com/madebyollin/taehv.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

TINY = (
    "clamp conv relu block block block up grow1 conv block block block up grow2 conv "
    "block block block up grow2 conv relu conv"
)
SUPER = (
    "conv1 super super super conv relu shuffle grow1 super super super conv relu shuffle grow2 "
    "super super super conv relu shuffle grow2 conv"
)


def decoded(weights: Mapping[str, Tensor], latents: Tensor, patch: int, layers: str) -> Tensor:
    """Pictures [T, 3, H, W] of a whole stream of latents [z, F, h, w], layer names in the order of their numbers."""
    names = layers.split()
    pasts: dict[int, Tensor] = {}
    frames = [
        frame for z in latents.unbind(1) for frame in _through(weights, names, 0, z.double()[None], pasts)
    ]
    pictures = [F.pixel_shuffle(frame, patch).clamp(0, 1) for frame in frames]
    return torch.cat(pictures[3:])


def _through(
    weights: Mapping[str, Tensor], names: list[str], at: int, x: Tensor, pasts: dict[int, Tensor]
) -> Iterator[Tensor]:
    """All frames that one frame becomes behind layer ``at``."""
    if at == len(names):
        yield x
        return
    name, own = names[at], {key: value.double() for key, value in _of_layer(weights, at).items()}
    if name.startswith("grow"):
        count = int(name.removeprefix("grow"))
        grown = F.conv2d(x, own["conv.weight"][-count * x.shape[1] :])
        for frame in grown.chunk(count, dim=1):
            yield from _through(weights, names, at + 1, frame, pasts)
        return
    if name in ("block", "super"):
        both = torch.cat((x, pasts.get(at, torch.zeros_like(x))), 1)
        pasts[at] = x
        y = _block(own, both) if name == "block" else _super_block(own, both)
        y = torch.relu(y + x) if name == "block" else y + x
    else:
        y = _plain(name, own, x)
    yield from _through(weights, names, at + 1, y, pasts)


def _plain(name: str, own: Mapping[str, Tensor], x: Tensor) -> Tensor:
    match name:
        case "clamp":
            return torch.tanh(x / 3) * 3
        case "relu":
            return torch.relu(x)
        case "up":
            return x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        case "shuffle":
            return F.pixel_shuffle(x, 2)
        case "conv1":
            return F.conv2d(x, own["weight"])
    return F.conv2d(x, own["weight"], own.get("bias"), padding=1)


def _block(own: Mapping[str, Tensor], both: Tensor) -> Tensor:
    y = torch.relu(F.conv2d(both, own["conv.0.weight"], own["conv.0.bias"], padding=1))
    y = torch.relu(F.conv2d(y, own["conv.2.weight"], own["conv.2.bias"], padding=1))
    return F.conv2d(y, own["conv.4.weight"], own["conv.4.bias"], padding=1)


def _super_block(own: Mapping[str, Tensor], both: Tensor) -> Tensor:
    channels = both.shape[1]
    y = F.conv2d(both, own["conv.0.weight"], padding=3, groups=channels)
    y = torch.relu(F.conv2d(y, own["conv.1.weight"], own["conv.1.bias"]))
    return F.conv2d(y, own["conv.3.weight"])


def _of_layer(weights: Mapping[str, Tensor], at: int) -> dict[str, Tensor]:
    prefix = f"decoder.{at}."
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


ENCODER = (
    "conv relu pool2 halve block block block pool2 halve block block block pool1 halve block block block conv"
)


def encoded(weights: Mapping[str, Tensor], frames: Tensor, patch: int) -> Tensor:
    """Latents [z, F, h, w] of a whole clip [4F, 3, H, W] of levels 0..1, one frame after another; each pooling layer
    waits for as many frames as it makes one of."""
    names = ENCODER.split()
    pasts: dict[int, Tensor] = {}
    waiting: dict[int, list[Tensor]] = {}
    made = []
    for frame in F.pixel_unshuffle(frames.double(), patch):
        x: Tensor | None = frame[None]
        for at, name in enumerate(names):
            own = {
                key.removeprefix(f"encoder.{at}."): value.double()
                for key, value in weights.items()
                if key.startswith(f"encoder.{at}.")
            }
            assert x is not None
            if name.startswith("pool"):
                waiting.setdefault(at, []).append(x)
                if len(waiting[at]) < int(name.removeprefix("pool")):
                    x = None
                    break
                x = F.conv2d(torch.cat(waiting.pop(at), 1), own["conv.weight"])
            elif name == "halve":
                x = F.conv2d(x, own["weight"], stride=2, padding=1)
            elif name == "block":
                both = torch.cat((x, pasts.get(at, torch.zeros_like(x))), 1)
                pasts[at] = x
                x = torch.relu(_block(own, both) + x)
            else:
                x = _plain(name, own, x)
        if x is not None:
            made.append(x[0])
    return torch.stack(made, 1)

"""Streams of the sample with any cache format, by the exporter's eager session; what attention saw is watched here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scripts.kv_quality.sample import Sample
from seko_export.config.video import VideoBuild
from seko_export.families.layers.rotary import key_rotary_tables, rotary_tables, rotate
from seko_export.video.recording import eager_session
from seko_runtime.video.ring import Ring

Scales = Mapping[str, Tensor]  # the constants of a format, by the names of their weights


@dataclass(frozen=True)
class Places:
    """Positions in the cache at one chunk, and the rotary tables for them.

    Parameters
    ----------
    cos, sin : Tensor
        [1, N, D/2], rotary tables for the token in each place of the cache.
    chunk : Tensor
        [N] bool, whether a token is of the chunk itself.
    tables : dict of str to Tensor
        The tables cos and sin in the form that a format with keys before RoPE takes.
    """

    cos: Tensor
    sin: Tensor
    chunk: Tensor
    tables: dict[str, Tensor]

    def unrotated(self, k: Tensor) -> Tensor:
        """Return keys [B, N, H, D] float32 as they were before RoPE."""
        return rotate(k.float(), self.cos, -self.sin)


def run_stream(
    sample: Sample,
    config: VideoBuild,
    text: Tensor,
    seeds: list[int],
    chunks: int,
    scales: Scales | None = None,
) -> Tensor:
    """Return latents [B, C, chunks*F, h, w] float32 on the CPU, one stream a prompt.

    Parameters
    ----------
    sample, config
        What runs.
    text : Tensor
        [B, text tokens, text_dim].
    seeds : list of int
        One a row: noise depends on it and on the frame alone, so two formats get the same.
    chunks : int
        How long the streams are.
    scales : mapping of str to Tensor, optional
        The format's constants.
    """
    weights = weights_with(sample, config, scales)
    with eager_session(config, weights, text, seeds) as session:
        results = [torch.from_numpy(session.run_chunk().to_host()) for _ in range(chunks)]
    return torch.cat(results, dim=2)


def weights_with(sample: Sample, config: VideoBuild, scales: Scales | None) -> dict[str, Tensor]:
    """Return every weight of a build, with the constants of its cache's format."""
    constants = {name: tensor.to(config.target.device) for name, tensor in (scales or {}).items()}
    return sample.weights(config) | constants


def places(config: VideoBuild, chunk: int) -> Places:
    """Return the cache's layout while chunk number ``chunk`` is made; a place not yet filled counts as frame 0."""
    s = config.workload.stream
    ring = Ring(s.sink_frames, s.ring_frames, s.chunk_frames)
    first = chunk * s.chunk_frames
    end = first + s.chunk_frames
    frames_in_slots = dict.fromkeys(range(s.cache_frames), 0)
    for frame in (*range(min(s.sink_frames, end)), *range(max(0, end - s.ring_frames), end)):
        frames_in_slots[ring.slot(frame)] = frame
    frames = torch.tensor([list(frames_in_slots.values())])
    cos, sin = (t.to(config.target.device) for t in rotary_tables(frames, config.model, s))
    own = torch.zeros(s.cache_frames, dtype=torch.bool)
    own[ring.write_slots(first)] = True
    slot_rotary, patch_rotary = (
        t.to(config.target.device) for t in key_rotary_tables(frames[0], config.model, s)
    )
    tables = {"slot_rotary": slot_rotary, "patch_rotary": patch_rotary}
    return Places(cos, sin, own.repeat_interleave(s.frame_tokens).to(config.target.device), tables)


def first_full_chunk(config: VideoBuild) -> int:
    """Return the number of the first chunk that evicts a frame."""
    return -(-config.workload.stream.cache_frames // config.workload.stream.chunk_frames)


class SelfAttention(TorchFunctionMode):
    """Keeps q [B, T, H, D], k and v [B, N, H, D] of each attention over the cache, on the CPU.

    Those over the text stand between them.
    """

    def __init__(self, config: VideoBuild) -> None:
        super().__init__()
        self._tokens, self._calls = config.workload.stream.cache_tokens, 0
        self.seen: list[tuple[Tensor, ...]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            over_text = bool(self._calls % 2)
            self._calls += 1
            q, k, v = (x.transpose(1, 2) for x in args)  # each [B, tokens, H, D]
            if not over_text:
                if k.shape[1] != self._tokens:
                    raise RuntimeError(
                        f"attention over {k.shape[1]} keys, expected the cache's {self._tokens}"
                    )
                self.seen.append(tuple(x.to("cpu", copy=True) for x in (q, k, v)))
        return result

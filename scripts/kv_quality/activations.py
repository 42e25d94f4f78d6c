"""Real Q, K and V of an exact stream: captured past the wrap, and how far each contender's attention is off."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from scripts.kv_quality.ideas import Contender
from scripts.kv_quality.sample import Sample
from scripts.kv_quality.streams import Scales, run_stream
from scripts.kv_quality.trial_formats import Channels, TrialKv
from seko_export.models.causal_dit import attention, rotary_tables, rotate
from seko_export.pieces import BuildConfig
from seko_kernels.kv_formats import KvFormat
from seko_runtime.ring import Ring


@dataclass(frozen=True)
class Seen:
    """One layer's attention in one pass, on the CPU: q [B, T, H, D]; k (after RoPE), v [B, N, H, D]."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Places:
    """Where things stand in the cache at one chunk.

    Parameters
    ----------
    cos, sin : Tensor
        [1, N, D/2], the rotary tables of what each token of the cache holds.
    chunk : Tensor
        [N] bool, the tokens of the chunk itself.
    """

    cos: Tensor
    sin: Tensor
    chunk: Tensor

    def unrotated(self, k: Tensor) -> Tensor:
        """Return keys [B, N, H, D] float32 as they were before RoPE."""
        return rotate(k.float(), self.cos, -self.sin)

    def rotated(self, k: Tensor) -> Tensor:
        """Return keys [B, N, H, D] after RoPE."""
        return rotate(k.float(), self.cos, self.sin)


@dataclass
class LayerStatistics:
    """What a calibration keeps of one layer, on the CPU, by name: magnitudes and sums of each channel [H, D]."""

    amax: dict[str, Tensor] = field(default_factory=dict)
    total: dict[str, Tensor] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0

    def add(self, seen: dict[str, Tensor]) -> None:
        """Take in tensors [B, N, H, D] by name."""
        for name, x in seen.items():
            x = x.float()
            amax, total, squares = x.abs().amax((0, 1)), x.sum((0, 1)), x.square().sum((0, 1))
            self.amax[name] = torch.maximum(self.amax.get(name, torch.zeros(())), amax.cpu())
            self.total[name] = self.total.get(name, torch.zeros(())) + total.cpu()
            self.squares[name] = self.squares.get(name, torch.zeros(())) + squares.cpu()
        self.tokens += next(iter(seen.values())).shape[:2].numel()

    def channels(self, name: str) -> Channels:
        """Return what is known of ``k``, ``v`` or ``before`` (K before RoPE)."""
        mean = self.total[name] / self.tokens
        variance = (self.squares[name] / self.tokens - mean.square()).clamp_min(0)
        return Channels(self.amax[name], mean, variance.sqrt())


def places(config: BuildConfig, chunk: int) -> Places:
    """Return the cache's layout while chunk number ``chunk`` is made; the cache must be full by then."""
    s = config.stream
    ring = Ring(s.sink_frames, s.ring_frames, s.chunk_frames)
    first = chunk * s.chunk_frames
    last = first + s.chunk_frames - 1
    held = {ring.slot(f): f for f in (*range(s.sink_frames), *range(last - s.ring_frames + 1, last + 1))}
    frames = torch.tensor([[held[slot] for slot in range(s.cache_frames)]])
    cos, sin = (t.to(config.device) for t in rotary_tables(frames, config.model, s))
    own = torch.tensor([held[slot] >= first for slot in range(s.cache_frames)], device=config.device)
    return Places(cos, sin, own.repeat_interleave(s.frame_tokens))


def first_full_chunk(config: BuildConfig) -> int:
    """Return the number of the first chunk that evicts a frame."""
    return -(-config.stream.cache_frames // config.stream.chunk_frames)


def calibrate(
    sample: Sample, config: BuildConfig, text: Tensor, seeds: list[int], chunks: int
) -> list[LayerStatistics]:
    """Return each layer's statistics over an exact stream, from where its cache is full on.

    Parameters
    ----------
    sample, config, text, seeds
        As for `run_stream`, with the exact format; other prompts than those that are measured.
    chunks : int
        Chunks that are looked at.
    """
    statistics = [LayerStatistics() for _ in range(config.model.layers)]
    began = first_full_chunk(config)
    layout: dict[int, Places] = {}

    def see(chunk: int, _pass: int, layer: int, _q: Tensor, k: Tensor, v: Tensor) -> None:
        if chunk >= began:
            if chunk not in layout:
                layout[chunk] = places(config, chunk)
            statistics[layer].add({"k": k, "v": v, "before": layout[chunk].unrotated(k)})

    run_stream(sample, config, text, seeds, began + chunks, watch=see)
    return statistics


def capture(sample: Sample, config: BuildConfig, text: Tensor, seeds: list[int], chunk: int) -> list[Seen]:
    """Return every attention of chunk number ``chunk`` of an exact stream, pass by pass, layer by layer."""
    found: list[Seen] = []

    def see(number: int, _pass: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if number == chunk:
            found.append(Seen(layer, *(x.to("cpu", copy=True) for x in (q, k, v))))

    run_stream(sample, config, text, seeds, chunk + 1, watch=see)
    return found


def scales_of(contender: Contender, statistics: list[LayerStatistics]) -> Scales:
    """Return the constants of a contender, a layer each."""
    source = "before" if contender.before_rope else "k"
    made = []
    for layer in statistics:
        k, v = layer.channels(source), layer.channels("v")
        if isinstance(contender.form, TrialKv):
            made.append(contender.form.constants(k, v))
        else:
            made.append(contender.form.calibrate(k.amax.amax(-1), v.amax.amax(-1)))
    return made


def errors(
    contender: Contender, seen: list[Seen], layout: Places, statistics: list[LayerStatistics]
) -> dict[str, list[float]]:
    """Return relative errors a layer, over all passes, rows and heads: ``k``, ``v``, ``attention`` (its output)."""
    scales = scales_of(contender, statistics)
    sums = {name: torch.zeros(len(statistics), 2, dtype=torch.float64) for name in ("k", "v", "attention")}
    for one in seen:
        q, true_k, true_v = (x.to(layout.cos.device).float() for x in (one.q, one.k, one.v))
        k, v = _read_back(contender, true_k, true_v, layout, scales[one.layer])
        exact, lossy = attention(q, true_k, true_v, None), attention(q, k, v, None)
        for name, a, b in (("k", k, true_k), ("v", v, true_v), ("attention", lossy, exact)):
            sums[name][one.layer] += torch.stack(((a - b).square().sum(), b.square().sum())).cpu()
    return {name: (s[:, 0] / s[:, 1]).sqrt().tolist() for name, s in sums.items()}


def _read_back(
    contender: Contender, k: Tensor, v: Tensor, layout: Places, scales: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return K (after RoPE) and V [B, N, H, D] float32 as the contender gives them to the attention."""
    batch, device = k.shape[0], k.device
    k = layout.unrotated(k) if contender.before_rope else k
    constants = {name: t.to(device) for name, t in scales.items()}
    if contender.window_mean:
        constants["k_mean"] = k.mean((0, 1))
    own = layout.chunk.repeat(batch)
    k, v = _through(contender.form, constants, k.flatten(0, 1), v.flatten(0, 1), own)
    k, v = k.unflatten(0, (batch, -1)).float(), v.unflatten(0, (batch, -1)).float()
    return (layout.rotated(k) if contender.before_rope else k), v


def _through(
    form: KvFormat, scales: dict[str, Tensor], k: Tensor, v: Tensor, own: Tensor
) -> tuple[Tensor, Tensor]:
    """Write tokens [N, H, D] as a stream does, the chunk's ``own`` [N] last, and read them back."""
    caches = {
        c.name: torch.zeros(len(k), *c.token_shape, dtype=c.dtype, device=k.device)
        for c in form.cache_tensors
    }
    dtype = caches["k"].dtype if "k" in caches else torch.float32
    for part in (~own, own):
        index = part.nonzero()[:, 0]
        form.write(caches, scales, index, k[index].to(dtype), v[index].to(dtype))
    return form.window(caches, scales, dtype)

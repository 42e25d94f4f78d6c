"""Cache formats on trial: each idea as plain torch behind the KvFormat protocol; rounded numbers, no packed bytes.

The eager pieces run with them unchanged. `bits_per_number` is what the idea would store; the pool here is larger,
since it holds the rounded numbers themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from seko_kernels import reference
from seko_kernels.formats import E2M1_STEPS, E2M1_VALUES, CacheTensor, ScaleTensor

Round = Callable[[Tensor, Tensor], Tensor]  # of [T, H, D] float32 and global scales [H]: what a read gives


@dataclass(frozen=True)
class Rounding:
    """How numbers are stored.

    Parameters
    ----------
    round : callable
        Tokens [T, H, D] float32 and the heads' powers of two [H] to what a read gives.
    bits : float
        Stored bits a number, scales included.
    """

    round: Round
    bits: float


@dataclass(frozen=True)
class Channels:
    """What a calibration knows of K or V of one layer, each [H, D] float32: largest magnitude, mean, spread."""

    amax: Tensor
    mean: Tensor
    deviation: Tensor


# What may be done around the rounding. Nothing of it costs stored bits but "sink-exact".
TRICKS = {
    "k-mean": "K's calibrated channel means are taken off, which changes no softmax; here they come back on reading",
    "v-mean": "V's too; a kernel adds them to the attention's output once",
    "hadamard": "K's channels are mixed by a Hadamard matrix; a kernel mixes Q instead of unmixing K",
    "sorted": "channels share a block with those of like spread: an order of weight rows, fixed at build",
    "smooth": "K is divided by the spread of its RoPE pair, Q multiplied: in the weights of the two norms",
    "sink-exact": "the sink frames are stored as they are",
    "chunk-exact": "the chunk being denoised sees its own keys and values as they are, not as they are stored",
}


@dataclass(frozen=True)
class TrialKv:
    """One idea; see `KvFormat` for the members.

    Parameters
    ----------
    stored : str
        How numbers are stored, for the name.
    heads, head_dim, dtype
        Of the model.
    sink_tokens, cache_tokens : int
        Of a row's cache.
    k, v : Rounding
        Of keys and values.
    tricks : tuple of str
        Of `TRICKS`.

    Raises
    ------
    ValueError
        If there is no such trick.
    """

    stored: str
    heads: int
    head_dim: int
    dtype: torch.dtype
    sink_tokens: int
    cache_tokens: int
    k: Rounding
    v: Rounding
    tricks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        odd = set(self.tricks) - set(TRICKS)
        if odd:
            raise ValueError(f"no trick {sorted(odd)[0]!r}; there are {', '.join(TRICKS)}")

    @property
    def name(self) -> str:
        """How numbers are stored and what is done around it."""
        return " ".join((self.stored, *self.tricks))

    @property
    def cache_tensors(self) -> tuple[CacheTensor, ...]:
        """Rounded keys and values; with "chunk-exact" also the exact ones, and which tokens are the chunk's."""
        shape = (self.heads, self.head_dim)
        if "chunk-exact" not in self.tricks:
            return tuple(CacheTensor(name, shape, self.dtype) for name in ("k", "v"))
        caches = (CacheTensor(name, shape, self.dtype) for name in ("k", "v", "k_exact", "v_exact"))
        return (*caches, CacheTensor("fresh", (1, 1), torch.uint8))

    @property
    def scale_tensors(self) -> tuple[ScaleTensor, ...]:
        """Of keys and of values: a power of two a head; mean, divisor and order of the channels."""
        per_channel = (self.heads, self.head_dim)
        return tuple(
            ScaleTensor(f"{x}_{name}", shape, dtype)
            for x in "kv"
            for name, shape, dtype in (
                ("global_scale", (self.heads,), torch.float32),
                ("mean", per_channel, torch.float32),
                ("divisor", per_channel, torch.float32),
                ("order", per_channel, torch.int64),
            )
        )

    @property
    def bits_per_number(self) -> float:
        """Bits that the idea stores a number, over sink and ring."""
        bits = (self.k.bits + self.v.bits) / 2
        share = self.sink_tokens / self.cache_tokens if "sink-exact" in self.tricks else 0.0
        return share * 16 + (1 - share) * bits

    def pool_bytes(self, layers: int, tokens: int) -> int:
        """Bytes of the tensors here, not of the idea."""
        return layers * tokens * sum(tensor.token_bytes for tensor in self.cache_tensors)

    def write(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        token_index: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> None:
        """Round and store; see `KvFormat.write`."""
        for name, x, rounding in (("k", k, self.k), ("v", v, self.v)):
            rounded = self._rounded(name, rounding, x.float(), scales).to(self.dtype)
            if "sink-exact" in self.tricks:
                in_sink = (token_index % self.cache_tokens < self.sink_tokens)[:, None, None]
                rounded = torch.where(in_sink, x.to(self.dtype), rounded)
            caches[name].index_copy_(0, token_index, rounded)
            if "chunk-exact" in self.tricks:
                caches[f"{name}_exact"].index_copy_(0, token_index, x.to(self.dtype))
        if "chunk-exact" in self.tricks:
            caches["fresh"].zero_().index_fill_(0, token_index, 1)

    def window(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],  # noqa: ARG002 - the protocol's; reading needs none here
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Return what attention sees; see `KvFormat.window`."""
        if "chunk-exact" not in self.tricks:
            return caches["k"].to(dtype), caches["v"].to(dtype)
        fresh = caches["fresh"].bool()
        k, v = (torch.where(fresh, caches[f"{x}_exact"], caches[x]).to(dtype) for x in "kv")
        return k, v

    def calibrate(self, k_amax: Tensor, v_amax: Tensor) -> dict[str, Tensor]:
        """Choose the powers of two; every channel is treated alike until `constants`."""
        made: dict[str, Tensor] = {}
        for name, amax in (("k", k_amax), ("v", v_amax)):
            alike = torch.zeros(self.heads, self.head_dim)
            order = torch.arange(self.head_dim).expand(self.heads, -1).contiguous()
            made |= {f"{name}_global_scale": reference.nvfp4_global_scale(amax), f"{name}_mean": alike,
                     f"{name}_divisor": torch.ones_like(alike), f"{name}_order": order}  # fmt: skip
        return made

    def constants(self, k: Channels, v: Channels) -> dict[str, Tensor]:
        """Return the constants of one layer, as the tricks want them."""
        divisor = torch.ones(self.heads, self.head_dim)
        if "smooth" in self.tricks:
            # One divisor a rotated pair, or Q's would not commute with RoPE; around 1, so that codes keep their range.
            pairs = k.deviation.square().unflatten(-1, (-1, 2)).mean(-1).sqrt().clamp_min(1e-6)
            pairs = pairs / pairs.log().mean(-1, keepdim=True).exp()
            divisor = pairs.repeat_interleave(2, dim=-1)
        made = self.calibrate((k.amax / divisor).amax(-1), v.amax.amax(-1)) | {"k_divisor": divisor}
        for name, channels in (("k", k), ("v", v)):
            if f"{name}-mean" in self.tricks:
                made[f"{name}_mean"] = channels.mean
            if "sorted" in self.tricks:
                spread = channels.deviation / made[f"{name}_divisor"]
                made[f"{name}_order"] = spread.argsort(-1, descending=True)
        return made

    def _rounded(self, name: str, rounding: Rounding, x: Tensor, scales: Mapping[str, Tensor]) -> Tensor:
        """Return what a read gives of tokens [T, H, D] float32."""
        mean, divisor = scales[f"{name}_mean"], scales[f"{name}_divisor"]
        order = scales[f"{name}_order"].expand_as(x)
        y = ((x - mean) / divisor).gather(-1, order)
        if name == "k" and "hadamard" in self.tricks:
            mixing = hadamard(self.head_dim).to(x.device)
            y = rounding.round(y @ mixing, scales[f"{name}_global_scale"]) @ mixing.T
        else:
            y = rounding.round(y, scales[f"{name}_global_scale"])
        return torch.empty_like(y).scatter_(-1, order, y) * divisor + mean


def e2m1(block: int, *, four_over_six: bool = False) -> Rounding:
    """Return e2m1 codes with one e4m3 scale a block of ``block`` channels, top code 6 or, where better, 4."""

    def rounded(x: Tensor, g: Tensor) -> Tensor:
        blocks = x.unflatten(-1, (-1, block))  # [T, H, D/block, block]
        amax = blocks.abs().amax(-1)
        choices = []
        for top in (6.0, 4.0) if four_over_six else (6.0,):
            bits = reference.e4m3_encode(amax * (1.0 / top) * g[:, None].reciprocal())
            choices.append(_on_e2m1(blocks, (reference.e4m3_decode(bits) * g[:, None])[..., None]))
        best = choices[0]
        for other in choices[1:]:
            closer = (other - blocks).square().sum(-1) < (best - blocks).square().sum(-1)
            best = torch.where(closer[..., None], other, best)
        return best.flatten(-2)

    return Rounding(rounded, 4 + 8 / block)


def mxfp4(block: int = 32) -> Rounding:
    """Return e2m1 codes with a power of two a block, as the OCP Microscaling formats have them."""

    def rounded(x: Tensor, g: Tensor) -> Tensor:  # noqa: ARG001 - a power of two needs no second scale
        blocks = x.unflatten(-1, (-1, block))
        _, exponent = torch.frexp(blocks.abs().amax(-1))  # amax = m * 2**exponent, m in [0.5, 1)
        scale = torch.exp2(exponent.float() - 3)  # e2m1's top is 1.5 * 2**2
        return _on_e2m1(blocks, scale[..., None]).flatten(-2)

    return Rounding(rounded, 4 + 8 / block)


def e4m3() -> Rounding:
    """Return e4m3 numbers over the head's power of two."""

    def rounded(x: Tensor, g: Tensor) -> Tensor:
        scaled = x / g[:, None]
        return reference.e4m3_decode(reference.e4m3_encode(scaled)) * g[:, None]

    return Rounding(rounded, 8.0)


def read_as_e4m3(stored: Rounding) -> Rounding:
    """Return a rounding whose reads are rounded to e4m3 again, as attention in fp8 would take them."""
    return Rounding(lambda x, g: e4m3().round(stored.round(x, g), g), stored.bits)


def int4_channels(group: int) -> Rounding:
    """Return asymmetric int4 over groups of channels of one token; step and lowest value in bfloat16."""
    return Rounding(lambda x, _: _asymmetric(x.unflatten(-1, (-1, group)), -1).flatten(-2), 4 + 32 / group)


def int4_frames(frame_tokens: int) -> Rounding:
    """Return asymmetric int4 of each channel over the tokens of one latent frame (K as KIVI stores it)."""

    def rounded(x: Tensor, _: Tensor) -> Tensor:
        return _asymmetric(x.unflatten(0, (-1, frame_tokens)), 1).flatten(0, 1)

    return Rounding(rounded, 4 + 32 / frame_tokens)


def int8_tokens(head_dim: int) -> Rounding:
    """Return symmetric int8 with a bfloat16 scale a token and head."""

    def rounded(x: Tensor, _: Tensor) -> Tensor:
        scale = (x.abs().amax(-1, keepdim=True) / 127).bfloat16().float().clamp_min(1e-30)
        return (x / scale).round().clamp(-127, 127) * scale

    return Rounding(rounded, 8 + 16 / head_dim)


def hadamard(size: int) -> Tensor:
    """Return the orthonormal Hadamard matrix [size, size] float32 (Sylvester's).

    Raises
    ------
    ValueError
        If ``size`` is no power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Hadamard matrix of {size} channels: expected a power of two")
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / size**0.5


def _on_e2m1(x: Tensor, scale: Tensor) -> Tensor:
    """Return the nearest of scale times e2m1, ties to the even code; 0 where the scale is 0."""
    magnitude = x.abs()
    value = torch.zeros_like(x)
    for (midpoint, tie_goes_up), upper in zip(E2M1_STEPS, E2M1_VALUES[1:], strict=True):
        edge = scale * midpoint
        above = (magnitude >= edge) if tie_goes_up else (magnitude > edge)
        value = torch.where(above & (scale > 0), upper, value)
    signed: Tensor = value * scale * torch.where(x < 0, -1.0, 1.0)
    return signed


def _asymmetric(x: Tensor, axis: int) -> Tensor:
    low = x.amin(axis, keepdim=True).bfloat16().float()
    step = ((x.amax(axis, keepdim=True) - low) / 15).bfloat16().float().clamp_min(1e-30)
    stored: Tensor = ((x - low) / step).round().clamp(0, 15) * step + low
    return stored

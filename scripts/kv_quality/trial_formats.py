"""Cache formats on trial: each idea as plain torch behind the KvFormat protocol; rounded numbers, no packed bytes.

The eager pieces run with them unchanged. `bits_per_number` is what the idea would store; the pool here is larger,
since it holds the rounded numbers themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.kv_quality.roundings import Rounding
from seko_export.families.layers.rotary import rotate
from seko_kernels import reference
from seko_kernels.formats import CacheTensor, ScaleTensor
from seko_kernels.kv_formats import ChannelStatistics

# What may be done around the rounding. Only "sink-exact" costs stored bits.
TRICKS = {
    "before-rope": "K is rounded before RoPE and rotated on reading",
    "k-mean": "K's calibrated channel means are taken off; after RoPE no softmax sees it, before it they come back",
    "turning-mean": "K's means before RoPE are taken off after it, rotated to the token's place, and put back at reads",
    "v-mean": "V's means are taken off; a kernel adds them to the attention's output once",
    "hadamard": "K's channels are mixed by a Hadamard matrix; a kernel mixes Q instead of unmixing K",
    "sink-exact": "the sink frames are stored as they are",
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
        If there is no such trick, or two contradict each other.
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
        if "turning-mean" in self.tricks and {"before-rope", "k-mean"} & set(self.tricks):
            raise ValueError("turning-mean takes off what k-mean would, after RoPE; leave the other two out")

    @property
    def name(self) -> str:
        """Name of the format: the rounding of stored numbers, and the transforms around it."""
        return " ".join((self.stored, *self.tricks))

    @property
    def keys_before_rope(self) -> bool:
        """No: `write` takes them after RoPE, turns them back if the idea says so, and stores what a read would give."""
        return False

    @property
    def exact(self) -> tuple[bool, bool]:
        """Neither: a chunk is read as it is, its past as it was rounded."""
        return False, False

    @property
    def cache_tensors(self) -> tuple[CacheTensor, ...]:
        """Rounded keys and values."""
        return tuple(CacheTensor(name, (self.heads, self.head_dim), self.dtype) for name in ("k", "v"))

    @property
    def scale_tensors(self) -> tuple[ScaleTensor, ...]:
        """A power of two a head and a mean a channel, of K and V; rotary tables of what each place holds.

        The tables are no constants: who runs a stream renews them before each chunk (all rows stand alike).
        """
        per_channel, places = (self.heads, self.head_dim), (self.cache_tokens, self.head_dim // 2)
        shapes = {
            "k_global_scale": (self.heads,),
            "k_mean": per_channel,
            "v_global_scale": (self.heads,),
            "v_mean": per_channel,
            "place_cos": places,
            "place_sin": places,
        }
        return tuple(ScaleTensor(name, shape, torch.float32) for name, shape in shapes.items())

    @property
    def bits_per_number(self) -> float:
        """Bits that the idea stores a number, over sink and ring."""
        bits = (self.k.bits + self.v.bits) / 2
        share = self.sink_tokens / self.cache_tokens if "sink-exact" in self.tricks else 0.0
        return share * 16 + (1 - share) * bits

    def write(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        token_index: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> None:
        """Round and store; see `KvFormat.write`."""
        read_k = self._read_k(k.float(), scales, token_index % self.cache_tokens)
        mean = scales["v_mean"]
        read_v = self.v.round(v.float() - mean, scales["v_global_scale"]) + mean
        for name, x, read in (("k", k, read_k), ("v", v, read_v)):
            rounded = read.to(self.dtype)
            if "sink-exact" in self.tricks:
                in_sink = (token_index % self.cache_tokens < self.sink_tokens)[:, None, None]
                rounded = torch.where(in_sink, x.to(self.dtype), rounded)
            caches[name].index_copy_(0, token_index, rounded)

    def expand(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],  # noqa: ARG002 - the protocol's; reading needs none here
        key_rotary: Mapping[str, Tensor],  # noqa: ARG002 - the protocol's; keys are turned when they are written
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Return what attention sees of the past; see `KvFormat.expand`."""
        return caches["k"].to(dtype), caches["v"].to(dtype)

    def calibrate(self, k: ChannelStatistics, v: ChannelStatistics) -> dict[str, Tensor]:
        """Choose the powers of two; means stand at 0 until `constants`, tables at no rotation."""
        zeros, places = torch.zeros(self.heads, self.head_dim), (self.cache_tokens, self.head_dim // 2)
        return {
            "k_global_scale": reference.nvfp4_global_scale(k.amax()),
            "k_mean": zeros,
            "v_global_scale": reference.nvfp4_global_scale(v.amax()),
            "v_mean": zeros.clone(),
            "place_cos": torch.ones(places),
            "place_sin": torch.zeros(places),
        }

    def constants(
        self, k: ChannelStatistics, k_before: ChannelStatistics, v: ChannelStatistics
    ) -> dict[str, Tensor]:
        """Return the constants of one layer, from K after RoPE, K before RoPE, and V."""
        rounded = k_before if "before-rope" in self.tricks else k
        constants = self.calibrate(rounded, v)
        if "k-mean" in self.tricks:
            constants["k_mean"] = rounded.mean
        if "turning-mean" in self.tricks:
            constants["k_mean"] = k_before.mean
        if "v-mean" in self.tricks:
            constants["v_mean"] = v.mean
        return constants

    def _read_k(self, k: Tensor, scales: Mapping[str, Tensor], place: Tensor) -> Tensor:
        """Return what a read gives of keys [T, H, D] float32 that stand at ``place`` [T] of their row."""
        cos, sin = scales["place_cos"][place][None], scales["place_sin"][place][None]  # [1, T, D/2]
        mean, g = scales["k_mean"], scales["k_global_scale"]
        if "before-rope" in self.tricks:
            k = rotate(k[None], cos, -sin)[0]
        if "turning-mean" in self.tricks:
            mean = rotate(mean.expand_as(k)[None], cos, sin)[0]
        if "hadamard" in self.tricks:
            mixing = hadamard(self.head_dim).to(k.device)
            read = self.k.round((k - mean) @ mixing, g) @ mixing.T + mean
        else:
            read = self.k.round(k - mean, g) + mean
        return rotate(read[None], cos, sin)[0] if "before-rope" in self.tricks else read


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
    orthonormal: Tensor = matrix / size**0.5
    return orthonormal

"""The tiny decoders, and the encoder beside them, as a stream of pure calls, one row at a time.

For each frame, a block of a tiny decoder reads its input for this frame and its input for the frame before. The last
input of each block is therefore kept as a cache. These nine caches are the whole state of a stream between two calls of
the decoder. The first call of a stream reads zeros in place of the caches. The decoder makes four frames for each
latent frame, but the first latent frame of a stream stands for one video frame. The first call therefore drops the
first three frames that it makes. Parameters of the tiny decoders have the checkpoint's names. The maths of the tiny
decoders is from github.com/madebyollin/taehv (MIT licence).

In shapes F is the number of latent frames, h x w the number of latent cells, N the number of frames within the decoder,
T the number of video frames, and H x W the number of pixels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.media.taehv.config import BLOCKS, STAGES, TaehvConfig
from seko_runtime.video.contract import PICTURE_CHANNELS

GROWTH = (1, 2, 2)  # frames that each stage makes of one
POOLED = (2, 2, 1)  # frames of which each stage of the encoder makes one
_ENCODER_STARTS, _ENCODER_LAST = (
    (2, 7, 12),
    "17",
)  # numbers of the encoder's stages, and of its last convolution
_TAEHV_STARTS, _SUPER_STARTS, _LAST = (3, 9, 15), (1, 8, 15), "22"  # numbers of the stages' first blocks
_LIMIT = 3.0  # of the latents, which a tanh bends towards it
_LEVELS = 255


class Memory:
    """The last input of each block, in the order in which blocks run.

    Parameters
    ----------
    earlier : sequence of Tensor or None
        The caches of the last call (`kept`), each [1, H, W, C] contiguous; None at the start of a stream.
    """

    def __init__(self, earlier: Sequence[Tensor] | None) -> None:
        self._earlier = earlier
        self.kept: list[Tensor] = []

    def with_earlier(self, x: Tensor) -> Tensor:
        """Return [1 + N, C, H, W], the frame before ``x`` [N, C, H, W] followed by ``x``, and keep the last frame of
        ``x`` for the next call."""
        joined = torch.cat((self._before(x), x))
        # A copy that the compiler does not remove, of the result of torch.cat: see `wan_vae.layers.FrameCaches.keep`.
        self.kept.append(joined[-1:].permute(0, 2, 3, 1).clamp(min=-torch.inf).contiguous())
        return joined

    def _before(self, x: Tensor) -> Tensor:
        if self._earlier is None:
            return torch.zeros_like(x[:1])
        return self._earlier[len(self.kept)].permute(0, 3, 1, 2)


class Block(nn.Module):
    """Three convolutions over a frame and the frame before it, added to the frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            _conv3(2 * channels, channels),
            nn.ReLU(),
            _conv3(channels, channels),
            nn.ReLU(),
            _conv3(channels, channels),
        )

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """Return the block's output, in the shape of ``x`` [N, C, H, W]."""
        return F.relu(self.conv(_beside_earlier(x, memory)) + x)


class SuperBlock(nn.Module):
    """A 7x7 convolution of each channel, then two layers over channels, added to the frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        both = 2 * channels
        self.conv = nn.Sequential(
            nn.Conv2d(both, both, 7, padding=3, groups=both, bias=False),
            nn.Conv2d(both, 2 * both, 1),
            nn.ReLU(),
            nn.Conv2d(2 * both, channels, 1, bias=False),
        )

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """Return the block's output, in the shape of ``x`` [N, C, H, W]."""
        y: Tensor = self.conv(_beside_earlier(x, memory))
        return y + x


class Grow(nn.Module):
    """Makes ``growth`` frames out of each frame."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.growth = growth
        self.conv = nn.Conv2d(channels, growth * channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the frames [growth * N, C, H, W] that are made from ``x`` [N, C, H, W]."""
        frames: Tensor = self.conv(x).unflatten(1, (self.growth, -1))
        return frames.flatten(0, 1)


class TinyDecode(nn.Module, ABC):
    """Base class of the tiny decoders: subclasses add the layers.

    Parameters
    ----------
    config : TaehvConfig
        Dimensions of the decoder.
    layers : dict of str to Module
        The layers that have weights, by their numbers in the checkpoint.
    first : bool
        Whether the call is the first of a stream, which takes no caches.
    dtype : torch.dtype
        Dtype of weights and caches.
    """

    latents_mean: nn.Parameter
    latents_std: nn.Parameter

    def __init__(
        self, config: TaehvConfig, layers: dict[str, nn.Module], *, first: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config, self.first, self.dtype = config, first, dtype
        last = _conv3(config.widths[-1], PICTURE_CHANNELS * config.patch_size**2)
        self.decoder = nn.ModuleDict({**layers, _LAST: last}).to(dtype)
        for name, values in latent_statistics(config, dtype).items():
            self.register_parameter(name, nn.Parameter(values))

    @abstractmethod
    def enter(self, latents: Tensor) -> Tensor:
        """Return the input of the first stage [F, C, h, w] for latents [F, z, h, w], float32 or wider."""

    @abstractmethod
    def stage(self, x: Tensor, number: int, memory: Memory) -> Tensor:
        """Return the result [growth * N, C', 2*H, 2*W] of one of the stages for ``x`` [N, C, H, W]."""

    def leave(self, x: Tensor) -> Tensor:
        """Return the input of the last convolution for the last stage's result."""
        return x

    def forward(self, latents: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        """Decode one chunk of one row.

        Parameters
        ----------
        latents : Tensor
            Latents of the chunk, [z, F, h, w] float32, normalised as the diffusion model returns them.
        *caches : Tensor
            The caches that the previous call returned, [1, rows, columns, channels] each, in the weights' dtype. The
            first call of a stream takes no caches.

        Returns
        -------
        video : Tensor
            Video frames, [T, H, W, 3] uint8: red, green, blue, rounded to the nearest level.
        *caches : Tensor
            The caches for the next call, in new memory.

        Raises
        ------
        ValueError
            If the number of caches is wrong for this call.
        """
        pictures, *kept = self.decode(latents, caches)
        levels = (pictures.float() * _LEVELS).round().to(torch.uint8)
        return (levels.permute(0, 2, 3, 1).contiguous(), *kept)

    def decode(self, latents: Tensor, caches: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Decode as `forward` does, but return pictures [T, 3, H, W] in 0..1, in the weights' dtype."""
        expected = 0 if self.first else STAGES * BLOCKS
        if len(caches) != expected:
            raise ValueError(f"the tiny decoder got {len(caches)} caches, expected {expected}")
        memory = Memory(None if self.first else caches)
        x = latents.transpose(0, 1)
        if self.config.latents_std:
            x = x * self.latents_std.view(-1, 1, 1) + self.latents_mean.view(-1, 1, 1)
        x = self.enter(x)
        for number in range(STAGES):
            x = self.stage(x, number, memory)
        if self.first:
            x = x[self.config.temporal_stride - 1 :]
        x = self.decoder[_LAST](self.leave(x))
        return (F.pixel_shuffle(x, self.config.patch_size).clamp(0, 1), *memory.kept)

    def _blocks(self, x: Tensor, first: int, memory: Memory) -> Tensor:
        for number in range(first, first + BLOCKS):
            x = self.decoder[str(number)](x, memory)
        return x


class TaehvDecode(TinyDecode):
    """The decoder of TAEHV and LightTAE."""

    def __init__(self, config: TaehvConfig, *, first: bool, dtype: torch.dtype) -> None:
        layers: dict[str, nn.Module] = {"1": _conv3(config.z_dim, config.widths[0])}
        for start, growth, (channels, following) in zip(
            _TAEHV_STARTS, GROWTH, pairwise(config.widths), strict=True
        ):
            layers |= {str(start + block): Block(channels) for block in range(BLOCKS)}
            layers[str(start + 4)] = Grow(channels, growth)
            layers[str(start + 5)] = _conv3(channels, following, bias=False)
        super().__init__(config, layers, first=first, dtype=dtype)

    def enter(self, latents: Tensor) -> Tensor:
        """Limit the latents smoothly to -3..3 by ``3 * tanh(latents / 3)``, and apply the first convolution."""
        bent = torch.tanh(latents / _LIMIT) * _LIMIT
        return F.relu(self.decoder["1"](_images(bent, self.dtype)))

    def stage(self, x: Tensor, number: int, memory: Memory) -> Tensor:
        """Run the blocks of a stage, then make more frames, enlarge the pictures and convolve.

        In the order of the original code, pictures are enlarged before more frames are made. Making more frames reads
        one pixel at a time, so making frames first gives the same result with a quarter of the work.
        """
        start = _TAEHV_STARTS[number]
        grown = self.decoder[str(start + 4)](self._blocks(x, start, memory))
        y: Tensor = self.decoder[str(start + 5)](F.interpolate(grown, scale_factor=2.0, mode="nearest"))
        return y

    def leave(self, x: Tensor) -> Tensor:
        """Return the input of the last convolution for the last stage's result."""
        return F.relu(x)


class SuperDecode(TinyDecode):
    """The decoder of the super variant of TAEHV."""

    def __init__(self, config: TaehvConfig, *, first: bool, dtype: torch.dtype) -> None:
        layers: dict[str, nn.Module] = {"0": nn.Conv2d(config.z_dim, config.widths[0], 1, bias=False)}
        for start, growth, (channels, following) in zip(
            _SUPER_STARTS, GROWTH, pairwise(config.widths), strict=True
        ):
            layers |= {str(start + block): SuperBlock(channels) for block in range(BLOCKS)}
            layers[str(start + 3)] = _conv3(channels, 4 * following)
            layers[str(start + 6)] = Grow(following, growth)
        super().__init__(config, layers, first=first, dtype=dtype)

    def enter(self, latents: Tensor) -> Tensor:
        """Mix the channels of the latents."""
        y: Tensor = self.decoder["0"](_images(latents, self.dtype))
        return y

    def stage(self, x: Tensor, number: int, memory: Memory) -> Tensor:
        """Run the blocks of a stage, move channels into rows and columns, then make more frames."""
        start = _SUPER_STARTS[number]
        wide = F.relu(self.decoder[str(start + 3)](self._blocks(x, start, memory)))
        y: Tensor = self.decoder[str(start + 6)](F.pixel_shuffle(wide, 2))
        return y


class Pool(nn.Module):
    """Makes one frame out of ``pooled`` frames."""

    def __init__(self, channels: int, pooled: int) -> None:
        super().__init__()
        self.pooled = pooled
        self.conv = nn.Conv2d(pooled * channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the frames [N / pooled, C, H, W] that are made from ``x`` [N, C, H, W]."""
        y: Tensor = self.conv(x.unflatten(0, (-1, self.pooled)).flatten(1, 2))
        return y


class TinyEncode(nn.Module):
    """The encoder in the file of TAEHV and LightTAE, for one row's chunk of a video.

    The encoder makes one latent frame of four frames. As the first latent frame of a stream stands for one video frame,
    the first call repeats this frame three times in front.

    Parameters
    ----------
    config : TaehvConfig
        Dimensions of the file.
    first : bool
        Whether the call is the first of a stream, which takes no caches.
    dtype : torch.dtype
        Dtype of weights and caches.
    """

    latents_mean: nn.Parameter
    latents_std: nn.Parameter

    def __init__(self, config: TaehvConfig, *, first: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.first, self.dtype = config, first, dtype
        n = config.encoder_width
        layers: dict[str, nn.Module] = {"0": _conv3(PICTURE_CHANNELS * config.patch_size**2, n)}
        for start, pooled in zip(_ENCODER_STARTS, POOLED, strict=True):
            layers[str(start)] = Pool(n, pooled)
            layers[str(start + 1)] = nn.Conv2d(n, n, 3, stride=2, padding=1, bias=False)
            layers |= {str(start + 2 + block): Block(n) for block in range(BLOCKS)}
        layers[_ENCODER_LAST] = _conv3(n, config.z_dim)
        self.encoder = nn.ModuleDict(layers).to(dtype)
        for name, values in latent_statistics(config, dtype).items():
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, video: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        """Encode one chunk of one row.

        Parameters
        ----------
        video : Tensor
            Video frames, [T, H, W, 3] uint8: red, green, blue. The first chunk of a stream does not read the first
            three of them.
        *caches : Tensor
            The caches that the previous call returned, [1, rows, columns, channels] each, in the weights' dtype. The
            first call of a stream takes no caches.

        Returns
        -------
        latents : Tensor
            Latents, [z, F, h, w] float32 or wider, normalised for the diffusion model.
        *caches : Tensor
            The caches for the next call, in new memory.

        Raises
        ------
        ValueError
            If the number of caches is wrong for this call.
        """
        expected = 0 if self.first else STAGES * BLOCKS
        if len(caches) != expected:
            raise ValueError(f"the tiny encoder got {len(caches)} caches, expected {expected}")
        wide, memory = torch.promote_types(self.dtype, torch.float32), Memory(None if self.first else caches)
        x = video.permute(0, 3, 1, 2).to(wide) / _LEVELS
        if self.first:
            lacking = self.config.temporal_stride - 1
            x = torch.cat((x[lacking : lacking + 1].expand(lacking, -1, -1, -1), x[lacking:]))
        x = F.pixel_unshuffle(x, self.config.patch_size)
        x = F.relu(self.encoder["0"](_images(x, self.dtype)))
        for start in _ENCODER_STARTS:
            x = self.encoder[str(start + 1)](self.encoder[str(start)](x))
            for block in range(BLOCKS):
                x = self.encoder[str(start + 2 + block)](x, memory)
        latents = self.encoder[_ENCODER_LAST](x).to(wide)
        if self.config.latents_std:
            latents = (latents - self.latents_mean.view(-1, 1, 1)) / self.latents_std.view(-1, 1, 1)
        return (latents.transpose(0, 1).contiguous(), *memory.kept)


def decoder_of(config: TaehvConfig, *, first: bool, dtype: torch.dtype) -> TinyDecode:
    """Return the decoder of a config."""
    return (SuperDecode if config.is_super else TaehvDecode)(config, first=first, dtype=dtype)


def latent_statistics(config: TaehvConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the mean and the standard deviation of the latents by name, [z] each, in the wider of ``dtype`` and
    float32. No checkpoint holds these two parameters. The result is empty if the decoder takes normalised latents.
    """
    if not config.latents_std:
        return {}
    wide = torch.promote_types(dtype, torch.float32)
    return {
        "latents_mean": torch.tensor(config.latents_mean, dtype=wide),
        "latents_std": torch.tensor(config.latents_std, dtype=wide),
    }


def cache_shapes(config: TaehvConfig, h: int, w: int) -> list[tuple[int, ...]]:
    """Return the shape of each cache, [1, rows, columns, channels], for latents of h x w cells."""
    return [
        (1, h << stage, w << stage, channels)
        for stage, channels in enumerate(config.widths[:STAGES])
        for _ in range(BLOCKS)
    ]


def encoder_cache_shapes(config: TaehvConfig, h: int, w: int) -> list[tuple[int, ...]]:
    """Return the shape of each cache of the encoder, [1, rows, columns, channels], for latents of h x w cells."""
    halvings = range(STAGES - 1, -1, -1)
    return [(1, h << stage, w << stage, config.encoder_width) for stage in halvings for _ in range(BLOCKS)]


def _conv3(channels_in: int, channels_out: int, *, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=bias)


def _images(latents: Tensor, dtype: torch.dtype) -> Tensor:
    """Return latents in the dtype and the memory order in which every layer works."""
    return latents.to(dtype).contiguous(memory_format=torch.channels_last)


def _beside_earlier(x: Tensor, memory: Memory) -> Tensor:
    """Return [N, 2*C, H, W]: each frame of ``x`` [N, C, H, W], and behind its channels those of the frame before."""
    joined = memory.with_earlier(x)
    return torch.cat((x, joined[:-1]), 1)

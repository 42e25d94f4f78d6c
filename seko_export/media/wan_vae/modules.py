"""The Wan VAEs as modules for a stream of chunks, without hidden state. The modules are `VaeDecode` and `VaeEncode`,
with the shapes of their caches.

Two graphs (FIRST and STEADY) decode a stream of chunks of F latent frames. The graph FIRST (``first=True``) takes the
first chunk and no caches. The graph STEADY takes every later chunk with the caches of the previous call. FIRST and
STEADY return the same caches, so a stream restarts by calling FIRST. At a restart nothing has to be zeroed, and no
cache of an earlier stream can be read. The module `layers` has the layers, `levels` the levels of Wan 2.2, and `keys`
the names in checkpoints.

In shapes B is the number of rows, F the number of latent frames, z the number of latent channels, and h x w the number
of latent cells. T is the number of video frames: 4*F, or 1 + 4*(F - 1) for FIRST. H x W is the number of pixels; a
latent cell has 8 x 8 pixels, 16 x 16 in Wan 2.2. The maths of the VAEs is from Wan 2.1 (arXiv 2503.20314) and Wan 2.2.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from seko_export.engines.weight_source import WeightSource
from seko_export.errors import UsageError
from seko_export.media.row_split import RowSplit
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.media.wan_vae.layers import (
    AttentionBlock,
    CausalConv3d,
    Downsample,
    FrameCaches,
    ResidualBlock,
    RmsNorm,
    Streamed,
    Upsample,
    channels_last,
    residual_blocks,
    run,
)
from seko_export.media.wan_vae.levels import DownLevel, UpLevel, patched, unpatched
from seko_export.media.wan_vae.own_convolution import E4M3, FILTERS_FP8, PACKED, own_weights
from seko_runtime.video.contract import PICTURE_CHANNELS


class _StreamedHalf(nn.Module):
    """Base class of the VAE's decoder and encoder: length of a call, statistics of the latents, checks of the inputs.

    Parameters
    ----------
    config : WanVaeConfig
        Dimensions of the VAE.
    first : bool
        Whether the call is the first of a stream and therefore takes no caches.
    frames : int
        Number of latent frames in one call, at least 1.
    dtype : torch.dtype
        Dtype of weights, video and caches. The statistics ``latents_mean`` and ``latents_std`` are parameters of
        float32 or wider: constants of the graph would become constants of the engine, which the runtime refuses.

    Raises
    ------
    UsageError
        If ``frames`` is below 1.
    """

    def __init__(
        self, config: WanVaeConfig, *, first: bool, frames: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        if frames < 1:
            raise UsageError(f"a call takes at least 1 latent frame, got {frames}")
        self.config, self.first, self.frames, self.dtype = config, first, frames, dtype
        statistics = latent_statistics(config, dtype)
        self.latents_mean = nn.Parameter(statistics["latents_mean"])
        self.latents_std = nn.Parameter(statistics["latents_std"])

    @property
    def video_frames(self) -> int:
        """Number T of video frames in one call."""
        return self.config.video_frames(self.frames, first=self.first)

    @property
    def cache_count(self) -> int:
        """Number of caches that a call returns; a STEADY call also takes as many."""
        return sum(m.keeps for m in self.modules() if isinstance(m, Streamed))

    def _begin(
        self,
        x: Tensor,
        channels: int,
        frames: int,
        caches: tuple[Tensor, ...],
        split: RowSplit | None = None,
    ) -> FrameCaches:
        call = f"{type(self).__name__}(first={self.first}, frames={self.frames})"
        if x.dim() != 5 or x.shape[1:3] != (channels, frames):
            raise ValueError(f"{call} got {list(x.shape)}, expected [B, {channels}, {frames}, rows, columns]")
        expected = 0 if self.first else self.cache_count
        if len(caches) != expected:
            raise ValueError(f"{call} got {len(caches)} caches, expected {expected}")
        return FrameCaches(None if self.first else caches, split)

    def _mean_and_std(self) -> tuple[Tensor, Tensor]:
        return self.latents_mean.view(-1, 1, 1, 1), self.latents_std.view(-1, 1, 1, 1)  # over [B, z, F, h, w]


class VaeDecode(_StreamedHalf):
    """Decodes the latents of one chunk to video frames."""

    def __init__(
        self, config: WanVaeConfig, *, first: bool, frames: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(config, first=first, frames=frames, dtype=dtype)
        self.conv2 = nn.Conv3d(config.z_dim, config.z_dim, 1, dtype=dtype)
        self.decoder = Decoder(config).to(dtype)

    def forward(self, latents: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        """Decode one chunk of latents to video frames.

        Parameters
        ----------
        latents : Tensor
            Latents, [B, z, F, h, w], normalised as the diffusion model returns them; float32 or another dtype.
        *caches : Tensor
            The caches that the previous call returned, with `decoder_cache_shapes`, in the weights' dtype; none for
            FIRST.

        Returns
        -------
        video : Tensor
            Video, [B, 3, T, H, W] in -1..1, with the weights' dtype.
        *caches : Tensor
            The caches for the next call, in new memory.

        Raises
        ------
        ValueError
            If the latents' channels or frames, or the number of caches, are wrong for this call.
        """
        video, *new_caches = self.decode(latents, caches)
        return (video.contiguous(), *new_caches)

    def decode(
        self, latents: Tensor, caches: tuple[Tensor, ...], split: RowSplit | None = None
    ) -> tuple[Tensor, ...]:
        """Decode a chunk as `forward` does, but return the video in the memory order of the last layer.

        With a ``split``, the video and all caches have the pixel rows of one rank, but the latents are whole.
        """
        carried = self._begin(latents, self.config.z_dim, self.frames, caches, split)
        if split is not None:
            latents = split.own_rows(latents)
        mean, std = self._mean_and_std()
        z = channels_last((latents * std + mean).to(self.dtype))
        video = unpatched(self.decoder(self.conv2(z), carried), self.config.patch_size)
        return (video.clamp(-1, 1), *carried.kept)


class VaeEncode(_StreamedHalf):
    """Encodes video frames to the mean of their latents, which is normalised where `normalises` says so."""

    normalises = True

    def __init__(
        self, config: WanVaeConfig, *, first: bool, frames: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(config, first=first, frames=frames, dtype=dtype)
        self.encoder = Encoder(config).to(dtype)
        self.conv1 = nn.Conv3d(2 * config.z_dim, 2 * config.z_dim, 1, dtype=dtype)

    def forward(self, video: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        """Encode the frames of one call; a start picture is a FIRST call with one latent frame.

        Parameters
        ----------
        video : Tensor
            Video, [B, 3, T, H, W] in -1..1, any floating dtype; H and W multiples of the spatial stride.
        *caches : Tensor
            The caches that the previous call returned, with `encoder_cache_shapes`, in the weights' dtype; none for
            FIRST.

        Returns
        -------
        latents : Tensor
            Latents, [B, z, F, h, w] float32 or wider: the posterior's mean, normalised for the diffusion model.
        *caches : Tensor
            The caches for the next call, in new memory.

        Raises
        ------
        ValueError
            If the video's channels, frames or sides, or the number of caches, are wrong for this call.
        """
        carried = self._begin(video, PICTURE_CHANNELS, self.video_frames, caches)
        stride = self.config.spatial_stride
        if video.shape[3] % stride or video.shape[4] % stride:
            raise ValueError(f"video of {list(video.shape[3:])} pixels; expected multiples of {stride}")
        patches = channels_last(patched(video.to(self.dtype), self.config.patch_size))
        x = self.conv1(self.encoder(patches, carried))
        mean, std = self._mean_and_std()
        latents = x[:, : self.config.z_dim].to(mean.dtype)
        latents = (latents - mean) / std if self.normalises else latents
        return (latents.contiguous(), *carried.kept)


class Decoder(nn.Module):
    """The decoder of the VAE, from z channels to patches of a picture, with a cache for each causal convolution."""

    def __init__(self, config: WanVaeConfig) -> None:
        super().__init__()
        dims = config.decoder_level_dims[::-1]
        self.conv1 = CausalConv3d(config.z_dim, dims[0], side=3)
        self.middle = _middle(dims[0], fp8=config.fp8)
        self.upsamples = nn.ModuleList()
        steps = (*config.temporal_downsample[::-1], None)
        blocks = config.num_res_blocks + 1
        channels = dims[0]
        for dim, temporal in zip(dims, steps, strict=True):
            if config.is_residual:
                self.upsamples.append(UpLevel(channels, dim, blocks, temporal=temporal, fp8=config.fp8))
                channels = dim
                continue
            self.upsamples.extend(residual_blocks(channels, dim, blocks, fp8=config.fp8))
            channels = dim
            if temporal is not None:
                channels = dim // 2
                self.upsamples.append(Upsample(dim, channels, temporal=temporal))
        self.head = nn.Sequential(
            RmsNorm(channels, axes=3), nn.SiLU(), CausalConv3d(channels, config.patch_channels, side=3)
        )

    def forward(self, z: Tensor, caches: FrameCaches) -> Tensor:
        """Return patches [B, 3 * patch_size**2, T, H', W'] from latents [B, z, F, h, w]."""
        return run((self.conv1, *self.middle, *self.upsamples, *self.head), z, caches)


class Encoder(nn.Module):
    """The encoder of the VAE, from patches of a picture to mean and log-variance of z channels, with a cache for each
    layer that uses earlier frames.
    """

    def __init__(self, config: WanVaeConfig) -> None:
        super().__init__()
        dims = config.level_dims
        self.conv1 = CausalConv3d(config.patch_channels, config.base_dim, side=3)
        self.downsamples = nn.ModuleList()
        steps = (*config.temporal_downsample, None)
        channels = config.base_dim
        for dim, temporal in zip(dims, steps, strict=True):
            if config.is_residual:
                self.downsamples.append(DownLevel(channels, dim, config.num_res_blocks, temporal=temporal))
            else:
                self.downsamples.extend(residual_blocks(channels, dim, config.num_res_blocks))
                if temporal is not None:
                    self.downsamples.append(Downsample(dim, temporal=temporal))
            channels = dim
        self.middle = _middle(channels)
        self.head = nn.Sequential(
            RmsNorm(channels, axes=3), nn.SiLU(), CausalConv3d(channels, 2 * config.z_dim, side=3)
        )

    def forward(self, patches: Tensor, caches: FrameCaches) -> Tensor:
        """Return mean and log-variance of the latents, [B, 2*z, F, h, w], from patches [B, 3 * patch_size**2, T, H',
        W']."""
        return run((self.conv1, *self.downsamples, *self.middle, *self.head), patches, caches)


@lru_cache(maxsize=32)
def decoder_cache_shapes(config: WanVaeConfig, batch: int, h: int, w: int) -> tuple[tuple[int, ...], ...]:
    """Return the shape of each cache of `VaeDecode`, [B, t, rows, columns, channels], for latents of h x w cells."""
    with torch.device("meta"):
        decode = VaeDecode(config, first=True, frames=1)
        new_caches = decode(torch.empty(batch, config.z_dim, 1, h, w))[1:]
    return tuple(tuple(cache.shape) for cache in new_caches)


@lru_cache(maxsize=32)
def encoder_cache_shapes(config: WanVaeConfig, batch: int, h: int, w: int) -> tuple[tuple[int, ...], ...]:
    """Return the shape of each cache of `VaeEncode`, [B, t, rows, columns, channels], for latents of h x w cells."""
    side = config.spatial_stride
    with torch.device("meta"):
        encode = VaeEncode(config, first=True, frames=1)
        new_caches = encode(torch.empty(batch, PICTURE_CHANNELS, 1, h * side, w * side))[1:]
    return tuple(tuple(cache.shape) for cache in new_caches)


def latent_statistics(config: WanVaeConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the mean and the standard deviation of the latents by name, [z] each, in the wider of ``dtype`` and
    float32. No checkpoint holds these two parameters.

    A module on the meta device has only the shapes of these parameters; their values come from this function.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return {
        "latents_mean": torch.tensor(config.latents_mean, dtype=wide),
        "latents_std": torch.tensor(config.latents_std, dtype=wide),
    }


class VaeTensors:
    """The tensors of a VAE's checkpoint, the weights that are packed for Seko's convolutions, and the latents'
    statistics.

    Parameters
    ----------
    checkpoint : WeightSource
        Tensors of the checkpoint by Wan's key names.
    config : WanVaeConfig
        Config of the same VAE, with the latents' statistics.
    """

    def __init__(self, checkpoint: WeightSource, config: WanVaeConfig) -> None:
        self._checkpoint, self._statistics = checkpoint, latent_statistics(config, torch.float32)
        # the tensors of one convolution are read one after another
        self._packed = lru_cache(maxsize=1)(partial(own_weights, checkpoint))

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor of one parameter of `VaeDecode` or `VaeEncode`."""
        if name in self._statistics:
            return self._statistics[name]
        convolution, _, leaf = name.rpartition(".")
        if leaf in PACKED:
            return self._packed(convolution, FILTERS_FP8 if leaf in E4M3 else leaf)[leaf]
        return self._checkpoint[name]


def _middle(channels: int, *, fp8: bool = False) -> nn.Sequential:
    before, after = (ResidualBlock(channels, channels, fp8=fp8) for _ in range(2))
    return nn.Sequential(before, AttentionBlock(channels), after)

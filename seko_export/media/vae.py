"""The interface between Seko and a VAE: the methods that a VAE provides, and the code that calls them.

A VAE is a module with a `VAE`, which is an object of a class derived from `Vae`. A `Vae` reads its files and builds its
modules; its config (`VaeConfig`) has strides and channels. The code for engines, buffers, programs, `plan` and replay
is the same for every VAE. A VAE recognises its files without torch, which its other methods import.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from seko_export.checkpoints.sources import Layout, OpenedFiles, TensorSource
from seko_export.config.media import VaeConfig

if TYPE_CHECKING:  # the table of VAEs is read for the options' help, before torch is imported
    import torch
    from torch import Tensor, nn

    from seko_export.engines.weight_source import WeightSource

HALVES = ("decoder", "encoder", "both")
C = TypeVar("C", bound=VaeConfig)


class Vae(ABC, Generic[C]):
    """One kind of VAE, with configs of the class ``C``. An object of a subclass of `Vae` has no state: it serves every
    build."""

    layout: Layout
    """Layout of the VAE's weight files, with a description of the supported formats for error messages."""
    presets: Mapping[str, C]
    """Configs of published VAEs by name. If the user names no VAE, `seko-export plan` uses the first preset whose
    latents fit the model."""

    @abstractmethod
    def recognise(self, path: Path) -> C | None:
        """Return the config of the VAE at ``path``. The config is read from the config.json beside the weights or, if
        there is no config.json, from the shapes of the weights.

        The result is None if the file holds another kind of VAE, or no VAE. The first kind that recognises a file is
        used, so shapes or a class name must distinguish each kind from others.

        Raises
        ------
        CheckpointError
            If the file is of this kind of VAE and cannot be read.
        UsageError
            If dimensions in the VAE's config.json contradict each other.
        """

    @abstractmethod
    def config(self, config_json: Mapping[str, Any], where: str) -> C | None:
        """Return the VAE's config for these fields of a config.json, or None if the fields describe another kind of
        VAE.

        Raises
        ------
        CheckpointError
            If a field has the wrong type; ``where`` names the file.
        """

    def alternatives(self, config: C) -> Mapping[str, C]:
        """Return, by the name for ``--vae-kind``, all configs that fit the tensors of a file that `recognise` read as
        ``config``. Such configs exist for VAEs whose files differ in nothing but the file's name; `recognise` chooses
        one of the configs by this name.
        """
        del config
        return {}

    @abstractmethod
    def match(
        self, path: Path, opened: OpenedFiles, config: C, half: str
    ) -> tuple[str, Mapping[str, TensorSource]]:
        """Return the name of a VAE file's format, and the stored tensor of every parameter of the VAE's modules by the
        parameter's name.

        The argument ``half`` is one of `HALVES`: the file need not contain the other half.
        `checkpoints.keycheck.compare_keys` compares names and shapes.

        Raises
        ------
        WeightKeysError
            If a key is unknown, missing, misshapen or doubled; one error lists all of them.
        """

    def weights(self, checkpoint: WeightSource, config: C) -> WeightSource:
        """Return the tensors of the modules' parameters by name: tensors of the file, and tensors computed from the
        config."""
        del config
        return checkpoint

    @abstractmethod
    def decoder(self, config: C, *, first: bool, frames: int, dtype: torch.dtype) -> nn.Module:
        """Return the module that decodes one chunk of one session; the module's weights may be uninitialised.

        The module takes latents [C, frames, h, w] float32 as the transformer returns them and, unless ``first``, the
        caches that the previous call returned. The module returns pictures [`VaeConfig.video_frames`, H, W, 3] uint8
        and the caches for the next call, in new memory, both with the shapes of `cache_shapes`. ``first`` is true if
        the module decodes the first chunk of a stream.
        """

    def use_own_convolutions(self, module: nn.Module, inputs: Sequence[Tensor], arch: str) -> None:
        """Replace convolutions of a module, in place, by Seko's convolution kernel where the kernel was measured to be
        faster.

        A replaced convolution has weights with new names and shapes; `weights` also returns the weights with the new
        names. By default no convolution is replaced.

        Parameters
        ----------
        module : nn.Module
            A decoder or encoder, on the meta device.
        inputs : sequence of Tensor
            Inputs of one call, on the meta device.
        arch : str
            Architecture of the GPU for which the module is compiled, such as ``sm_90``.
        """
        del module, inputs, arch

    def shared_decoder(
        self, config: C, *, first: bool, frames: int, dtype: torch.dtype, ranks: int
    ) -> nn.Module:
        """Return the module that decodes, on one of several ranks (GPUs), one chunk of one session to that rank's pixel
        rows of the pictures.

        `shared_decoder` is called only if ``shares_rows`` is true in the VAE's config; ``ranks`` divides the latents'
        height. The module takes the latents [C, frames, h, w] of the whole picture, then the rank's number [1] int64,
        then the caches. The module returns the rank's pixel rows of the pictures [`VaeConfig.video_frames`, H / ranks,
        W, 3] uint8, and the caches for the next call, with the shapes of `cache_shapes` for h / ranks rows.
        `row_split.RowSplit` has the collectives between the ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} has no decoder that ranks share")

    def encoder(self, config: C, *, dtype: torch.dtype) -> nn.Module:
        """Return the module that encodes a start picture, from [H, W, 3] uint8 to latents [C, 1, h, w] float32.

        `encoder` is called only if ``encodes`` is true in the VAE's config.
        """
        raise NotImplementedError(f"{type(self).__name__} has no encoder")

    def picture_encoder(self, config: C, *, dtype: torch.dtype) -> nn.Module:
        """Return the module that encodes a picture which is followed by grey frames.

        The module takes pixel levels [H, W, 3] float32 of 0 to 255; after a bicubic resize some levels may be outside
        this range. The module returns latents [C, 1, h, w] float32 and the caches for `grey_encoder`, with the shapes
        of `encoder_cache_shapes`. The methods `picture_encoder`, `grey_encoder` and `last_encoder` are called only if
        ``encodes_on`` is true in the VAE's config.
        """
        raise NotImplementedError(f"{type(self).__name__} encodes no frames behind a picture")

    def grey_encoder(self, config: C, *, height: int, width: int, dtype: torch.dtype) -> nn.Module:
        """Return the module that encodes one latent frame of grey after earlier frames. The module takes caches, and
        returns latents and new caches.
        """
        raise NotImplementedError(f"{type(self).__name__} encodes no frames behind a picture")

    def last_encoder(self, config: C, *, dtype: torch.dtype) -> nn.Module:
        """Return the module that encodes the latent frame with which a stream ends: grey frames, then a picture.

        The module takes pixel levels [H, W, 3] float32 as `picture_encoder` does, followed by the caches of the frames
        before. The module returns latents [C, 1, h, w] float32.
        """
        raise NotImplementedError(f"{type(self).__name__} encodes no frames behind a picture")

    def video_encoder(
        self, config: C, *, first: bool, frames: int, dtype: torch.dtype, normalised: bool = True
    ) -> nn.Module:
        """Return the module that encodes one chunk of a video, `frames` latent frames.

        The module takes video frames [T, H, W, 3] uint8, with T the number of frames of a later chunk, and unless
        ``first`` the caches that the previous call returned. The first call of a stream encodes only the last
        `VaeConfig.video_frames` of its frames. The module returns latents [C, frames, h, w] float32, normalised for the
        diffusion model unless ``normalised`` is false, and the caches for the next call, with the shapes of
        `encoder_cache_shapes`. `video_encoder` is called only if ``encodes_video`` is true in the VAE's config.
        """
        raise NotImplementedError(f"{type(self).__name__} encodes no video")

    def encoder_cache_shapes(self, config: C, rows: int, columns: int) -> list[tuple[int, ...]]:
        """Return the shape of each cache of `picture_encoder`, `grey_encoder` and `video_encoder`, for latents of this
        size."""
        raise NotImplementedError(f"{type(self).__name__} encodes no frames behind a picture")

    @abstractmethod
    def cache_shapes(self, config: C, rows: int, columns: int) -> list[tuple[int, ...]]:
        """Return the shape of each cache of one session's decoder, for latents of this size; [] if the decoder has no
        cache.

        If ``shares_rows`` is true in the VAE's config, axis 1 of a cache is the axis of pixel rows.
        """

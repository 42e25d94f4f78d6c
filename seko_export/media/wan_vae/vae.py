"""The exporter's interface to the VAEs of Wan 2.1 and 2.2: their files, dimensions, modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seko_export.checkpoints.errors import NotACheckpointError
from seko_export.checkpoints.json_files import read_config
from seko_export.checkpoints.readers import open_files
from seko_export.checkpoints.sources import Layout, OpenedFiles, TensorSource
from seko_export.errors import UsageError
from seko_export.media.vae import Vae
from seko_export.media.wan_vae.config import VAE_PRESETS, WAN_2_1, WAN_2_2, WanVaeConfig
from seko_export.media.wan_vae.keys import RESIDUAL_SIGNS, match_vae_sources, widths_in

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from seko_export.engines.weight_source import WeightSource
    from seko_export.media.wan_vae.rows import (
        DecodeRow,
        DecodeShare,
        EncodeChunk,
        EncodeGrey,
        EncodeImage,
        EncodeLast,
        EncodePicture,
    )

_CLASS = "AutoencoderKLWan"  # diffusers'; our sample's config.json names none
_FIELDS = (
    "base_dim",
    "z_dim",
    "dim_mult",
    "num_res_blocks",
    "latents_mean",
    "latents_std",
    "decoder_base_dim",
    "is_residual",
    "patch_size",
)


class WanVae(Vae[WanVaeConfig]):
    """The VAE of Wan 2.1 or 2.2, of any width, such as LightVAE."""

    layout = Layout(
        "a Wan VAE's .pth, safetensors under the same names, or diffusers safetensors (a file, or a folder)",
        ("vae",),
    )
    presets = VAE_PRESETS

    def recognise(self, path: Path) -> WanVaeConfig | None:
        """Return the config of the VAE in a file. The config is read from diffusers' config.json. Without a
        config.json, the result is Wan's config with the widths read from the shapes of the tensors.

        The names of the keys distinguish Wan 2.2 from Wan 2.1.
        """
        config_json = read_config(path, self.layout)
        stated = None if config_json is None else self.config(config_json, str(path))
        if stated is not None:
            return stated
        shapes = {source.key: source.shape for source in open_files(path, self.layout).sources}
        preset = VAE_PRESETS[WAN_2_2 if any(key.startswith(RESIDUAL_SIGNS) for key in shapes) else WAN_2_1]
        widths = widths_in(shapes, preset.dim_mult)
        if not widths:
            return None
        encoder, decoder = widths.get("base_dim"), widths.get("decoder_base_dim")
        if preset.decoder_base_dim is not None:
            return replace(
                preset,
                base_dim=encoder or preset.base_dim,
                decoder_base_dim=decoder or preset.decoder_base_dim,
            )
        encoder = encoder or decoder or preset.base_dim
        return replace(
            preset, base_dim=encoder, decoder_base_dim=None if decoder in (None, encoder) else decoder
        )

    def config(self, config_json: Mapping[str, Any], where: str) -> WanVaeConfig | None:
        """Return the config for fields of diffusers or of Seko. Missing fields have Wan 2.1's values; if
        ``is_residual`` is true, they have Wan 2.2's values."""
        if config_json.get("_class_name", _CLASS) != _CLASS or "model_type" in config_json:
            return None  # another class of diffusers, or a model of transformers, such as CLIP
        fields: dict[str, Any] = {}
        for ours, theirs in (("temporal_downsample", "temperal_downsample"), *((n, n) for n in _FIELDS)):
            value = config_json.get(theirs, config_json.get(ours))
            if value is not None:
                fields[ours] = tuple(value) if isinstance(value, list) else value
        if not fields.keys() & {"base_dim", "z_dim"} and "_class_name" not in config_json:
            return None  # sizes with such names are in the configs of other models, too
        try:
            return replace(VAE_PRESETS[WAN_2_2 if fields.get("is_residual") else WAN_2_1], **fields)
        except (TypeError, UsageError) as fault:
            raise NotACheckpointError(f"{where} describes no VAE: {fault}") from fault

    def match(
        self, path: Path, opened: OpenedFiles, config: WanVaeConfig, half: str
    ) -> tuple[str, Mapping[str, TensorSource]]:
        """Return the name of the file's format and the stored tensors by Wan's names; see `match_vae_sources`."""
        return match_vae_sources(path, opened, config, half)

    def weights(self, checkpoint: WeightSource, config: WanVaeConfig) -> WeightSource:
        """Return the checkpoint's tensors, the weights packed for Seko's convolutions, and the latents' statistics."""
        from seko_export.media.wan_vae.modules import VaeTensors

        return VaeTensors(checkpoint, config)

    def decoder(self, config: WanVaeConfig, *, first: bool, frames: int, dtype: torch.dtype) -> DecodeRow:
        """Return the module that decodes one chunk of one session."""
        from seko_export.media.wan_vae.rows import DecodeRow

        return DecodeRow(config, first=first, frames=frames, dtype=dtype)

    def use_own_convolutions(self, module: nn.Module, inputs: Sequence[Tensor], arch: str) -> None:
        """Replace the convolutions that `tuned_conv.json` lists for a GPU by Seko's kernel, in place."""
        from seko_export.media.wan_vae.own_convolution import use_own_convolutions
        from seko_kernels.tuned_conv import measured_tiles

        use_own_convolutions(module, inputs, partial(measured_tiles, arch))

    def shared_decoder(
        self, config: WanVaeConfig, *, first: bool, frames: int, dtype: torch.dtype, ranks: int
    ) -> DecodeShare:
        """Return the module that decodes one rank's pixel rows of one session's chunk."""
        from seko_export.media.wan_vae.rows import DecodeShare

        return DecodeShare(config, first=first, frames=frames, dtype=dtype, ranks=ranks)

    def encoder(self, config: WanVaeConfig, *, dtype: torch.dtype) -> EncodeImage:
        """Return the encoder of a start picture."""
        from seko_export.media.wan_vae.rows import EncodeImage

        return EncodeImage(config, first=True, frames=1, dtype=dtype)

    def picture_encoder(self, config: WanVaeConfig, *, dtype: torch.dtype) -> EncodePicture:
        """Return the module that encodes a picture which is followed by grey frames."""
        from seko_export.media.wan_vae.rows import EncodePicture

        return EncodePicture(config, first=True, frames=1, dtype=dtype)

    def grey_encoder(
        self, config: WanVaeConfig, *, height: int, width: int, dtype: torch.dtype
    ) -> EncodeGrey:
        """Return the module that encodes one latent frame of grey after earlier frames."""
        from seko_export.media.wan_vae.rows import EncodeGrey

        return EncodeGrey(config, height, width, dtype)

    def last_encoder(self, config: WanVaeConfig, *, dtype: torch.dtype) -> EncodeLast:
        """Return the module that encodes three grey frames and a picture after earlier frames."""
        from seko_export.media.wan_vae.rows import EncodeLast

        return EncodeLast(config, first=False, frames=1, dtype=dtype)

    def video_encoder(
        self, config: WanVaeConfig, *, first: bool, frames: int, dtype: torch.dtype, normalised: bool = True
    ) -> EncodeChunk:
        """Return the module that encodes one chunk of a video."""
        from seko_export.media.wan_vae.rows import EncodeChunk, EncodeRawChunk

        kind = EncodeChunk if normalised else EncodeRawChunk
        return kind(config, first=first, frames=frames, dtype=dtype)

    def encoder_cache_shapes(self, config: WanVaeConfig, rows: int, columns: int) -> list[tuple[int, ...]]:
        """Return the shape of each cache of the encoders that go on."""
        from seko_export.media.wan_vae.modules import encoder_cache_shapes

        return [shape[1:] for shape in encoder_cache_shapes(config, 1, rows, columns)]

    def cache_shapes(self, config: WanVaeConfig, rows: int, columns: int) -> list[tuple[int, ...]]:
        """Return the shape of each cache of one session's decoder."""
        from seko_export.media.wan_vae.modules import decoder_cache_shapes

        return [shape[1:] for shape in decoder_cache_shapes(config, 1, rows, columns)]


VAE = WanVae()

"""The exporter's interface to the tiny decoders: their files, dimensions and modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seko_export.checkpoints.errors import NotACheckpointError
from seko_export.checkpoints.key_table import Naming
from seko_export.checkpoints.keycheck import compare_keys
from seko_export.checkpoints.readers import open_files
from seko_export.checkpoints.sources import Layout, OpenedFiles, TensorSource
from seko_export.errors import UsageError
from seko_export.media.taehv.config import SUPER_WIDTHS, TaehvConfig
from seko_export.media.vae import Vae
from seko_export.media.wan_vae.config import VAE_PRESETS
from seko_runtime.video.contract import PICTURE_CHANNELS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from seko_export.engines.weight_source import WeightSource
    from seko_export.media.taehv.modules import TinyDecode, TinyEncode

TAEHV, LIGHTTAE = "taehv", "lighttae"
_SIGN = "decoder.{}.conv.0.weight"  # a block's first convolution, 3: of the super variant, too
_WIDTHS = ("decoder.1.weight", "decoder.8.weight", "decoder.14.weight", "decoder.20.weight")
_SUPER_WIDTHS = ("decoder.0.weight", "decoder.4.weight", "decoder.11.weight", "decoder.18.weight")
_LAST, _ENTERS = "decoder.22.weight", "encoder.0.weight"
_GROWN = (".7.", ".13.", ".19."), (".7.", ".14.", ".21.")  # in the keys of layers that make frames
_ENCODER_WIDTH = 64  # of published files
_PATCHES = {16: 1, 48: 2}  # by latent channels: of Wan 2.1, of Wan 2.2


def _preset(z_dim: int, *, light: bool = False, is_super: bool = False) -> TaehvConfig:
    config = TaehvConfig(z_dim, patch_size=_PATCHES[z_dim], encoder_width=0 if is_super else _ENCODER_WIDTH)
    config = replace(config, widths=SUPER_WIDTHS, is_super=True) if is_super else config
    return _light(config) if light else config


def _light(config: TaehvConfig) -> TaehvConfig:
    """Return the config with the statistics of the VAE whose latents it decodes."""
    wan = next(vae for vae in VAE_PRESETS.values() if vae.z_dim == config.z_dim)
    return replace(config, latents_mean=wan.latents_mean, latents_std=wan.latents_std)


class Taehv(Vae[TaehvConfig]):
    """TAEHV, its super variant, and LightTAE. A file of LightTAE has the tensor names and shapes of a file of TAEHV, so
    only the file's name tells them apart."""

    layout = Layout("a tiny decoder's .pth or safetensors (taew2_1, lighttaew2_1, taew2_2, ...)", ())
    presets: Mapping[str, TaehvConfig] = {
        "taew2_1": _preset(16),
        "lighttaew2_1": _preset(16, light=True),
        "taew2_2": _preset(48),
        "lighttaew2_2": _preset(48, light=True),
        "taew2_2_super": _preset(48, is_super=True),
    }

    def recognise(self, path: Path) -> TaehvConfig | None:
        """Return the config of a tiny decoder, with all sizes from the shapes. A file with ``lighttae`` in its name is
        a LightTAE."""
        shapes = {source.key: source.shape for source in open_files(path, self.layout).sources}
        is_super = _SIGN.format(1) in shapes and _SIGN.format(3) in shapes
        if _SIGN.format(3) not in shapes or "decoder.conv1.weight" in shapes:
            return None

        def size(key: str, axis: int = 0) -> int:
            if len(shapes.get(key, ())) <= axis:
                raise NotACheckpointError(f"{path} looks like a tiny decoder, but has no weight {key}")
            return shapes[key][axis]

        enter, *others = _SUPER_WIDTHS if is_super else _WIDTHS
        z_dim, patch = size(enter, 1), round((size(_LAST) / PICTURE_CHANNELS) ** 0.5)
        if _PATCHES.get(z_dim) != patch:
            raise NotACheckpointError(
                f"{path} is a tiny decoder of {z_dim} latent channels and {size(_LAST)} numbers a place, of another "
                "model: expected 16 and 3, as taew2_1 has, or 48 and 12, as taew2_2 has"
            )
        widths = (size(enter), *(size(key) // (4 if is_super else 1) for key in others))
        config = TaehvConfig(z_dim, widths, patch, is_super)
        stored = {key: shape for key, shape in shapes.items() if key.startswith("encoder.")}
        with_encoder = replace(config, encoder_width=shapes.get(_ENTERS, (0,))[0])
        if not is_super and with_encoder.encodes_video and stored == encoder_shapes(with_encoder):
            config = with_encoder  # another one, as of the super variant, is passed over
        return _light(config) if LIGHTTAE in path.name.lower() else config

    def config(self, config_json: Mapping[str, Any], where: str) -> TaehvConfig | None:
        """Return None, because no tiny decoder has a config.json."""
        del config_json, where
        return None

    def alternatives(self, config: TaehvConfig) -> Mapping[str, TaehvConfig]:
        """Return the configs of TAEHV and LightTAE with these sizes; there is no super variant of LightTAE."""
        plain = replace(config, latents_mean=(), latents_std=())
        return {} if config.is_super else {TAEHV: plain, LIGHTTAE: _light(plain)}

    def match(
        self, path: Path, opened: OpenedFiles, config: TaehvConfig, half: str
    ) -> tuple[str, Mapping[str, TensorSource]]:
        """Return the format's name and the tensors of the decoder and, of a file with a known one, of the encoder.

        The stored weight of a layer that makes frames may have rows for more frames than the layer makes; the layer
        uses the last rows.
        """
        del half
        shapes = decoder_shapes(config) | (encoder_shapes(config) if config.encodes_video else {})
        sources = tuple(
            _last_rows(source, shapes[source.key][0])
            if source.key in shapes and any(part in source.key for part in _GROWN[config.is_super])
            else source
            for source in opened.sources
        )
        return "taehv", compare_keys(
            f"{path} does not hold the weights of a {config.title}:",
            replace(opened, sources=sources),
            Naming("taehv", str, str),
            shapes,
            passed_over=[
                source.key
                for source in sources
                if source.key.startswith("encoder.") and not config.encodes_video
            ],
        )

    def weights(self, checkpoint: WeightSource, config: TaehvConfig) -> WeightSource:
        """Return the file's tensors and the latents' statistics, which no file holds."""
        import torch

        from seko_export.media.taehv.modules import latent_statistics

        return _Tensors(checkpoint, latent_statistics(config, torch.float32))

    def decoder(self, config: TaehvConfig, *, first: bool, frames: int, dtype: torch.dtype) -> TinyDecode:
        """Return the module that decodes one chunk of one session."""
        from seko_export.media.taehv.modules import decoder_of

        del frames
        return decoder_of(config, first=first, dtype=dtype)

    def video_encoder(
        self, config: TaehvConfig, *, first: bool, frames: int, dtype: torch.dtype, normalised: bool = True
    ) -> TinyEncode:
        """Return the module that encodes one chunk of a video; UsageError for latents that are not normalised."""
        from seko_export.media.taehv.modules import TinyEncode

        del frames
        if not normalised:
            raise UsageError(
                f"a {config.title} gives normalised latents, and this model takes others; give --vae-encoder, a whole "
                "VAE"
            )
        return TinyEncode(config, first=first, dtype=dtype)

    def encoder_cache_shapes(self, config: TaehvConfig, rows: int, columns: int) -> list[tuple[int, ...]]:
        """Return the shape of each cache of the encoder."""
        from seko_export.media.taehv.modules import encoder_cache_shapes

        return encoder_cache_shapes(config, rows, columns)

    def cache_shapes(self, config: TaehvConfig, rows: int, columns: int) -> list[tuple[int, ...]]:
        """Return the shape of each cache of one session's decoder."""
        from seko_export.media.taehv.modules import cache_shapes

        return cache_shapes(config, rows, columns)


def decoder_shapes(config: TaehvConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the decoder in a file, by its name."""
    import torch

    from seko_export.media.taehv.modules import decoder_of, latent_statistics

    with torch.device("meta"):
        parameters = decoder_of(config, first=True, dtype=torch.float32).named_parameters()
    statistics = latent_statistics(config, torch.float32)
    return {name: tuple(value.shape) for name, value in parameters if name not in statistics}


def encoder_shapes(config: TaehvConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the encoder in a file, by its name."""
    import torch

    from seko_export.media.taehv.modules import TinyEncode, latent_statistics

    with torch.device("meta"):
        parameters = TinyEncode(config, first=True, dtype=torch.float32).named_parameters()
    statistics = latent_statistics(config, torch.float32)
    return {name: tuple(value.shape) for name, value in parameters if name not in statistics}


class _Tensors:
    """A file's tensors, together with computed ones."""

    def __init__(self, checkpoint: WeightSource, computed: Mapping[str, Tensor]) -> None:
        self._checkpoint, self._computed = checkpoint, computed

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor of one parameter of the decoder."""
        return self._computed[name] if name in self._computed else self._checkpoint[name]


def _last_rows(source: TensorSource, rows: int) -> TensorSource:
    """Return the last rows of a stored tensor, if it has more."""
    if not source.shape or source.shape[0] <= rows:
        return source
    return replace(
        source, shape=(rows, *source.shape[1:]), read=lambda: source.read()[-rows:].contiguous(), copy=None
    )


VAE = Taehv()

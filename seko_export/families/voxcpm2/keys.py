"""The files of a VoxCPM2 checkpoint: names and shapes of their tensors, and strict reading."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from seko_export.checkpoints.errors import CheckpointNotFoundError
from seko_export.checkpoints.key_table import Naming, linear_shapes
from seko_export.checkpoints.keycheck import compare_keys
from seko_export.checkpoints.load import Checkpoint, load_weights
from seko_export.checkpoints.sources import Layout, OpenedFiles, TensorSource
from seko_export.families.voxcpm2.config import NetConfig, VoxCpm2Config

FILES = ("model.safetensors", "pytorch_model.bin")  # the first that is there is read
ENCODER, DECODER = "feat_encoder.encoder", "feat_decoder.estimator.decoder"
ESTIMATOR = "feat_decoder.estimator"
FORMATS = f"a VoxCPM2 folder: config.json, and {' or '.join(FILES)} with the keys of its state dict"
_LAYOUT = Layout(FORMATS, (), ("state_dict",))
_NAMING = Naming("voxcpm2", str, str)


def voxcpm2_shapes(config: VoxCpm2Config) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor in the model's file; the audio VAE has a file of its own."""
    d, local = config.base.dim, config.decoder.dim
    latents = config.latent_dim
    shapes: dict[str, tuple[int, ...]] = {"base_lm.embed_tokens.weight": (config.vocab_size, d)}
    shapes |= _net_shapes("base_lm", config.base) | _net_shapes("residual_lm", config.residual)
    shapes["feat_encoder.special_token"] = (1, 1, 1, config.encoder.dim)
    shapes |= linear_shapes("feat_encoder.in_proj", config.encoder.dim, latents)
    shapes |= _net_shapes(ENCODER, config.encoder)
    shapes |= linear_shapes(f"{ESTIMATOR}.in_proj", local, latents)
    shapes |= linear_shapes(f"{ESTIMATOR}.cond_proj", local, latents)
    shapes |= linear_shapes(f"{ESTIMATOR}.out_proj", latents, local)
    for embedding in ("time_mlp", "delta_time_mlp"):
        for layer in ("linear_1", "linear_2"):
            shapes |= linear_shapes(f"{ESTIMATOR}.{embedding}.{layer}", local, local)
    shapes |= _net_shapes(DECODER, config.decoder)
    shapes |= linear_shapes("fsq_layer.in_proj", config.fsq_dim, d)
    shapes |= linear_shapes("fsq_layer.out_proj", d, config.fsq_dim)
    shapes |= linear_shapes("enc_to_lm_proj", d, config.encoder.dim)
    shapes |= linear_shapes("lm_to_dit_proj", local, d) | linear_shapes("res_to_dit_proj", local, d)
    shapes |= linear_shapes("fusion_concat_proj", d, 2 * d) | linear_shapes("stop_proj", d, d)
    shapes["stop_head.weight"] = (2, d)
    return shapes


def load_voxcpm2(folder: Path, config: VoxCpm2Config, *, dtype: torch.dtype | None = None) -> Checkpoint:
    """Open the model in a checkpoint folder and check all keys, shapes and dtypes. The values of the checkpoint's
    tensors are read later.

    Parameters
    ----------
    folder : Path
        Checkpoint folder with ``model.safetensors`` or ``pytorch_model.bin``; ``pytorch_model.bin`` may hold the
        weights in an entry ``state_dict``.
    config : VoxCpm2Config
        Dimensions of the expected model; `recognise.recognise` reads them from the folder.
    dtype : torch.dtype, optional
        The parameter of `load_weights`, whose errors are raised.
    """
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if file is None:
        raise CheckpointNotFoundError(f"no {' and no '.join(FILES)} in {folder}: expected {_LAYOUT.formats}")
    return load_weights(file, config, _LAYOUT, lambda opened: _match(file, opened, config), dtype=dtype)


def _match(file: Path, opened: OpenedFiles, config: VoxCpm2Config) -> tuple[str, Mapping[str, TensorSource]]:
    sources = compare_keys(
        f"{file} does not hold the weights that its config.json describes:",
        opened,
        _NAMING,
        voxcpm2_shapes(config),
    )
    return _NAMING.name, sources


def _net_shapes(prefix: str, net: NetConfig) -> dict[str, tuple[int, ...]]:
    d = net.dim
    projections = {
        "self_attn.q_proj": (net.attention_width, d),
        "self_attn.k_proj": (net.kv_width, d),
        "self_attn.v_proj": (net.kv_width, d),
        "self_attn.o_proj": (d, net.attention_width),
        "mlp.gate_proj": (net.ffn_dim, d),
        "mlp.up_proj": (net.ffn_dim, d),
        "mlp.down_proj": (d, net.ffn_dim),
    }
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.norm.weight": (d,)}
    for layer in range(net.layers):
        at = f"{prefix}.layers.{layer}"
        shapes |= {f"{at}.input_layernorm.weight": (d,), f"{at}.post_attention_layernorm.weight": (d,)}
        shapes |= {f"{at}.{name}.weight": shape for name, shape in projections.items()}
    return shapes

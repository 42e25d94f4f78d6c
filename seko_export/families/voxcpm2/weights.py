"""Conversion of the checkpoint's two files to the artifact's weights of a VoxCPM2 model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from seko_export.engines.weight_source import WeightSource
from seko_export.families.voxcpm2.config import VoxCpm2Config
from seko_export.families.voxcpm2.keys import DECODER, ENCODER, ESTIMATOR
from seko_export.families.voxcpm2.layers import local_rotary, rope_tables
from seko_export.families.voxcpm2.solver import solver_tables
from seko_export.media.audio_vae.files import AudioVaeTensors

VAE = "vae."  # prefix of the audio VAE's weights
INVERSE_FACTORS, FREQUENCIES = "rope.inverse_factors", "rope.frequencies"
PATCH_ROTARY, SOLVER_ROTARY = (("rope.patch_cos", "rope.patch_sin"), ("rope.solver_cos", "rope.solver_sin"))
TIMES, SIZES = "solver.time", "solver.size"  # an entry for each solver step with a velocity
# A module between the layers as its engine has it, and its checkpoint's name.
_NAMES = {
    "patch_tokens": "feat_encoder",
    "patch_embedding.norm": f"{ENCODER}.norm",
    "patch_embedding.proj": "enc_to_lm_proj",
    "prompt_tokens": "base_lm",
    "fusion.norm": "base_lm.norm",
    "fusion.fsq": "fsq_layer",
    "fusion.fusion": "fusion_concat_proj",
    "keep_state.norm": "residual_lm.norm",
    "condition.lm_proj": "lm_to_dit_proj",
    "condition.residual_proj": "res_to_dit_proj",
    "condition.cond_proj": f"{ESTIMATOR}.cond_proj",
    "condition.stop_proj": "stop_proj",
    "condition.stop_head": "stop_head",
    "solver_tokens": ESTIMATOR,
    "solver_step.norm": f"{DECODER}.norm",
    "solver_step.out_proj": f"{ESTIMATOR}.out_proj",
}
_FUSED = {".qkv_proj.": (".q_proj.", ".k_proj.", ".v_proj."), ".gate_up_proj.": (".gate_proj.", ".up_proj.")}


class SpeechWeights:
    """The weights of a VoxCPM2 build, by the names that the engines use.

    Parameters
    ----------
    model, vae : WeightSource
        Tensors of the checkpoint's two files, by the names in these files.
    config : VoxCpm2Config
        Dimensions of the model.
    """

    def __init__(self, model: WeightSource, vae: WeightSource, config: VoxCpm2Config) -> None:
        self._model, self._vae = model, AudioVaeTensors(vae, config.vae)

    def __getitem__(self, name: str) -> Tensor:
        """Return one weight as a tensor on the CPU."""
        if name.startswith(VAE):
            return self._vae[name.removeprefix(VAE)]
        for fused, parts in _FUSED.items():
            if fused in name:
                return torch.cat([self._model[name.replace(fused, part)] for part in parts])
        ours = next((ours for ours in _NAMES if name.startswith(f"{ours}.")), None)
        return self._model[name if ours is None else _NAMES[ours] + name.removeprefix(ours)]


def speech_tables(
    model: WeightSource, config: VoxCpm2Config, steps: int, dtype: torch.dtype
) -> Mapping[str, Tensor]:
    """Return the weights that are computed at export: rotary tables, and the solver's times and step sizes."""
    inverse, frequencies = rope_tables(config.rope)
    times, sizes = solver_tables(model, config, steps, dtype)
    return {
        INVERSE_FACTORS: inverse,
        FREQUENCIES: frequencies,
        **dict(zip(PATCH_ROTARY, local_rotary(config.rope, config.patch_tokens), strict=True)),
        **dict(zip(SOLVER_ROTARY, local_rotary(config.rope, config.solver_tokens), strict=True)),
        TIMES: times,
        SIZES: sizes,
    }

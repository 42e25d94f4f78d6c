"""AudioVAE V2 against the original: whole, chunk by chunk, and its file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch._inductor import config as compiler
from torch._inductor.utils import run_and_get_code

from seko_export.checkpoints.errors import CheckpointNotFoundError, WeightKeysError
from seko_export.errors import CheckpointError, UsageError
from seko_export.families.voxcpm2.presets import FULL, PRESETS, TINY
from seko_export.media.audio_vae.config import AudioVaeConfig
from seko_export.media.audio_vae.files import BOUNDARIES, AudioVaeTensors, audio_vae_shapes, load_audio_vae
from seko_export.media.audio_vae.modules import (
    DecodeChunk,
    DecodeRows,
    EncodeChunk,
    ResidualUnit,
    States,
    state_shapes,
    state_size,
)
from tests.support.tolerances import ORACLE, relative_error
from tests.voxcpm2.oracle import original_model, original_vae, weights_of

BAR = ORACLE[torch.float32]
CONFIG = PRESETS[TINY].vae
# Odd and even strides, dilations longer than a chunk, and another row of the conditions.
OTHER = replace(CONFIG, encoder_rates=(2, 5), decoder_rates=(3, 2, 5), out_sample_rate=24_000)


def filled(module: Any, part: str, config: AudioVaeConfig, stored: dict[str, Tensor]) -> Any:
    """A module with the weights of the original's state dict."""
    tensors = AudioVaeTensors(stored, config)
    module.load_state_dict({name: tensors[f"{part}.{name}"] for name, _ in module.named_parameters()})
    return module.eval().requires_grad_(False)


def latents_of(config: AudioVaeConfig, rows: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(rows, count, config.latent_dim, generator=generator)


@pytest.mark.parametrize("config", [CONFIG, OTHER], ids=["tiny", "odd rates"])
def test_decoding_is_the_originals_whole_and_in_chunks(
    config: AudioVaeConfig, worst: Callable[[str, float], None]
) -> None:
    """Two rows of 21 latents; in chunks of 4, of 1, and of lengths that change."""
    vae = original_vae(config, seed=2)
    # The original never ran yet: what it calls its weights would be those before they were drawn.
    decoder = filled(DecodeChunk(config), "decoder", config, vae.state_dict())
    latents = latents_of(config, 2, 21)
    with torch.no_grad():
        wanted = vae.decode(latents.transpose(1, 2))[:, 0]
    for sizes in ([21], [4] * 5 + [1], [1] * 21, [7, 2, 12]):
        states = torch.zeros(2, state_size(decoder))
        chunks = []
        for chunk in latents.split(sizes, dim=1):
            samples, states = decoder(chunk, states)
            assert samples.shape == (2, chunk.shape[1] * config.decoder_stride)
            chunks.append(samples)
        error = relative_error(torch.cat(chunks, dim=1), wanted)
        worst("AudioVAE decode", error)
        assert error <= BAR, sizes


def test_chunks_are_the_originals_streaming() -> None:
    vae = original_vae(CONFIG, seed=3)
    decoder = filled(DecodeChunk(CONFIG), "decoder", CONFIG, vae.state_dict())
    states = torch.zeros(1, state_size(decoder))
    with vae.streaming_decode() as theirs, torch.no_grad():
        for chunk in latents_of(CONFIG, 1, 20).split(4, dim=1):
            samples, states = decoder(chunk, states)
            wanted = theirs.decode_chunk(chunk.transpose(1, 2))[:, 0]
            assert relative_error(samples, wanted) <= BAR


@pytest.mark.parametrize("config", [CONFIG, OTHER], ids=["tiny", "odd rates"])
def test_encoding_is_the_originals_whole_and_in_chunks(
    config: AudioVaeConfig, worst: Callable[[str, float], None]
) -> None:
    vae = original_vae(config, seed=4)
    encoder = filled(EncodeChunk(config), "encoder", config, vae.state_dict())
    samples = torch.randn(2, 24 * config.encoder_stride, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = vae.encode(samples, config.sample_rate).transpose(1, 2)
    for latents in (24, 8, 1):
        states = torch.zeros(2, state_size(encoder))
        chunks = []
        for chunk in samples.split(latents * config.encoder_stride, dim=1):
            encoded, states = encoder(chunk, states)
            chunks.append(encoded)
        error = relative_error(torch.cat(chunks, dim=1), wanted)
        worst("AudioVAE encode", error)
        assert error <= BAR, latents


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)  # of the compiler
def test_a_compiled_activation_is_computed_once_for_all_taps() -> None:
    """On a CPU, with the form of concatenation that the compiler has on a GPU, where it merges into what reads it."""
    unit = ResidualUnit(4, dilation=9).requires_grad_(False)
    generator = torch.Generator().manual_seed(9)
    for parameter in unit.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    shapes = state_shapes(unit)
    x, old = (
        torch.randn(2, 4, 40, generator=generator),
        torch.randn(2, math.prod(shapes[0]), generator=generator),
    )

    def run(x: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        states = States(old, shapes)
        return unit(x, states), states.packed()

    # Without vector instructions, as a loop with them has its code twice: for whole vectors and for the rest.
    with compiler.patch({"force_pointwise_cat": True, "cpp.simdlen": 1}):
        results, codes = run_and_get_code(torch.compile(run, fullgraph=True, dynamic=False), x, old)
    for mine, wanted in zip(results, run(x, old), strict=True):
        assert relative_error(mine, wanted) <= BAR
    assert sum(code.count("sin(") for code in codes) == 2  # one for each Snake activation of the unit


def test_rows_of_a_pool_keep_their_own_states() -> None:
    """Rows 2 and 0 of three, in changing company, are each as alone."""
    vae = original_vae(CONFIG, seed=5)
    pooled = filled(DecodeRows(CONFIG), "decoder", CONFIG, vae.state_dict())
    alone = filled(DecodeChunk(CONFIG), "decoder", CONFIG, vae.state_dict())
    latents, pool = latents_of(CONFIG, 3, 12), torch.zeros(3, state_size(alone))
    states = torch.zeros(3, state_size(alone))
    for number, rows in enumerate([[2, 0], [0], [2, 0]]):
        chunk = latents[:, 4 * number : 4 * number + 4]
        decoded = pooled(chunk[rows], torch.tensor(rows), pool)
        wanted, new_states = alone(chunk[rows], states[rows])
        states[rows] = new_states
        assert torch.equal(decoded, wanted)
        assert torch.equal(pool, states)
    assert not pool[1].any()


def test_the_public_decoder_has_26_states_of_162_thousand_numbers() -> None:
    with torch.device("meta"):
        decoder = DecodeChunk(PRESETS[FULL].vae)
    assert len(decoder.state_shapes) == 26
    assert state_size(decoder) == 161_856


def stored_vae(**changes: Tensor) -> dict[str, Tensor]:
    return {**weights_of(original_model(PRESETS[TINY]))[1], **changes}


def test_a_file_of_either_kind_is_read(tmp_path: Path) -> None:
    """As safetensors, as .pth, and in a .pth's entry ``state_dict``."""
    stored = stored_vae()
    forms: dict[str, Callable[[Path], None]] = {
        "safetensors": lambda folder: save_file(stored, folder / "audiovae.safetensors"),
        "pth": lambda folder: torch.save(stored, folder / "audiovae.pth"),
        "entry": lambda folder: torch.save({"state_dict": stored, "epoch": 3}, folder / "audiovae.pth"),
    }
    for name, write in forms.items():
        folder = tmp_path / name
        folder.mkdir()
        write(folder)
        loaded = load_audio_vae(folder, CONFIG)
        assert set(loaded.names) == set(audio_vae_shapes(CONFIG)) - {BOUNDARIES}
        assert torch.equal(loaded["encoder.fc_mu.weight_v"], stored["encoder.fc_mu.weight_v"])


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    stored = stored_vae()
    with pytest.raises(CheckpointNotFoundError, match="audiovae"):
        load_audio_vae(tmp_path, CONFIG)
    file = tmp_path / "audiovae.safetensors"
    save_file({name: tensor for name, tensor in stored.items() if name != "decoder.model.0.bias"}, file)
    with pytest.raises(WeightKeysError, match=r"1 missing: decoder\.model\.0\.bias"):
        load_audio_vae(tmp_path, CONFIG)
    save_file(stored, file)
    with pytest.raises(WeightKeysError, match="mis-shaped"):
        load_audio_vae(tmp_path, replace(CONFIG, decoder_rates=(2, 2)))
    save_file({**stored, BOUNDARIES: stored[BOUNDARIES] + 1}, file)
    with pytest.raises(CheckpointError, match="20001"):
        load_audio_vae(tmp_path, CONFIG)
    save_file({**stored, "encoder.fc_mu.bias": torch.full((CONFIG.latent_dim,), torch.nan)}, file)
    with pytest.raises(CheckpointError):
        load_audio_vae(tmp_path, CONFIG)["encoder.fc_mu.bias"]


class Runs:
    """An object whose pickle would run code."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (eval, ("1",))


def test_a_pickle_with_code_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.zeros(1)}, "more": Runs()}, tmp_path / "audiovae.pth")
    with pytest.raises(CheckpointError, match="eval"):
        load_audio_vae(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"decoder_dim": 6}, "multiple of 4"),
        ({"encoder_rates": ()}, "no blocks"),
        ({"latent_dim": 0}, "below 1"),
        ({"rate_boundaries": (3, 2)}, "must rise"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        replace(CONFIG, **fields)

"""The voice from samples to tokens: HuBERT and the projector against the originals, and a session that hears."""

from __future__ import annotations

import argparse
import json
import wave
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from seko_export.artifact.describe import describe
from seko_export.backends import EAGER
from seko_export.checkpoints.errors import CheckpointNotFoundError, NotACheckpointError, WeightKeysError
from seko_export.config.media import HubertConfig
from seko_export.config.video import VideoBuild
from seko_export.engines.piece import dtype_name, on_meta
from seko_export.errors import UsageError
from seko_export.families.base import MediaTensors
from seko_export.families.seko_talk import audio
from seko_export.families.seko_talk.family import FAMILY
from seko_export.families.seko_talk.keys import PROJECTOR
from seko_export.media.hubert.encoder import HubertFeatures
from seko_export.media.hubert.files import hubert_config_of, hubert_shapes, load_hubert
from seko_export.video.recording import golden_text
from seko_runtime.cli.video.controls import fed_controls, read_controls
from seko_runtime.controls import Controls
from seko_runtime.controls import voice as voice_module
from seko_runtime.controls.masks import MasksControl
from seko_runtime.controls.voice import AudioWindows
from seko_runtime.errors import UsageError as RuntimeUsageError
from seko_runtime.format.manifest import InputSpec, Weight
from seko_runtime.video.manifest import VideoManifest
from tests.seko_talk.streams import (
    PRESET,
    heard_by,
    opened,
    random_checkpoint,
    random_reference,
    talk_config,
    weights_of,
    write_hubert,
)
from tests.support.asked import resolved
from tests.support.stacked import eager_session, needed, push
from tests.support.tolerances import ORACLE, relative_error
from tests.support.voices import Heard

pytest.importorskip("transformers", reason="transformers is not installed")

BAR = ORACLE[torch.float32]
STREAM_BAR = 5e-5  # as in test_stream: passes that feed on each other
WIDTH = PRESET.model.audio_dim  # type: ignore[attr-defined]
CHUNKS = 4


@pytest.fixture(scope="module")
def hubert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A HuBERT folder, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("hubert")
    return folder, write_hubert(folder, WIDTH)


def changed(folder: Path, target: Path, **fields: object) -> Path:
    """A copy of a HuBERT folder whose config.json says something else."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    table = json.loads((folder / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(table))
    return target


def features(folder: Path) -> HubertFeatures:
    config, weights = hubert_config_of(folder), load_hubert(folder, hubert_config_of(folder))
    module = HubertFeatures(config, 13)
    module.load_state_dict({name: weights[name] for name, _ in module.named_parameters()})
    return module.eval()


@pytest.mark.shows("hubert")
def test_hubert_is_transformers(hubert: tuple[Path, Any], worst: Callable[[str, float], None]) -> None:
    """Frames 18 to 30 of 49, in float32; from safetensors and from an older .bin with torch's older names."""
    folder, model = hubert
    windows = torch.randn(3, 16_000, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, actual = model(windows).last_hidden_state, features(folder)(windows)
    assert wanted.shape[1] == hubert_config_of(folder).feature_count(16_000) == 49
    error = relative_error(actual, wanted[:, 18:31])
    worst("HuBERT", error)
    assert error <= BAR
    assert relative_error(actual, wanted[:, 17:30]) > 1000 * BAR


def test_the_large_models_names_and_shapes_are_transformers() -> None:
    """Those of the encoder that Seko-Talk names, 24 layers of width 1024, without its numbers."""
    import transformers

    large = transformers.HubertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        conv_bias=True,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
    )
    with torch.device("meta"):
        stored = transformers.HubertModel(large).state_dict()
    stored.pop("masked_spec_embed")
    assert hubert_shapes(HubertConfig()) == {name: tuple(tensor.shape) for name, tensor in stored.items()}


def test_an_older_file_is_the_same(hubert: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = hubert
    older = changed(folder, tmp_path / "older")
    stored = load_file(older / "model.safetensors")
    conv = "encoder.pos_conv_embed.conv."
    stored[f"{conv}weight_g"] = stored.pop(f"{conv}parametrizations.weight.original0")
    stored[f"{conv}weight_v"] = stored.pop(f"{conv}parametrizations.weight.original1")
    torch.save(stored | {"masked_spec_embed": torch.zeros(WIDTH)}, older / "pytorch_model.bin")
    (older / "model.safetensors").unlink()
    state, other = features(folder).state_dict(), features(older).state_dict()
    assert all(torch.equal(state[name], other[name]) for name in state)


def test_other_encoders_are_refused(hubert: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = hubert
    for number, (fields, words) in enumerate(
        (
            ({"model_type": "wav2vec2"}, "model_type is 'wav2vec2', expected 'hubert'"),
            ({"feat_extract_norm": "group"}, "feat_extract_norm is 'group', expected 'layer'"),
            ({"do_stable_layer_norm": False}, "do_stable_layer_norm is False, expected True"),
            ({"hidden_size": "48"}, "hidden_size has another type"),
        )
    ):
        with pytest.raises(NotACheckpointError, match=words):
            hubert_config_of(changed(folder, tmp_path / str(number), **fields))
    bare = changed(folder, tmp_path / "bare")
    (bare / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"no preprocessor_config\.json"):
        hubert_config_of(bare)
    odd = changed(folder, tmp_path / "odd")
    stored = load_file(odd / "model.safetensors")
    stored["encoder.layers.0.extra"] = stored.pop("encoder.layers.0.attention.q_proj.bias")
    save_file(stored, odd / "model.safetensors")
    with pytest.raises(WeightKeysError, match=r"1 unknown: encoder\.layers\.0\.extra") as refusal:
        load_hubert(odd, hubert_config_of(odd))
    assert refusal.value.missing == ("encoder.layers.0.attention.q_proj.bias",)
    odd = changed(folder, tmp_path / "narrow", num_attention_heads=5)
    with pytest.raises(
        NotACheckpointError, match=r"narrow is of a model that cannot be built: .* its 5 heads"
    ):
        resolved("seko-talk-tiny", audio_encoder=odd)
    with pytest.raises(UsageError, match="49 frames of 16000 samples, the model takes 50"):
        HubertConfig().first_frame(50)
    for width, words in ((64, "64 wide, 'seko-talk-tiny' takes 48"),):
        with pytest.raises(UsageError, match=words):
            talk_config(audio=HubertConfig(dim=width))


@pytest.mark.parametrize("frames", [1, 3])
def test_the_projector_is_torchs_decoder(frames: int, worst: Callable[[str, float], None]) -> None:
    """13 frames of features to the tokens of a latent frame, by torch's own class and the file's names."""
    config = talk_config(layout={"chunk_frames": frames, "ring_frames": 2 * frames})
    m, checkpoint = config.model, random_checkpoint(config)
    weights = {
        name.removeprefix(f"{PROJECTOR}."): tensor
        for name, tensor in checkpoint.items()
        if name.startswith(PROJECTOR)
    }
    ours = on_meta(lambda: audio.AudioTokens(config)).to_empty(device="cpu")
    ours.load_state_dict(weights)
    layer = torch.nn.TransformerDecoderLayer(
        m.audio_width, m.audio_heads, m.audio_ffn, dropout=0.0, batch_first=True
    )
    theirs = torch.nn.TransformerDecoder(layer, m.audio_layers).eval()
    theirs.load_state_dict(
        {
            name.removeprefix("transformer_decoder."): weight
            for name, weight in weights.items()
            if name.startswith("transformer_decoder.")
        }
    )
    heard = FAMILY.golden_inputs(config, 0)[audio.AUDIO]
    with torch.no_grad():
        actual, _ = ours({audio.AUDIO: heard}, torch.arange(frames)[None])
        memory = torch.nn.functional.linear(heard[0, 0], weights["proj_in.weight"], weights["proj_in.bias"])
        wanted = theirs(weights["learnable_queries"].expand(frames, -1, -1), memory)
    error = relative_error(actual[0, 0], wanted)
    worst("the audio projector", error)
    assert error <= BAR


def sound(speakers: int = 1, seed: int = 5) -> np.ndarray:
    """A voice of as many samples as the chunks hear, louder and softer."""
    samples = 1000 * (4 * (2 * CHUNKS - 1) + 1)
    generator = np.random.default_rng(seed)
    return (generator.normal(0, 0.2, (speakers, samples)) * np.linspace(0.2, 2, samples)).astype(np.float32)


def session_of(config: VideoBuild, folder: Path | None) -> Any:
    """A session over the eager model, which hears samples, or without a folder is given features."""
    media = None
    if folder is not None:
        config = config.changed(audio=hubert_config_of(folder))
        media = MediaTensors(audio=load_hubert(folder, hubert_config_of(folder)))
    weights = weights_of(config, random_checkpoint(config), media)
    return eager_session(config, weights, golden_text(config), [3], reference=random_reference(config))


@pytest.mark.parametrize("speakers", [1, 2])
def test_a_session_hears_what_is_pushed(
    speakers: int, hubert: tuple[Path, Any], worst: Callable[[str, float], None]
) -> None:
    """Samples come late and in pieces, each chunk runs when its own are there, and the chunks are those of features
    that transformers makes. Sound that is one latent frame late makes another video.
    """
    folder, model = hubert
    config, voices = talk_config(model={"speakers": speakers}), sound(speakers)
    with session_of(config, None) as session:
        wanted = []
        for number in range(CHUNKS):
            heard = [heard_by(model, torch.from_numpy(voice), 2 * number, 2)[0] for voice in voices]
            wanted.append(session.run_chunk({"audio": torch.stack(heard).numpy()}).to_host())
    for late in (0, 4000):
        results: list[np.ndarray] = []
        pushed = np.concatenate((np.zeros((speakers, late), np.float32), voices), axis=1)
        with session_of(config, folder) as session:
            at = 0
            for number in range(CHUNKS):
                first, end = needed(session.sessions[0])
                assert (first, end) == (max(0, 1000 * (8 * number - 1) - 8000), 1000 * (8 * number + 5))
                session.push_audio(pushed[:, at : end - 1])
                with pytest.raises(RuntimeUsageError, match=f"hears samples {first} to {end}.*give 1 more"):
                    session.run_chunk()
                session.push_audio(pushed[:, end - 1 : end])
                at = end
                results.append(session.run_chunk().to_host())
        errors = [
            relative_error(torch.from_numpy(result), torch.from_numpy(other))
            for result, other in zip(results, wanted, strict=True)
        ]
        if late:
            assert errors[-1] > 100 * STREAM_BAR
        else:
            worst("a session that hears", max(errors))
            assert max(errors) <= STREAM_BAR


def test_rows_hear_their_own_voices_and_forget_them(hubert: tuple[Path, Any]) -> None:
    """Two rows of a batch; the second begins again and hears what the first one hears."""
    folder, _ = hubert
    config = talk_config(layout={"batch": 2})
    config = config.changed(audio=hubert_config_of(folder))
    weights = weights_of(
        config, random_checkpoint(config), MediaTensors(audio=load_hubert(folder, hubert_config_of(folder)))
    )
    text, portrait = golden_text(config), random_reference(config)[:1].expand(2, -1, -1, -1, -1).contiguous()
    voice, other = sound()[0], sound(seed=6)[0]
    with eager_session(
        config, weights, text[:1].expand(2, -1, -1).contiguous(), [3, 3], reference=portrait
    ) as session:
        session.set_inputs({"picture": np.ones((5, 40), np.float32)})
        session.push_audio(voice, row=0)
        with pytest.raises(RuntimeUsageError, match=r"none has come"):
            session.run_chunk()
        session.push_audio(other, row=1)
        with pytest.raises(
            RuntimeUsageError, match="found the input 'audio' and events of the control 'voice'"
        ):
            session.run_chunk({"audio": np.zeros((1, 2, 16_000), np.float32)})
        first = session.run_chunk().to_host()
        assert relative_error(*map(torch.from_numpy, first)) > 100 * STREAM_BAR
        session.restart_row(0)
        session.restart_row(1)
        with pytest.raises(RuntimeUsageError, match="none has come: give"):
            session.run_chunk()
        session.push_audio((voice * 32767).astype(np.int16))
        again = session.run_chunk().to_host()
        assert np.array_equal(again[0], again[1])
        assert (
            relative_error(torch.from_numpy(again[0]), torch.from_numpy(first[0])) <= 1e-2
        )  # rounded samples


def test_features_have_no_samples() -> None:
    """A build without the encoder takes features, and says so."""
    config = talk_config()
    weights: dict[str, Tensor] = weights_of(config, random_checkpoint(config))
    with (
        eager_session(
            config, weights, golden_text(config), [3], reference=random_reference(config)
        ) as session,
        pytest.raises(
            RuntimeUsageError, match="this artifact has no control 'voice'; its controls: 'pictures'"
        ),
    ):
        session.push_audio(sound()[0])


def write_wav(path: Path, samples: int) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, samples, "NONE", ""))
        file.writeframes(bytes(2 * samples))


def fed(options: dict[str, object], manifest: VideoManifest, files: Any = ()) -> Controls:
    """The controls of a run with these options."""
    given = argparse.Namespace(chunks=None, **options)
    return fed_controls(given, manifest, read_controls(given), files)[0]


@pytest.mark.parametrize("hears", [True, False])
def test_a_file_of_sound_for_an_artifact_that_takes_none_is_told_what_to_do(
    hears: bool, tmp_path: Path
) -> None:
    """One that takes features, and one whose model hears nothing."""
    config = talk_config()
    table = tuple(
        Weight(name, tuple(tensor.shape), dtype_name(tensor.dtype))
        for name, tensor in weights_of(config, random_checkpoint(config)).items()
    )
    manifest = describe(config, EAGER, table, {})
    if not hears:
        manifest = replace(manifest, inputs=())
    words, masks = "hears features of a voice, not its sound: give .* --audio-encoder", "has one speaker"
    if not hears:
        words, masks = "this artifact's model hears no audio; its inputs: none", "hears no speakers"
    manifest = replace(manifest, controls=None)
    write_wav(tmp_path / "voice.wav", 9000)
    np.save(tmp_path / "mask.npy", np.zeros((64, 64, 3), np.uint8))
    with pytest.raises(RuntimeUsageError, match=f"--audio: .*{words}"):
        fed({"audio": [tmp_path / "voice.wav"]}, manifest)
    with pytest.raises(RuntimeUsageError, match=f"--mask: .*{masks}"):
        fed({"mask": [tmp_path / "mask.npy"]}, manifest)


def test_a_mask_is_not_rounded_on_its_way() -> None:
    """A token counts if its red is above the middle of the range; exactly the middle is not, and no byte."""
    config = talk_config(model={"speakers": 2})
    s = config.workload.stream
    fine = np.zeros((2 * s.height, 2 * s.width, 3), np.uint8)
    fine[:, 0::2], fine[:, 1::2] = 127, 128  # its mean, 127.5, would be rounded to 128
    spec = InputSpec("masks", (2, s.frame_tokens), "float32", "input.masks", per="session")
    rows, columns = s.latent_height // 2, s.latent_width // 2
    declared = MasksControl.declared("masks", height=s.height, width=s.width, rows=rows, columns=columns)
    control = MasksControl(declared, {"masks": spec})
    control.take({"masks": [fine, np.full_like(fine, 128)]})
    masks = control.opening()["inputs"]["masks"]
    assert (masks[0].max(), masks[1].min()) == (0, 1)


def test_a_pause_keeps_the_voice_and_a_snapshot_does_not(hubert: tuple[Path, Any], tmp_path: Path) -> None:
    """A session of a pool moves to the host and to another row with its samples; to a file without them."""
    folder, _ = hubert
    config = talk_config(model={"image_dim": 0})
    config = config.changed(audio=hubert_config_of(folder))
    media = MediaTensors(audio=load_hubert(folder, hubert_config_of(folder)))
    text, voice = golden_text(config).numpy(), sound()[0]
    opening = {"seed": 3, "text": text, "reference": random_reference(config)[0].numpy()}
    with opened(config, media=media) as pool:
        runs: list[list[np.ndarray]] = []
        for interrupted in (False, True):
            session = pool.open_session(**opening)
            push(session, voice)
            chunks = []
            for number in range(CHUNKS):
                chunks.append(session.run_chunk().to_host())
                if interrupted and number == 0:
                    session.pause()
                    other = pool.open_session(**opening)  # takes the row
                    with pytest.raises(RuntimeUsageError, match="none has come: give"):
                        other.run_chunk()
                    session.resume()
                    other.close()
                if interrupted and number == 1:
                    session.save(tmp_path / "stream")
                    session.close()
                    session = pool.restore(tmp_path / "stream")
                    with pytest.raises(RuntimeUsageError, match="none has come: give"):
                        session.run_chunk()
                    first, _ = needed(session)
                    push(session, voice[first:], at=first)
            session.close()
            runs.append(chunks)
    for chunk, other_chunk in zip(*runs, strict=True):
        assert np.array_equal(chunk, other_chunk)


def test_a_session_steps_back_and_hears_something_else(hubert: tuple[Path, Any]) -> None:
    """Whatever was made is as if it had not been: an interruption. Past the wrap by the last chunk alone."""
    folder, _ = hubert
    config = talk_config(layout={"chunk_frames": 1, "ring_frames": 3})  # and a sink of 1
    voice, other = sound()[0], sound(seed=6)[0]
    for count, back in ((3, 1), (4, 0), (6, 5)):
        cut = 1000 * (4 * back - 3) if back else 0
        with session_of(config, folder) as session:
            session.push_audio(np.concatenate((voice[:cut], other[cut:])))
            wanted = [session.run_chunk().to_host() for _ in range(count + 1)]
        with session_of(config, folder) as session:
            session.push_audio(voice)
            for _ in range(count):
                session.run_chunk()
            with pytest.raises(RuntimeUsageError, match=f"cannot step back to chunk {count + 1}"):
                session.rewind(count + 1)
            if count > 4:
                with pytest.raises(
                    RuntimeUsageError, match=r"expected 5 to 6: before that the cache holds no"
                ):
                    session.rewind(back - 1)
            session.rewind(back)
            if count > 4:  # what was undone took slots of frames that the chunk before it reads
                with pytest.raises(RuntimeUsageError, match="expected 5 to 5"):
                    session.rewind(back - 1)
            session.push_audio(other[cut:], at=cut)
            for number in range(back, count + 1):
                assert np.array_equal(session.run_chunk().to_host(), wanted[number])


def test_masks_of_speakers_are_made_of_pictures(tmp_path: Path) -> None:
    """Bright where a speaker is, at any size and aspect; tokens of 16 pixels."""
    two, alone = (describe(talk_config(model={"speakers": count}), EAGER, (), {}) for count in (2, 1))
    assert (two.workload.stream.height, two.workload.stream.width) == (32, 48)  # 2 x 3 tokens
    left = np.zeros((64, 96, 3), np.uint8)
    left[:, :32] = 255
    tall = np.zeros((96, 48, 3), np.uint8)  # its middle third is what is seen
    tall[48:64] = 255
    for name, picture in (("left", left), ("tall", tall)):
        np.save(tmp_path / f"{name}.npy", picture)
    files = [tmp_path / "left.npy", tmp_path / "tall.npy"]
    controls = fed({"mask": files}, two, {"audio": 0})
    mask_array = controls.opening()["inputs"]["speaker_masks"]
    assert mask_array.dtype == np.float32
    described = controls["speaker_masks"].describe()["events"]["masks"]["masks"]
    assert described["items"]["type"] == "array"
    assert mask_array.tolist() == [[1, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 1]]
    for masks, manifest, arrays, words in (
        (files[:1], two, {}, "--mask: 1 masks given for 2 speakers"),
        (files[:1], alone, {}, "takes no masks"),
        (files, two, {"speaker_masks": mask_array}, "--input speaker_masks contradicts --mask; give one"),
    ):
        with pytest.raises(RuntimeUsageError, match=words):
            fed({"mask": masks}, manifest, arrays)


def test_a_chunk_knows_when_it_was_heard(hubert: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the push that brought its last sample, for every row its own; not without a voice."""
    clock = iter(range(100))
    monkeypatch.setattr(voice_module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    windows = AudioWindows(1, 2, 1000, 4, normalised=True)
    voice = Heard(windows)  # chunks end at samples 5000, 13000, 21000
    for count in (4000, 2000, 6000, 1000):
        voice.push(np.zeros(count, np.float32))
    assert [voice.heard_at(first) for first in (0, 2)] == [1, 3]
    voice.push(np.zeros(3000, np.float32), at=4500, last=True)
    assert [voice.heard_at(first) for first in (0, 2, 4)] == [4, 4, 4]
    voice.forget(4)
    assert voice.heard_at(4) == 4
    monkeypatch.undo()
    with session_of(talk_config(), hubert[0]) as session:
        session.push_audio(sound()[0])
        chunk = session.run_chunk()
    assert chunk.heard_at is not None
    assert chunk.late_s() > 0


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=8), st.floats(0, 10))
def test_lateness_is_that_of_a_live_run(seconds: list[float], began: float) -> None:
    """A chunk begins when its samples are there and the one before it is done, sample by sample of time."""
    windows = AudioWindows(1, 3, 1000, 4, normalised=True)
    times = np.cumsum([began, *seconds]).tolist()
    free, late = 0.0, []
    for number, taken in enumerate(seconds):
        spoken = (
            9000 + 12_000 * number
        ) / 16_000  # a chunk of three: the first is 9 video frames, later ones are 12
        free = spoken + taken if free < spoken else free + taken
        late.append(free - spoken)
    assert windows.lateness(times) == pytest.approx(late, abs=1e-6)
    assert all(latency >= taken - 1e-6 for latency, taken in zip(late, seconds, strict=True))

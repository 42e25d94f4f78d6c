"""Checkpoints of Seko-Talk in two files: recognised by their keys, compared strictly, nothing guessed in silence."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import seko_export
from scripts.random_checkpoint import write_random_checkpoint
from seko_export import inspect
from seko_export.checkpoints.errors import CheckpointNotFoundError, NotACheckpointError, WeightKeysError
from seko_export.checkpoints.sources import LoadOptions
from seko_export.cli import main
from seko_export.errors import CheckpointError, UsageError
from seko_export.families.model_files import load_checkpoint, recognise_checkpoint
from seko_export.families.recognition import Source
from seko_export.families.registry import graph_of
from seko_export.families.seko_talk.family import FAMILY
from seko_export.families.seko_talk.keys import seko_shapes, to_ours, to_theirs
from seko_export.families.seko_talk.model import MOST_SPEAKERS, SekoTalkModel
from seko_export.families.seko_talk.presets import FULL, PRESETS, TINY
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import resolve_build
from seko_runtime import open_artifact
from tests.seko_talk.streams import talk_config
from tests.seko_talk.test_run_config import LOCAL
from tests.support.uncompiled import leave_uncompiled

MODEL = PRESETS[TINY].model
ADAPTER = "audio_adapter_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder: shards with their index, config.json, and the adapter."""
    write_random_checkpoint(tmp_path / "model", MODEL, seed=0, dtype=torch.float32)
    return tmp_path / "model"


def changed_config(folder: Path, **fields: object) -> None:
    """Change or (with None) remove fields of config.json."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def test_names_are_those_of_the_two_files(folder: Path) -> None:
    adapter = load_file(folder / ADAPTER)
    assert {"ca.1.to_kv.weight", "ca.0.shift_scale_gate", "audio_proj.learnable_queries"} <= {*adapter}
    assert "time_embedding.time_embedder.linear_1.weight" in adapter
    assert "audio_proj.transformer_decoder.layers.1.multihead_attn.in_proj_weight" in adapter
    index = json.loads((folder / "diffusion_pytorch_model.safetensors.index.json").read_text())["weight_map"]
    assert {"ref_patch_embedding.weight", "blocks.0.cross_attn.norm_k_img.weight", "img_emb.proj.3.bias"} <= {
        *index
    }
    assert not {*index} & {*adapter}
    for name in seko_shapes(MODEL):
        assert to_ours(to_theirs(name)) == name


def test_the_real_layout_has_the_shapes_of_the_description() -> None:
    shapes = {to_theirs(name): shape for name, shape in seko_shapes(PRESETS[FULL].model).items()}
    assert shapes["patch_embedding.weight"] == shapes["ref_patch_embedding.weight"] == (5120, 16, 1, 2, 2)
    assert shapes["state_embedding.weight"] == (2, 5120)
    assert shapes["img_emb.proj.1.weight"] == (1280, 1280)
    assert shapes["ca.39.to_kv.weight"] == (10240, 1024)
    assert shapes["ca.0.norm_kv.bias"] == (1024,)
    assert shapes["ca.7.shift_scale_gate"] == (1, 3, 5120)
    assert shapes["time_embedding.time_embedder.linear_1.weight"] == (5120, 256)
    assert shapes["time_embedding.time_proj.weight"] == (15360, 5120)
    assert shapes["audio_proj.learnable_queries"] == (1, 32, 1024)
    assert shapes["audio_proj.transformer_decoder.layers.3.self_attn.in_proj_weight"] == (3072, 1024)
    assert shapes["audio_proj.transformer_decoder.layers.0.linear1.weight"] == (4096, 1024)


def test_a_folder_tells_its_model(folder: Path) -> None:
    recognised = recognise_checkpoint(folder).recognised
    assert (recognised.family, recognised.kind, recognised.lacking, recognised.foreign) == (
        "seko_talk",
        SekoTalkModel,
        (),
        (),
    )
    assert recognised.model_named(TINY) == MODEL
    resolved = resolve_build(BuildOptions(checkpoint=folder, target="cpu"))
    assert resolved.config.model == MODEL
    assert (
        resolved.config.workload.stream.pass_caches,
        resolved.config.workload.stream.reference_frames,
    ) == (True, 1)
    assert resolved.config.workload.schedule.sampler == "euler-bf16"
    loaded = load_checkpoint(folder, MODEL)
    assert torch.equal(loaded["blocks.1.audio.to_q.weight"], load_file(folder / ADAPTER)["ca.1.to_q.weight"])


def test_what_no_shape_tells_is_told_as_assumed(folder: Path) -> None:
    changed_config(folder, audio_eps=None, ref_state=None)
    model = recognise_checkpoint(folder).recognised.model
    assert [model[name].source for name in ("audio_eps", "ref_state")] == [Source.ASSUMED] * 2
    (folder / "config.json").unlink()
    resolved = resolve_build(BuildOptions(checkpoint=folder, target="cpu", heads=2))
    assert any("audio_eps 1e-06" in note for note in resolved.notes)


# As TINY, but of sizes that no preset has: decoder heads of 64 channels, as the original's.
ODD = replace(MODEL, name="seko_talk-128x3", layers=3, audio_width=128, audio_heads=2)


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """The folder of a model that no preset has."""
    write_random_checkpoint(tmp_path / "odd", ODD, seed=0, dtype=torch.float32)
    return tmp_path / "odd"


def test_positions_of_a_model_that_no_preset_has_are_asked_for(odd: Path, tmp_path: Path) -> None:
    """Wrong ones show in the video alone. A run configuration or config.json answers too."""
    with pytest.raises(UsageError, match=r"does not tell window_positions .* give --window-positions"):
        resolve_build(BuildOptions(odd, target="cpu"))
    for wish, changed in (
        ({"window_positions": True}, {"window_positions": True}),
        ({"window_positions": False}, {"window_positions": False}),
        (
            {"window_positions": True, "rope_max_frames": 40},
            {"window_positions": True, "rope_max_frames": 40},
        ),
    ):
        stream = resolve_build(BuildOptions(odd, target="cpu", **wish)).config.workload.stream
        assert stream == replace(PRESETS[FULL].stream, **changed)
    run = tmp_path / "run.json"
    cache = LOCAL["ar_config"] | {"rope_position_mode": "global", "rope_max_frames": 40}
    run.write_text(json.dumps(LOCAL | {"ar_config": cache}))
    assert (
        resolve_build(BuildOptions(odd, run_config=run, target="cpu")).config.workload.stream.rope_max_frames
        == 40
    )
    changed_config(odd, rope_position_mode="local")
    assert resolve_build(BuildOptions(odd, target="cpu")).config.workload.stream == PRESETS[FULL].stream
    changed_config(
        odd,
        rope_position_mode=None,
        ar_config={"rope_position_mode": "global", "rope_max_frames": 40},
    )
    assert resolve_build(BuildOptions(odd, target="cpu")).config.workload.stream.rope_max_frames == 40
    changed_config(odd, ar_config={"rope_position_mode": "older"})
    with pytest.raises(NotACheckpointError, match="rope_position_mode is 'older', expected local or global"):
        resolve_build(BuildOptions(odd, target="cpu"))


def test_positions_of_a_preset_are_told(folder: Path) -> None:
    (note,) = resolve_build(BuildOptions(folder, target="cpu")).notes
    assert note.startswith(
        "window_positions True is taken (preset seko-talk-tiny); if the weights have others"
    )


def test_every_stream_has_a_cache_for_each_pass_and_a_portrait(odd: Path) -> None:
    with pytest.raises(UsageError, match="give --pass-caches, not --context-pass"):
        graph_of(
            resolve_build(BuildOptions(odd, window_positions=True, pass_caches=False, target="cpu")).config
        )
    with pytest.raises(UsageError, match="give --reference-frames 1, not 0"):
        graph_of(
            resolve_build(BuildOptions(odd, window_positions=True, reference_frames=0, target="cpu")).config
        )


@pytest.mark.parametrize(("width", "heads"), [(64, 1), (128, 2), (320, 5)])
def test_the_projectors_heads_are_64_channels_wide_as_the_originals(
    width: int, heads: int, tmp_path: Path
) -> None:
    model = replace(ODD, audio_width=width, audio_heads=heads)
    write_random_checkpoint(tmp_path / "any", model, seed=0, dtype=torch.float32)
    changed_config(tmp_path / "any", audio_heads=None)
    assert recognise_checkpoint(tmp_path / "any").recognised.model_named(ODD.name) == model
    changed_config(tmp_path / "any", audio_heads=4)
    assert recognise_checkpoint(tmp_path / "any").recognised.model["audio_heads"].value == 4


def test_heads_of_another_width_are_asked_for(tmp_path: Path) -> None:
    """No multiple of 64: neither a rule nor a preset says them, so config.json must."""
    model = replace(ODD, audio_width=96, audio_heads=3)
    write_random_checkpoint(tmp_path / "any", model, seed=0, dtype=torch.float32)
    assert recognise_checkpoint(tmp_path / "any").recognised.model["audio_heads"].value == 3
    changed_config(tmp_path / "any", audio_heads=None)
    asked = BuildOptions(tmp_path / "any", window_positions=True, target="cpu")
    with pytest.raises(UsageError, match=r"tell its audio_heads, .* audio_width 96: give a config\.json"):
        resolve_build(asked)


def test_speakers_are_read_from_config_json_and_asked_for(folder: Path, odd: Path, tmp_path: Path) -> None:
    """A choice of the build, whatever the weights: presets still fit, named or not."""

    def speakers(**options: object) -> int:
        return resolve_build(BuildOptions(**options, target="cpu")).config.model.speakers

    assert speakers(preset=TINY, random_weights=0, speakers=3) == 3
    for checkpoint, more in ((folder, {}), (folder, {"preset": TINY}), (odd, {"window_positions": True})):
        changed_config(checkpoint, speakers=None)
        assert speakers(checkpoint=checkpoint, **more) == 1
        changed_config(checkpoint, speakers=2)
        assert speakers(checkpoint=checkpoint, **more) == 2
        assert speakers(checkpoint=checkpoint, speakers=1, **more) == 1
    assert resolve_build(BuildOptions(folder, target="cpu")).config.model == replace(MODEL, speakers=2)
    assert inspect(folder)["preset"] == TINY
    changed_config(folder, speakers=0)
    with pytest.raises(NotACheckpointError, match=r"speakers in the config\.json of .* is 0"):
        resolve_build(BuildOptions(folder, target="cpu"))
    with pytest.raises(UsageError, match="--speakers is 0, expected 1 to 64"):
        speakers(preset=TINY, random_weights=0, speakers=0)
    assert speakers(preset=TINY, random_weights=0, speakers=MOST_SPEAKERS) == MOST_SPEAKERS
    with pytest.raises(UsageError, match="--speakers is 100000, expected 1 to 64"):
        speakers(preset=TINY, random_weights=0, speakers=100_000)
    changed_config(folder, speakers=100_000)
    with pytest.raises(NotACheckpointError, match="speakers is 100000, expected 1 to 64"):
        speakers(checkpoint=folder)
    changed_config(folder, speakers=2)
    with pytest.raises(UsageError, match="--speakers 2: 'tiny' hears no voice"):
        resolve_build(BuildOptions(preset="tiny", speakers=2, target="cpu"))
    run = tmp_path / "run.json"
    run.write_text(json.dumps(LOCAL | {"speakers": 2}))
    with pytest.raises(UsageError, match=r"speakers is 2, .* give --speakers N"):
        resolve_build(BuildOptions(preset=TINY, random_weights=0, run_config=run, target="cpu"))


def test_speakers_in_the_config_of_a_model_that_hears_nothing_are_refused(tmp_path: Path) -> None:
    from seko_export.families.wan.presets import PRESETS as WAN

    write_random_checkpoint(tmp_path / "wan", WAN["tiny"].model, seed=0, format="wan-sharded")
    changed_config(tmp_path / "wan", speakers=2)
    with pytest.raises(
        NotACheckpointError, match=r"speakers in the config\.json .* is 2, .* a wan hears no voice"
    ):
        resolve_build(BuildOptions(tmp_path / "wan", target="cpu"))


def test_fields_of_config_json_that_are_not_used_are_told(folder: Path, odd: Path) -> None:
    """Windows, which Wan counts otherwise, and times; what says nothing is not worth a sentence."""
    changed_config(folder, local_attn_size=-1, sink_size=0)
    notes = resolve_build(BuildOptions(folder, target="cpu")).notes
    assert not any("not used" in note for note in notes)
    for checkpoint, more in ((folder, {}), (folder, {"preset": TINY}), (odd, {"window_positions": True})):
        changed_config(checkpoint, local_attn_size=9, sink_size=2, shift=3.0)
        notes = resolve_build(BuildOptions(checkpoint, target="cpu", **more)).notes
        assert any("shift 3.0, local_attn_size 9, sink_size 2; --run-config or" in note for note in notes)


@pytest.mark.slow
def test_the_command_that_inspect_prints_builds(
    odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that no preset has, as it is printed; only the sizes of the stream are added, for the test's time."""
    leave_uncompiled(monkeypatch)
    monkeypatch.setattr(seko_export, "build", partial(seko_export.build, compiler_cache=False))
    monkeypatch.chdir(tmp_path)
    report = inspect(odd)
    assert report["preset"] is None
    assert any("--rope-max-frames M for its global ones" in note for note in report["notes"])
    program, *words = shlex.split(report["command"])
    assert program == "seko-export"
    small = ["--height", "32", "--width", "48", "--ring-frames", "2", "--backend", "compile"]
    result = CliRunner().invoke(main, [*words, *small, "--target", "cpu", "--speakers", "2", "--json"])
    assert result.exit_code == 0, result.stderr
    with open_artifact(tmp_path / "artifacts" / ODD.name) as artifact:
        inputs = {spec.name: spec.shape for spec in artifact.manifest.inputs}
        assert inputs["audio"] == (2, 1, 13, 48)
        assert inputs["speaker_masks"][0] == 2


def test_the_picture_branch_is_read_off_the_keys(tmp_path: Path) -> None:
    plain = SekoTalkModel(**{**vars(MODEL), "image_dim": 0})
    write_random_checkpoint(tmp_path / "plain", plain, seed=0, dtype=torch.float32)
    assert recognise_checkpoint(tmp_path / "plain").recognised.model["image_dim"].value == 0
    with pytest.raises(WeightKeysError, match="missing"):
        load_checkpoint(tmp_path / "plain", MODEL)
    changed_config(tmp_path / "plain", use_image_encoder=True)
    with pytest.raises(CheckpointError, match="has no picture branch"):
        recognise_checkpoint(tmp_path / "plain")


def test_an_adapter_is_read_from_a_pt_flat_or_in_a_part(folder: Path) -> None:
    adapter = load_file(folder / ADAPTER)
    (folder / ADAPTER).unlink()
    for content in (adapter, {"model_state": adapter}):
        torch.save(content, folder / "audio_adapter_model.pt")
        loaded = load_checkpoint(folder, recognise_checkpoint(folder).recognised.model_named(TINY))
        assert torch.equal(loaded["audio_time.time_proj.bias"], adapter["time_embedding.time_proj.bias"])


@pytest.mark.parametrize("form", ["safetensors", "pt", "fp8"])
def test_an_adapter_is_named_itself_or_lies_in_the_model_folder(form: str, tmp_path: Path) -> None:
    """Outside of the transformer's folder, by any name; it comes before the one beside the transformer."""
    whole, dit = tmp_path / "whole", tmp_path / "whole" / "dit"
    whole.mkdir()
    write_random_checkpoint(dit, MODEL, seed=0, dtype=torch.float32)
    stored = load_file(dit / ADAPTER)
    if form == "fp8":
        in_fp8(dit / ADAPTER, whole / "audio_adapter_model_fp8.safetensors", ADAPTER_PARTS)
        (dit / ADAPTER).unlink()
        adapter = whole / "audio_adapter_model_fp8.safetensors"
    elif form == "pt":
        adapter = whole / "audio_adapter_model.pt"
        torch.save({"model_state": stored}, adapter)
        (dit / ADAPTER).unlink()
    else:
        adapter = (dit / ADAPTER).rename(whole / ADAPTER)
    key = "blocks.1.audio.norm_kv.weight"
    report = inspect(whole)
    assert report["beside"] == {"--audio-adapter": str(adapter)}
    assert f"{dit} --audio-adapter {adapter}" in report["command"]
    for options in (
        {"model_folder": whole},
        {"checkpoint": dit, "model_folder": whole},
        {"checkpoint": dit, "audio_adapter": adapter},
    ):
        resolved = resolve_build(BuildOptions(**options, target="cpu"))
        assert (resolved.config.model, resolved.checkpoint) == (MODEL, dit)
        assert resolved.load_options.companion == adapter
        loaded = load_checkpoint(dit, MODEL, LoadOptions(companion=resolved.load_options.companion))
        assert torch.equal(loaded[key], stored["ca.1.norm_kv.weight"])
    with pytest.raises(CheckpointNotFoundError, match="without its audio adapter"):
        resolve_build(BuildOptions(dit, target="cpu"))
    other = {name: tensor + 1 for name, tensor in stored.items()}
    save_file(other, dit / ADAPTER)
    assert resolve_build(BuildOptions(model_folder=whole, target="cpu")).load_options.companion is None
    mine = dit / "mine.safetensors"
    save_file(stored, mine)
    assert resolve_build(BuildOptions(dit, audio_adapter=mine, target="cpu")).config.model == MODEL
    loaded = load_checkpoint(dit, MODEL, LoadOptions(companion=mine))
    assert torch.equal(loaded[key], stored["ca.1.norm_kv.weight"])


def test_an_adapter_of_another_model_or_of_none_is_refused(folder: Path, tmp_path: Path) -> None:
    from seko_export.families.wan.presets import PRESETS as WAN

    write_random_checkpoint(tmp_path / "wan", WAN["tiny"].model, seed=0)
    with pytest.raises(UsageError, match="is of wan, which has none"):
        resolve_build(BuildOptions(tmp_path / "wan", audio_adapter=folder / ADAPTER, target="cpu"))
    with pytest.raises(UsageError, match="belongs to a checkpoint"):
        BuildOptions(preset=TINY, random_weights=0, audio_adapter=folder / ADAPTER)
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint at"):
        resolve_build(BuildOptions(folder, audio_adapter=tmp_path / "missing.pt", target="cpu"))
    with pytest.raises(CheckpointError, match=r"config\.json is of no kind .* is read together with it"):
        resolve_build(BuildOptions(folder, audio_adapter=folder / "config.json", target="cpu"))


def in_fp8(file: Path, target: Path, parts: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Write a file as LightX2V's converter does, with rows of its own numbers that fp8 and bfloat16 both hold.

    Matrices whose names contain one of the parts become e4m3 with a scale for each row. Returns the same numbers plain.
    """
    plain, quantised = load_file(file), {}
    for name, tensor in plain.items():
        quantised[name] = tensor
        if tensor.dim() == 2 and name.endswith(".weight") and any(part in name for part in parts):
            scale = torch.exp2((tensor.abs().amax(1, keepdim=True) / 448).log2().ceil())
            codes = (tensor / scale).clamp(-448, 448)
            codes[:, 0] = 448  # the converter's scale is a row's largest number / 448
            quantised[name] = codes.to(torch.float8_e4m3fn)
            quantised[f"{name}_scale"] = scale
            plain[name] = quantised[name].float() * scale
    save_file(quantised, target)
    return plain


DIT_PARTS, ADAPTER_PARTS = (".self_attn.", ".cross_attn.", ".ffn."), (".to_q", ".to_kv", ".to_out")


def test_weights_in_fp8_are_those_of_the_bf16_files(tmp_path: Path) -> None:
    """Transformer and adapter: the same numbers, the same build, and with --fp8 the codes of the file."""
    write_random_checkpoint(tmp_path / "made", MODEL, seed=0, dtype=torch.float32)
    quantised, plain = tmp_path / "fp8", tmp_path / "bf16"
    for folder in (quantised, plain):
        folder.mkdir()
        (folder / "config.json").write_text((tmp_path / "made" / "config.json").read_text())
    shards = sorted((tmp_path / "made").glob("diffusion*.safetensors"))
    whole = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    save_file(whole, tmp_path / "whole")
    for source, parts, name, plain_name in (
        (tmp_path / "whole", DIT_PARTS, "converted_fp8.safetensors", "dit.safetensors"),
        (tmp_path / "made" / ADAPTER, ADAPTER_PARTS, "audio_adapter_model_fp8.safetensors", ADAPTER),
    ):
        numbers = in_fp8(source, quantised / name, parts)
        save_file({name: number.bfloat16() for name, number in numbers.items()}, plain / plain_name)
    assert resolve_build(BuildOptions(model_folder=quantised, target="cpu")).config.model == MODEL
    loaded, wanted = (
        load_checkpoint(folder, MODEL, LoadOptions(dtype=torch.bfloat16)) for folder in (quantised, plain)
    )
    assert loaded.names == wanted.names
    assert all(torch.equal(loaded[name], wanted[name]) for name in loaded.names)
    config = talk_config("fp4").changed(fused=True, fp8=True)
    built = dict(FAMILY.weights(FAMILY.graph(config).pieces, load_checkpoint(quantised, MODEL)))
    dit, adapter = (
        load_file(quantised / name)
        for name in ("converted_fp8.safetensors", "audio_adapter_model_fp8.safetensors")
    )
    for ours, stored, theirs in (
        ("blocks.1.ffn.0", dit, "blocks.1.ffn.0"),
        ("blocks.1.cross_attn.q", dit, "blocks.1.cross_attn.q"),
        ("blocks.0.tail.to_out", adapter, "ca.0.to_out"),
    ):
        assert torch.equal(built[f"{ours}.weight_fp8"].float(), stored[f"{theirs}.weight"].float())
        assert torch.allclose(
            built[f"{ours}.weight_scale"], stored[f"{theirs}.weight_scale"], rtol=3e-7, atol=0
        )


@pytest.mark.parametrize("fault", ["no scale", "no weight"])
def test_an_adapter_in_fp8_that_is_not_whole_is_refused(folder: Path, fault: str) -> None:
    in_fp8(folder / ADAPTER, folder / "audio_adapter_model_fp8.safetensors", ADAPTER_PARTS)
    load_checkpoint(folder, MODEL)  # the other one beside it comes first
    (folder / ADAPTER).unlink()
    whole = load_checkpoint(folder, MODEL)
    adapter = load_file(folder / "audio_adapter_model_fp8.safetensors")
    torch.save(adapter, folder / "audio_adapter_model.pt")
    assert torch.equal(
        load_checkpoint(folder, MODEL)["blocks.1.audio.to_q.weight"], whole["blocks.1.audio.to_q.weight"]
    )
    (folder / "audio_adapter_model.pt").unlink()
    weight, scale = "ca.1.to_q.weight", "ca.1.to_q.weight_scale"
    del adapter[scale if fault == "no scale" else weight]
    save_file(adapter, folder / "audio_adapter_model_fp8.safetensors")
    with pytest.raises(
        CheckpointError if fault == "no scale" else WeightKeysError, match=r"ca\.1\.to_q\.weight"
    ):
        load_checkpoint(folder, MODEL)


def test_a_scale_that_is_no_number_is_refused(folder: Path) -> None:
    in_fp8(folder / ADAPTER, folder / "audio_adapter_model_fp8.safetensors", ADAPTER_PARTS)
    (folder / ADAPTER).unlink()
    adapter = load_file(folder / "audio_adapter_model_fp8.safetensors")
    adapter["ca.1.to_q.weight_scale"][3] = torch.nan
    save_file(adapter, folder / "audio_adapter_model_fp8.safetensors")
    with pytest.raises(CheckpointError, match=r"ca\.1\.to_q\.weight holds 128 NaN"):
        load_checkpoint(folder, MODEL)["blocks.1.audio.to_q.weight"]


def test_a_missing_or_other_adapter_is_refused(folder: Path) -> None:
    adapter = load_file(folder / ADAPTER)
    (folder / ADAPTER).unlink()
    with pytest.raises(CheckpointNotFoundError, match="without its audio adapter"):
        recognise_checkpoint(folder)
    odd = {name: tensor for name, tensor in adapter.items() if name != "ca.0.to_q.bias"} | {
        "ca.0.extra": torch.zeros(1)
    }
    save_file(odd, folder / ADAPTER)
    with pytest.raises(WeightKeysError, match=r"1 unknown: ca\.0\.extra") as refusal:
        load_checkpoint(folder, MODEL)
    assert refusal.value.missing == ("blocks.0.audio.to_q.bias",)
    assert "ca.0.to_q.bias" in str(refusal.value)


def test_a_wan_checkpoint_stays_one(tmp_path: Path) -> None:
    """What Wan does not know outside of its layers counts too: without a picture branch the layers are Wan's."""
    from seko_export.families.wan.presets import PRESETS as WAN

    write_random_checkpoint(tmp_path / "wan", WAN["tiny"].model, seed=0)
    assert recognise_checkpoint(tmp_path / "wan").recognised.family == "wan"


def test_a_named_preset_of_another_family_is_told_by_its_keys(folder: Path) -> None:
    """What the preset has no field for is not compared; `ref_patch_embedding` is no landmark behind a prefix."""
    asked = BuildOptions(folder, preset="lingbot-tiny", target="cpu")
    model = resolve_build(asked).config.model
    with pytest.raises(WeightKeysError, match="does not hold the weights of 'lingbot-tiny'") as refusal:
        load_checkpoint(folder, model)
    assert "the prefix" not in str(refusal.value)

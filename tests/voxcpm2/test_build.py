"""Artifacts of a tiny VoxCPM2, built from a folder as the command takes it, against the original."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from scripts.random_speech import config_json, stored_tensors, tokenizer_json
from seko_export import BuildOptions, build, inspect, plan
from seko_export.artifact.describe import describe
from seko_export.backends import EAGER
from seko_export.checkpoints.errors import CheckpointNotFoundError
from seko_export.checkpoints.sources import LoadOptions, LoraFile
from seko_export.engines.piece import OF_LAYER, dtype_name
from seko_export.errors import CheckpointError, UsageError
from seko_export.families.model_files import load_checkpoint
from seko_export.families.registry import family_of, graph_of
from seko_export.families.speech.config import SpeechBuild
from seko_export.families.voxcpm2.config import VoxCpm2Config
from seko_export.host.progress import silent
from seko_export.options.asked import workload_asked
from seko_export.options.checks import check_options
from seko_export.speech.description import kv_pool
from seko_export.speech.options import SpeechOptions
from seko_export.speech.recording import LEAST
from seko_export.speech.resolve import resolve_speech
from seko_export.speech.workload import WORKLOAD
from seko_runtime import open_artifact
from seko_runtime.backends.cuda_memory import ENGINE_ALIGNMENT, CudaMemory
from seko_runtime.errors import ArtifactError
from seko_runtime.format.manifest import Weight
from seko_runtime.speech import contract, golden
from seko_runtime.speech.artifact import SpeechArtifact, speech_artifact
from seko_runtime.speech.manifest import SpeechManifest
from seko_runtime.speech.prompts import SpeechPrompt
from tests.support.rows import rows_of
from tests.support.shared import made_once
from tests.support.tolerances import ORACLE, relative_error
from tests.support.uncompiled import UNCOMPILED, programs_as_they_are
from tests.voxcpm2.models import PLAIN, prompt, with_heads
from tests.voxcpm2.oracle import Step, original_model, run_original, weights_of

# Heads wide enough for the groups of quantised caches.
WIDE = with_heads(32)
ROOT = Path(__file__).parents[2]
POSITIONS, TOKENS, STEPS, SEED = 64, 19, 6, 3
BAR = 10 * ORACLE[torch.float32]  # steps that feed on each other, and a prompt in two calls


def write_folder(folder: Path, config: VoxCpm2Config, model: Any = None) -> None:
    """Write a model's folder: config.json, both files of weights, the tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    weights, vae = weights_of(model or original_model(config, seed=SEED))
    for name, tensors in (("model", weights), ("audiovae", vae)):
        save_file(
            {key: tensor.contiguous().clone() for key, tensor in tensors.items()},
            folder / f"{name}.safetensors",
        )


def build_speech(folder: Path) -> Any:
    """Build an artifact of two sessions beside its checkpoint; its engines are exported programs."""
    checkpoint = folder.with_name(f"{folder.name}-checkpoint")
    write_folder(checkpoint, PLAIN)
    asked = SpeechOptions(
        checkpoint,
        sessions=2,
        batch=(2,),  # a session alone has a batch index without one beside it
        positions=POSITIONS,
        prefill=(16,),
        target="cpu",
        backend="compile",
        read_lengths=(32, POSITIONS),
    )
    with programs_as_they_are():
        return build(asked, folder, compiler_cache=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact whose programs torch runs op by op; not to be changed."""

    def make(folder: Path) -> None:
        artifact = build_speech(folder)
        assert artifact.golden_errors.keys() == {
            *artifact.golden_rounding,
            golden.VOICE_LATENTS,
            golden.STOP_LOGITS,
        }
        assert artifact.golden_error == max(artifact.golden_errors.values())
        (patches,) = (line for line in artifact.lines() if line.strip().startswith(golden.PATCHES))
        assert f"{artifact.golden_errors[golden.PATCHES]:.2e}; other last bits" in patches

    return made_once(tmp_path_factory, "built-speech", make)


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNCOMPILED, "1")


def original_steps() -> tuple[dict[str, Any], list[Step]]:
    """Return a prompt with a reference and a voice that goes on, and the original's steps behind it."""
    prompt_tensors = prompt(PLAIN, TOKENS, range(1, 5), range(15, TOKENS))
    return prompt_tensors, run_original(original_model(PLAIN, seed=SEED), **prompt_tensors, count=STEPS)


def check_steps(artifact: SpeechArtifact, worst: Callable[[str, float], None]) -> None:
    """Compare a session's states, patches and stop logits with the original's, each step from the original's state."""
    prompt_tensors, steps = original_steps()
    speech_prompt = SpeechPrompt(*(prompt_tensors[name].numpy() for name in ("ids", "is_audio", "patches")))
    with artifact.open_pool() as pool, pool.open_session(seed=1) as session:
        rows, device = rows_of(pool), rows_of(pool).device()
        session.begin_prompt(speech_prompt, STEPS)
        row = session._running_row()
        while rows.row(row).pending is not None:
            rows.run([row])
        for number, step in enumerate(steps):
            wanted = dict(zip(contract.STATES, (step.base, step.residual, step.last_patch), strict=True))
            for name, state in device.state(row).items():
                assert relative_error(torch.from_numpy(state), wanted[name][0]) <= BAR, (number, name)
            with rows.memory.ordered():
                device.set_state(row, {name: state[0].numpy() for name, state in wanted.items()})
                # the original draws its noise by torch: what `begin` makes of the state is kept, its noise replaced
                device._fill(numbers(rows, row))
                begin, solve, advance, decode = contract.step_programs(2, POSITIONS)
                device.run_all(device.programs[begin])
                rows.memory.write(device.results(1, contract.PATCH)[contract.PATCH], step.noise.numpy())
                for name in (solve, advance, decode):
                    device.run_all(device.programs[name])
            rows.row(row).filled += 1
            results = device.results(1, contract.PATCH, contract.STOP_LOGITS)
            for name, truth in ((contract.PATCH, step.patch), (contract.STOP_LOGITS, step.stop_logits)):
                error = relative_error(
                    torch.from_numpy(rows.memory.read(results[name])).flatten(), truth.flatten()
                )
                worst(f"VoxCPM2 artifact, {name}", error)
                assert error <= BAR, (number, name)


def numbers(rows: Any, row: int) -> dict[str, list[float]]:
    """Return what the host fills for a step of one row."""
    state = rows.row(row)
    return {
        contract.ROWS: [row],
        contract.STARTS: [state.start],
        contract.FIRST: [state.filled],
        contract.COUNT: [1],
        contract.TEMPERATURE: [1.0],
        contract.GUIDANCE: [2.0],
    }


def test_it_speaks_as_the_original(built: Path, worst: Callable[[str, float], None]) -> None:
    with open_artifact(built) as opened:
        artifact = speech_artifact(opened)
        check_steps(artifact, worst)
        assert all(error.within for error in artifact.verify())
        with artifact.open_session(seed=4) as session:
            sound = list(session.speak("hello 世界", patches=3))
    assert [len(samples) for samples in sound] == [PLAIN.patch_samples] * 3
    assert all(np.isfinite(samples).all() for samples in sound)


LORA = {"enable_lm": True, "enable_dit": True, "enable_proj": True, "r": 4, "alpha": 6}


def write_lora(folder: Path, model: Any, form: str) -> Path:
    """Write the LoRA of a model as the original's trainer does."""
    folder.mkdir()
    state = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}
    if form == "safetensors":
        save_file(state, folder / "lora_weights.safetensors")
    else:
        torch.save({"state_dict": state}, folder / "lora_weights.ckpt")
    (folder / "lora_config.json").write_text(json.dumps({"base_model": "a/b", "lora_config": LORA}))
    return folder


@pytest.mark.shows("lora")
@pytest.mark.parametrize("form", ["safetensors", "ckpt"])
def test_a_lora_of_the_originals_trainer_is_read_with_its_config(form: str, tmp_path: Path) -> None:
    model = original_model(PLAIN, seed=SEED, lora=LORA)
    write_folder(tmp_path / "base", PLAIN, model)
    lora = write_lora(tmp_path / "ada", model, form)

    def load() -> Any:
        return load_checkpoint(tmp_path / "base", PLAIN, LoadOptions(loras=(LoraFile(lora, 0.5),)))

    loaded = load()
    assert "rank 4, scale by lora_config.json, weight 0.5" in loaded.notes[-1]
    for name, module in model.named_modules():
        if getattr(module, "lora_A", None) is not None:
            wanted = module.weight + 0.5 * LORA["alpha"] / LORA["r"] * module.lora_B @ module.lora_A
            assert relative_error(loaded[f"{name}.weight"], wanted.detach()) <= ORACLE[torch.float32]
    config = lora / "lora_config.json"
    for content, words in (
        (json.dumps({"lora_config": {**LORA, "r": 5}}), "its rank is 4, and 5 by lora_config.json"),
        (json.dumps({"lora_config": {"r": 4}}), "alpha in its lora_config.json is None"),
        (json.dumps(LORA), "lora_config in its lora_config.json is None"),
    ):
        config.write_text(content)
        with pytest.raises(CheckpointError, match=words):
            load()
    config.unlink()
    with pytest.raises(CheckpointNotFoundError, match="which alone states alpha"):
        load()


def test_its_manifest_says_what_was_asked_for(built: Path) -> None:
    report = inspect(built)
    speech = report["workload"]
    assert (speech["positions"], speech["places"]) == (POSITIONS, 2 * POSITIONS + 1)
    assert (speech["read_lengths"], speech["prefill_tokens"]) == ((32, POSITIONS), (16,))
    assert speech["solver"]["moving_steps"] == 9
    assert set(report["programs"]) == {
        *(f"{name}.2" for name in ("begin", "solve", "decode")),
        *(f"advance.2.{length}" for length in (32, POSITIONS)),
        *(f"prefill.16.{length}" for length in (32, POSITIONS)),
        contract.LEAD_IN,
        contract.VOICE_PROGRAM,
    }


def test_a_tampered_manifest_is_refused(built: Path, tmp_path: Path) -> None:
    manifest = json.loads((built / "manifest.json").read_text())
    for change, why in (
        (lambda m: m["workload"].update(vocabulary=10**6), "looks ids up"),
        (lambda m: m["workload"].update(places=POSITIONS), "the last place is nobody's"),
        (lambda m: m["workload"].update(step_lengths=[32]), "step_lengths end with 32"),
        (lambda m: m["workload"]["solver"].update(moving_steps=10), "fewer than the 10 steps"),
        (lambda m: m.update(pool=None), "needs the table pool"),
        (lambda m: m["programs"].pop("voice"), "lack"),
        (lambda m: m["buffers"][0].update(dtype="int8"), "buffer"),
    ):
        copy = json.loads(json.dumps(manifest))
        change(copy)
        folder = tmp_path / why.replace(" ", "-")
        folder.mkdir()
        for file in built.iterdir():
            if file.name != "manifest.json":
                (folder / file.name).symlink_to(file)
        (folder / "manifest.json").write_text(json.dumps(copy))
        with pytest.raises(ArtifactError, match=why):
            open_artifact(folder)


def test_a_folder_is_recognised_and_its_model_named(tmp_path: Path) -> None:
    write_folder(tmp_path / "tiny", PLAIN)
    options = BuildOptions(tmp_path / "tiny", target="cpu")
    assert workload_asked(options).name == "speech"
    config = resolve_speech(options).config
    assert (config.model, config.workload.positions) == (PLAIN, PLAIN.rope.max_positions)
    report = inspect(tmp_path / "tiny")
    assert (report["family"], report["preset"]) == ("voxcpm2", "voxcpm2-tiny")
    assert report["model"]["fsq_dim"] == {"value": 16, "from": "config.json"}
    assert sum(report["dtypes"].values()) == stored_tensors(PLAIN) - 1  # the boundaries of rates are compared
    on_gpu = inspect(tmp_path / "tiny", gpu="h200")["gpu"]
    planned = plan(SpeechOptions(tmp_path / "tiny"), "h200")["bytes"]
    assert (on_gpu["weight_bytes"], on_gpu["cache_bytes"]) == (planned["weights"], planned["caches"])
    assert sum(planned[part] for part in ("weights", "caches", "other buffers")) == on_gpu["peak_bytes"]
    assert on_gpu["fits"]
    odd = replace(PLAIN, name="voxcpm2", fsq_dim=24)
    write_folder(tmp_path / "odd", odd)
    assert resolve_speech(BuildOptions(tmp_path / "odd", target="cpu")).config.model == odd
    assert inspect(tmp_path / "odd")["preset"] is None
    with pytest.raises(CheckpointError, match="contradicts --preset voxcpm2-tiny: fsq_dim is 24"):
        resolve_speech(BuildOptions(tmp_path / "odd", preset="voxcpm2-tiny", target="cpu"))
    os.remove(tmp_path / "odd" / "tokenizer.json")
    with pytest.raises(CheckpointNotFoundError, match=r"no tokenizer\.json"):
        resolve_speech(BuildOptions(tmp_path / "odd", target="cpu"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"ranks": 2}, "runs on one GPU"),
        ({"height": 480}, "--height belongs to models of video"),
        ({"positions": 10**6}, "has 2048 at most"),
        ({"prefill": (64, 32)}, "rising numbers"),
        ({"read_lengths": (32,)}, "the last must be --positions 2048"),
        ({"steps": 1025}, "--steps 1025: expected at most 1024"),
        ({"steps": 1}, "at least 2"),
        ({"sessions": 2, "batch": (1, 4)}, "from 1 to 2"),
        ({"backend": "tensorrt"}, "makes engines for the workload video"),
        ({"backend": "onnx"}, "makes engines for the workload video"),
        ({"kv": "int8-fp4"}, "keys and values alike"),
    ],
)
def test_what_speech_cannot_have_is_refused(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    asked = SpeechOptions(preset="voxcpm2-tiny", random_weights=0, **{"target": "cpu", **options})
    with pytest.raises(UsageError, match=why):
        build(asked, tmp_path / "artifact")


@pytest.mark.parametrize(
    ("options", "share", "worst_error"),
    [({"kv": "int8"}, 0.52, 0.05), ({"fp4_kv": True}, 0.29, 0.5), ({"fp8": True}, 2, 0.5)],
    ids=["int8", "fp4", "fp8"],
)
def test_lossy_caches_and_weights_are_compared_with_exact_ones(
    options: dict[str, Any], share: float, worst_error: float, tmp_path: Path
) -> None:
    """The size of the caches as a share of bf16, and what the loss does to a step's results."""
    folder = tmp_path / "model"
    write_folder(folder, WIDE)
    sizes = {"positions": POSITIONS, "prefill": (16,), "read_lengths": (POSITIONS,)}
    resolved = resolve_speech(SpeechOptions(folder, target="cpu", **sizes, **options))
    config, family = resolved.config, family_of(resolved.config)
    checkpoint = family.load(folder, config.model)
    weights = dict(family.weights(graph_of(config).pieces, checkpoint)) | dict(
        family.tables(config, checkpoint)
    )
    recording = WORKLOAD.record(config, weights, checkpoint, resolved.media, silent, lambda: None)
    assert 0 < max(recording.error_vs_exact.values()) < worst_error
    assert recording.bounds == LEAST[torch.float32]
    assert recording.rounding.keys() == recording.results.keys() - {golden.VOICE_LATENTS, golden.STOP_LOGITS}
    assert min(recording.rounding.values()) > 0  # every result depends on layers whose bits were changed
    assert recording.rounding[golden.PATCHES] < LEAST[torch.float32].patches
    pool = kv_pool(config)
    assert 0.9 * share < pool.pool_bytes / pool.bf16_pool_bytes <= share
    assert_resolves(config)


def assert_resolves(config: SpeechBuild) -> None:
    """Check a build's manifest against the runtime's contract."""
    table = tuple(Weight(name, shape, dtype) for name, shape, dtype in weight_table(config))
    contract.resolve_speech(cast(SpeechManifest, describe(config, EAGER, table, {})))


def weight_table(config: SpeechBuild) -> list[tuple[str, tuple[int, ...], str]]:
    """Return name, shape and dtype of each weight that the engines take."""
    table = {}
    for piece in graph_of(config).pieces.values():
        for layer in piece.served or (0,):
            for argument in piece.signature:
                kind, _, name = argument.ref.format(layer=layer, place=layer).partition(":")
                if kind == "weight":
                    steps = (9,) if name.endswith("[pass]") else ()
                    name = name.removesuffix("[pass]")
                    table[name] = (name, (*steps, *argument.shape), dtype_name(argument.dtype))
    return list(table.values())


@pytest.mark.parametrize("kv", ["int8", "fp4"])
def test_each_layers_cache_begins_where_an_engine_may_write_it(kv: str, tmp_path: Path) -> None:
    """In memory as on a GPU, where engines copy misaligned inputs and lose what they write there."""
    folder = tmp_path / "model"
    write_folder(folder, WIDE)
    options = {"fp4_kv": True} if kv == "fp4" else {"kv": kv}
    config = resolve_speech(SpeechOptions(folder, target="cpu", positions=POSITIONS, **options)).config
    graph, memory = graph_of(config), cast(CudaMemory, SimpleNamespace(device=torch.device("cpu")))
    tensors = {buffer.name: CudaMemory.allocate(memory, buffer) for buffer in graph.buffers}
    layers = [
        tensors[argument.ref.removeprefix("buffer:").removesuffix(OF_LAYER)][layer]
        for piece in graph.pieces.values()
        for argument in piece.inputs
        if argument.ref.endswith(OF_LAYER) and argument.ref.startswith("buffer:")
        for layer in piece.served
    ]
    sizes = {layer.numel() * layer.itemsize % ENGINE_ALIGNMENT for layer in layers}
    assert sizes != {0}  # otherwise nothing would be tested: scales of this model end between two multiples
    assert [layer.data_ptr() % ENGINE_ALIGNMENT for layer in layers] == [0] * len(layers)


def test_quantised_caches_need_heads_of_whole_groups() -> None:
    with pytest.raises(UsageError, match="heads of 16 channels are no multiple"):
        graph_of(
            resolve_speech(
                BuildOptions(preset="voxcpm2-tiny", random_weights=0, kv="int8", target="cpu")
            ).config
        )


def test_video_has_no_options_of_speech() -> None:
    with pytest.raises(UsageError, match="--positions belongs to models of speech"):
        check_options(SpeechOptions(preset="tiny", positions=8))


def test_a_plan_has_memory_and_the_time_of_a_step() -> None:
    """Of the public model on an H200: 7.55 GB of weights and 0.18 of the audio VAE a step at 4.8 TB/s.

    The times are those of the newest rows of `vox_step_ms` and `vox_fp8_step_vs_bf16`.
    """
    options = SpeechOptions(preset="voxcpm2", sessions=64, batch=(1, 64), positions=1024)
    report = plan(options, "h200")
    alone, many = report["steps"]
    assert alone["weight_bytes"] == pytest.approx(7.55e9 + 4 * 45.7e6, rel=0.01)
    assert alone["least_ms"] == pytest.approx(1.61, rel=0.02)
    rows = list(map(json.loads, (ROOT / "docs/benchmarks/h200.jsonl").read_text().splitlines()))
    newest = [row for row in rows if row["figure"] == "vox_step_ms"][-1]
    assert alone["ms"] == pytest.approx(newest["value"], rel=0.15)
    assert many["ms"] == pytest.approx(newest["b64_ms"], rel=0.15)
    assert many["least_ms"] < 10 * alone["least_ms"]  # a batch costs little more than one row
    assert report["bytes"]["of a position"] == 36 * 1024
    assert report["fits"]
    assert report["sessions_fit"] > 1000
    halved, halved_many = plan(replace(options, fp8=True), "h200")["steps"]
    in_fp8 = [row for row in rows if row["figure"] == "vox_fp8_step_vs_bf16"][-1]
    assert halved["ms"] == pytest.approx(in_fp8["fp8_ms"], rel=0.15)
    assert halved_many["ms"] == pytest.approx(in_fp8["fp8_b64_ms"], rel=0.15)
    assert halved["weight_bytes"] < 0.53 * alone["weight_bytes"]
    assert halved["ms"] < alone["ms"]
    int8 = plan(replace(options, kv="int8", batch=(1,)), "h200")["steps"][0]
    assert int8["ms"] > int8["least_ms"]  # its ops are counted
    fewer = plan(replace(options, steps=4), "h200")["steps"]
    assert fewer == plan(options, "h200", steps=4)["steps"]
    assert fewer[0]["ms"] < alone["ms"]
    with pytest.raises(UsageError, match="--fps 24 belongs to models of video"):
        plan(options, "h200", fps=24)

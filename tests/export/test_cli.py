"""The command: one JSON line or readable text, one sentence and its exit code for what cannot be, no remains."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file

from scripts.random_checkpoint import write_random_checkpoint
from seko_export.artifact.manifest_json import manifest_json
from seko_export.artifact.writer import hash_files
from seko_export.config.model import ModelConfig
from seko_export.families.wan.presets import PRESETS
from seko_export.host import environment
from seko_export.options.declaration import KV_FORMATS
from seko_runtime.format.whole_files import whole_folder
from seko_runtime.video.manifest import parse_video_manifest
from tests.conftest import SEKO_EXPORT
from tests.export.media_files import write_text_encoder, write_vae

USAGE, CHECKPOINT, ARTIFACT, ENVIRONMENT, NUMERIC = 2, 3, 4, 5, 6
PATIENCE_S = 300  # ends early where all is well; a busy machine takes minutes to import torch
SAMPLE_NOTE = "no checkpoint named: using seeded random weights (noise, not video)\n"
# Those that a refused build may have come to.
STEPS = ("compiling the engines", "reading the checkpoint", "probing the compiler")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a TMPDIR of its own: what a build leaves behind is in one of the two."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "out").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "tiny.pt"
    write_random_checkpoint(path, PRESETS["tiny"].model, format="self-forcing", seed=0)
    return path


def last_json(result: Result) -> dict[str, Any]:
    """The last line of stdout as one JSON object, without NaN or infinity, which JSON has not."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1], parse_constant=refuse)
    assert isinstance(report, dict)
    return report


def assert_refused(result: Result, code: int, *words: str) -> None:
    """The exit code, and a sentence on stderr that holds the words; no traceback, no report."""
    assert result.exit_code == code, (result.output, result.exception)
    assert result.stdout == ""
    before, mark, sentence = result.stderr.partition("seko-export: ")
    assert mark
    progress = [line for line in before.splitlines() if not line.startswith("takes about ")]
    steps = [re.sub(r", \d+ s(; engines: .*)?$", "", line) for line in progress]  # with the time, after 10 s
    assert set(steps) <= {SAMPLE_NOTE.strip(), *STEPS}
    for word in words:
        assert word in sentence
    assert "Traceback" not in result.stderr


def assert_nothing_left(workplace: Path) -> None:
    assert list((workplace / "out").iterdir()) == []
    assert [path.name for path in (workplace / "tmp").iterdir() if path.name.startswith("seko-")] == []


# -- what it says ----------------------------------------------------------------------------------------------


def test_build_prints_one_json_object_and_its_steps_to_stderr(fp4):
    """No bars in a log: lines, one of them says what the build takes."""
    assert len(fp4.done.stdout.splitlines()) == 1
    steps = fp4.done.stderr.splitlines()
    assert [line for line in steps if line.startswith("takes about ") and " free)" in line]
    wanted = {"compiling the engines", "reading the checkpoint", "verifying in a new process"}
    assert {SAMPLE_NOTE.strip(), *wanted} <= set(steps)


def test_inspect(fp4, invoke):
    """Everything that the JSON holds is in the text, by the same names."""
    report = last_json(invoke("inspect", fp4.folder, "--json"))
    assert report["digest"] == fp4.report["digest"]
    assert report["engine_bytes"] == fp4.report["engine_bytes"]
    assert report["weight_bytes"] == fp4.report["weight_bytes"]
    assert report["kv"]["pool_bytes"] == fp4.report["kv"]["pool_bytes"]
    assert report["stream"]["ring_frames"] == PRESETS["tiny"].stream.ring_frames
    text = invoke("inspect", fp4.folder)
    assert text.exit_code == 0
    assert {line.split()[0] for line in text.stdout.splitlines()} == set(report)
    assert report["text"] is report["video"] is None


def test_inspect_of_a_checkpoint(invoke, checkpoint, tmp_path):
    """Told by what lies there; everything that the JSON holds is in the text; the command can be run as it is."""
    report = last_json(invoke("inspect", checkpoint, "--json"))
    assert (report["family"], report["format"], report["part"]) == ("wan", "self-forcing", "generator_ema")
    assert report["preset"] == "tiny"
    assert report["model"]["dim"] == {"value": 256, "from": "shapes"}
    assert report["model"]["heads"] == {"value": 2, "from": "preset tiny"}
    assert (report["dtypes"], report["bytes"]) == ({"bfloat16": 69}, checkpoint.stat().st_size)
    assert report["parameters"] == 2_177_856
    assert report["command"] == f"seko-export build {checkpoint} --heads 2 -o artifacts/tiny"
    (note,) = report["notes"]
    assert "heads 2, text_tokens 32, norm_eps 1e-06 (preset tiny)" in note
    text = invoke("inspect", checkpoint)
    assert text.exit_code == 0
    assert {line.split()[0] for line in text.stdout.splitlines()} == set(report)
    odd = ModelConfig("odd", layers=3, dim=144, heads=3, ffn_dim=80, text_dim=24, freq_dim=16)
    write_random_checkpoint(tmp_path / "o d d", odd, format="diffusers", seed=0)
    (tmp_path / "o d d/vae").mkdir()
    report = last_json(invoke("inspect", tmp_path / "o d d", "--json"))
    assert report["preset"] is None
    assert report["model"]["heads"] == {"value": 3, "from": "config.json (num_attention_heads)"}
    vae = f"--vae '{tmp_path}/o d d/vae'"
    assert report["command"] == f"seko-export build '{tmp_path}/o d d' {vae} -o artifacts/wan-144x3"


def test_inspect_of_a_checkpoint_that_leaves_its_heads_open(invoke, tmp_path):
    odd = ModelConfig("odd", layers=1, dim=144, heads=3, ffn_dim=80, text_dim=24, freq_dim=16)
    write_random_checkpoint(tmp_path / "odd", odd, format="wan", seed=0)
    report = last_json(invoke("inspect", tmp_path / "odd", "--json"))
    assert "heads" not in report["model"]
    assert "--heads N" in report["command"]
    assert "does not tell its heads" in report["notes"][-1]
    refused = invoke("build", tmp_path / "odd", "-o", tmp_path / "out")
    assert_refused(refused, USAGE, "does not tell its heads", "144", "--heads N", "config.json")


def test_inspect_of_other_files(invoke, tmp_path, checkpoint):
    """A VAE is described; a damaged checkpoint is a damaged checkpoint, not an artifact; weights alone of a .pt."""
    vae = last_json(invoke("inspect", write_vae(tmp_path / "vae"), "--json"))
    assert vae["title"] == "Wan 2.1 VAE of base_dim 4"
    assert (vae["latent_channels"], vae["spatial_stride"], vae["temporal_stride"]) == (16, 8, 4)
    assert vae["encodes_pictures"] is True
    assert {"tiny", "self-forcing-1.3b"} <= {*vae["presets"]}
    assert vae["command"].startswith("seko-export build CHECKPOINT --vae ")
    text = invoke("inspect", write_text_encoder(tmp_path / "text"))
    assert_refused(text, CHECKPOINT, "it is a UMT5 text encoder", "--text-encoder")
    (tmp_path / "cut.pt").write_bytes(checkpoint.read_bytes()[:5000])
    assert_refused(invoke("inspect", tmp_path / "cut.pt"), CHECKPOINT, "cut short or damaged")
    trained = torch.load(checkpoint, weights_only=True)["generator"]
    torch.save({"generator": trained}, tmp_path / "trained.pt")
    report = last_json(invoke("inspect", tmp_path / "trained.pt", "--json"))
    assert report["part"] == "generator"
    trained["model.stray"] = torch.zeros(1)
    torch.save({"generator_ema": trained}, tmp_path / "stray.pt")
    assert_refused(invoke("inspect", tmp_path / "stray.pt"), CHECKPOINT, "1 unknown: model.stray")


def test_inspect_lists_a_preset_s_fields_in_the_order_of_their_class(invoke, checkpoint):
    """The order does not follow Python's hashes, which differ between processes."""
    fields = [*vars(PRESETS["tiny"].stream)]
    lines = invoke("inspect", checkpoint).stdout.splitlines()
    shown = [line.split()[1] for line in lines if line.startswith("stream ")]
    assert {*shown} == {*fields}
    of_preset = shown[shown.index("fps") + 1 :]  # behind those that the family states
    assert of_preset == [field for field in fields if field in of_preset]


def test_inspect_of_a_sample_needs_nothing(invoke):
    """Its config.json states the passes, VAE and text encoder, too."""
    world = Path(__file__).parents[2] / "artifacts" / "world-sample"
    report = last_json(invoke("inspect", world, "--json"))
    assert report["needs"] == report["notes"] == []
    assert report["command"] == f"seko-export build {world} -o artifacts/sample"


def test_inspect_of_a_lora_that_is_refused(invoke, tmp_path):
    """It says why the LoRA is refused, and nothing about a base model."""
    pair = {f"blocks.0.self_attn.q.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}
    save_file(pair, tmp_path / "lora.safetensors", {"lora_adapter_metadata": "{"})
    assert_refused(invoke("inspect", tmp_path / "lora.safetensors"), CHECKPOINT, "of its header is no JSON")
    save_file({"blocks.0.self_attn.q.hada_w1_a": torch.ones(2, 2)}, tmp_path / "loha.safetensors")
    assert_refused(invoke("inspect", tmp_path / "loha.safetensors"), CHECKPOINT, "is a LoHa")


def test_inspect_of_a_folder_without_a_model(invoke, tmp_path):
    """It is no checkpoint, which `inspect` takes too; nothing there says that it was to be an artifact."""
    (tmp_path / "README.md").touch()
    assert_refused(invoke("inspect", tmp_path), CHECKPOINT, f"the folder {tmp_path} holds no *.safetensors")


def test_inspect_of_a_folder_with_two_vaes(invoke, tmp_path, checkpoint):
    """The two files are named, not the checkpoint beside them."""
    (tmp_path / "folder").mkdir()
    model = torch.load(checkpoint, weights_only=True)["generator"]
    save_file(model, tmp_path / "folder/model.safetensors")
    vae = next(write_vae(tmp_path / "vae").glob("*.safetensors"))
    for name in "ab":
        shutil.copyfile(vae, tmp_path / f"folder/{name}.safetensors")
    refused = invoke("inspect", tmp_path / "folder")
    assert_refused(refused, CHECKPOINT, "holds a VAE 2 times: a.safetensors, b.safetensors")


def test_verify(fp4, invoke):
    report = last_json(invoke("verify", fp4.folder, "--json"))
    assert report["ok"] is True
    assert report["digest"] == fp4.report["digest"]
    worst = report["worst"]
    assert worst["golden"] == max(chunk["golden"] for chunk in report["errors"]) <= worst["tolerance"]
    assert 0 <= worst["cache"] <= worst["cache_tolerance"]
    text = invoke("verify", fp4.folder)
    assert text.exit_code == 0
    assert f"{worst['golden']:.3g}" in text.stdout


def test_bench(fp4, invoke):
    report = last_json(invoke("bench", fp4.folder, "--chunks", 2, "--json"))
    assert report["digest"] == fp4.report["digest"]
    assert report["counters"]["pool_bytes"] == fp4.report["kv"]["pool_bytes"]
    assert 0 < report["chunk_median_s"] <= report["chunk_p99_s"]
    text = invoke("bench", fp4.folder, "--chunks", 1)
    assert text.exit_code == 0
    assert {line.split()[0] for line in text.stdout.splitlines()} == set(report)
    assert invoke("bench", fp4.folder, "--chunks", 0).exit_code == USAGE


def test_doctor(invoke, monkeypatch):
    """A finding a line, with its advice; the JSON says what can be built."""
    monkeypatch.setenv("CXX", "/nonexistent")
    result = invoke("doctor", "--json")
    report = last_json(result)
    assert result.exit_code == 0
    assert report["build_cpu"] is False
    assert set(report) == {"build_cpu", "build_cuda", "gpu", "findings"}
    assert all(set(f) == {"subject", "ok", "found", "advice"} for f in report["findings"])
    lines = invoke("doctor").stdout.splitlines()
    assert len(lines) == len(report["findings"])
    for line, finding in zip(lines, report["findings"], strict=True):
        assert line.startswith("ok  " if finding["ok"] else "no  ")
        assert finding["subject"] in line
        assert finding["advice"] in line


# -- artifacts that are not what they were ---------------------------------------------------------------------


def test_other_weights_do_not_verify(artifact, invoke):
    """Consistent hashes, another number: exit code 6, and the worst error in the report and in the sentence."""
    manifest = parse_video_manifest((artifact / "manifest.json").read_bytes())
    name = "blocks.0.ffn.0.weight"
    file = next(weight.file for weight in manifest.weights if weight.name == name)
    tensors = load_file(artifact / file)
    tensors[name].neg_()
    save_file(tensors, artifact / file)
    rewrite_manifest(artifact)
    result = invoke("verify", artifact, "--json")
    report = last_json(result)
    assert result.exit_code == NUMERIC
    assert report["ok"] is False
    worst = report["worst"]
    assert worst["golden"] > worst["tolerance"]
    assert f"{worst['golden']:.3g}" in result.stderr
    assert_refused(invoke("verify", artifact), NUMERIC, f"{worst['golden']:.3g}", "rebuild")


def test_weights_that_make_nan_do_not_verify(artifact, invoke):
    """NaN compares with nothing; it is still the worst error, and JSON still JSON."""
    for file in (artifact / "weights").iterdir():
        tensors = load_file(file)
        for name in tensors:
            if name == "head.head.bias":
                tensors[name].fill_(torch.nan)
        save_file(tensors, file)
    rewrite_manifest(artifact)
    result = invoke("verify", artifact, "--json")
    assert result.exit_code == NUMERIC
    assert last_json(result)["worst"]["golden"] == "nan"


@pytest.mark.parametrize("command", ["inspect", "verify", "bench"])
def test_a_damaged_artifact(artifact, invoke, command):
    engine = artifact / "engines/block.pt2"
    content = bytearray(engine.read_bytes())
    content[len(content) // 2] ^= 1
    engine.write_bytes(content)
    assert_refused(invoke(command, artifact), ARTIFACT, "engines/block.pt2")


@pytest.mark.parametrize("command", ["inspect", "verify", "bench"])
def test_no_artifact(tmp_path, invoke, command):
    # `inspect` also takes checkpoints; what is missing there has the code of an input file.
    code = CHECKPOINT if command == "inspect" else ARTIFACT
    assert_refused(invoke(command, tmp_path / "absent"), code, "absent")
    sentence = "holds no *.safetensors" if command == "inspect" else "manifest.json"
    assert_refused(invoke(command, tmp_path), code, sentence)


# -- builds that cannot be -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--height", "50"], USAGE, ["height 50", "multiple of 16"]),
        (["--width", "0"], USAGE, ["width 0", "multiple of 16"]),
        (["--height", "-16"], USAGE, ["height -16", "multiple of 16"]),
        (["--chunk-frames", "0"], USAGE, ["chunk_frames 0", "at least 1"]),
        (["--batch", "0"], USAGE, ["batch 0", "at least 1"]),
        (["--heads", "2"], USAGE, ["--heads 2", "needs a checkpoint"]),
        (["--sink-frames", "-1"], USAGE, ["sink_frames -1", "at least 0"]),
        (["--sink-frames", "30"], USAGE, ["--sink-frames 30", "--ring-frames 6", "36", "N minus the sink"]),
        (["--chunk-frames", "7"], USAGE, ["chunk of 7", "ring of 6", "raise --ring-frames"]),
        (["--ring-frames", "2"], USAGE, ["chunk of 3", "ring of 2"]),
        (["--preset", "huge"], USAGE, ["'huge'", "sample, tiny, ", "self-forcing-1.3b"]),
        (["--kv", "int3"], USAGE, ["'int3'", ", ".join(KV_FORMATS)]),
        (["--kv", "int8-fp4-fp8"], USAGE, ["'int8-fp4-fp8'", "KEYS-VALUES"]),
        (["--kv", "bf16-sink"], USAGE, ["--kv bf16-sink", "leave the exact sink out"]),
        (["--kv", "fp4-sink", "--sink-frames", "0"], USAGE, ["fp4-sink", "give it sink frames"]),
        (["--layer-rings", "3,x"], USAGE, ["--layer-rings", "3,x"]),
        (["--layer-rings", "2,6"], USAGE, ["ring of 2", "raise --layer-rings"]),
        (["--timesteps", "1000,x"], USAGE, ["--timesteps '1000,x'", "numbers with commas"]),
        (["--timesteps", "500,750"], USAGE, ["--timesteps", "must fall"]),
        (["--timesteps", "1000,500", "--sigmas", "1"], USAGE, ["--timesteps, --sigmas: --sigmas must be 2"]),
        (["--sigmas", "1"], USAGE, ["--sigmas must be 4 noise levels"]),
        (["--renoise-sigmas", "1"], USAGE, ["--renoise-sigmas must be 3 noise levels"]),
        (["--first-timesteps", "1000,nan"], USAGE, ["--first-timesteps '1000,nan'"]),
        (["--first-timesteps", "1000", "--batch", "2"], USAGE, ["--batch 2", "give --sessions"]),
        (["--shift", "5"], USAGE, ["--shift 5.0", "--first-timesteps"]),
        (["--timesteps", "1000", "--shift", "-1"], USAGE, ["--shift", "positive shift"]),
        (["--fp8", "--target", "cpu"], USAGE, ["--fp8 needs a GPU, and this build is for cpu"]),
        (["--context-timestep", "1001"], USAGE, ["--context-timestep must lie in [0, 1000]"]),
        (["--sampler", "dpm"], USAGE, ["--sampler", "'dpm'", "renoise, euler"]),
        (["--backend", "onnx", "--layer-rings", "3,6"], USAGE, ["--backend onnx", "--layer-rings"]),
        (["--backend", "onnx", "--reference-frames", "1"], USAGE, ["--backend onnx", "--reference-frames"]),
        (["--reference-frames", "-1"], USAGE, ["reference_frames must be at least 0, got -1"]),
        (["--backend", "onnx", "--pass-caches"], USAGE, ["--backend onnx", "--pass-caches"]),
        (["--backend", "onnx", "--kv", "int8"], USAGE, ["--backend onnx", "int8", "--kv fp4"]),
        (["--backend", "onx"], USAGE, ["'onx'", "aoti, compile, onnx, tensorrt"]),
        (["--target", "sm_x"], USAGE, ["'sm_x'", "auto, cpu or sm_NN"]),
        (["--fp4-kv", "--kv", "bf16"], USAGE, ["--fp4-kv", "--kv bf16"]),
        (["--vae", "x", "--no-vae"], USAGE, ["--vae x", "--no-vae"]),
        (["--text-encoder", "x", "--no-text"], USAGE, ["--text-encoder x", "--no-text"]),
        (["--tokenizer", "x", "--no-text"], USAGE, ["--tokenizer x", "--no-text"]),
        (["--tokenizer", "x"], USAGE, ["--tokenizer x", "--text-encoder"]),
        (["--vae", "absent"], CHECKPOINT, ["absent", "Wan VAE"]),
        (["--text-encoder", "absent"], CHECKPOINT, ["absent", "umt5"]),
        (["--backend", "tensorrt", "--target", "cpu"], USAGE, ["tensorrt", "GPUs", "another backend"]),
        (["--target", "sm_70"], ENVIRONMENT, ["sm_70", "this machine has"]),
    ],
)
def test_options_that_cannot_be(workplace, invoke, options, code, words):
    result = invoke("build", "--preset", "tiny", *options, "-o", workplace / "out/x")
    assert_refused(result, code, *words)
    assert_nothing_left(workplace)


@pytest.mark.parametrize("options", [["--height", "tall"], ["--nonsense"], ["--json"], ["-o"]])
def test_options_that_click_refuses(workplace, invoke, options):
    result = invoke("build", *options)
    assert result.exit_code == USAGE
    assert "Error: " in result.stderr
    assert_nothing_left(workplace)


@pytest.mark.slow
def test_checkpoints_that_cannot_be(workplace, invoke, checkpoint):
    goal = workplace / "out/x"
    named = ["--preset", "tiny", "-o", goal]
    nameless = invoke("build", workplace / "absent.pt", "-o", goal)
    assert_refused(nameless, CHECKPOINT, "absent.pt", "give the path")
    assert_refused(invoke("build", checkpoint, "--heads", "3", "-o", goal), USAGE, "dim 256", "heads 3")
    both = invoke("build", checkpoint, "--heads", "4", *named)
    assert_refused(both, USAGE, "--heads 4", "--preset tiny, which has 2")
    assert_refused(invoke("build", workplace / "absent.pt", *named), CHECKPOINT, "absent.pt", "give the path")
    other = invoke("build", checkpoint, "--preset", "self-forcing-1.3b", "--no-room-check", "-o", goal)
    assert_refused(other, CHECKPOINT, "tiny.pt")
    assert "the dimensions of --preset tiny" in other.stderr
    weights = torch.load(checkpoint, weights_only=True)
    next(iter(weights["generator_ema"].values())).fill_(torch.nan)
    torch.save({"generator_ema": weights["generator_ema"]}, workplace / "nan.pt")
    assert_refused(invoke("build", workplace / "nan.pt", *named), CHECKPOINT, "NaN", "take another one")
    assert_nothing_left(workplace)


def test_a_pickle_that_would_run_code(workplace, invoke):
    class Trap:
        def __reduce__(self) -> Any:
            return os.system, (f"touch '{workplace}/out/sprung'",)

    torch.save({"generator_ema": Trap()}, workplace / "evil.pt")
    result = invoke("build", workplace / "evil.pt", "--preset", "tiny", "-o", workplace / "out/x")
    assert_refused(result, CHECKPOINT, "evil.pt")
    assert_nothing_left(workplace)


def test_outputs_that_cannot_be(workplace, invoke, fp4):
    """Told before a sample is made; an artifact gives way to --force alone, anything else never."""
    thesis = workplace / "thesis"
    thesis.mkdir()
    (thesis / "chapter.txt").write_text("years of work")
    for force in ([], ["--force"]):
        assert_refused(
            invoke("build", "--preset", "tiny", *force, "-o", thesis),
            USAGE,
            "thesis",
            "is no artifact",
            "another place",
        )
    assert_refused(invoke("build", "--preset", "tiny", "-o", fp4.folder), USAGE, "exists already", "--force")
    assert (thesis / "chapter.txt").read_text() == "years of work"
    assert_nothing_left(workplace)


def test_a_second_build_to_the_same_place_is_told_so_at_its_start(workplace, invoke):
    with whole_folder(workplace / "artifact", replace=False):
        result = invoke("build", "--preset", "tiny", "-o", workplace / "artifact")
    assert_refused(result, USAGE, "another process is making", "artifact now")
    assert_nothing_left(workplace)


@pytest.mark.parametrize("parent", ["/proc", "FILE"])
def test_an_output_that_cannot_be_written(workplace, invoke, parent):
    (workplace / "file").write_text("x")
    goal = Path(parent.replace("FILE", str(workplace / "file")), "x")
    result = invoke("build", "--preset", "tiny", "--target", "cpu", "-o", goal)
    assert_refused(result, ENVIRONMENT, "cannot be written", "another place")
    assert_nothing_left(workplace)


def test_a_compiler_that_fails(workplace, invoke, monkeypatch):
    """Found after the workers were started: they are ended."""
    monkeypatch.setattr(environment, "compiler_command", lambda: "false")  # CXX is read once in a process
    result = invoke("build", "--preset", "tiny", "--target", "cpu", "-o", workplace / "out/x")
    assert_refused(result, ENVIRONMENT, "cannot build a shared library", "set CXX")
    assert_nothing_left(workplace)


@pytest.mark.slow
def test_a_full_disk(workplace, invoke, checkpoint):
    """The command itself on a file system smaller than the weights: told before, and where it tries nevertheless."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(workplace / "out")]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        build = [
            "build",
            checkpoint,
            "--preset",
            "tiny",
            "--target",
            "cpu",
            "--json",
            "-o",
            workplace / "out/x",
        ]
        told = invoke(*build)
        assert (told.exit_code, "which is too little" in told.stderr) == (ENVIRONMENT, True), told.stderr
        command = [SEKO_EXPORT, *build, "--no-room-check"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == ENVIRONMENT, done.stderr
        sentence = done.stderr.splitlines()[-1]
        assert sentence.startswith(f"seko-export: no space left for {workplace / 'out/x'}")
        assert json.loads(done.stdout) == {
            "error": sentence.removeprefix("seko-export: "),
            "exit": ENVIRONMENT,
        }
        assert_nothing_left(workplace)
    finally:
        subprocess.run(["umount", workplace / "out"], check=True)


# -- builds that are ended -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "to_group", "awaited"),
    [
        # Ctrl-C while the workers start: the terminal tells the whole group
        (signal.SIGINT, True, "engines"),
        # a supervisor tells one process, while the workers' server imports torch and none is known yet
        (signal.SIGTERM, False, "engines"),
        # the same while they compile
        pytest.param(signal.SIGTERM, False, "golden/golden.safetensors", marks=pytest.mark.slow),
    ],
)
def test_an_ended_build_leaves_nothing(workplace, checkpoint, number, to_group, awaited):
    """Its exit code tells the signal; no output, no half artifact, no temporary files, no process."""
    mark = f"SEKO_TEST_MARK={workplace}"
    # What runs the tests may have SIGINT ignored (a shell's background job has), and children inherit that.
    default = ["env", "--default-signal=INT"]
    command = [*default, SEKO_EXPORT, "build", checkpoint, "--preset", "tiny", "--target", "cpu", "--json"]
    started = subprocess.Popen(
        [*command, "-o", workplace / "out/x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | dict([mark.split("=")]),
    )
    wait_until(lambda: any((workplace / "out").glob(f".x.seko-*/new/{awaited}")))
    (os.killpg if to_group else os.kill)(started.pid, number)
    stdout, stderr = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 128 + number, stderr
    assert stderr.splitlines()[-1] == "seko-export: interrupted; nothing was left behind"
    assert "Traceback" not in stderr
    ended = "interrupted; nothing was left behind"
    assert json.loads(stdout) == {"error": ended, "exit": 128 + number}
    assert_nothing_left(workplace)
    wait_until(lambda: not processes_with(mark))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def processes_with(mark: str) -> list[str]:
    """Return the ids of the processes that have ``NAME=VALUE`` in their environment."""
    ids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                ids.append(process.name)
        except OSError:  # it has ended, or is another user's
            continue
    return ids


def rewrite_manifest(folder: Path) -> None:
    """Give the manifest the hashes of what is in the folder now."""
    manifest = parse_video_manifest((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_bytes(manifest_json(replace(manifest, files=hash_files(folder))))


def test_targets_are_the_machines_own(invoke, monkeypatch, workplace):
    """A GPU's arch that this machine has not: the sentence names both."""
    monkeypatch.setattr(environment, "local_gpu_arch", lambda: "sm_89")
    result = invoke("build", "--preset", "tiny", "--target", "sm_90", "-o", workplace / "out/x")
    assert_refused(result, ENVIRONMENT, "sm_90", "a GPU of sm_89")

"""What a build is refused for before torch is loaded, and what it takes of its machine before it begins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from seko_export import build
from seko_export.checkpoints.errors import CheckpointNotFoundError
from seko_export.checkpoints.sources import LoadOptions
from seko_export.errors import MachineError, UsageError
from seko_export.families.model_files import load_checkpoint
from seko_export.host import environment
from seko_export.options.checks import SAMPLE_FOLDER, check_build, check_options
from seko_export.options.declaration import KV_FORMATS, BuildOptions
from seko_export.roofline import room as room_module
from seko_export.roofline.room import Room, check_room, room_of
from seko_kernels.formats import NUMBER_FORMATS
from seko_runtime.errors import DiskError
from tests.support.asked import resolved

# Runs commands in one process; of each, how it ended, what it wrote, and whether torch has been loaded by then.
LIGHT = """
import contextlib, io, json, sys
from seko_export.cli.commands import main
for arguments in json.loads(sys.argv[1]):
    said, code = io.StringIO(), None
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code
    loaded = [name for name in ('torch', 'seko_kernels') if name in sys.modules]
    print(json.dumps([code, said.getvalue(), loaded]))
"""
# Runs a command up to its first words on stdout; then ends with them, and with whether torch has been loaded.
FIRST_WORDS = """
import os, sys
from seko_export.cli.commands import main
class First:
    encoding, isatty, flush = "utf-8", lambda self: False, lambda self: None
    def write(self, words):
        print(words, "torch" in sys.modules, file=sys.stderr, flush=True)
        os._exit(0)
sys.stdout = First()
main(sys.argv[1:])
"""
TYPOS = (
    (["build", "--kv", "nonsense"], 2, "--kv 'nonsense' is not known"),
    (["build", "--preset", "huge"], 2, "--preset 'huge' is not known"),
    (["build", "--attention", "fast"], 2, "--attention 'fast' is not known"),
    (["build", "--kernels", "fast"], 2, "--kernels 'fast' is not known"),
    (["build", "--backend", "onx"], 2, "--backend 'onx' is not known"),
    (["build", "--target", "gpu"], 2, "--target 'gpu' is not known"),
    (["build", "--height", "50"], 2, "height 50"),
    (["build", "--preset", "tiny", "--sink-frames", "30"], 2, "--sink-frames 30"),
    (["build", "--preset", "wan-14b"], 2, "--preset wan-14b says how large"),
    (["build", "absent.pt"], 3, "absent.pt was not found"),
    (["build", "--vae", "absent"], 3, "--vae absent was not found"),
    (["build", "--run-config", "absent"], 3, "--run-config absent was not found"),
    (["build", "n" * 300], 3, "cannot be read (File name too long): give the path"),
    (["build", "--vae", "loop"], 3, "--vae loop cannot be read (Too many levels of symbolic links)"),
    (["inspect", "n" * 300], 3, "cannot be read (File name too long): give the path"),
    (["build", "--lora", "absent:nan"], 2, "--lora absent:nan: expected a finite weight"),
    (["build", "--lora", ""], 2, "--lora '': expected FILE"),
    (["build", "-o", ""], 2, "'--output': an empty path"),
    (["build", "--force", "-o", "."], 2, "is no artifact"),
    (["build", "-o", "file/x"], 5, "x cannot be written (Not a directory)"),
    (["plan", "--gpu", "h200", "--fps", "0"], 2, "'--fps': 0"),
    (["plan", "--gpu", "h300"], 2, "--gpu 'h300' is not known"),
    (["plan", "--gpu", "h200", "--kv", "nonsense"], 2, "--kv 'nonsense' is not known"),
    (["inspect", "absent"], 3, "absent was not found"),
    (["presets"], 0, ""),  # no typos, and as quick
    (["inspect", str(SAMPLE_FOLDER / "dit.safetensors")], 0, ""),
    (["inspect", str(SAMPLE_FOLDER)], 0, ""),
)


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, list[str]]]:
    """How the commands of `TYPOS` ended, in their order."""
    folder = tmp_path_factory.mktemp("typos")
    (folder / "file").write_text("")
    (folder / "loop").symlink_to("loop")
    commands = [
        [*words, *(["-o", "out"] if words[0] == "build" and "-o" not in words else [])]
        for words, _, _ in TYPOS
    ]
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, json.dumps(commands)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(TYPOS)), ids=[" ".join(words) for words, _, _ in TYPOS])
def test_a_typo_is_told_before_torch_is_loaded(endings, number):
    code, said, loaded = endings[number]
    assert (code, loaded) == (TYPOS[number][1], [])
    assert TYPOS[number][2] in said


def test_doctor_begins_before_torch_is_loaded():
    done = subprocess.run(
        [sys.executable, "-c", FIRST_WORDS, "doctor"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("ok  python: ")
    assert done.stderr.split()[-1] == "False"


def test_a_build_is_resolved_without_a_compiler():
    program = (
        "import sys\nfrom seko_export import BuildOptions\nfrom seko_export.options.resolve import resolve_build\n"
        "resolve_build(BuildOptions(preset='tiny'))\n"
        "assert not {'torch._inductor', 'torch._dynamo', 'sympy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_names_of_caches_are_those_of_the_kernels():
    assert ("bf16", *NUMBER_FORMATS) == KV_FORMATS
    for keys in KV_FORMATS:
        for values in KV_FORMATS:
            check_options(BuildOptions(kv=f"{keys}-{values}-sink"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batch", "9" * 5000],
        ["--batch", "9" * 9],
        ["--sessions", "9" * 30],
        ["--ring-frames", "9" * 30],
        ["--rope-max-frames", "9" * 30, "--window-positions"],
        ["--height", "16000000000", "--width", "16000000000"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_numbers_that_would_overflow_are_named(arguments, invoke):
    done = invoke("plan", "--gpu", "h200", "--preset", "tiny", *arguments)
    assert done.exit_code == 2
    assert f"seko-export: {arguments[0]}" in done.stderr


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--positions", "--positions 0: expected at least 2"),
        ("--sessions", "--sessions 0: a pool holds at least 1"),
        ("--batch", "--batch 0: with --sessions 1"),
    ],
)
def test_a_size_of_speech_that_is_zero_is_not_the_default(option, sentence, invoke):
    done = invoke("plan", "--gpu", "h200", "--preset", "voxcpm2", option, "0")
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_a_plan_of_speech_is_for_people(invoke):
    asked = ("plan", "--gpu", "h200", "--preset", "voxcpm2", "--sessions", "4", "--batch", "1,4")
    done, report = invoke(*asked), json.loads(invoke(*asked, "--json").stdout)
    for step in report["steps"]:
        assert f"{1 / step['real_time_factor']:.1f} x real time" in done.stdout
    assert f"{report['sessions_fit']} sessions would fit" in done.stdout


def test_a_config_that_cannot_be_read_is_left_to_the_loader(tmp_path):
    """It is looked at first, for a sample's: nested too deeply, or a pipe that nobody writes to."""
    nested, pipe = tmp_path / "nested", tmp_path / "pipe"
    for folder in (nested, pipe):
        folder.mkdir()
    (nested / "config.json").write_text("[" * 100_000)
    os.mkfifo(pipe / "config.json")
    for folder in (nested, pipe):
        check_options(BuildOptions(folder))


@pytest.mark.parametrize("word", ["sm_x", "cuda", "", "SM_90", "sm_9", "sm_90; rm -rf"])
def test_words_that_are_no_target(word):
    with pytest.raises(UsageError, match="expected auto, cpu or sm_NN"):
        check_options(BuildOptions(target=word))


def test_a_path_may_be_a_string():
    names = [field.name for field in fields(BuildOptions) if field.type == "Path | None"]
    assert {"checkpoint", "vae"} < {*names}
    strings = BuildOptions(**dict.fromkeys(names, "there"))
    assert strings == BuildOptions(**dict.fromkeys(names, Path("there")))
    with pytest.raises(CheckpointNotFoundError, match="checkpoint there was not found"):
        build(strings, "out")


def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(DiskError, match=r"x cannot be written \(Permission denied\): choose another place"):
        check_build(BuildOptions(preset="tiny"), tmp_path / "new" / "x", force=False)


# -- random weights --------------------------------------------------------------------------------------------


def test_large_presets_want_a_checkpoint_or_a_seed(tmp_path):
    for preset in ("self-forcing-1.3b", "wan-14b"):
        with pytest.raises(UsageError, match=f"--preset {preset} .*--random-weights 0"):
            check_build(BuildOptions(preset=preset), tmp_path / "x", force=False)
        check_build(BuildOptions(preset=preset, random_weights=0), tmp_path / "x", force=False)
    for preset in (None, "sample", "tiny"):
        check_build(BuildOptions(preset=preset), tmp_path / "x", force=False)


def test_random_weights_beside_others_are_refused():
    with pytest.raises(UsageError, match=r"--random-weights 3 contradicts the checkpoint a\.pt"):
        BuildOptions(Path("a.pt"), preset="tiny", random_weights=3)
    for preset in (None, "sample"):
        with pytest.raises(UsageError, match="--random-weights 3 needs a --preset"):
            BuildOptions(preset=preset, random_weights=3)


def test_random_weights_have_no_entries():
    with pytest.raises(UsageError, match="--entry generator"):
        resolved("tiny", entry="generator")


def test_the_seed_decides_the_weights():
    model, name = resolved("tiny").config.model, "blocks.0.ffn.0.weight"
    zero, again, seven = (load_checkpoint(None, model, LoadOptions(seed=seed))[name] for seed in (0, 0, 7))
    assert torch.equal(zero, again)
    assert not torch.equal(zero, seven)


# -- room ------------------------------------------------------------------------------------------------------


def test_a_build_takes_its_weights_at_the_least():
    """Bytes follow the parameters: four of each in float32 on a CPU."""
    config = resolved("wan-14b", no_vae=True, no_text=True).config
    parameters = 14_288_491_584
    room = room_of(config)
    assert 4 * parameters <= room.disk < 4.1 * parameters
    cache = config.model.layers * 2 * config.workload.stream.cache_tokens * config.model.dim * 4
    assert room.memory > 4 * parameters + cache


def test_fp8_builds_hold_the_layers_twice():
    def memory(**options: bool) -> int:
        options |= {"no_vae": True, "no_text": True}
        config = resolved("wan-14b", "fp4", device="cuda", arch="sm_90", attention="torch", **options).config
        return room_of(config).memory

    layers = 40 * (4 * 5120**2 + 2 * 5120**2 + 2 * 5120 * 13824)  # those matrices that are fp8, in numbers
    assert memory(fp8=True) - memory() == pytest.approx(layers, rel=0.2)


@pytest.mark.parametrize(
    ("room", "words"),
    [
        (
            Room(memory=10**18, disk=1),
            r"takes about 1000000000\.0 GB of memory \(2\.0 GB free\), 0\.0 MB of disk",
        ),
        (
            Room(memory=1, disk=10**18),
            r"1000000000\.0 GB of disk at .* free\), which is too little: .*--no-room-check",
        ),
    ],
)
def test_too_little_room_is_refused_with_what_was_found(tmp_path, monkeypatch, room, words):
    monkeypatch.setattr(room_module, "free_host_bytes", lambda: 2 * 10**9)
    with pytest.raises(MachineError, match=words):
        check_room(room, tmp_path / "new" / "x")
    assert check_room(Room(10**9, 10**6), tmp_path / "x").startswith(
        "takes about 1.0 GB of memory (2.0 GB free), 1.0 MB of disk"
    )


def test_the_command_refuses_and_can_be_told_to_try(tmp_path, monkeypatch, invoke):
    """Refused before random weights are written; with --no-room-check it goes on to the next refusal."""
    monkeypatch.setattr(room_module, "free_host_bytes", lambda: 10**6)
    monkeypatch.setattr(environment, "compiler_command", lambda: "false")  # CXX is read once in a process
    goal = tmp_path / "x"
    arguments = ("build", "--preset", "tiny", "--target", "cpu", "-o", goal)
    refused = invoke(*arguments)
    assert refused.exit_code == 5
    assert "of memory (1.0 MB free)" in refused.stderr
    assert "random weights" not in refused.stderr
    tried = invoke(*arguments, "--no-room-check")
    assert (tried.exit_code, "cannot build a shared library" in tried.stderr) == (5, True)
    assert not goal.exists()

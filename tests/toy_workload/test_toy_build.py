"""The toy built by the exporter's own API: verified, opened, pooled, saved. GPUs compile it (test_toy_workload.py)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from seko_export import build, plan
from seko_export.backends import export_backend
from seko_export.build_steps import build_artifact
from seko_export.cli.commands import main as seko_export
from seko_export.errors import UsageError
from seko_export.families.registry import graph_of
from seko_export.options.asked import all_options, options_of, workload_asked
from seko_export.options.checks import check_options
from seko_export.roofline.room import room_of
from seko_export.workloads.registry import workload_named
from seko_runtime import open_artifact, read_manifest, register_workload
from seko_runtime.cli.commands import main as seko_run
from seko_runtime.errors import ManifestError, PoolFullError
from seko_runtime.opening import workloads
from tests.support.entry_points import installing
from tests.support.shared import made_once
from tests.support.tiers import first_is_fast
from tests.support.uncompiled import UNCOMPILED, leave_uncompiled
from tests.toy_workload import model
from tests.toy_workload.export import CONFIG, FAMILY, GOLDEN_STEPS, WORKLOAD, ToyOptions
from tests.toy_workload.test_toy_workload import NEAR, ROOT, WORDS, alone, said
from tests.toy_workload.workload import WORKLOAD as IN_RUNTIME

# Found by its entry point in the processes that verify, by its name in those that compile.
ENTRY_POINT = "[seko.workloads]\ntoy-speech = tests.toy_workload.workload:WORKLOAD\n"


@contextmanager
def installed(home: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Context manager in which family and workload are installed in a folder for the exporter."""
    home.mkdir()
    with (
        installing(home, patch, "seko.families") as family,
        installing(home, patch, "seko.export_workloads") as workload,
    ):
        family("toy_family", **{FAMILY.name: FAMILY.name})
        workload("toy_workload", **{WORKLOAD.name: WORKLOAD.name})
        yield


def build_uncompiled(folder: Path) -> None:
    """Build it in this process from its preset; its engines are exported programs."""
    with (
        pytest.MonkeyPatch.context() as patch,
        installed(folder.with_name(f"{folder.name}-installed"), patch),
    ):
        leave_uncompiled(patch)
        patch.setattr(workloads, "_registered", {})
        register_workload(IN_RUNTIME)
        checkpoint = folder.with_name(f"{folder.name}.safetensors")
        save_file(model.weights(), checkpoint)
        asked = ToyOptions(checkpoint, preset="toy-speech", backend="compile")
        result = build(asked, folder, compiler_cache=False)
    assert set(result.engine_s) == set(model.MODULES)


def build_in_processes(folder: Path) -> None:
    """Build it as a user does, in processes that find its workload installed beside the packages by its entry point."""
    beside = folder.with_name(f"{folder.name}-installed")
    info = beside / "toy_speech-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-speech\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    (beside / "tests").symlink_to(ROOT / "tests")  # the command drops the current directory from its path
    checkpoint = beside / "toy.safetensors"
    save_file(model.weights(), checkpoint)
    path = os.pathsep.join(
        [
            str(beside),
            str(ROOT),
            str(ROOT / "runtime"),
            str(ROOT / "kernels"),
            os.environ.get("PYTHONPATH", ""),
        ]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv(UNCOMPILED, "1")
        result = build_artifact(CONFIG, checkpoint, folder, backend="compile", compiler_cache=False)
    assert result.report()["kernels"] == "plain"
    assert set(result.engine_s) == set(model.MODULES)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact; not to be changed. That it is there says that it was verified."""
    return made_once(tmp_path_factory, "toy-built", build_uncompiled)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNCOMPILED, "1")
    monkeypatch.setattr(workloads, "_registered", {})
    register_workload(IN_RUNTIME)


def test_the_manifest_is_the_one_that_was_written_by_hand(built: Path) -> None:
    """Engines, programs and buffers as `model.manifest` has them; the exporter adds machine, files and goldens."""
    with open_artifact(built) as artifact:
        manifest, wanted = artifact.manifest, model.manifest()
    assert (manifest.programs, manifest.buffers, manifest.pool) == (
        wanted.programs,
        wanted.buffers,
        wanted.pool,
    )
    assert sorted(manifest.engines, key=lambda engine: engine.name) == sorted(
        wanted.engines, key=lambda engine: engine.name
    )
    assert manifest.state_rows == wanted.state_rows == CONFIG.workload.state_rows
    assert manifest.workload.golden is not None
    assert manifest.workload.golden.steps == GOLDEN_STEPS


@pytest.mark.parametrize("build_toy", first_is_fast([build_uncompiled, build_in_processes]))
def test_it_verifies_and_its_sessions_join_pause_and_leave(
    build_toy: Callable[[Path], None], built: Path, tmp_path: Path
) -> None:
    if build_toy is build_in_processes:
        built = tmp_path / "built"
        build_in_processes(built)
    with open_artifact(built) as artifact:
        assert [error.within for error in artifact.verify()] == [True]
        with artifact.open_pool() as pool:
            first, second, third = (pool.open_session(words) for words in WORDS[:3])
            with pytest.raises(PoolFullError, match="all 3 rows"):
                pool.open_session(WORDS[3])
            calls = [pool.step([first, second, third])]
            second.pause()
            fourth = pool.open_session(WORDS[3])
            late = pool.step([fourth, first])
            fourth.close()
            second.resume()
            again = pool.step([second, third])
            for samples, words, place in (
                *((calls[0][row], WORDS[row], 0) for row in range(3)),
                (late[0], WORDS[3], 0),
                (late[1], WORDS[0], 1),
                (again[0], WORDS[1], 1),
                (again[1], WORDS[2], 1),
            ):
                if place < len(alone(words)):
                    np.testing.assert_allclose(samples, alone(words)[place], **NEAR)
            for session in (first, second, third):
                session.close()


def test_a_saved_session_goes_on_in_another_pool_of_it(built: Path, tmp_path: Path) -> None:
    words = max(WORDS, key=lambda each: len(alone(each)))
    with open_artifact(built) as artifact:
        with artifact.open_pool() as pool:
            session = pool.open_session(words)
            before = said(session, 2)
            session.save(tmp_path / "toy.session")
            on = said(session, 2)
            session.close()
        with artifact.open_pool() as pool, pool.restore(tmp_path / "toy.session") as restored:
            after = said(restored, 2)
    np.testing.assert_allclose([*before, *on], alone(words)[:4], **NEAR)
    assert [samples.tobytes() for samples in after] == [samples.tobytes() for samples in on]


def test_without_it_the_kind_is_unknown(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "_registered", {})
    with pytest.raises(ManifestError, match="workload is 'toy-speech', this runtime knows speech, video"):
        read_manifest(built)


def test_a_child_finds_the_workload_by_its_entry_point(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And runs it; where it is registered, the commands that any artifact has take it, too."""
    info = tmp_path / "toy_speech-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-speech\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(
        f"{ENTRY_POINT}[seko.runs]\ntoy-speech = tests.toy_workload.run:COMMAND\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "runtime"), str(ROOT / "kernels")])
    words, output = WORDS[0], tmp_path / "said.npy"
    run = ["run", str(built), "--words", ",".join(map(str, words)), "-o", str(output), "--json"]
    child = subprocess.run(
        [sys.executable, "-m", "seko_runtime", *run],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout)["steps"] == len(alone(words))
    np.testing.assert_allclose(np.load(output), alone(words), **NEAR)
    for command, said_there in (("verify", {"ok": True}), ("info", {"workload": model.KIND, "words": 8})):
        assert seko_run([command, str(built), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert {name: report[name] for name in said_there} == said_there


def test_a_workload_from_outside_answers_for_its_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its preset is listed, its own option stands under its heading, and options of others are refused."""
    with installed(tmp_path / "installed", monkeypatch):
        listed = json.loads(CliRunner().invoke(seko_export, ["presets", "--json"]).stdout)
        assert listed["toy-speech"] == {"family": FAMILY.name, "model": asdict(CONFIG.model)}
        assert all_options()["lengths"][1].group == "Toy (words)"
        asked = options_of(preset="toy-speech", lengths=(4,), height=None)
        assert asked == ToyOptions(preset="toy-speech", lengths=(4,))
        assert workload_asked(asked).resolve_options(asked).config == CONFIG.changed(lengths=(4,))
        for preset, options, why in (
            ("toy-speech", {"height": 480}, "--height belongs to models of video, and this is one of tests"),
            ("tiny", {"lengths": (4,)}, r"--lengths belongs to models of tests\S*, and this is one of video"),
            ("toy-speech", {"lengths": (5,)}, "--lengths: expected some of 4, 8"),
        ):
            with pytest.raises(UsageError, match=why):
                check_options(options_of(preset=preset, **options))
        with pytest.raises(UsageError, match="has no estimate of memory and time"):
            plan(asked, "h200")


def test_a_backend_of_another_workload_refuses_it() -> None:
    with pytest.raises(UsageError, match="makes engines for the workload video"):
        export_backend("tensorrt").check_build(CONFIG.changed(device="cuda", archs=("sm_90",)))


def test_what_asks_its_workload_finds_it_by_name() -> None:
    assert workload_named(CONFIG.model.workload) is WORKLOAD
    with pytest.raises(UsageError, match="workload 'song' is not known: expected one of video"):
        workload_named("song")
    sizes = sum(weight.nbytes for weight in model.manifest().weights)
    engines = len(graph_of(CONFIG).pieces)
    assert room_of(CONFIG).disk == sizes + engines * (4 << 20)
    with pytest.raises(TypeError, match="has the fields tempo"):
        CONFIG.changed(tempo=2)
    assert torch.float32 is CONFIG.target.dtype


def test_only_what_says_how_it_is_run_is_run_and_with_its_own_options(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["run", str(built), "-o", str(tmp_path / "said.npy")]
    assert seko_run(asked) == 2
    assert (
        "workload that seko-run runs 'toy-speech' is not known: expected one of video"
        in capsys.readouterr().err
    )
    with installing(tmp_path, monkeypatch, "seko.runs") as install:
        install("toys", **{model.KIND: "tests.toy_workload.run:COMMAND"})
        for name in ("--prompt", "--voice"):
            assert seko_run([*asked, "--words", "1", name, "x"]) == 2
            assert re.search(f"{name} is for artifacts that .*; this one says words", capsys.readouterr().err)
        with pytest.raises(SystemExit):
            seko_run(["run", "--help"])
        shown = capsys.readouterr().out
        assert "Toy (words):" in shown
        assert "toys: .npy; a named pipe" in " ".join(shown.split())
    assert not (tmp_path / "said.npy").exists()

"""Artifacts that the real command built in a process of its own, once a session; worst errors of the truths."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.lone_runtime import lone_python, wheel
from tests.support.manifest_schema import check_manifest, check_what_builds_write
from tests.support.minutes import Minutes
from tests.support.rooms_reached import RoomsReached
from tests.support.shared import made_once
from tests.support.skips import Skips

__all__ = ["lone_python", "wheel"]  # fixtures for all
_worst: dict[str, float] = {}
check_what_builds_write()  # here: conftest.py files below this one may import the builder
# A busy machine may take any time for an example.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

SEKO_EXPORT = str(Path(sysconfig.get_path("scripts"), "seko-export"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer the times of all files."""
    parser.addoption(
        "--minutes-by-file", action="store_true", help="print the minutes of every file of tests"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Have the minutes by folder, the skipped tests and, where they are measured, the rooms told after the run."""
    config.pluginmanager.register(Minutes())
    config.pluginmanager.register(Skips())
    if config.pluginmanager.hasplugin("_cov"):
        config.pluginmanager.register(RoomsReached())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a run of several processes, put files of few tests first: these are the long ones, and a long file at the end
    would leave the other processes idle."""
    if hasattr(config, "workerinput"):
        tests_of = Counter(item.path for item in items)
        items.sort(key=lambda item: (tests_of[item.path], item.path))


def pytest_collection_finish() -> None:
    """Leave the modules and tests that are there now, a million objects, out of all garbage collections: a test that
    collects garbage took most of a second for them."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` where there is none, `trt` where TensorRT cannot build, `rtx` where plans cannot run."""
    if not any(item.get_closest_marker(name) for name in ("gpu", "trt", "rtx")):
        return
    import torch  # here: most tests of the runtime need none

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; torch.cuda.is_available() is False")
    if item.get_closest_marker("rtx"):
        from seko_export.errors import MachineError
        from seko_export.host.environment import local_gpu_arch
        from seko_export.host.tensorrt_library import RTX

        if local_gpu_arch() not in RTX.targets:
            pytest.skip(f"needs one of {', '.join(RTX.targets)}; this GPU is {local_gpu_arch()}")
        try:
            RTX.require()
        except MachineError as reason:
            pytest.skip(str(reason))
    if item.get_closest_marker("trt"):
        from seko_export.errors import MachineError
        from seko_export.host.tensorrt_library import DATA_CENTRE

        try:
            DATA_CENTRE.require()
        except MachineError as reason:
            pytest.skip(str(reason))


@dataclass(frozen=True)
class Built:
    """What one `seko-export build` gave.

    Parameters
    ----------
    folder : Path
        The artifact; not to be changed.
    report : dict
        The JSON line.
    done : subprocess.CompletedProcess
        Output and exit code.
    """

    folder: Path
    report: dict[str, Any]
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def fp4(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The tiny model with an FP4 cache, AOTInductor engines, one row."""
    return build_once(tmp_path_factory, "fp4", "--fp4-kv")


@pytest.fixture(scope="session")
def small_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest real artifact, of exported programs that nothing was compiled of. Not to be changed."""
    from tests.support.small_artifact import small_artifact_once  # here: most tests need no exporter

    return small_artifact_once(tmp_path_factory)


def build_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, *options: str, target: str = "cpu"
) -> Built:
    """Return what `build_tiny` gives in a folder of that name, made by the first process of this run that asks."""

    def build(folder: Path) -> None:
        built = build_tiny(folder / "artifact", *options, target=target)
        folder.with_suffix(".json").write_text(json.dumps(vars(built.done)))

    folder = made_once(tmp_path_factory, name, build)
    done = subprocess.CompletedProcess(**json.loads(folder.with_suffix(".json").read_text()))
    return Built(folder / "artifact", json.loads(done.stdout.splitlines()[-1]), done)


def build_tiny(
    goal: Path, *options: str, model: tuple[str, ...] = ("--preset", "tiny"), target: str = "cpu"
) -> Built:
    """Run `seko-export build`, of the preset tiny or another ``model``, for a ``target``; skip without a compiler.

    It has a TMPDIR of its own: in a shared one it would say what it removes of builds that others killed.
    """
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler: nothing can be built here")
    command = [
        sys.executable,  # a GPU box with its own torch has no `seko-export` beside it
        "-m",
        "seko_export",
        "build",
        *model,
        *options,
        "--target",
        target,
        "-o",
        str(goal),
        "--json",
    ]
    with tempfile.TemporaryDirectory() as own:
        environ = os.environ | {"TMPDIR": own}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    if goal.is_dir():  # else it is packed, as one file
        check_manifest(goal)
    return Built(goal, json.loads(done.stdout.splitlines()[-1]), done)


@pytest.fixture
def worst() -> Callable[[str, float], None]:
    """Return a function that remembers the largest error of a name: the margin below the bar, told after the run."""
    return _remember


def _remember(name: str, error: float) -> None:
    _worst[name] = max(error, _worst.get(name, 0.0))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand what this process saw to the one that reports, where the tests run in several."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["worst"] = dict(_worst)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what another process saw; pytest-xdist's."""
    for name, error in getattr(node, "workeroutput", {}).get("worst", {}).items():
        _remember(name, error)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line a truth, unless a test failed: its message would be lost in front of two hundred lines."""
    if terminalreporter.stats.keys() & {"failed", "error"}:
        return
    for name, error in sorted(_worst.items()):
        terminalreporter.write_line(f"worst relative error, {name}: {error:.2e}")

"""Builds whose engines nothing is compiled of, made in this process. No tests."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch._export.serde import serialize
from torch.export import ExportedProgram

from seko_export import build_steps
from seko_export.backends.base import Capabilities, ExportBackend
from seko_export.backends.workers import make_engine
from seko_export.cli.commands import main as seko_export
from seko_export.config.build import BuildConfig
from seko_export.engines.key import engine_file
from seko_export.families.registry import graph_of
from seko_export.host import environment
from seko_export.host.child_process import run_child
from seko_export.host.progress import Progress
from seko_runtime.cli.commands import main as seko_run
from seko_runtime.format.manifest import ENGINES_FOLDER
from tests.conftest import Built
from tests.support.new_thread import in_new_thread

PROGRAMS_KEPT = 128
UNCOMPILED = "TORCHDYNAMO_DISABLE"  # torch's: where it is 1, `torch.compile` returns what it was given


def leave_uncompiled(patch: pytest.MonkeyPatch) -> None:
    """Have builds with ``backend="compile"`` save exported programs, which torch then runs op by op, and do it in this
    process.

    What a build writes and the runtime does with it is tested without the minutes that code for a CPU takes, and
    without the seconds in which processes import torch. Builds by the command (`build_tiny`) compile in worker
    processes and verify in a process of its own.
    """
    patch.setenv(UNCOMPILED, "1")
    # Torch sorts a copy of each program that it saves, and drops it: most of the time of saving, for no byte.
    patch.setattr(serialize, "canonicalize", lambda program, *_: program)
    _read_programs_once()
    patch.setattr(build_steps, "compiled_in_background", _made_here)
    patch.setattr(build_steps, "waiting_child", _run_here)
    patch.setattr(environment, "probing_compiler", lambda: contextlib.nullcontext(lambda: None))


@cache
def _read_programs_once() -> None:
    """Have this process read an exported program once, and make one module of it, however many tests open its artifact:
    an artifact has a dozen, and both take a third of a second. Weights and caches are a module's inputs, so its calls
    leave nothing in it."""
    load = torch.export.load

    @lru_cache(PROGRAMS_KEPT)
    def of_bytes(content: bytes) -> ExportedProgram:
        program = load(io.BytesIO(content))
        module = program.module(check_guards=False)
        program.module = lambda *, check_guards: module  # noqa: ARG005 - as torch calls it
        return program

    torch.export.load = lambda file: of_bytes(file.getvalue()) if isinstance(file, io.BytesIO) else load(file)


def build_here(goal: Path, *options: str) -> Built:
    """Run `seko-export build` for this machine's processor as `build_tiny` does, in this process."""
    with pytest.MonkeyPatch.context() as patch, _silent():
        leave_uncompiled(patch)
        command = ["build", *options, "--target", "cpu", "-o", str(goal), "--json"]
        run = CliRunner().invoke(seko_export, command)
    assert run.exit_code == 0, run.stderr
    done = subprocess.CompletedProcess(command, run.exit_code, run.stdout, run.stderr)
    return Built(goal, json.loads(run.stdout.splitlines()[-1]), done)


@contextlib.contextmanager
def programs_as_they_are() -> Iterator[None]:
    """Have builds with ``backend="compile"`` take fused layers and offloaded caches, too, and leave them uncompiled.

    Compiled layers of these kinds are tested as one package (tests/kernels/test_fused_package.py) and, as whole builds,
    on a GPU.
    """
    backend_named = build_steps.export_backend

    def carrying_all(name: str) -> ExportBackend:
        return replace(backend_named(name), capabilities=Capabilities(fused_kernels=True, offloading=True))

    with pytest.MonkeyPatch.context() as patch:
        leave_uncompiled(patch)
        patch.setattr(build_steps, "export_backend", carrying_all)
        yield


@contextlib.contextmanager
def _made_here(
    config: BuildConfig, backend: ExportBackend, artifact: Path, progress: Progress
) -> Iterator[Callable[[], dict[str, float]]]:
    """As `compiled_in_background`: the engines are made when they are waited for, in threads of their own."""
    del progress
    folder, suffix = backend.form or (ENGINES_FOLDER, backend.suffix)
    (artifact / folder).mkdir()

    def make_all() -> dict[str, float]:
        assert backend.compile_piece is not None
        files = {name: artifact / engine_file(name, suffix, folder) for name in graph_of(config).pieces}
        with _silent():
            return {
                name: in_new_thread(make_engine, backend.compile_piece, config, name, file)
                for name, file in files.items()
            }

    yield make_all


@contextlib.contextmanager
def _run_here(
    module: str, *arguments: str, imports: str
) -> Iterator[Callable[[], subprocess.CompletedProcess[str]]]:
    """As `waiting_child`: the runtime's command in this process, other modules in one of their own."""
    del imports

    def run() -> subprocess.CompletedProcess[str]:
        if module != "seko_runtime":
            return run_child(module, *arguments)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _silent():
            code = seko_run(list(arguments))
        return subprocess.CompletedProcess([module, *arguments], code, out.getvalue(), err.getvalue())

    yield run


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Hide torch's warnings about itself, which tests take as errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

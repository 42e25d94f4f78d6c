"""What the command says of failures and of a build's steps, and where: stdout, stderr, a full disk, a closed pipe."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from rich.console import Console

from seko_export.backends import BACKENDS
from seko_export.backends.workers import _Watch
from seko_export.cli.commands import main
from seko_export.cli.progress import _bars, _lines
from seko_export.cli.shared import print_table
from seko_export.errors import NumericError
from seko_export.families.registry import all_presets
from seko_export.options.declaration import ATTENTIONS, KERNELS, KV_FORMATS
from seko_export.roofline.gpus import GPUS
from tests.conftest import SEKO_EXPORT
from tests.support.tiers import first_is_fast

ROOT = Path(__file__).parents[2]


# -- failures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("build", "--kv", "nonsense", "-o", "x"), 2, "--kv 'nonsense' is not known"),
        (("build", "--heigth", "64", "-o", "x"), 2, "Did you mean one of: '--height'"),
        (("build",), 2, "Missing option '-o'"),
        (("biuld",), 2, "Did you mean 'build'"),
        (("plan", "--gpu", "h300"), 2, "--gpu 'h300' is not known"),
        (("build", "absent.pt", "-o", "x"), 3, "absent.pt was not found"),
        (("inspect", "absent"), 3, "absent was not found"),
        (("verify", "absent"), 4, "absent was not found"),
        (("unpack", "absent.tar", "-o", "x"), 4, "absent.tar was not found"),
        (("build", "-o", "/proc/version/x"), 5, "cannot be written"),
    ],
)
def test_a_failure_is_one_object_on_stdout_and_a_sentence_on_stderr(invoke, arguments, code, words):
    result = invoke(*arguments, "--json")
    (line,) = result.stdout.splitlines()
    report = json.loads(line)
    assert set(report) == {"error", "exit"}
    assert (report["exit"], result.exit_code) == (code, code)
    assert words in report["error"]
    assert report["error"] in result.stderr
    plain = invoke(*arguments)
    assert (plain.exit_code, plain.stdout) == (code, "")
    assert words in plain.stderr


def test_a_report_and_a_failure_are_one_object(monkeypatch, invoke, small_artifact):
    missed = NumericError("missed")
    missed.report = {"ok": False, "worst": 1.5}

    def fail(*_: Any, **__: Any) -> None:
        raise missed

    monkeypatch.setattr("seko_export.inspect", fail)
    result = invoke("inspect", small_artifact, "--json")
    assert result.exit_code == 6
    assert json.loads(result.stdout) == {"ok": False, "worst": 1.5, "error": "missed", "exit": 6}


def test_a_fault_of_ours_is_told_as_json_and_not_hidden(monkeypatch, invoke, small_artifact):
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("seko_export.inspect", fail)
    result = invoke("inspect", small_artifact, "--json")
    assert isinstance(result.exception, ZeroDivisionError)
    assert json.loads(result.stdout) == {"error": "ZeroDivisionError: a bug", "exit": 1}


# -- stdout that cannot be written -----------------------------------------------------------------------------


def run_into(stdout: Any, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "seko_export", *map(str, arguments)]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


# A command that needs no torch, and one that does.
PRINTING = first_is_fast(
    [["presets"], ["presets", "--json"], ["inspect", ROOT / "artifacts" / "world-sample"]], 2
)


@pytest.mark.parametrize("command", PRINTING, ids=["text", "JSON", "torch"])
def test_a_full_stdout_is_one_sentence(command):
    with Path("/dev/full").open("w") as full:
        done = run_into(full, *command)
    assert done.returncode == 5
    assert (
        done.stderr == "seko-export: stdout cannot be written (No space left on device): send it elsewhere\n"
    )


@pytest.mark.parametrize("command", PRINTING[:2], ids=["text", "JSON"])
def test_a_closed_pipe_is_one_sentence(command):
    read, write = os.pipe()
    os.close(read)
    try:
        done = run_into(write, *command)
    finally:
        os.close(write)
    assert done.returncode == 1
    assert done.stderr == "seko-export: whoever read the output stopped reading\n"


# -- tables ----------------------------------------------------------------------------------------------------


def test_a_table_has_a_row_for_every_value(capsys):
    print_table(
        {
            "name": "tiny",
            "stream": {"height": 64, "rings": []},
            "model": {"dim": {"value": 256, "from": "shapes"}},
            "notes": ["one thing", "another"],
            "text": None,
            "chunk_s": 0.123456789,
        }
    )
    assert capsys.readouterr().out.splitlines() == [
        "name             tiny",
        "stream   height  64",
        "stream   rings   -",
        "model    dim     256  (shapes)",
        "notes            one thing",
        "notes            another",
        "text             -",
        "chunk_s          0.123457",
    ]


# -- progress --------------------------------------------------------------------------------------------------


def test_a_log_is_never_silent_for_long(monkeypatch):
    """A line a step, and while one lasts a line now and then, with what goes on beside it."""
    lines: list[str] = []
    heard = threading.Event()

    def hear(line: str) -> None:
        lines.append(line)
        if line.startswith("recording goldens (2 of 4), "):
            heard.set()

    monkeypatch.setattr("seko_export.cli.progress.note", hear)
    monkeypatch.setattr("seko_export.cli.progress.SILENCE_S", 0.02)
    with _lines() as tell:
        tell("compiling the engines", 0, 3, in_background=lambda: "engines: 2 of 3 left")
        tell("recording goldens", 1, 4)
        tell("recording goldens", 2, 4)
        assert heard.wait(60)
    assert [line for line in lines if "," not in line] == ["compiling the engines", "recording goldens"]
    assert lines[-1].endswith(" s; engines: 2 of 3 left")


def test_bars_show_what_goes_on_beside_a_step():
    drawn = io.StringIO()
    with _bars(Console(force_terminal=True, width=160, file=drawn)) as show:
        show("compiling the engines", 0, 3, in_background=lambda: "engines: 2 of 3 left, compiling block")
        show("recording goldens", 1, 4)
        show("writing the weights", 0, 1)
    text = drawn.getvalue()
    assert "engines: 2 of 3 left, compiling block" in text
    assert "writing the weights" in text


def test_the_engines_that_compile_are_named_with_what_is_left(tmp_path, monkeypatch):
    """Two of four done in 10 s a unit: one of 5 units runs for 20 s, one of 1 waits, on two workers."""
    futures: dict[Future[float], str] = {Future(): name for name in ("block", "vae_decode", "head", "embed")}
    costs = {"block": 5.0, "vae_decode": 5.0, "head": 1.0, "embed": 1.0}
    by_name = {name: future for future, name in futures.items()}
    clock = iter((100.0, 120.0))
    monkeypatch.setattr("seko_export.backends.workers.time.monotonic", lambda: next(clock))
    watch = _Watch(futures, costs, tmp_path, workers=2)
    (tmp_path / "block").mkdir()
    (tmp_path / "vae_decode").mkdir()
    assert watch() == "engines: 4 of 4 left, compiling block, vae_decode"
    by_name["block"].set_result(50.0)
    by_name["head"].set_result(10.0)
    assert watch() == "engines: 2 of 4 left, compiling vae_decode, about 30 s"
    for name in ("vae_decode", "embed"):
        by_name[name].set_result(1.0)
    assert watch() == ""


def test_an_engine_that_failed_ends_the_sentence(tmp_path):
    future: Future[float] = Future()
    future.set_exception(ValueError("it did not compile"))
    assert (
        _Watch({future: "block", Future(): "head"}, {"block": 5.0, "head": 1.0}, tmp_path, workers=1)() == ""
    )


# -- completion ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "option", "values"),
    [
        ("build", "--preset", ["sample", *all_presets()]),
        ("plan", "--preset", ["sample", *all_presets()]),
        ("build", "--kv", list(KV_FORMATS)),
        ("build", "--backend", list(BACKENDS.names())),
        ("build", "--kernels", list(KERNELS)),
        ("plan", "--attention", list(ATTENTIONS)),
        ("build", "--target", ["auto", "cpu"]),
        ("plan", "--gpu", list(GPUS)),
    ],
)
def test_a_shell_completes_values(command, option, values):
    shell = ShellComplete(main, {}, "seko-export", "_SEKO_EXPORT_COMPLETE")
    assert [item.value for item in shell.get_completions([command, option], "")] == values
    begun = values[-1][:2]
    completions = [item.value for item in shell.get_completions([command, option], begun)]
    assert completions == [value for value in values if value.startswith(begun)]


def test_the_page_says_how_a_shell_learns_it():
    """The variable is made of the program's name as click does it; the script that comes out names the function."""
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for shell in ("bash", "zsh", "fish"):
        assert f"_SEKO_EXPORT_COMPLETE={shell}_source seko-export" in page
    done = subprocess.run(
        [SEKO_EXPORT],
        env=os.environ | {"_SEKO_EXPORT_COMPLETE": "zsh_source"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "#compdef seko-export" in done.stdout

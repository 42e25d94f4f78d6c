"""What argparse and click make of values that look like options, for every option of every command."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from click.testing import CliRunner

import seko_export.cli
from seko_runtime.cli.parser import SUMMARIES, parsers
from seko_runtime.errors import UsageError
from seko_serve import cli as serve
from seko_serve import load
from seko_serve.fleet import command as fleet
from seko_serve.simulation import command as simulation

_, RUN_PARSERS = parsers(dict.fromkeys(SUMMARIES, print))
PARSERS: dict[str, argparse.ArgumentParser] = RUN_PARSERS | {
    "seko-serve": serve.parser(),
    "seko-serve load": load.parser(),
    "seko-serve fleet": fleet.parser(),
    "seko-serve simulate": simulation.parser(),
}
OPTIONS = [
    (command, spelled)
    for command, parser in PARSERS.items()
    for action in parser._actions  # the table of a parser, which has no public name
    for spelled in action.option_strings
    if spelled.startswith("--")
]
EXPORT_OPTIONS = [
    (name, spelled)
    for name, command in seko_export.cli.main.commands.items()
    for parameter in command.params
    for spelled in (*parameter.opts, *parameter.secondary_opts)
    if spelled.startswith("--")
]


@pytest.mark.parametrize(("command", "spelled"), OPTIONS)
def test_two_dashes_are_the_value_of_an_option(
    capsys: pytest.CaptureFixture[str], command: str, spelled: str
) -> None:
    """A text or a path, or the error of any other value; argparse made an empty list of them."""
    parser = PARSERS[command]
    (action,) = (action for action in parser._actions if spelled in action.option_strings)
    needed = ["x"] if "-o" not in parser._option_string_actions else ["x", "-o", "y"]
    value, refusal = None, ""
    try:
        value = getattr(parser.parse_args([*needed, f"{spelled}=--"]), action.dest)
    except (UsageError, SystemExit) as error:
        refusal = f"{error} {capsys.readouterr().err}"
    assert spelled in refusal if refusal else value in ("--", Path("--"), ["--"], [Path("--")])


@pytest.mark.parametrize(("command", "spelled"), EXPORT_OPTIONS)
def test_two_dashes_are_the_value_of_an_option_of_the_exporter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, spelled: str
) -> None:
    monkeypatch.chdir(tmp_path)
    given = (
        ["absent"]
        if any(p.param_type_name == "argument" for p in seko_export.cli.main.commands[command].params)
        else []
    )
    result = CliRunner().invoke(seko_export.cli.main, [command, *given, f"{spelled}=--"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output

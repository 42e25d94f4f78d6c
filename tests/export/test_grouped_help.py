"""Help of both programs: every option stands under a heading, `build --help` is short, and docs/cli.md agrees."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from scripts.docs_site import with_options
from seko_export.cli.commands import main as export_command
from seko_export.cli.grouped_help import GroupedOption
from seko_export.options.declaration import Group
from seko_runtime.cli.parser import SUMMARIES, all_options, groups

OPTIONS = all_options()
GROUPS = groups(OPTIONS)
PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


def options_of(command: str) -> list[GroupedOption]:
    """The options of a command of `seko-export`, but those that show help."""
    options = [param for param in export_command.commands[command].params if isinstance(param, click.Option)]
    assert all(isinstance(option, GroupedOption) for option in options if option.name != "help_all")
    return [option for option in options if isinstance(option, GroupedOption)]


def headings(command: str) -> list[str]:
    """The headings of a command's options in their order: those of `Group`, then those of workloads."""
    return list(dict.fromkeys((*Group, *(option.group for option in options_of(command)))))


def sections(text: str) -> dict[str, list[str]]:
    """The options that a help shows under each heading, by their last spelling."""
    shown: dict[str, list[str]] = {}
    heading = ""
    for line in text.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            heading = line[:-1]
        elif re.match(r"  -", line):
            spellings = re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", re.split(r"(?<=\S)  ", line.strip())[0])
            shown.setdefault(heading, []).append(spellings[-1])
    return shown


def spelled(option: click.Option) -> str:
    return (*option.opts, *option.secondary_opts)[-1]


@pytest.mark.parametrize(("command", "switch"), [("build", "--help-all"), ("plan", "--help")])
def test_the_help_shows_every_option_under_its_heading(invoke, command: str, switch: str) -> None:
    shown = sections(invoke(command, switch).stdout)
    for group in headings(command):
        expected = [spelled(option) for option in options_of(command) if option.group == group]
        assert expected
        assert shown.pop(group) == expected
    assert shown.pop("Help")[-1] == "--help"
    assert not shown


def test_the_short_help_of_build_shows_about_a_dozen_options_and_where_the_others_are(invoke) -> None:
    shown = sections(invoke("build", "--help").stdout)
    assert shown.pop("Help") == ["--help-all", "--help"]
    common = [option for option in options_of("build") if option.common]
    assert len(common) == 14
    assert {heading: [*options] for heading, options in shown.items()} == {
        group: [spelled(option) for option in common if option.group == group]
        for group in headings("build")
        if any(option.group == group for option in common)
    }
    assert all(option.common for option in options_of("build") if option.required)


def test_every_command_of_seko_export_is_in_a_section(invoke) -> None:
    sections = export_command.sections
    assert sorted(name for names in sections.values() for name in names) == sorted(export_command.commands)
    text = invoke("--help").stdout
    assert "..." not in text.replace("[ARGS]...", "")  # each summary fits its line
    for heading in sections:
        assert f"\n{heading}:\n" in text


@pytest.mark.parametrize("command", SUMMARIES)
def test_the_help_of_seko_run_shows_every_option_under_its_heading(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from seko_runtime.cli.commands import main as runtime_command

    with pytest.raises(SystemExit):
        runtime_command([command, "--help"])
    expected: dict[str, list[str]] = {}
    for option in sorted(OPTIONS, key=lambda option: GROUPS.index(option.group)):
        if command in option.commands and option.names[-1].startswith("-"):
            expected.setdefault(option.group, []).append(option.names[-1])
    assert sections(capsys.readouterr().out) == expected


def test_the_page_has_the_options_of_seko_run_under_the_same_headings() -> None:
    table = with_options(PAGE).split("| option | of | what it does |")[1].split("\n\n")[0]
    listed: dict[str, set[tuple[str, frozenset[str]]]] = {}
    for row in table.splitlines()[2:]:
        names, commands = (cell.strip() for cell in row.split("|")[1:3])
        if heading := re.fullmatch(r"\*\*(.*)\*\*", names):
            group = listed.setdefault(heading[1], set())
        else:
            of = frozenset(SUMMARIES if commands == "all" else re.findall(r"`(\w+)`", commands))
            group.add((re.findall(r"`(--?[a-z-]+)", names)[-1], of))
    expected = {
        group: {
            (option.names[-1], frozenset(option.commands))
            for option in OPTIONS
            if option.group == group and option.names[-1].startswith("-")
        }
        for group in GROUPS
    }
    assert listed == expected
    assert [*listed] == [*GROUPS]

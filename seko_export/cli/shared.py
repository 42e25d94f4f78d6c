"""Options that several commands share: the argument ARTIFACT, and `--json`, which prints one JSON object as the last
line of stdout.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from seko_export.cli.grouped_help import GroupedOption, write_sections
from seko_export.errors import ExportError, RunError
from seko_export.options.declaration import Group
from seko_runtime.cli.output import Report, note, print_lines, show, show_failure
from seko_runtime.errors import SekoRuntimeError
from seko_runtime.host.end_signals import until_ended
from seko_runtime.host.faults import machine_faults

if TYPE_CHECKING:
    from rich.console import Console

artifact_argument = click.argument("artifact", type=click.Path(path_type=Path))
json_option = click.option(
    "--json",
    "as_json",
    cls=GroupedOption,
    group=Group.OUTPUT,
    is_flag=True,
    help="Print one JSON object on stdout, also for a failure.",
)


class _EndedError(Exception):
    """Exception: a command was ended by a signal, or because nobody reads its output."""

    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence)
        self.code = code


class SekoGroup(click.Group):
    """A group of commands that ends with Seko's exit codes: 2 usage, 3 checkpoint, 4 artifact, 5 environment, 6
    numeric.

    A failure of a command is one sentence on stderr. With ``--json`` it is also the object ``{"error": SENTENCE,
    "exit": CODE}`` on stdout. The help of the group shows the commands in sections.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.sections: dict[str, list[str]] = {}

    def add_section(self, heading: str, *commands: click.Command) -> None:
        """Add commands to the group, under a heading of the help."""
        self.sections[heading] = [str(command.name) for command in commands]
        for command in commands:
            self.add_command(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  click gives it
        """Write the sections of commands in the help."""
        sections = {
            heading: [(name, self.commands[name].get_short_help_str(formatter.width)) for name in names]
            for heading, names in self.sections.items()
        }
        write_sections(formatter, sections)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line and end the process with its exit code. With ``standalone_mode=False`` the method is
        click's own, which returns the result instead."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        words = [*(sys.argv[1:] if args is None else args)]
        report: Mapping[str, object] = {}
        failed: str | None = None
        try:
            with machine_faults():
                code = super().main(words, prog_name, complete_var, standalone_mode=False, **extra) or 0
                print_lines([])  # what was printed so far
        except (ExportError, SekoRuntimeError) as error:
            failed, code, report = str(error), error.exit_code, getattr(error, "report", {})
            if isinstance(error, RunError):  # its process has said the sentence
                for advice in getattr(error, "__notes__", ()):
                    note(f"  hint: {advice}")
            else:
                note(f"seko-export: {failed}")
        except _EndedError as ended:
            failed, code = str(ended), ended.code
            note(f"seko-export: {failed}")
        except click.ClickException as error:
            failed, code = error.format_message(), error.exit_code
            with contextlib.suppress(OSError):
                error.show()
        except click.Abort:  # of a question
            failed, code = "no answer was given", 1
            note(f"seko-export: {failed}")
        except Exception as fault:
            if "--json" in words:
                show_failure({}, f"{type(fault).__name__}: {fault}", 1)
            raise
        if failed is not None and "--json" in words:
            show_failure({**report}, failed, code)
        sys.exit(code)

    def invoke(self, ctx: click.Context) -> None:
        """Run the command until it ends, a signal arrives, or the reader of its output is gone."""

        def command() -> int:
            try:
                super(SekoGroup, self).invoke(ctx)
                print_lines([])  # what was printed so far
            except BrokenPipeError:  # click would end without a word
                raise _EndedError("whoever read the output stopped reading", 1) from None
            return 0

        ended: list[str] = []
        code = until_ended(command, ended.append)
        if ended:
            raise _EndedError(ended[0], code)


def print_json(report: Mapping[str, Any]) -> None:
    """Print a report as one line of JSON with sorted keys."""
    show(Report({**report}, ()), as_json=True)


def say(*lines: str) -> None:
    """Print lines of text for a person on stdout."""
    print_lines(lines)


@contextlib.contextmanager
def drawn() -> Iterator[Console]:
    """Yield a console. The text that is printed on the console appears on stdout at the end of the block, in colours if
    stdout is a terminal."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        text = io.StringIO()
        yield Console(file=text, no_color=True)
        say(text.getvalue().removesuffix("\n"))
        return
    with console.capture() as capture:
        yield console
    say(capture.get().removesuffix("\n"))


def answer(report: Mapping[str, Any], as_json: bool, *lines: str) -> None:
    """Print the report of a command as one line of JSON, or for a person as lines of text; without ``lines`` as a table
    of its entries."""
    if as_json:
        print_json(report)
    elif lines:
        say(*lines)
    else:
        print_table(report)


def print_table(report: Mapping[str, Any]) -> None:
    """Print a report in three columns: entry, name within the entry, value."""
    rows = [row for key, value in report.items() for row in _rows(key, value)]
    widths = [max(len(row[at]) for row in rows) for at in range(2)]
    say(*(f"{key:{widths[0]}}  {name:{widths[1]}}  {value}".rstrip() for key, name, value in rows))


def _rows(key: str, value: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of an entry of a report: a row for each item of a mapping or sentence of a list."""
    if isinstance(value, Mapping) and value:
        for name, entry in value.items():
            if isinstance(entry, Mapping) and {*entry} == {"value", "from"}:
                yield key, name, f"{_plain(entry['value'])}  ({entry['from']})"
            else:
                yield key, name, _plain(entry)
    elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        for item in value:
            yield key, "", item
    else:
        yield key, "", _plain(value)


def _plain(value: Any) -> str:
    if value is None or value in ({}, [], ()):
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple) and not any(isinstance(item, list | tuple | dict) for item in value):
        return ", ".join(map(_plain, value))
    return json.dumps(value) if isinstance(value, Mapping | list | tuple) else str(value)


def completing(names: Callable[[], Sequence[str]]) -> Callable[..., list[CompletionItem]]:
    """Return a shell completion for an option or argument whose value is one of ``names``."""

    def complete(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in names() if name.startswith(begun)]

    return complete

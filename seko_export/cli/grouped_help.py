"""Help in groups: options are grouped by subject, and commands by the stage of work at which they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from seko_export.options.declaration import Group

MOST_LETTERS = 30  # of a name that has its text beside it
_ALL = "seko_export.help_all"  # in a context's `meta`: whether --help-all was given


class GroupedOption(click.Option):
    """A command-line option that belongs to a group of the help.

    Parameters
    ----------
    group : str
        Heading of the option in the help of a `GroupedCommand`.
    common : bool
        Whether ``--help`` shows the option if the command has ``--help-all``.
    arguments, more
        The arguments of `click.Option`.
    """

    def __init__(self, *arguments: Any, group: str, common: bool = False, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.group, self.common = group, common

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Return the value as the option's type; an empty path, which would be the current folder, is refused."""
        if value == "" and isinstance(self.type, click.Path):
            raise click.BadParameter("an empty path names nothing", ctx, self)
        return super().type_cast_value(ctx, value)


class GroupedCommand(click.Command):
    """A command whose help shows the options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups of options. Without ``--help-all`` only the common options are written, if the command has
        ``--help-all``."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        short = any(option.name == "help_all" for option in options) and not ctx.meta.get(_ALL)
        own = [option.group for option in options if isinstance(option, GroupedOption)]  # of workloads, too
        sections: dict[str, list[tuple[str, str]]] = {group: [] for group in (*Group, *own, "Help")}
        for option in options:
            record = option.get_help_record(ctx)
            if record is not None and not (short and isinstance(option, GroupedOption) and not option.common):
                sections[option.group if isinstance(option, GroupedOption) else "Help"].append(record)
        write_sections(formatter, sections)


def write_sections(formatter: click.HelpFormatter, sections: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Write sections of the help by heading. Each section of the help is a list of names and texts. The texts of all
    sections are in one column."""
    names = [name for section in sections.values() for name, _ in section]
    width = max(len(name) for name in names if len(name) <= MOST_LETTERS)
    for heading, section in sections.items():
        if section:
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, text in section], MOST_LETTERS)


def help_all_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds ``--help-all`` to a `GroupedCommand`. ``--help`` of the command then shows the common options
    only."""

    def show(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:
            ctx.meta[_ALL] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return click.option(
        "--help-all",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show the other options, too.",
    )(command)

"""A hook of mkdocs: pages of the repository's root join the site, the page of commands has tables of all options of
`seko-export build` and of `seko-run`, and links that leave docs/ are checked, too.

On the site a link to a file that is no page, such as a test, becomes the file's name.
"""

from __future__ import annotations

import logging
import os
import re
from itertools import groupby
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from seko_export.options.asked import all_options
from seko_export.options.declaration import flag
from seko_runtime.cli.parser import SUMMARIES, groups
from seko_runtime.cli.parser import all_options as all_run_options

ROOT = Path(__file__).parents[1]
FROM_ROOT = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
OPTIONS, RUN_OPTIONS = "<!-- options of build -->", "<!-- options of run -->"  # in docs/cli.md
log = logging.getLogger("mkdocs.hooks.docs_site")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root as ``project/NAME``."""
    for name in FROM_ROOT:
        files.append(File.generated(config, f"project/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Write the tables of options, and turn links between files of the repository into links between pages of the
    site."""
    markdown = with_options(markdown)
    source = Path(page.file.abs_src_path)
    docs = Path(config.docs_dir)

    def on_site(link: re.Match[str]) -> str:
        mark, text, path, anchor = link.groups()
        goal = Path(os.path.normpath(source.parent / path))
        if not goal.exists():
            log.warning("%s links to %s, which does not exist", source.relative_to(ROOT), path)
        if goal.parent == ROOT and goal.name in FROM_ROOT:
            uri = f"project/{goal.name}"
        elif goal.is_relative_to(docs) and files.get_file_from_path(goal.relative_to(docs).as_posix()):
            uri = goal.relative_to(docs).as_posix()
        else:
            return f"{mark and 'picture '}{text}"
        return f"{mark}[{text}]({os.path.relpath(uri, Path(page.file.src_uri).parent)}{anchor or ''})"

    parts = re.split(r"(^```.*?^```|^ {4}.*?$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else LINK.sub(on_site, part) for number, part in enumerate(parts))


def with_options(markdown: str) -> str:
    """Return a page with its tables of options."""
    for place, table in ((OPTIONS, options_table), (RUN_OPTIONS, run_options_table)):
        if place in markdown:
            markdown = markdown.replace(place, table())
    return markdown


def options_table() -> str:
    """Return the table of the options of `build`, as Markdown."""
    lines = ["| option | default | what it does |", "|---|---|---|"]
    for group, options in groupby(all_options().values(), key=lambda pair: pair[1].group):
        lines.append(f"| **{group}** | | |")
        for option_field, option in options:
            spelled = f"`{flag(option_field.name)}`" + (f", `{option.off}`" if option.off else "")
            default = "" if option_field.default in (None, False, ()) else f"`{option_field.default}`"
            lines.append(f"| {spelled} | {default} | {option.help} |")
    return "\n".join(lines) + "\n"


def run_options_table() -> str:
    """Return the table of the options of `seko-run`, as Markdown."""
    lines = ["| option | of | what it does |", "|---|---|---|"]
    options = all_run_options()
    for group in groups(options):
        lines.append(f"| **{group}** | | |")
        for option in options:
            if option.group == group and option.names[-1].startswith("-"):
                value = f" {option.settings['metavar']}" if "metavar" in option.settings else ""
                spelled = ", ".join(f"`{name}{value}`" for name in option.names)
                every = len(option.commands) == len(SUMMARIES)
                of = "all" if every else ", ".join(f"`{command}`" for command in option.commands)
                default = option.settings.get("default")
                said = option.settings.get("help", "")
                if default is not None and "default" not in said:
                    said += f"; default: {default}"
                lines.append(f"| {spelled} | {of} | {said} |")
    return "\n".join(lines) + "\n"

"""What every command has: `--json`, and one JSON object as the last line of stdout."""

from __future__ import annotations

import json
from typing import Any

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")


def print_json(report: Any) -> None:
    """Print a report as one line, keys sorted."""
    click.echo(json.dumps(report, sort_keys=True))

"""What several commands have: ARTIFACT, and `--json` with one JSON object as the last line of stdout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

artifact_argument = click.argument("artifact", type=click.Path(path_type=Path))
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")


def print_json(report: Any) -> None:
    """Print a report as one line, keys sorted."""
    click.echo(json.dumps(report, sort_keys=True))

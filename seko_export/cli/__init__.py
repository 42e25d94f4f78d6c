"""The `seko-export` command."""

from seko_export.cli.commands import main

__all__ = ["main"]

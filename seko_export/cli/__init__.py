"""The command line of `seko-export`."""

from seko_export.cli.commands import main

__all__ = ["main"]

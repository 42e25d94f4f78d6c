"""Helpers of all command lines of `seko-serve`: a parser that prints errors as one sentence, and sentences for errors
of the operating system.
"""

from __future__ import annotations

from typing import NoReturn

from seko_runtime.cli.option_values import OptionParser


class Parser(OptionParser):
    """An argparse parser that prints an error as one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the sentence, and end the process with exit code 2."""
        self.exit(2, f"seko-serve: {message}; see `{self.prog} --help`\n")


def sentence(error: Exception) -> str:
    """Return an error as a sentence. For an error of the operating system the sentence names the file, and leaves the
    error's number out."""
    reason = getattr(error, "reason", None)  # of an address that cannot be reached
    if isinstance(reason, OSError):
        return sentence(reason)
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    if error.filename is None:
        return str(error.strerror)
    if isinstance(error, FileNotFoundError):
        return f"{error.filename} was not found; check the path"
    return f"{error.filename} cannot be used: {error.strerror}"


def lacking(error: ImportError) -> str:
    """Return the sentence for a library that is not installed."""
    return f"the package {error.name} is not installed; in Seko's folder, pip install ./runtime ./serve"

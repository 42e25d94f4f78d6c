"""A parser of command lines that takes two dashes as the value of an option, which argparse itself loses."""

from __future__ import annotations

import argparse
from typing import Any


class OptionParser(argparse.ArgumentParser):
    """An argparse parser whose options take every text after ``=`` as their value.

    Up to Python 3.12 argparse removes ``--`` from the values of an option, too, so ``--seed=--`` gave an empty list
    whatever the option's type.
    """

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if not (action.option_strings and arg_strings == ["--"]):
            return super()._get_values(action, arg_strings)
        value = self._get_value(action, "--")
        self._check_value(action, value)
        return value if action.nargs in (None, argparse.OPTIONAL) else [value]

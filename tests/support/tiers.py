"""Which cases of a parametrised test are in the fast tier. No tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_is_fast(cases: Iterable[Any], fast: int = 1) -> list[Any]:
    """Return a test's cases; those behind the first ``fast`` ones are marked slow. A case that is a tuple holds several
    arguments."""
    every = list(cases)
    return every[:fast] + [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in every[fast:]
    ]

"""A pool of the toy that speaks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from seko_runtime.speech.pool import SpeechPool
from tests.speech.toy_speech import open_pool


@pytest.fixture
def pool() -> Iterator[SpeechPool]:
    """A pool of every bucket, on the CPU."""
    with open_pool() as opened:
        yield opened

"""A host that waits for a GPU is an error, as far as torch sees it. Needs a GPU; no tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Let torch raise where it makes the host wait; afterwards it does as it did before.

    The first time in a process torch warns that this mode is a prototype. Where warnings are errors that raises with
    the mode already set: so the warning is ignored, and whatever raises, the mode goes back.
    """
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)

"""Limits of the sizes of models, which come from the files of strangers: a table of keys is made for every layer before
any tensor is compared."""

from __future__ import annotations

from collections.abc import Iterable

from seko_export.errors import UsageError

MOST_LAYERS = 1 << 10  # of Wan 14B: 40
MOST_SIZE = 1 << 20  # the vocabulary of UMT5: 256,384


def check_sizes(config: object, names: Iterable[str], of: str = "") -> None:
    """Raise a UsageError if a field of a config is no whole number from 1 to `MOST_SIZE`, or `MOST_LAYERS` for fields
    whose names end in ``layers``. ``of`` stands before the field's name in the message."""
    for name in names:
        size, most = getattr(config, name), MOST_LAYERS if name.endswith("layers") else MOST_SIZE
        if type(size) is not int or not 1 <= size <= most:
            raise UsageError(f"{of}{name} must be a whole number from 1 to {most}, got {size!r:.60}")

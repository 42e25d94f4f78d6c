"""Comparison of the keys of a file with the keys of a model, which lists every difference. The comparison reads no
tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from seko_export.checkpoints.errors import WeightKeysError
from seko_export.checkpoints.key_table import KeyTable, Naming
from seko_export.checkpoints.sources import OpenedFiles, TensorSource, shown
from seko_export.config.build import ModelIdentity

SHOWN_KEYS = 20  # of each sort in a message; the error's attributes hold all


def match_sources(
    path: Path, opened: OpenedFiles, config: ModelIdentity, keys: KeyTable
) -> tuple[str, Mapping[str, TensorSource]]:
    """Find the stored tensor of every key of the model; any difference is an error.

    Parameters
    ----------
    path : Path
        Path of the checkpoint, for the error message.
    opened : OpenedFiles
        The tensors in the checkpoint, whose numbers are not read yet.
    config : ModelIdentity
        Dimensions of the expected model.
    keys : KeyTable
        The family's key table.

    Returns
    -------
    format_name : str
        Name of the naming that the file uses.
    sources : Mapping[str, TensorSource]
        Stored tensors by the exporter's key, in the order of ``keys.shapes``.

    Raises
    ------
    WeightKeysError
        If a key is unknown, missing, misshapen or doubled; one error lists all of them.
    """
    naming = keys.naming_of(opened)
    sources = compare_keys(
        f"{path} ({naming.name} names) does not hold the weights of {config.name!r}:",
        opened,
        naming,
        keys.shapes(config),
        hints=lambda: keys.hints(opened, config),
    )
    return naming.name, sources


def compare_keys(
    heading: str,
    opened: OpenedFiles,
    naming: Naming,
    expected: Mapping[str, tuple[int, ...]],
    *,
    hints: Callable[[], list[str]] = list,
    passed_over: Iterable[str] = (),
) -> Mapping[str, TensorSource]:
    """Find the stored tensor of every expected key, in order. The file may also have the keys in ``passed_over``.

    Raises
    ------
    WeightKeysError
        If a key is unknown, missing, misshapen or doubled. The message is ``heading``, all such keys, ``hints``.
    """
    known = {*expected, *passed_over}
    matched: dict[str, TensorSource] = {}
    unknown: list[str] = []
    doubled: list[str] = []
    for source in opened.sources:
        name = naming.translated(source.key)
        if name is None or name not in known:
            unknown.append(source.file_key)
        elif name in matched:
            doubled.append(source.file_key)
        else:
            matched[name] = source
    missing = [name for name in expected if name not in matched]
    misshapen = [name for name in expected if name in matched and matched[name].shape != expected[name]]
    if not (unknown or missing or misshapen or doubled):
        return {name: matched[name] for name in expected}

    shapes = [
        f"{shown(matched[name].file_key)} is {list(matched[name].shape)}, expected {list(expected[name])}"
        for name in misshapen
    ]
    lines = [heading]
    for kind, keys in (
        ("unknown", [shown(key) for key in unknown]),
        ("missing", [naming.to_theirs(name) for name in missing]),
        ("mis-shaped", shapes),
        ("there twice under different wrappers", [shown(key) for key in doubled]),
    ):
        if keys:
            rest = f", and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else ""
            lines.append(f"  {len(keys)} {kind}: {', '.join(keys[:SHOWN_KEYS])}{rest}")
    lines.extend(f"  hint: {hint}" for hint in hints())
    raise WeightKeysError(
        "\n".join(lines),
        unknown=tuple(unknown),
        missing=tuple(missing),
        misshapen=tuple(misshapen),
        doubled=tuple(doubled),
    )

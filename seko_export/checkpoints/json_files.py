"""Reader of the small JSON files beside weights: the index of shards, and config.json."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from seko_export.checkpoints.errors import NotACheckpointError
from seko_export.checkpoints.sources import Layout, shown

CONFIG_FILE = "config.json"
# An index of shards, or a file with a variant in its name: those of a folder that is named with --variant.
_OF_A_FOLDER = re.compile(r"(diffusion_pytorch_)?model\.([\w-]+\.safetensors|.*safetensors\.index.*\.json)")
_MOST_DIGITS = 300  # of an integer that a float holds
MAX_JSON_BYTES = 4 << 20  # the index of a model of 14B has 0.1 MB


def read_json(file: Path, most: int = MAX_JSON_BYTES) -> object:
    """Return the content of a JSON file of at most ``most`` bytes.

    Parameters
    ----------
    file : Path
        A regular file, or a link to a regular file. The content of the file is not trusted.

    Raises
    ------
    ValueError
        If the path is not a regular file, or the file is larger than ``most`` bytes or not JSON; the message states the
        cause.
    OSError
        If the file cannot be read.
    """
    if file.exists() and not file.is_file():
        raise ValueError("it is no regular file")
    with file.open("rb") as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most} bytes")
    return parse_json(content)


def parse_json(content: bytes | str) -> object:
    """Return the value of a JSON text of a stranger. An integer that no float holds is infinite, as 1e400 is, so that
    checks of numbers need not expect an OverflowError.

    Raises
    ------
    ValueError
        If the text is not JSON, or nested too deeply.
    """
    text = content.decode("utf-8") if isinstance(content, bytes) else content
    try:
        value: object = json.loads(text, parse_int=_whole)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


def read_json_object(file: Path, most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file of at most ``most`` bytes.

    Raises
    ------
    NotACheckpointError
        If the file is not a JSON object.
    """
    try:
        value = read_json(file, most)
    except (OSError, ValueError) as fault:
        raise NotACheckpointError(f"{file} cannot be read as JSON: {shown(str(fault))}") from fault
    if not isinstance(value, dict):
        raise NotACheckpointError(f"{file} holds a JSON {type(value).__name__}, expected an object")
    return value


def finite_number(value: object) -> float | None:
    """Return a number of a JSON file as a float. None for any other value: true, an infinite number, NaN, a number that
    is written as text."""
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        return None
    return float(value)  # type: ignore[arg-type]


def config_file_of(path: Path, layout: Layout) -> Path | None:
    """Return the path of the ``config.json`` in the folder of the weights, or None.

    Parameters
    ----------
    path : Path
        A folder, as `open_files` takes it, or an index of shards or a file of a variant in the folder. For any other
        file the result is None, since the folder of the file may hold other models.
    layout : Layout
        File layout of the model's weights, which names the subfolders of a pipeline.
    """
    homes: tuple[Path, ...] = ()
    if path.is_dir():
        homes = (path, *(path / name for name in layout.subfolders))
    elif _OF_A_FOLDER.fullmatch(path.name):
        homes = (path.parent,)
    return next((home / CONFIG_FILE for home in homes if (home / CONFIG_FILE).is_file()), None)


def read_config(path: Path, layout: Layout) -> dict[str, Any] | None:
    """Return the content of the ``config.json`` that `config_file_of` finds, or None if it finds no file.

    Raises
    ------
    NotACheckpointError
        If the file is not a JSON object.
    """
    file = config_file_of(path, layout)
    return None if file is None else read_json_object(file)

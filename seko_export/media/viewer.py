"""What an artifact brings for the person who meets it: a sentence of help, prompts to try, and pictures to begin with.
The maker of a model writes them into a JSON file; a build copies them into the artifact."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path, PurePath

from seko_export.checkpoints.errors import CheckpointNotFoundError, NotACheckpointError
from seko_export.checkpoints.json_files import read_json_object
from seko_runtime.arguments import shown
from seko_runtime.video.manifest import MAX_EXAMPLES, Viewer, ViewerPicture

VIEWER_FILE = "viewer.json"  # beside a checkpoint
MAX_PICTURE_BYTES = 4 << 20  # of one picture, so that servers take it and browsers wait for none
MAX_LETTERS = 4096  # of one text
# What browsers and the runtime both read, by its first bytes.
_FORMATS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpg"}


@dataclass(frozen=True)
class ViewerFiles:
    """The table for the manifest, and the files of its pictures, in the same order."""

    viewer: Viewer
    pictures: tuple[Path, ...]


def read_viewer(file: Path) -> ViewerFiles:
    """Read a JSON file such as ``{"help": "...", "prompts": ["..."], "pictures": [{"file": "a.png", "caption":
    "..."}]}``. Each of the three may be left out; a picture lies in the JSON file's folder or below it.

    Raises
    ------
    CheckpointError
        If the file is of another form, or a picture is missing, too large, or neither PNG nor JPEG.
    """
    table = read_json_object(file)
    _check_keys(table, {"help", "prompts", "pictures"}, str(file))
    prompts = tuple(_text(text, f"{file}: prompts") for text in _entries(table, "prompts", file))
    pictures, paths = [], []
    for number, entry in enumerate(_entries(table, "pictures", file)):
        where = f"{file}: pictures[{number}]"
        if not isinstance(entry, dict):
            raise NotACheckpointError(f'{where} is no object, expected {{"file": "...", "caption": "..."}}')
        _check_keys(entry, {"file", "caption"}, where)
        named = PurePath(_text(entry.get("file"), f"{where}.file"))
        # A strange checkpoint could take any picture of the machine along.
        if named.is_absolute() or ".." in named.parts:
            raise NotACheckpointError(
                f"{where}: {shown(str(named))} lies elsewhere; copy it into the folder of {file.name}"
            )
        path = file.parent / named
        pictures.append(
            ViewerPicture(
                f"viewer/{number}.{_suffix(path, where)}", _text(entry.get("caption", ""), f"{where}.caption")
            )
        )
        paths.append(path)
    return ViewerFiles(
        Viewer(_text(table.get("help", ""), f"{file}: help"), prompts, tuple(pictures)), tuple(paths)
    )


def write_viewer(folder: Path, files: ViewerFiles) -> None:
    """Copy the pictures into an artifact's folder."""
    for picture, path in zip(files.viewer.pictures, files.pictures, strict=True):
        copy = folder / picture.file
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def _suffix(path: Path, where: str) -> str:
    if not path.is_file():
        raise CheckpointNotFoundError(f"{where}: {path} does not exist; correct the path, or leave it out")
    size = path.stat().st_size
    if size > MAX_PICTURE_BYTES:
        raise NotACheckpointError(
            f"{where}: {path} has {size} bytes, at most {MAX_PICTURE_BYTES} are taken; scale it down"
        )
    with path.open("rb") as opened:
        head = opened.read(max(map(len, _FORMATS)))
    suffix = next((suffix for begin, suffix in _FORMATS.items() if head.startswith(begin)), None)
    if suffix is None:
        raise NotACheckpointError(f"{where}: {path} is neither PNG nor JPEG; convert it")
    return suffix


def _entries(table: dict[str, object], name: str, file: Path) -> list[object]:
    entries = table.get(name, [])
    if not isinstance(entries, list) or len(entries) > MAX_EXAMPLES:
        raise NotACheckpointError(f"{file}: {name} is no list of at most {MAX_EXAMPLES}")
    return entries


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_LETTERS:
        raise NotACheckpointError(f"{where} holds no text of at most {MAX_LETTERS} letters")
    return value


def _check_keys(table: dict[str, object], known: set[str], where: str) -> None:
    if unknown := sorted(set(table) - known):
        raise NotACheckpointError(f"{where} has {unknown[0][:40]!r}, expected {', '.join(sorted(known))}")

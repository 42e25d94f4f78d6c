"""What an artifact brings for the person who meets it: the file beside a checkpoint, its mistakes, its pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from seko_export.checkpoints.errors import CheckpointError
from seko_export.media.viewer import MAX_PICTURE_BYTES, VIEWER_FILE, read_viewer, write_viewer
from seko_export.options.sample import SAMPLE_FOLDER
from seko_runtime.video.manifest import MAX_EXAMPLES, Viewer, ViewerPicture
from tests.support.asked import resolved

WORLD = Path(__file__).parents[2] / "artifacts" / "world-sample"
PNG = b"\x89PNG\r\n\x1a\n and so on"


def written(folder: Path, content: object) -> Path:
    file = folder / VIEWER_FILE
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_pictures_are_copied_under_names_of_the_artifact(tmp_path: Path) -> None:
    (tmp_path / "a photo.JPEG").write_bytes(b"\xff\xd8\xff and so on")
    (tmp_path / "b").write_bytes(PNG)
    file = written(tmp_path, {"pictures": [{"file": "a photo.JPEG", "caption": "A"}, {"file": "b"}]})
    files = read_viewer(file)
    assert files.viewer == Viewer(
        pictures=(ViewerPicture("viewer/0.jpg", "A"), ViewerPicture("viewer/1.png"))
    )
    artifact = tmp_path / "artifact"
    artifact.mkdir()
    write_viewer(artifact, files)
    assert (artifact / "viewer/1.png").read_bytes() == PNG
    assert sorted(path.name for path in (artifact / "viewer").iterdir()) == ["0.jpg", "1.png"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[", "cannot be read as JSON"),
        ({"promts": []}, "'promts', expected help, pictures, prompts"),
        ({"help": 1}, "help holds no text"),
        ({"prompts": "a"}, "prompts is no list of at most 64"),
        ({"prompts": ["a"] * (MAX_EXAMPLES + 1)}, "prompts is no list of at most 64"),
        ({"prompts": [1]}, "prompts holds no text of at most 4096 letters"),
        ({"prompts": ["a" * 5000]}, "prompts holds no text of at most 4096 letters"),
        ({"pictures": ["a.png"]}, r"pictures\[0\] is no object"),
        ({"pictures": [{"caption": "a"}]}, r"pictures\[0\].file holds no text"),
        ({"pictures": [{"file": "b.png", "alt": "a"}]}, r"pictures\[0\] has 'alt', expected caption, file"),
        ({"pictures": [{"file": "none.png"}]}, "none.png does not exist"),
        (
            {"pictures": [{"file": "/b.png"}]},
            "'/b.png' lies elsewhere; copy it into the folder of viewer.json",
        ),
        ({"pictures": [{"file": "x/../../b.png"}]}, "lies elsewhere"),
        ({"pictures": [{"file": "large.png"}]}, f"at most {MAX_PICTURE_BYTES} are taken; scale it down"),
        ({"pictures": [{"file": "word.png"}]}, "neither PNG nor JPEG; convert it"),
    ],
)
def test_a_wrong_file_is_told_by_its_place(tmp_path: Path, content: Any, words: str) -> None:
    (tmp_path / "b.png").write_bytes(PNG)
    (tmp_path / "word.png").write_bytes(b"GIF89a")
    (tmp_path / "large.png").write_bytes(PNG.ljust(MAX_PICTURE_BYTES + 1))
    with pytest.raises(CheckpointError, match=words):
        read_viewer(written(tmp_path, content))


def test_a_build_takes_the_file_beside_its_checkpoint_or_the_one_that_is_named(tmp_path: Path) -> None:
    own, world = resolved("sample"), resolved(None, checkpoint=WORLD)
    assert own.media.viewer == SAMPLE_FOLDER / VIEWER_FILE
    assert own.config.workload.viewer is not None
    assert "a red disc bouncing on a dark background" in own.config.workload.viewer.prompts
    assert world.config.workload.viewer is not None
    assert world.config.workload.viewer.pictures[0].file == "viewer/0.png"
    named = resolved(None, checkpoint=WORLD, viewer=written(tmp_path, {"help": "Another."}))
    assert named.config.workload.viewer == Viewer("Another.")
    copy = tmp_path / "copy"
    shutil.copytree(WORLD, copy, ignore=shutil.ignore_patterns(VIEWER_FILE))
    assert resolved(None, checkpoint=copy).config.workload.viewer is None
    assert resolved("tiny").config.workload.viewer is None
    with pytest.raises(CheckpointError, match=r"none\.json cannot be read"):
        resolved("tiny", viewer=tmp_path / "none.json")

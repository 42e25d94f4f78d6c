"""Seconds of the parts of opening, which benches print."""

from __future__ import annotations

from pathlib import Path

from seko_runtime.host.part_times import PartTime, part, recorded, seconds_of
from seko_runtime.opening.artifact import open_artifact


def test_seconds_of_several_threads_count_once() -> None:
    times = [
        PartTime("hash", 1, 4),
        PartTime("hash", 2, 3),
        PartTime("upload", 2, 5),
        PartTime("hash", 3.5, 6),
        PartTime("hash", 7, 8),
        PartTime("manifest", 0, 1),
    ]
    assert seconds_of(times) == {"manifest": 1, "hash": 6, "upload": 3}
    assert [*seconds_of(times)] == ["manifest", "hash", "upload"]


def test_nothing_is_recorded_outside_of_a_recording() -> None:
    with recorded() as times, part("in"):
        pass
    with part("out"):
        pass
    assert [time.name for time in times] == ["in"]


def test_an_opening_names_its_parts(whole_folder: Path) -> None:
    with recorded() as times, open_artifact(whole_folder) as artifact:
        artifact.open_session(5).close()
    wanted = {"manifest", "import", "device", "read", "hash", "upload", "tokenizer", "engines", "allocate"}
    assert {time.name for time in times} == wanted
    assert sum(time.name == "manifest" for time in times) == 2  # parsed once, and its programs resolved once

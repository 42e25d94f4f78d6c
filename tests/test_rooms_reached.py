"""The table that `scripts/test.sh --coverage` prints."""

from __future__ import annotations

from tests.support.rooms_reached import ROOT, table


def test_a_line_a_room_and_one_for_all() -> None:
    runtime = ROOT / "runtime/seko_runtime"
    files = [
        (runtime / "video/ring.py", 10, 5),
        (runtime / "video/deeper/other.py", 30, 25),
        (runtime / "arguments.py", 4, 4),
        (ROOT / "seko_export/tools/__init__.py", 0, 0),
    ]
    assert [line.split(maxsplit=3) for line in table(files)] == [
        ["0", "%", "0", "seko_export/tools"],
        ["100", "%", "4", "seko_runtime"],
        ["75", "%", "40", "seko_runtime/video"],
        ["77", "%", "44", "all"],
    ]

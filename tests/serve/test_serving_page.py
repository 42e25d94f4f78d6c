"""docs/serving.md repeats what the code says."""

from __future__ import annotations

from pathlib import Path

from seko_serve.errors import table

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def test_the_table_of_errors_is_that_of_the_code() -> None:
    assert table() in PAGE, f"write this into docs/serving.md:\n{table()}"

"""The page on speech artifacts against the contract."""

from __future__ import annotations

import re
from pathlib import Path

from seko_runtime.speech import contract
from tests.speech.toy_speech import BUCKETS, manifest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "speech-format.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The rows of the table whose first cell is this."""
    table = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_page_leaves_the_fields_to_the_schema() -> None:
    """Whose test demands a meaning of each."""
    assert "`seko_runtime/speech/manifest.schema.json`" in PAGE


def test_programs_and_buffers_are_those_of_the_contract() -> None:
    roles = {re.match(r"\w+", cells[0].strip("`"))[0] for cells in rows("program")}
    known = contract.speech_contract(manifest(buckets=BUCKETS)).programs
    assert roles == {name.split(".")[0] for name in known}
    named = {name for cells in rows("buffer") for name in re.findall(r"`([\w.]+)`", cells[0])}
    constants = {value for name, value in vars(contract).items() if name.isupper() and isinstance(value, str)}
    assert named - {"row_axis"} == constants - {contract.LEAD_IN}

"""The page on the manifest of speech against the schema and the contract."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from seko_runtime.speech import contract
from tests.speech.toy_speech import BUCKETS, manifest
from tests.support.manifest_schema import schema_file

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "speech-format.md").read_text(encoding="utf-8")
RECORDS: dict[str, Any] = json.loads(schema_file("speech").read_text(encoding="utf-8"))["$defs"]
OF_THE_CORE = {"SpeechManifest", "KvPool"}  # and what else docs/engine-format.md has


def rows(heading: str) -> list[list[str]]:
    """The rows of the table whose first cell is this."""
    table = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_every_record_of_speech_has_a_table_that_says_which_fields_are_optional() -> None:
    other = (ROOT / "docs" / "engine-format.md").read_text(encoding="utf-8")
    own = {name for name in RECORDS if f"| `{name}` |" in PAGE}
    assert own | OF_THE_CORE | {name for name in RECORDS if f"| `{name}` |" in other} == {*RECORDS}
    for name in own:
        fields, optional = set(), set()
        for named, text, *_ in rows(f"`{name}`"):
            fields |= {*re.findall(r"`(\w+)`", named)}
            optional |= {*re.findall(r"`(\w+)`", named)} if text.startswith("optional") else set()
        assert fields == RECORDS[name]["properties"].keys(), name
        assert optional == fields - {*RECORDS[name]["required"]}, name


def test_programs_and_buffers_are_those_of_the_contract() -> None:
    roles = {re.match(r"\w+", cells[0].strip("`"))[0] for cells in rows("program")}
    known = contract.speech_contract(manifest(buckets=BUCKETS)).programs
    assert roles == {name.split(".")[0] for name in known}
    named = {name for cells in rows("buffer") for name in re.findall(r"`([\w.]+)`", cells[0])}
    constants = {value for name, value in vars(contract).items() if name.isupper() and isinstance(value, str)}
    assert named - {"row_axis"} == constants - {contract.LEAD_IN}

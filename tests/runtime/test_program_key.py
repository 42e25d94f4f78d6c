"""Names of programs, and back."""

from __future__ import annotations

import pytest

from seko_runtime.format.program_key import ProgramKey


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("step", ProgramKey("step")),
        ("step.4", ProgramKey("step", 4)),
        ("step_full.4", ProgramKey("step", 4, full=True)),
        ("step_first.4", ProgramKey("step", 4, first=True)),
        ("step_first_full", ProgramKey("step", full=True, first=True)),
        ("step.4.1024", ProgramKey("step", 4, length=1024)),
    ],
)
def test_a_name_is_its_key_and_back(name: str, key: ProgramKey) -> None:
    assert (ProgramKey.parse(name), key.name) == (key, name)


@pytest.mark.parametrize("name", ["step_full_first", "step.x", "step.04", "step_first."])
def test_what_no_key_is_called_is_a_role_that_no_program_has(name: str) -> None:
    parsed = ProgramKey.parse(name)
    assert parsed.name == name
    assert parsed.role != "step"

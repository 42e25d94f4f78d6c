"""How the processes that compile engines are started."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from seko_export.backends import export_backend, workers


@pytest.mark.parametrize(("length", "method"), [(75, "forkserver"), (76, "spawn")])
def test_a_long_folder_for_temporary_files_has_no_room_for_the_servers_socket(
    monkeypatch: pytest.MonkeyPatch, length: int, method: str
) -> None:
    """Linux takes 107 bytes; multiprocessing puts 32 behind the folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(Path("/", "x" * (length - 1))))
    monkeypatch.setattr(workers, "_settings_of_server", {})
    assert workers._started_by(export_backend("aoti")).get_start_method() == method

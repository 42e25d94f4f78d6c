"""`seko-export report`: one archive about an artifact on this machine, with nobody's name in it."""

from __future__ import annotations

import getpass
import json
import platform
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seko_export.errors import MachineError
from seko_export.host import environment
from seko_export.tools.field_report import CLIP, REPORT, write_report
from seko_runtime.errors import DiskError, EnvironmentLacksError
from tests.conftest import Built


def test_all_is_in_one_archive_and_no_name(fp4: Built, tmp_path: Path, invoke: Callable[..., Any]) -> None:
    output = tmp_path / "report.zip"
    done = invoke("report", str(fp4.folder), "-o", str(output), "--chunks", "1", "--json")
    assert done.exit_code == 0, done.stderr
    with zipfile.ZipFile(output) as archive:
        text = archive.read(REPORT).decode()
        found = json.loads(text)
        assert (CLIP in archive.namelist()) == (found["clip"] == CLIP)
    assert found["verify"]["ok"]
    assert found["bench"]["chunk_median_s"] > 0
    assert found["artifact"]["model"]["layers"] > 0
    assert found["machine"]["build_cpu"] in (True, False)
    for name in (str(fp4.folder), f"{Path.home()}/"):
        assert name not in text
    assert re.search(rf"\b{re.escape(platform.node())}\b", text) is None


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have neither the times of chunks nor a clip come about."""

    def lacks(*_: object) -> dict[str, Any]:
        raise EnvironmentLacksError(f"{Path.home()}/gone is not here")

    monkeypatch.setattr("seko_export.tools.field_report.bench_artifact", lacks)
    monkeypatch.setattr(
        "seko_export.tools.field_report.run_child",
        lambda *_, **__: subprocess.CompletedProcess([], 5, "", "opening\nerror: no encoder\n"),
    )


@pytest.mark.usefixtures("failing")
def test_what_fails_is_told_and_the_rest_is_there(
    fp4: Built, tmp_path: Path, invoke: Callable[..., Any]
) -> None:
    done = invoke("report", str(fp4.folder), "-o", str(tmp_path / "report.zip"), "--json")
    assert done.exit_code == 0, done.stderr
    with zipfile.ZipFile(tmp_path / "report.zip") as archive:
        found = json.loads(archive.read(REPORT))
    assert found["bench"] == {"error": "~/gone is not here"}
    assert found["clip"] == {"error": "error: no encoder"}
    assert found["verify"]["ok"]


def test_an_archive_inside_the_artifact_is_refused(tmp_path: Path, invoke: Callable[..., Any]) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    done = invoke("report", str(tmp_path), "-o", str(tmp_path / "manifest.json"))
    assert done.exit_code == 2
    assert "lies inside the artifact" in done.stderr


def test_an_archive_that_cannot_be_written_is_told_before_a_build(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="Not a directory"):
        write_report(lambda: pytest.fail("was built"), tmp_path / "file" / "report.zip", 1)


def test_an_archive_is_written_into_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seko_export.tools.field_report.inspect_artifact", lambda _: {})
    monkeypatch.setattr("seko_export.tools.field_report._examine", lambda *_: None)
    write_report(tmp_path, tmp_path.with_name("new") / "report.zip", 1)
    assert zipfile.is_zipfile(tmp_path.with_name("new") / "report.zip")


def test_no_artifact_writes_no_archive(
    tmp_path: Path, invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before the machine is examined, which takes seconds."""
    monkeypatch.setattr(environment, "examine", None)
    done = invoke("report", str(tmp_path), "-o", str(tmp_path.with_name("report.zip")))
    assert done.exit_code == 4
    assert not tmp_path.with_name("report.zip").exists()


@pytest.mark.usefixtures("failing")
def test_without_an_artifact_the_sample_is_built_first(
    fp4: Built, tmp_path: Path, invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here by a stand-in that was built before."""
    asked = []

    def built(options: Any, *_: object) -> tuple[Path, bool]:
        asked.append(options.checkpoint)
        return fp4.folder, True

    monkeypatch.setattr("seko_export.tools.trial.try_artifact", built)
    done = invoke("report", "-o", str(tmp_path / "report.zip"), "--chunks", "1", "--json")
    assert done.exit_code == 0, done.stderr
    assert asked == [None]
    found = json.loads(done.stdout)
    assert found["build"]["seconds"] >= 0
    assert found["verify"]["ok"]


def test_a_failed_build_is_told_with_the_machine(
    tmp_path: Path, invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> tuple[Path, bool]:
        raise MachineError(f"no compiler in {tmp_path}/bin or /data/{getpass.getuser()}/bin")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("seko_export.tools.trial.try_artifact", fails)
    done = invoke("report", "-o", "report.zip", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["build"] == {"error": "no compiler in FOLDER/bin or /data/USER/bin"}
    assert found["machine"]["cores"] > 0
    assert "verify" not in found

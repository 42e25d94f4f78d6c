"""What the commands print: success says so, `--json` is one object, unknown names are answered with the nearest."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seko_runtime import Pool, open_artifact
from seko_runtime.cli.commands import main
from seko_runtime.video.workload import WORKLOAD
from tests.support.rows import rows_of

from . import toy, toy_inputs, toy_pool, toy_whole
from .conftest import Edit

Said = pytest.CaptureFixture[str]
COMMANDS = ("run", "verify", "info", "unpack")


def test_verify_ends_with_verified(whole_folder: Path, capsys: Said) -> None:
    assert main(["verify", str(whole_folder)]) == 0
    *each, last = capsys.readouterr().out.splitlines()
    assert last.startswith("verified ")
    assert [line.split(":")[0] for line in each] == ["golden   chunk 0", "golden   chunk 3"]


def test_info_shows_the_size_of_a_saved_session(whole_folder: Path, tmp_path: Path, capsys: Said) -> None:
    """Read off the manifest alone, and what a session's file holds beside its header."""
    with open_artifact(whole_folder) as artifact, artifact.open_session() as session:
        session.save(tmp_path / "saved")
        size = rows_of(session._pool).layout().nbytes  # `Pool.session_bytes`, of a pool with one session
    assert main(["info", str(whole_folder)]) == 0
    assert f"session  {size} bytes when it is paused or saved" in capsys.readouterr().out.splitlines()
    assert main(["info", str(whole_folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["session_bytes"] == size
    assert 0 < (tmp_path / "saved").stat().st_size - size < 8192


def test_info_shows_what_it_takes_of_a_gpu(whole_folder: Path, edit_manifest: Edit, capsys: Said) -> None:
    """Which only a build for a GPU counts."""
    for counted, line in (
        (None, None),
        (11_891_047_726, "memory   at least 11.9 GB of a GPU, with a session"),
    ):
        edit_manifest(whole_folder, lambda manifest, counted=counted: replace(manifest, least_bytes=counted))
        assert main(["info", str(whole_folder)]) == 0
        said = [at for at in capsys.readouterr().out.splitlines() if at.startswith("memory")]
        assert said == ([] if line is None else [line])
        assert main(["info", str(whole_folder), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["least_bytes"] == counted


@pytest.mark.parametrize("opened", [toy_pool.open_pool, toy_inputs.open_pool])
def test_the_size_of_a_session_is_that_of_any_pool(opened: Callable[[], Pool]) -> None:
    """With rows that share calls, and inputs that are kept with each chunk."""
    with opened() as pool:
        assert WORKLOAD.described(pool.manifest)[1]["session_bytes"] == pool.session_bytes


def missed(folder: Path, edit_manifest: Edit) -> None:
    """Recorded chunks that no engine meets."""
    golden = replace(toy_whole.GOLDEN, bounds=(), tolerance=1e-30, seeds=(1,))
    edit_manifest(folder, lambda manifest: toy.changed(manifest, golden=golden))


def test_a_missed_golden_is_no_success(whole_folder: Path, edit_manifest: Edit, capsys: Said) -> None:
    missed(whole_folder, edit_manifest)
    assert main(["verify", str(whole_folder)]) == 6
    said = capsys.readouterr()
    assert "verified" not in said.out
    assert said.err.startswith("error: a golden is missed: chunk 0")
    assert main(["verify", str(whole_folder), "--json"]) == 6
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["exit"]) == (False, 6)
    assert report["error"].startswith("a golden is missed: chunk 0")


@pytest.mark.parametrize(
    ("options", "check"),
    [
        ([], "chunk 0: golden 0 "),
        (["--seed", "7"], "skipped (another prompt or seed)"),
        (["--steps", "1"], "skipped (--steps was given)"),
    ],
)
def test_a_run_that_went_well_prints_no_error(
    whole_folder: Path, tmp_path: Path, options: list[str], check: str, capsys: Said
) -> None:
    assert main(["run", str(whole_folder), "-o", str(tmp_path / "a.npy"), "--chunks", "1", *options]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[3].startswith(f"check    {check}")
    assert not [line for line in (*lines, *said.err.splitlines()) if line.startswith("error")]


def test_json_is_all_of_stdout(whole_folder: Path, tmp_path: Path, capsys: Said) -> None:
    for arguments in (
        ["info", str(whole_folder)],
        ["verify", str(whole_folder)],
        ["run", str(whole_folder), "-o", str(tmp_path / "a.y4m")],
    ):
        assert main([*arguments, "--json"]) == 0
        assert isinstance(json.loads(capsys.readouterr().out), dict)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 2),
        (["run"], 2),
        (["rum", "artifact"], 2),
        (["info", "artifact", "--trsut", "a"], 2),
        (["run", "artifact", "-o", "a.npy", "--chunks", "0"], 2),
        (["info", "not/there"], 4),
        (["unpack", "not/there.tar", "-o", "folder"], 4),
    ],
)
def test_json_is_all_of_stdout_of_a_failure_too(arguments: list[str], code: int, capsys: Said) -> None:
    assert main([*arguments, "--json"]) == code
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert said.err == f"error: {report.pop('error')}\n"
    assert report == {"exit": code}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rum", "a"], "there is no command 'rum': did you mean run?"),
        (["zzz", "a"], "there is no command 'zzz'; see `seko-run --help`"),
        (["run", "a", "--promt", "a disc", "-o", "b.npy"], "no option --promt: did you mean --prompt?"),
        (["run", "a", "--outptu=b.npy"], "no option --outptu: did you mean --output?"),
        (["verify", "a", "--divice", "cpu"], "no option --divice: did you mean --device?"),
        (["info", "a", "--zzz"], "no option --zzz; see `seko-run info --help`"),
        (["info", "a", "b"], "unrecognized arguments: b"),
    ],
)
def test_the_nearest_name_is_told(arguments: list[str], words: str, capsys: Said) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--chunks", "--steps", "--patches"])
def test_a_number_that_is_not_whole_is_named(option: str, capsys: Said) -> None:
    assert main(["run", "a", option, "1.5", "-o", "b.npy"]) == 2
    assert capsys.readouterr().err.startswith(f"error: argument {option}: '1.5' is no whole number; see")


def test_a_name_of_the_output_that_is_too_long_is_told(
    whole_folder: Path, tmp_path: Path, capsys: Said
) -> None:
    path = tmp_path / f"{'n' * 300}.npy"
    assert main(["run", str(whole_folder), "-o", str(path)]) == 5
    assert (
        capsys.readouterr().err
        == f"error: {path} cannot be written (File name too long): choose another place\n"
    )


@pytest.mark.parametrize("name", ["a.npy", "weights/a.npy", "manifest.json"])
def test_an_output_inside_the_artifact_would_spoil_it(whole_folder: Path, name: str, capsys: Said) -> None:
    before = (whole_folder / "manifest.json").read_bytes()
    arguments = ["run", str(whole_folder), "-o", str(whole_folder / name), "--format", "npy", "--chunks", "1"]
    assert main(arguments) == 2
    assert "lies inside the artifact, which it would spoil" in capsys.readouterr().err
    assert (whole_folder / "manifest.json").read_bytes() == before
    assert not (whole_folder / "a.npy").exists()


@pytest.mark.parametrize("given", ["--text={}", "--input=pose={}", "--events={}", "--prompts={}"])
def test_a_run_writes_over_no_file_that_it_reads(
    whole_folder: Path, tmp_path: Path, given: str, capsys: Said
) -> None:
    file, link = tmp_path / "a.npy", tmp_path / "b.npy"
    file.write_bytes(b"mine")
    link.symlink_to(file)
    assert main(["run", str(whole_folder), "-o", str(file), given.format(link)]) == 2
    said = f"-o {file} is also read, by {given.partition('=')[0]}; choose another place"
    assert said in capsys.readouterr().err
    assert file.read_bytes() == b"mine"


def test_a_text_beyond_float32_is_refused_without_a_warning(
    whole_folder: Path, tmp_path: Path, capsys: Said
) -> None:
    np.save(tmp_path / "text.npy", np.full((1, 2, 2), 1e300))
    arguments = [
        "run",
        str(whole_folder),
        "--text",
        str(tmp_path / "text.npy"),
        "-o",
        str(tmp_path / "a.npy"),
    ]
    assert main(arguments) in (2, 3)
    assert "RuntimeWarning" not in capsys.readouterr().err


def test_beginnings_of_options_and_sentences_that_look_like_options_are_taken(
    whole_folder: Path, tmp_path: Path, capsys: Said
) -> None:
    pytest.importorskip("tokenizers")
    goal = str(tmp_path / "a.npy")
    assert main(["run", str(whole_folder), "--chu", "1", "--out", goal, "--prompt=--red"]) == 0
    assert main(["run", str(whole_folder), "--chunks", "1", "-o", goal, "--prompt", "-- a red disc"]) == 0
    assert "error" not in capsys.readouterr().err


def test_the_commands_are_those_of_the_parser(capsys: Said) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert [name for name in COMMANDS if f"    {name} " not in printed] == []

"""Comparisons as they are called: variants in processes of their own, one JSON line each, the run left as it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from scripts.train_sample import compare, train_dit, train_vae
from scripts.train_sample.progress import read_ema

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TINY = ["--rehearse", "--device", "cpu"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a rehearsed VAE and teacher."""
    folder = tmp_path_factory.mktemp("runs")
    assert train_vae.main(["--folder", str(folder / "vae"), "--steps", "2", *TINY]) == 0
    told = ["--folder", str(folder / "dit"), "--vae", str(folder / "vae"), "--steps", "2"]
    assert train_dit.main([*told, *TINY]) == 0
    return folder


@pytest.fixture
def compared(runs, monkeypatch, capsys):
    """Give a function that compares on a CPU and returns the exit code and the lines by variant."""
    paths = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.chdir(ROOT)

    def call(*arguments: str):
        capsys.readouterr()
        code = compare.main(["--vae", str(runs / "vae"), "--device", "cpu", *arguments])
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return code, {line["variant"]: line for line in lines}

    return call


def test_students_are_judged_kept_and_one_that_fails_says_why(runs, compared, tmp_path):
    good, wrong = "rehearse steps=2 turns=first", "rehearse turns=middle"
    asked = [
        "--stage",
        "dmd",
        "--teacher",
        str(runs / "dit"),
        "--gpus",
        "2",
        "--keep",
        str(tmp_path / "kept"),
    ]
    code, lines = compared(*asked, good, wrong)
    assert code == 1
    line = lines[good]
    assert (line["stage"], line["steps"]) == ("dmd", 2)
    assert set(line["followed"]) == {"start", "end"}
    assert line["judge"]["start"]["clips"] == 2
    assert line["judge"]["alive"]["streams"] <= line["judge"]["alive"]["of"] <= 2
    assert set(line["loss"]) == {"gap first", "fake first", "size first"}
    assert lines[wrong]["failed"] != 0
    assert "turns 'middle'" in "\n".join(lines[wrong]["said"])
    assert read_ema(tmp_path / "kept" / "0")[1]["distillation"]["turns"] == ["first"]
    with pytest.raises(FileExistsError, match="kept/0 is there"):
        compared(*asked, good)


def test_a_teacher_goes_on_in_a_copy_by_two_ranks(runs, compared):
    before = (runs / "dit" / "state" / "state.json").read_bytes()
    code, lines = compared(
        "--run", str(runs / "dit"), "--gpus", "2", "--ranks", "2", "rehearse steps=2 pool=16"
    )
    assert code == 0, lines
    (line,) = lines.values()
    assert (line["stage"], line["steps"]) == ("dit", 2)
    assert set(line["probe"]) == set(line["before"]) == {"start", "window", "first"}
    assert (runs / "dit" / "state" / "state.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "behind --run"),
        (["--run", "R", "--teacher", "T"], "without --teacher"),
        (["--stage", "ode"], "ode needs --teacher"),
        (["--stage", "dmd", "--teacher", "T", "--run", "R", "--begin", "B"], "give one of them"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        compare.main(["--vae", "V", *arguments, "graphs"])
    assert message in capsys.readouterr().err

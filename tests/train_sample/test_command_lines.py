"""Command lines of several ranks, as torchrun reads them: it must leave every word behind the module to the module."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from scripts.train_sample import compare, distil, evaluate, train_dit, train_vae

FOLDER = Path(compare.__file__).parent
TORCHRUN = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "4"]
RANKED = (train_vae, train_dit, distil, evaluate)  # what run_all.sh and README start on several ranks


def options_of(script, monkeypatch) -> list[str]:
    """Return every option of a script."""
    found: list[str] = []

    class ReadError(Exception):
        pass

    def read(parser: argparse.ArgumentParser, *_):
        found.extend(name for action in parser._actions for name in action.option_strings)
        raise ReadError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read)
    with pytest.raises(ReadError):
        script.main([])
    monkeypatch.undo()
    return found


def left_to_the_module(arguments: list[str]) -> list[str]:
    """Return what torchrun hands on; a word that it could take for two of its own options ends the process."""
    return list(get_args_parser().parse_args([*TORCHRUN, "-m", "module", *arguments]).training_script_args)


def test_the_parser_of_these_tests_refuses_what_it_refused_on_the_gpus(capsys):
    with pytest.raises(SystemExit):
        left_to_the_module(["--alone=graphs", "--run", "R/dit"])
    assert "ambiguous option: --run could match --run-path, --run_path" in capsys.readouterr().err


@pytest.mark.parametrize("script", RANKED, ids=lambda script: script.__name__.rsplit(".")[-1])
def test_no_option_of_a_script_is_short_for_two_of_torchruns(script, monkeypatch):
    names = options_of(script, monkeypatch)
    assert len(names) > 5
    for name in names:
        assert left_to_the_module([name, "1"]) == [name, "1"]


def test_a_variant_of_several_ranks_is_told_whole(tmp_path):
    asked = argparse.Namespace(
        stage="dmd", run=None, vae=tmp_path / "vae", teacher=tmp_path, begin=None, seconds=3.0, prompts=9, chunks=7,
        device="cuda",
    )  # fmt: skip
    whole = compare.command(asked, "graphs batch-scale=0.5", tmp_path / "goal", 2)
    assert whole[1:3] == ["-m", "torch.distributed.run"]
    read = get_args_parser().parse_args(whole[3:])
    assert (read.module, read.training_script) == (True, "scripts.train_sample.variant")
    assert read.training_script_args == whole[-1:]
    assert compare.command(asked, "graphs", tmp_path, 1)[1:3] == ["-m", "scripts.train_sample.variant"]


def test_what_the_pages_write_behind_torchrun_is_read_as_written():
    """README's and run_all.sh's own words; `compare` is no child of torchrun's, its variants are."""
    pages = "".join((FOLDER / name).read_text(encoding="utf-8") for name in ("README.md", "run_all.sh"))
    lines = pages.replace("\\\n", " ").splitlines()
    started = [
        line for line in lines if "scripts.train_sample." in line and "train_sample.compare" not in line
    ]
    assert len(started) >= 3
    words = {word for line in started for word in re.findall(r"(?<!\S)--?[a-z][a-z-]*", line)}
    words |= {word for line in lines if line.startswith(("stage ", "judged ")) for word in shlex.split(line)}
    dashed = sorted(word for word in words - set(TORCHRUN) if word.startswith("-") and word != "-m")
    assert {"--student", "--count-odds", "--graphs"} <= set(dashed)
    assert left_to_the_module(dashed) == dashed

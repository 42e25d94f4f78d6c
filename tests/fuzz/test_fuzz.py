"""A share of the fuzzer's cases and its corpus: each ends in success or in an error of ours.

More of them: `python -m tests.fuzz --cases 3000 --seed 7`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the library cryptography is not installed: nothing can be signed")

from .corpus import CORPUS

ROOT = Path(__file__).parents[2]
CASES = 300
# What still ends badly.
OPEN = frozenset(
    {
        "buckets_that_fall",
        "device_as_a_snapshot",
        "header_of_very_many_tensors",
        "long_paths_of_many_folders",
        "long_paths_of_many_folders_in_a_tar",
        "manifest_of_empty_lists",
        "manifest_of_small_tables",
        "many_buckets",
        "many_calls_of_many_references",
        "many_kinds_of_layers",
        "pad_id_behind_the_text_engines_table",
        "pipe_as_a_snapshot",
        "pipe_as_a_trust_file",
        "planted_module_that_is_listed",
        "ring_of_18_frames_over_a_cache_of_12",
        "ring_of_2_31_frames",
        "sink_of_2_31_frames",
        "snapshot_with_a_clock_at_the_end_of_time",
        "snapshot_with_a_clock_of_another_length",
        "snapshot_with_more_given_frames_than_a_chunk_has",
        "sparse_engine_of_3_gib",
        "sparse_snapshot_of_3_gib",
        "trust_file_with_a_name_of_spaces",
        "two_engines_files_of_the_sample_swapped",
        "two_engines_files_swapped",
    }
)
QUIET = ("member", "tar", "safetensors", "snapshot", "trust", "checkpoint")


def fuzzed(*options: str) -> str:
    """Output of the fuzzer in a process of its own, which forks one for each case; it must end well."""
    command = [sys.executable, "-m", "tests.fuzz", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_numbered_cases_end_in_success_or_in_an_error_of_ours() -> None:
    options = [option for kind in QUIET for option in ("--kind", kind)]
    assert fuzzed("--cases", str(CASES), "--seed", "7", *options).endswith(" cases, 0 uncaught")


def test_each_case_of_the_corpus_is_refused() -> None:
    names = sorted(set(CORPUS) - OPEN)
    options = [option for name in names for option in ("--named", name)]
    assert fuzzed(*options) == f"{len(names)} cases, 0 uncaught"

"""`seko-export profile`: the command on real artifacts, what it refuses, what it shows."""

from __future__ import annotations

import errno
import getpass
import json
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from seko_export.backends import export_backend
from seko_export.tools import profile_ranks, profile_trace, profiling
from seko_export.tools.profile_trace import BETWEEN_ENGINES, CHUNK_RANGE, Digest, digest_trace
from seko_runtime.errors import DiskError
from tests.export.traces import cpu_trace, gpu_trace

USAGE, ARTIFACT, ENVIRONMENT = 2, 4, 5


def test_profile(fp4, invoke, tmp_path, monkeypatch):
    """One JSON object; every engine of a chunk, as often as the schedule calls it; a trace without this machine; and
    the same as text."""
    trace = tmp_path / "trace.json"
    result = invoke("profile", fp4.folder, "--chunks", 2, "--top", 3, "--trace", trace, "--json")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 1
    report = json.loads(result.stdout)
    assert report["digest"] == fp4.report["digest"]
    assert (report["device"], report["clock"]) == ("cpu", "cpu")
    assert sum(row["time_ns"] for row in report["buckets"].values()) == report["total_ns"]
    assert sum(row["time_ns"] for row in report["engines"].values()) == report["total_ns"]
    calls = {name: row["calls"] for name, row in report["engines"].items()}
    passes, layers = 5, 2
    assert (calls["block"], calls["noise"], calls["advance"]) == (passes * layers, 1, passes - 1)
    assert len(report["top"]) == 3
    assert report["other"] == []
    assert set(report["launches"].values()) == {0}
    assert report["chunk_s"] > 0
    setting = export_backend("aoti").named_kernels
    assert any(str(setting) in note for note in report["notes"])  # AOTInductor's kernels carry no names
    written = trace.read_text(encoding="utf-8")
    assert sum(event["name"] == CHUNK_RANGE for event in json.loads(written)["traceEvents"]) == 2
    for secret in (str(fp4.folder), str(tmp_path), str(Path.home()), platform.node(), "/tmp"):
        assert f'"{secret}' not in written
    assert f'"{getpass.getuser()}"' not in written
    monkeypatch.setattr(profile_ranks, "profile_artifact", lambda *_, **__: report)
    result = invoke("profile", fp4.folder, "--chunks", 2)
    assert result.exit_code == 0, result.output
    for word in (
        fp4.report["digest"][:16],
        "seko::block",
        "with the profiler on",
        "engine",
        "host",
        BETWEEN_ENGINES,
    ):
        assert word in result.stdout
    assert max(map(len, result.stdout.splitlines()[:-1])) <= profiling.WIDTH  # the last line is a note


def test_no_launch_is_dropped_from_the_text(capsys):
    """What a GPU's report shows: launches, and a name longer than the line, cut."""
    digest = digest_trace(gpu_trace(captured=False))
    digest = replace(digest, names=dict(digest.names) | {"k" * 300: (1, 5)})
    extra = {"artifact": "x", "digest": "d" * 64, "device": "cuda", "chunk_s": 0.5, "chunk_profiled_s": 1.0}
    profiling.show(digest.report(top=9) | extra | {"notes": ["[bold] is no markup"]})
    text = capsys.readouterr().out
    assert "2 kernels, 1 copies" in text
    assert "500.000 ms; 1000.000 ms with the profiler on" in text
    assert "[bold] is no markup" in text
    assert "k" * profiling.NAME_WIDTH not in text


@pytest.mark.parametrize(
    ("place", "code"), [(".", USAGE), ("pipe", USAGE), ("loop", USAGE), ("file/trace.json", ENVIRONMENT)]
)
def test_a_trace_that_cannot_be_written(tmp_path, monkeypatch, invoke, place, code):
    """Told before the artifact is read; a pipe without a reader is not waited for."""
    monkeypatch.setattr(profile_ranks, "read_manifest", None)
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    result = invoke("profile", tmp_path / "artifact", "--trace", tmp_path / place)
    assert result.exit_code == code
    assert str(tmp_path / place) in result.stderr
    assert result.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop", "pipe"]


def test_a_trace_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    trace = tmp_path / "new" / "trace.json"
    profiling.write_trace(trace, {"traceEvents": []})
    whole = trace.read_bytes()

    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError, match="no space left"):
        profiling.write_trace(trace, {"traceEvents": [{"name": "more"}]})
    assert trace.read_bytes() == whole
    assert [*trace.parent.iterdir()] == [trace]


def test_a_trace_must_not_spoil_the_artifact(fp4, invoke):
    result = invoke("profile", fp4.folder, "--trace", fp4.folder / "trace.json")
    assert result.exit_code == USAGE
    assert "inside the artifact" in result.stderr
    assert not (fp4.folder / "trace.json").exists()


def test_a_failed_run_leaves_no_trace(tmp_path, invoke):
    result = invoke("profile", tmp_path / "absent", "--trace", tmp_path / "trace.json")
    assert result.exit_code == ARTIFACT
    assert "absent" in result.stderr
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "trace.json").write_text("an older one")
    assert invoke("profile", tmp_path / "absent", "--trace", tmp_path / "trace.json").exit_code == ARTIFACT
    assert (tmp_path / "trace.json").read_text() == "an older one"


def test_a_damaged_artifact(artifact, invoke):
    engine = artifact / "engines/block.pt2"
    engine.write_bytes(engine.read_bytes()[:-1])
    result = invoke("profile", artifact)
    assert result.exit_code == ARTIFACT
    assert "engines/block.pt2" in result.stderr
    assert invoke("profile", artifact, "--chunks", 0).exit_code == USAGE


def test_a_gpu_that_the_profiler_does_not_see() -> None:
    """Copies alone are no chunk either: then the profiler did not see into the graph."""
    copies = gpu_trace(captured=True)
    copies["traceEvents"] = [event for event in copies["traceEvents"] if event["cat"] != "kernel"]
    for trace in (cpu_trace(), copies):
        with pytest.raises(profiling.MachineError, match="saw no kernel of the GPU"):
            profiling._digest_of(trace, on_device=True)
    assert isinstance(profiling._digest_of(cpu_trace(), on_device=False), Digest)
    assert profiling._digest_of(gpu_trace(captured=True), on_device=True).on_device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_profile_on_a_gpu(invoke, tmp_path):
    """One launch a chunk, in which the profiler sees each kernel; engines by a second run, which launches each."""
    torchs = ("--attention", "torch")  # which has engines of their own for full rows, as a steady chunk's are
    built = invoke("build", "--preset", "tiny", "--fp4-kv", *torchs, "-o", tmp_path / "artifact", "--json")
    assert built.exit_code == 0, built.output
    result = invoke("profile", tmp_path / "artifact", "--chunks", 2, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["clock"] == "device"
    assert (report["launches"]["graphs"], report["launches"]["kernels"]) == (1, 0)
    for bucket in ("attention", "matmul", "kv_write", "kv_read", "norm_elementwise"):
        assert report["buckets"][bucket]["calls"] > 0, report["top"]
    assert sum(row["time_ns"] for row in report["buckets"].values()) == report["total_ns"]
    for name in ("block_full", "block_last"):
        assert report["engines"][name]["time_ns"] > 0
    assert report["idle_ns"] < report["span_ns"]


def test_ranges_cost_nothing_while_they_are_not_shown() -> None:
    """Unprofiled chunks are timed without them."""
    seen: list[str] = []
    ranges = profiling._Ranges()

    def engine(inputs: list[Any]) -> list[Any]:
        seen.extend(inputs)
        return inputs

    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        labelled = ranges.around("block", engine)
        labelled(["plain"])
        with ranges.shown():
            labelled(["shown"])
        labelled(["plain again"])
    assert seen == ["plain", "shown", "plain again"]
    assert [event.name for event in profiler.events()].count(profile_trace.ENGINE_RANGE + "block") == 1

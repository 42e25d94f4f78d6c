"""Profiling of an open artifact: chunks with a full cache are run with and without torch's profiler. The module
`profile_trace` computes figures from the trace."""

from __future__ import annotations

import getpass
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from seko_export.backends import export_backend
from seko_export.errors import MachineError, UsageError
from seko_export.host.workshop import workshop
from seko_export.tools.profile_trace import CHUNK_RANGE, ENGINE_RANGE, Digest, digest_trace, scrubbed
from seko_runtime import VideoArtifact
from seko_runtime.backends.memory import Engine, Tensor
from seko_runtime.format.whole_files import check_file_place, is_inside, whole_file
from seko_runtime.video.lockstep import Lockstep

WIDTH = 120  # columns where no terminal says
NAME_WIDTH = 70
OPAQUE_SHARE = 0.2  # of the time inside engines without kernel names, from which on the reader is told
# Kineto tells start and stop on stderr below level 6. Re-initialising CUPTI after a teardown crashes where graphs
# were captured (torch sets the same two for its own graphs).
_KINETO = {"KINETO_LOG_LEVEL": "6", "DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}


def profile_opened(
    artifact: VideoArtifact, chunks: int, *, top: int, trace: Path | None = None
) -> dict[str, Any]:
    """Profile chunks of an artifact with a full cache and the recorded text.

    Parameters
    ----------
    artifact : VideoArtifact
        The artifact, opened inside `kineto_settings`. With several ranks each rank calls this function and gets its
        own figures.
    chunks : int
        Number of chunks to run without the profiler, and number of chunks to run with it. The figures are those of the
        median chunk.
    top : int
        Length of the list of the most expensive names.
    trace : Path, optional
        File to which the trace is written, for the viewer of Chrome or Perfetto.

    Returns
    -------
    dict
        The entries of `Digest.report`, and ``artifact``, ``digest`` and ``device``. ``chunk_s`` and
        ``chunk_profiled_s`` are medians of seconds on the host, from the call until latents and video frames are on the
        host. No chunk is queued before the previous chunk is on the host. ``notes`` are sentences about what the
        figures do not show.

    Raises
    ------
    DiskError
        If ``trace`` cannot be written.
    MachineError
        If the profiler records nothing of the GPU.
    """
    ranges = _Ranges()
    artifact.wrap_engines(ranges.around)
    on_device = artifact.device != "cpu"
    with artifact.open_together() as session:
        stream = _Chunks(artifact, session)
        stream.fill()
        plain = [stream.timed() for _ in range(chunks)]
        with ranges.shown():
            # The profiler's own start costs time in the first chunk it sees.
            traced(stream.timed, 1, on_device)
            recorded, profiled = traced(stream.timed, chunks, on_device)
        captured = session.stats.captured_graphs > 0
    digest = _digest_of(recorded, on_device)
    report = digest.report(top)
    notes = []
    if captured:
        report["engines"] = _uncaptured_engines(artifact, ranges).engine_rows()
        notes.append(
            "engines: from a run without capture, since a captured chunk is one launch of all of them"
        )
    opaque = report["buckets"]["engine"]["share"]
    setting = export_backend(artifact.manifest.backend).named_kernels
    if setting is not None and opaque >= OPAQUE_SHARE:
        notes.append(
            f"engine: {opaque:.0%} of the time is inside engines whose kernels carry no names; build with "
            f"{setting} in the environment to see them"
        )
    if report["other"]:
        notes.append(f"other: {len(report['other'])} names fit no bucket: {', '.join(report['other'])}")
    if trace is not None:
        write_trace(trace, recorded)
    return report | {
        "artifact": artifact.manifest.name,
        "digest": artifact.digest,
        "device": artifact.device,
        "chunk_s": statistics.median(plain),
        "chunk_profiled_s": statistics.median(profiled),
        "notes": notes,
    }


def check_trace_goal(trace: Path, artifact: Path) -> None:
    """Check that the file of a trace can be written, before any chunk is run.

    Raises
    ------
    DiskError
        If the file cannot be written.
    UsageError
        If the trace file is inside the artifact's folder, or what is there is no regular file.
    """
    if is_inside(trace, artifact):
        raise UsageError(
            f"--trace {trace} lies inside the artifact, which it would spoil; choose another place"
        )
    check_file_place(trace)


def show(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the result of `profile_opened` as tables."""
    console = Console() if console is None else console
    if not console.is_terminal:
        console = Console(file=console.file, width=WIDTH, no_color=True)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    say(f"{report['artifact']}  ({report['digest'][:16]}), one steady chunk on {report['device']}")
    say(
        f"chunk     {_ms(report['chunk_s'] * 1e9)}; {_ms(report['chunk_profiled_s'] * 1e9)} with the profiler on"
    )
    idle = "the device was idle" if report["clock"] == "device" else "no engine or op ran"
    say(
        f"{report['clock'] + ' time':9} {_ms(report['total_ns'])}; {idle} for {_ms(report['idle_ns'])} of "
        f"{_ms(report['span_ns'])}, at most {_ms(report['largest_gap_ns'])} at a time"
    )
    if report["clock"] == "device":
        say("launches  " + ", ".join(f"{count} {kind}" for kind, count in report["launches"].items()))
    buckets = {name: row for name, row in report["buckets"].items() if row["calls"]}
    ordered = sorted(buckets.items(), key=lambda pair: -pair[1]["time_ns"])
    console.print(_table("bucket", ordered))
    console.print(_table("engine", report["engines"].items()))
    console.print(_table("name", ((row["name"], row) for row in report["top"]), bucket=True))
    for note in report["notes"]:
        say(note)


class _Ranges:
    """Named ranges around engine calls, shown to the profiler only on request, so that other runs do not pay for
    them.
    """

    def __init__(self) -> None:
        self._on = False

    def around(self, name: str, engine: Engine) -> Engine:
        from torch.profiler import record_function

        def labelled(inputs: list[Tensor]) -> Sequence[Tensor]:
            if not self._on:
                return engine(inputs)
            with record_function(ENGINE_RANGE + name):
                return engine(inputs)

        return labelled

    @contextmanager
    def shown(self) -> Iterator[None]:
        self._on = True
        try:
            yield
        finally:
            self._on = False


def _uncaptured_engines(artifact: VideoArtifact, ranges: _Ranges) -> Digest:
    """Profile a chunk of a session without graph capture, in which every launch is inside the range of its engine."""
    with artifact.without_capture(), artifact.open_together() as session:
        stream = _Chunks(artifact, session)
        stream.fill()
        with ranges.shown():
            trace, _ = traced(stream.timed, 1, on_device=True)
    return _digest_of(trace, on_device=True)


class _Chunks:
    """The chunks of a session, made one after another with the recorded inputs."""

    def __init__(self, artifact: VideoArtifact, session: Lockstep) -> None:
        self._artifact, self._session, self._chunks_run = artifact, session, 0

    def fill(self) -> None:
        """Make chunks until the KV cache is full."""
        stream = self._artifact.manifest.workload.stream
        for _ in range(-(-stream.cache_frames // stream.chunk_frames) + 1):
            self.timed()

    def timed(self) -> float:
        """Make the next chunk; return the seconds that it took on the host."""
        inputs = self._artifact.golden_inputs(self._chunks_run, None)
        begin = time.perf_counter()
        chunk = self._session.run_chunk(inputs)
        chunk.to_host()
        if self._artifact.manifest.workload.video is not None:
            # wait for decoding, which has a CUDA stream of its own, so that it does not extend into the next
            # chunk
            chunk.video()
        self._chunks_run += 1
        return time.perf_counter() - begin


def traced(timed: Callable[[], float], chunks: int, on_device: bool) -> tuple[dict[str, Any], list[float]]:
    """Run chunks under torch's profiler.

    Parameters
    ----------
    timed : callable
        Function that makes the next chunk, waits for it, and returns its seconds on the host.
    chunks : int
        Number of chunks to run.
    on_device : bool
        Whether a GPU's kernels are recorded, too.

    Returns
    -------
    dict
        The trace as plain data, for `profile_trace.digest_trace`.
    list of float
        Seconds that each chunk took.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    times = []
    # One cycle, so nothing accumulates; without it torch warns that events are cleared between cycles.
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(chunks):
            with record_function(CHUNK_RANGE):
                times.append(timed())
    with workshop("seko-profile-") as folder:
        exported = folder / "trace.json"
        profiler.export_chrome_trace(str(exported))
        text = exported.read_text(encoding="utf-8", errors="replace")
    trace: dict[str, Any] = json.loads(text, strict=False)
    return trace, times


def _digest_of(trace: Mapping[str, Any], on_device: bool) -> Digest:
    digest = digest_trace(trace)
    if on_device and not any(name[:3] != "Mem" for name in digest.names if digest.on_device):
        raise MachineError(
            "the profiler saw no kernel of the GPU, expected those of a chunk: another profiler may hold it, or the "
            "driver keeps it for administrators; end the other one, or set NVreg_RestrictProfilingToAdminUsers=0"
        )
    return digest


def write_trace(path: Path, trace: Mapping[str, Any]) -> None:
    """Write a trace to a file, without the names of this machine and its user."""
    clean = scrubbed(trace, [name for name in (_user(), platform.node()) if name])
    with whole_file(path, replace=True) as file:
        file.write(json.dumps(clean).encode())


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in some containers
        return ""


@contextmanager
def kineto_settings() -> Iterator[None]:
    """Context manager that sets environment variables that Kineto reads, unless the user has set them. At the end of
    the context the variables are restored."""
    ours = {name: value for name, value in _KINETO.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _table(first: str, rows: Any, *, bucket: bool = False) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True, overflow="ellipsis", min_width=20, max_width=NAME_WIDTH)
    if bucket:
        table.add_column("bucket", no_wrap=True)
    for title in ("calls", "time", "share"):
        table.add_column(title, no_wrap=True, justify="right")
    for name, row in rows:
        shown = [name, *([row["bucket"]] if bucket else [])]
        table.add_row(*shown, str(row["calls"] or ""), _ms(row["time_ns"]), f"{row['share']:.1%}")
    return table


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.3f} ms"

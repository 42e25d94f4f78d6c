"""Computation of figures from a Chrome trace of profiled chunks: buckets, engines, launches, gaps. The module imports
no torch, and runs no engine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CHUNK_RANGE = "seko.chunk"  # named range around one chunk, its copy to the host included
ENGINE_RANGE = "seko::"  # prefix of the named range around a call of an engine
BETWEEN_ENGINES = "(between engines)"
BUCKETS = (
    *("attention", "matmul", "norm_elementwise", "kv_write", "kv_read", "convolution", "copies"),
    *("exchange", "engine", "host", "other"),
)
# Ops that make views or allocate memory and compute nothing.
_VIEWS = (
    r"as_strided|(_unsafe_)?view|_?reshape(_alias)?|expand|transpose|t|permute|slice|select|narrow|unsqueeze|squeeze"
    r"|unbind|split(_with_sizes)?|chunk|detach|alias|empty(_\w+)?|resolve_(conj|neg)|lift_fresh|result_type|item"
    r"|_local_scalar_dense|new_empty|is_nonzero"
)
_MOVES = r"copy_?|_to_copy|to|clone|contiguous|cat|stack|fill_?|zero_?|zeros|full|constant_pad_nd|pad"
_MATHS = (
    r"add|sub|rsub|mul|div|neg|exp|log|pow|sqrt|rsqrt|reciprocal|abs|sin|cos|tanh|sigmoid|silu|gelu|relu|clamp\w*|where"
    r"|mean|sum|amax|amin|max|min|any|all|cumsum|native_layer_norm|layer_norm|rms_norm|native_group_norm|group_norm"
    r"|var_mean|_?softmax|_safe_softmax|arange|eq|ne|lt|le|gt|ge|bitwise_\w+|round|floor|remainder|index|index_select"
    r"|gather|embedding|upsample_\w+|randn?|uniform_?|normal_?"
)
_OP = r"^(aten::|aoti_torch_(cpu_|cuda_)?)"  # an op by the dispatcher, or by AOTInductor's C shim
_OUT = r"_?(_out)?$"
# Patterns of kernel names; the first match wins. The name of a fused Inductor kernel contains the names of all its
# ops, so a kernel that only prepares attention's inputs has "attention" in its name. Patterns for fused kernels
# therefore come first.
_RULES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (bucket, re.compile(pattern, re.IGNORECASE))
    for bucket, pattern in (
        ("engine", rf"^{ENGINE_RANGE}|CompiledFxGraph"),
        (
            "host",
            rf"^{re.escape(CHUNK_RANGE)}$|^Torch-Compiled Region|^TorchDynamo|^AOTDispatcher|^Pregraph|^ProfilerStep",
        ),
        ("host", rf"{_OP}({_VIEWS}){_OUT}|^detach$"),
        ("exchange", r"nccl|^_?c10d|^gloo:|alltoall|all_to_all|all_gather"),
        ("kv_write", r"(kv|cache)_write|v_transpose|index_(copy|put)"),
        # Kernels with bit operations unpack codes; with an exclusive or they are the noise generator.
        ("kv_read", r"(nvfp4|fp8|kv)_expand|fused(?!.*bitwise_xor).*bitwise_(and|or)"),
        ("copies", r"^mem(cpy|set)|direct_copy_kernel|CatArrayBatchedCopy"),
        ("copies", rf"fused(_({_MOVES}|{_VIEWS}))+(_\d+)?$"),
        ("copies", rf"{_OP}({_MOVES}){_OUT}"),
        (
            "norm_elementwise",
            r"qk_norm_rope|row_(norm|gelu)|norm_silu|gaussian|cpp_fused|triton_(poi|red|per|mix|for|spl)_|elementwise_kernel|native::reduce_kernel",
        ),
        ("attention", r"sdpa|flash|fmha|attention|attn|over_time"),
        (
            "convolution",
            r"conv(?!ert)|implicit_gemm|fprop|winograd|nchwToNhwc|nhwcToNchw|(im|vol)2col",
        ),
        (
            "matmul",
            r"few_rows|warpgroup_rows|nvjet|gemm|gemv|cublas|cutlass|splitK|xmma"
            r"|(^|[_:])(addmm|baddbmm|bmm|mm|linear|matmul)(_|$)",
        ),
        ("norm_elementwise", r"(layer|group|batch|rms)_?norm|RowwiseMoments|softmax|distribution_|upsample"),
        ("norm_elementwise", rf"{_OP}({_MATHS}){_OUT}"),
    )
)
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # Kineto's categories of work on the device
_CALLS = ("cuda_runtime", "cuda_driver")  # Kineto's categories of calls on the host that launch work
_HOST = ("cpu_op", "user_annotation")
_LAUNCHES = {
    "graphs": re.compile(r"^cu(da)?GraphLaunch"),
    "kernels": re.compile(r"^cu(da)?Launch\w*Kernel"),
    "copies": re.compile(r"^cu(da)?Memcpy"),
    "sets": re.compile(r"^cu(da)?Memset"),
}
_TELLTALE = ("host_name", "traceName", "trace_id")
_PATH = re.compile(r"(?<![\w.~/])(file://)?~?(/[\w.+@~-]+)+/?")  # absolute; "GB/s" and "0/1" are none


def bucket_of(name: str) -> str:
    """Return the bucket (one of `BUCKETS`) of a kernel, copy, op or named range; ``other`` for unknown names."""
    return next((bucket for bucket, rule in _RULES if rule.search(name)), "other")


@dataclass(frozen=True)
class Span:
    """One complete event of a trace, with times in whole nanoseconds."""

    name: str
    category: str
    begin: int
    end: int
    thread: tuple[Any, Any]
    correlation: int | None = None  # of a launch, and of what it ran on the device


@dataclass(frozen=True)
class Digest:
    """The figures of one profiled chunk.

    Parameters
    ----------
    on_device : bool
        Whether times were measured on a GPU. If not, the times are CPU times, each without the time of nested spans.
    span_ns : int
        Nanoseconds from the call of the chunk until its latents (and video frames, if any) are on the host.
    busy_ns, largest_gap_ns : int
        Nanoseconds in which the device (on a CPU: an engine or op) was busy, and the longest time in which it was idle.
    names : Mapping[str, tuple[int, int]]
        Number of calls and nanoseconds of every kernel, copy, op and range, by name.
    engines : Mapping[str, tuple[int, int]]
        Number of calls and nanoseconds of every engine with everything inside it; empty if the trace has no ranges.
    launches : Mapping[str, int]
        Number of launches of ``graphs``, ``kernels``, ``copies`` and ``sets`` by the host.
    """

    on_device: bool
    span_ns: int
    busy_ns: int
    largest_gap_ns: int
    names: Mapping[str, tuple[int, int]]
    engines: Mapping[str, tuple[int, int]]
    launches: Mapping[str, int]

    @property
    def total_ns(self) -> int:
        """Sum of the nanoseconds of all kernels, copies, ops and ranges. A share in the report is a fraction of this
        sum."""
        return sum(time for _, time in self.names.values())

    def report(self, top: int) -> dict[str, Any]:
        """Return the figures of the chunk as plain data; the buckets' times add up to ``total_ns``."""
        total = self.total_ns
        buckets = dict.fromkeys(BUCKETS, (0, 0))
        for name, figures in self.names.items():
            before = buckets[bucket_of(name)]
            buckets[bucket_of(name)] = (before[0] + figures[0], before[1] + figures[1])
        ordered = sorted(self.names, key=lambda name: (-self.names[name][1], name))
        return {
            "clock": "device" if self.on_device else "cpu",
            "span_ns": self.span_ns,
            "total_ns": total,
            "idle_ns": self.span_ns - self.busy_ns,
            "largest_gap_ns": self.largest_gap_ns,
            "buckets": {bucket: _row(*figures, total) for bucket, figures in buckets.items()},
            "top": [
                {"name": name, "bucket": bucket_of(name)} | _row(*self.names[name], total)
                for name in ordered[:top]
            ],
            "other": [name for name in ordered if bucket_of(name) == "other"],
            "engines": self.engine_rows(),
            "launches": dict(self.launches),
        }

    def engine_rows(self) -> dict[str, dict[str, Any]]:
        """Return calls, time and share of each engine, the largest time first. The entry ``(between engines)`` is for
        work outside all engines."""
        total = self.total_ns
        rows = sorted(self.engines.items(), key=lambda row: -row[1][1])
        return {name: _row(*figures, total) for name, figures in rows}


def digest_trace(trace: Mapping[str, Any]) -> Digest:
    """Return the figures of the chunk with the median duration in a trace.

    Parameters
    ----------
    trace : Mapping[str, Any]
        The data that `torch.profiler` exports for Chrome, with a range `CHUNK_RANGE` around each chunk. If the trace
        has events of a GPU, the times are those of the GPU.

    Raises
    ------
    ValueError
        If the trace contains no chunk.
    """
    spans = sorted(_spans(trace), key=lambda span: (span.begin, -span.end))
    chunks = [span for span in spans if span.name == CHUNK_RANGE and span.category == "user_annotation"]
    if not chunks:
        raise ValueError(f"the trace holds no range {CHUNK_RANGE}")
    chunk = sorted(chunks, key=lambda span: span.end - span.begin)[(len(chunks) - 1) // 2]
    following = [span.begin for span in chunks if span.begin > chunk.begin]
    # The chunk's copy to the host waits for the device, so all device work until the next chunk belongs to this
    # chunk.
    first, last = chunk.begin, min(following, default=max(span.end for span in spans) + 1)
    mine = [span for span in spans if first <= span.begin < last]
    device = [span for span in mine if span.category in _DEVICE]
    host = [span for span in mine if span.category in _HOST and span.begin < chunk.end]
    calls = [span for span in mine if span.category in _CALLS]
    on_device = any(span.category in _DEVICE for span in spans)
    if on_device:
        names, work = _summed((span.name, span.end - span.begin) for span in device), device
        engines = _engines_by_launch(host, calls, device)
    else:
        names, work = _summed(_self_times(host)), [span for span in host if span is not chunk]
        engines = _engines_by_range(host, sum(time for _, time in names.values()))
    busy, gap = _busy(work, chunk)
    return Digest(on_device, chunk.end - chunk.begin, busy, gap, names, engines, _count_launches(calls))


def scrubbed(value: Any, words: Sequence[str] = ()) -> Any:
    """Return a trace without data that identifies the machine: host, file names, absolute paths, and ``words`` in
    values.

    Parameters
    ----------
    value : Any
        A trace or a part of one, as plain data.
    words : Sequence[str]
        Names, such as the user's name, that are blanked wherever they are whole words, except in event names.
    """
    if isinstance(value, Mapping):
        plain_keys = ("name", "cat", "ph") if value.get("ph") == "X" else ()
        return {
            _blanked(key, ()): "" if key in _TELLTALE else scrubbed(item, () if key in plain_keys else words)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [scrubbed(item, words) for item in value]
    return _blanked(value, words) if isinstance(value, str) else value


def _blanked(text: str, words: Sequence[str]) -> str:
    text = _PATH.sub("", text)
    for word in words:
        text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "", text)
    return text


def _spans(trace: Mapping[str, Any]) -> Iterable[Span]:
    for event in trace.get("traceEvents", ()):
        if event.get("ph") != "X" or event.get("cat") not in _DEVICE + _CALLS + _HOST:
            continue
        begin = round(event["ts"] * 1000)  # microseconds with three digits; whole numbers add up exactly
        end = begin + round(event.get("dur", 0) * 1000)
        correlation = event.get("args", {}).get("correlation")
        thread = (event.get("pid"), event.get("tid"))
        yield Span(event["name"], event["cat"], begin, end, thread, correlation)


def _self_times(host: Sequence[Span]) -> Iterable[tuple[str, int]]:
    """Return each span's time without that of nested spans, separately for each thread."""
    threads: dict[Any, list[Span]] = {}
    for span in host:
        threads.setdefault(span.thread, []).append(span)
    for spans in threads.values():
        open_spans: list[list[Any]] = []  # name, end, own time
        for span in spans:
            while open_spans and open_spans[-1][1] <= span.begin:
                yield open_spans[-1][0], open_spans.pop()[2]
            end = min(span.end, open_spans[-1][1]) if open_spans else span.end
            if open_spans:
                open_spans[-1][2] -= end - span.begin
            open_spans.append([span.name, end, end - span.begin])
        for name, _, own in open_spans:
            yield name, own


def _summed(times: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    sums: dict[str, tuple[int, int]] = {}
    for name, time in times:
        calls, before = sums.get(name, (0, 0))
        sums[name] = (calls + 1, before + time)
    return sums


def _engines_by_range(host: Sequence[Span], total: int) -> dict[str, tuple[int, int]]:
    ranges = [span for span in host if span.name.startswith(ENGINE_RANGE)]
    engines = _summed((span.name.removeprefix(ENGINE_RANGE), span.end - span.begin) for span in ranges)
    return _with_rest(engines, total)


def _engines_by_launch(
    host: Sequence[Span], calls: Sequence[Span], device: Sequence[Span]
) -> dict[str, tuple[int, int]]:
    """Attribute to each engine the device work that was launched inside its range; empty without ranges."""
    ranges = [span for span in host if span.name.startswith(ENGINE_RANGE)]
    if not ranges:  # a captured chunk: its engines ran once, when it was captured
        return {}
    engines = {span.name.removeprefix(ENGINE_RANGE): 0 for span in ranges}
    numbers = Counter(span.name.removeprefix(ENGINE_RANGE) for span in ranges)
    owner: dict[int | None, str] = {}
    waiting = list(ranges)
    for call in calls:  # both are in the order of time, and ranges of a thread do not overlap
        waiting = [span for span in waiting if span.end > call.begin]
        for span in waiting:
            if span.begin > call.begin:
                break
            if span.thread == call.thread:
                owner[call.correlation] = span.name.removeprefix(ENGINE_RANGE)
    for span in device:
        if span.correlation in owner:
            engines[owner[span.correlation]] += span.end - span.begin
    total = sum(span.end - span.begin for span in device)
    return _with_rest({name: (numbers[name], time) for name, time in engines.items()}, total)


def _with_rest(engines: dict[str, tuple[int, int]], total: int) -> dict[str, tuple[int, int]]:
    return engines | {BETWEEN_ENGINES: (0, total - sum(time for _, time in engines.values()))}


def _busy(work: Sequence[Span], chunk: Span) -> tuple[int, int]:
    """Return the time in which any of ``work`` ran within ``chunk``, and the longest idle time."""
    busy = longest = 0
    reached = chunk.begin
    for span in work:
        begin, end = min(span.begin, chunk.end), min(span.end, chunk.end)
        longest = max(longest, begin - reached)
        busy += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return busy, max(longest, chunk.end - reached)


def _count_launches(calls: Sequence[Span]) -> dict[str, int]:
    launches_by_kind: dict[str, set[Any]] = {kind: set() for kind in _LAUNCHES}
    for number, call in enumerate(calls):
        for kind, pattern in _LAUNCHES.items():
            if pattern.search(
                call.name
            ):  # a call of the runtime and the driver's inside it share a correlation
                launches_by_kind[kind].add(("own", number) if call.correlation is None else call.correlation)
    return {kind: len(launches) for kind, launches in launches_by_kind.items()}


def _row(calls: int, time_ns: int, total_ns: int) -> dict[str, Any]:
    return {"calls": calls, "time_ns": time_ns, "share": time_ns / total_ns if total_ns else 0.0}

"""Measured durations of a box, from a JSON file or from the metrics of running boxes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from seko_serve.metrics import PREFIX

LIKELY = 100  # equally likely values that stand for a histogram
Seconds = tuple[float, ...]
NONE: Seconds = (0.0,)


@dataclass(frozen=True)
class BoxTimes:
    """An artifact's rate of frames and the measured durations of a box that serves it.

    A duration in `BoxTimes` is a tuple of equally likely values, in seconds.

    Parameters
    ----------
    rows : int
        Number of rows of the pool.
    fps : float
        Video frames that a viewer shows in a second.
    chunk_frames, first_frames : int
        Video frames of a chunk, and of a stream's first chunk; if ``first_frames`` is 0, all chunks are alike.
    call_s : mapping of int to Seconds
        Duration of a call of the device, by its number of rows.
    variant_starts : tuple of int
        Numbers of the chunks with which a stream begins another launch variant, ascending. A call carries rows of one
        variant only. Without numbers all rows can share a call.
    open_s : Seconds
        Time for which opening a session occupies the device, for example to encode its prompt.
    encode_s : Seconds
        Duration from the end of a call to a chunk's last encoded frame.
    connect_s : Seconds
        Time of network and client when a session is opened.
    ack_s : Seconds
        Time from the moment at which a chunk was shown until its acknowledgement arrives: a message to the client and a
        message back.
    capture_s : Seconds
        Time for which a snapshot occupies the device.
    write_s, read_s : Seconds
        Time to write a snapshot to the store, and time to restore a session from a snapshot. The device continues to
        make chunks during both.
    start_s : Seconds
        Time from the end of a box's process until the process that replaces it takes sessions.

    Raises
    ------
    ValueError
        If a field is out of range; the message names the field.
    """

    rows: int
    fps: float
    chunk_frames: int
    call_s: Mapping[int, Seconds]
    first_frames: int = 0
    variant_starts: tuple[int, ...] = ()
    open_s: Seconds = field(default=NONE)
    encode_s: Seconds = field(default=NONE)
    connect_s: Seconds = field(default=NONE)
    ack_s: Seconds = field(default=NONE)
    capture_s: Seconds = field(default=NONE)
    write_s: Seconds = field(default=NONE)
    read_s: Seconds = field(default=NONE)
    start_s: Seconds = field(default=(30.0,))

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("fps", 1e-3), ("chunk_frames", 1), ("first_frames", 0)):
            if not least <= getattr(self, name) < 1e6:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {least} or more")
        if (
            list(self.variant_starts) != sorted({*self.variant_starts})
            or min(self.variant_starts, default=1) < 1
        ):
            raise ValueError("variant_starts are no ascending numbers of chunks from 1 on")
        if not self.call_s or min(self.call_s) < 1:
            raise ValueError("call_s is empty, expected seconds by number of rows, from 1 on")
        for name, values in (
            *((f"call_s of {rows} rows", values) for rows, values in self.call_s.items()),
            *((entry.name, getattr(self, entry.name)) for entry in fields(self) if entry.name in _DURATIONS),
        ):
            if not values or not all(0 <= value < 1e6 for value in values):
                raise ValueError(f"{name} has no value, or one below 0: expected seconds")

    @property
    def period_s(self) -> float:
        """Seconds for which a viewer shows a chunk."""
        return self.chunk_frames / self.fps


_DURATIONS = ("open_s", "encode_s", "connect_s", "ack_s", "capture_s", "write_s", "read_s", "start_s")
ARTIFACT = {"rows": int, "fps": float, "chunk_frames": int, "first_frames": int}


def read_times(text: str, overrides: Mapping[str, float] | None = None) -> BoxTimes:
    """Return the durations in a JSON object or in Prometheus' text of a box's ``/metrics``.

    Parameters
    ----------
    text : str
        The JSON object, whose keys are the fields of `BoxTimes` and whose durations are numbers or lists of numbers; or
        Prometheus' text.
    overrides : mapping of str to float, optional
        Values of ``rows``, ``fps``, ``chunk_frames`` and ``first_frames`` that override those of the text.

    Raises
    ------
    ValueError
        If the text is neither a JSON object nor Prometheus' text, or a field is unknown, missing or out of range; the
        message names the field.
    """
    table = _json_fields(text) if text.lstrip().startswith("{") else metrics_fields([text])
    table |= {name: ARTIFACT[name](value) for name, value in (overrides or {}).items()}
    missing = [name for name in ("rows", "fps", "chunk_frames", "call_s") if name not in table]
    if missing:
        raise ValueError(f"the field {missing[0]!r} is missing")
    return BoxTimes(**table)


def as_json(times: BoxTimes) -> str:
    """Return the durations as JSON text, which `read_times` reads."""
    table = {entry.name: getattr(times, entry.name) for entry in fields(times)}
    return json.dumps(table | {"call_s": {str(rows): seconds for rows, seconds in times.call_s.items()}})


def scaled(times: BoxTimes, factor: float) -> BoxTimes:
    """Return the durations, with the durations of calls multiplied by ``factor``."""
    calls = {rows: tuple(factor * value for value in values) for rows, values in times.call_s.items()}
    return replace(times, call_s=calls)


def _json_fields(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError("no JSON object")
    table: dict[str, Any] = {}
    for name, value in content.items():
        if name in ARTIFACT:
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or value != ARTIFACT[name](value)
            ):
                raise ValueError(f"{name} is {value!r}, expected a number")
            table[name] = ARTIFACT[name](value)
        elif name in _DURATIONS:
            table[name] = _seconds(name, value)
        elif name == "variant_starts":
            if not isinstance(value, list) or not all(type(chunk) is int for chunk in value):
                raise ValueError(f"variant_starts is {value!r}, expected a list of chunks' numbers")
            table[name] = tuple(value)
        elif name == "call_s":
            if not isinstance(value, dict) or not all(rows.isdecimal() for rows in value):
                raise ValueError("call_s is no table of seconds by number of rows")
            table[name] = {
                int(rows): _seconds(f"call_s of {rows} rows", seconds) for rows, seconds in value.items()
            }
        else:
            raise ValueError(f"{name!r} is no field")
    return table


def _seconds(name: str, value: object) -> Seconds:
    values = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int | float) for item in values):
        raise ValueError(f"{name} is {value!r}, expected seconds or a list of seconds")
    return tuple(map(float, values))


# -- metrics ------------------------------------------------------------------------------------------------------

_HISTOGRAMS = {  # by the metric's name and its label
    ("open_seconds", ""): "open_s",
    ("encode_seconds", ""): "encode_s",
    ("snapshot_seconds", "capture"): "capture_s",
    ("snapshot_seconds", "write"): "write_s",
    ("snapshot_seconds", "read"): "read_s",
}


def metrics_fields(texts: Iterable[str]) -> dict[str, Any]:
    """Return the fields of `BoxTimes` that the metrics of boxes with one artifact have, taken together.

    Raises
    ------
    ValueError
        If a text is not the metrics of a box, or no call was measured.
    """
    counts: defaultdict[tuple[str, str], defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    table: dict[str, Any] = {}
    starts: set[int] = set()
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removeprefix(f"{PREFIX}_")
                if name == "capacity":
                    table["rows"] = int(sample.value)
                elif name == "variant_start":
                    starts.add(int(sample.value))
                series = name.rpartition("_")[0], sample.labels.get("bucket", sample.labels.get("step", ""))
                if name.endswith("_seconds_bucket"):
                    counts[series][float(sample.labels["le"])] += sample.value
                elif name.endswith("_seconds_sum"):
                    sums[series] += sample.value
    calls = {
        int(rows): likely(count, sums[name, rows])
        for (name, rows), count in counts.items()
        if name == "call_seconds" and count[float("inf")]
    }
    if not calls:
        raise ValueError(f"{PREFIX}_call_seconds has no measured call")
    table["call_s"] = calls
    if starts:
        table["variant_starts"] = tuple(sorted(starts))
    for series, field_name in _HISTOGRAMS.items():
        if counts[series][float("inf")]:
            table[field_name] = likely(counts[series], sums[series])
    return table


def likely(counts: Mapping[float, float], total: float) -> Seconds:
    """Return `LIKELY` equally likely values that stand for a histogram, with the histogram's mean.

    A histogram states the bounds of each value, but not the value. The chosen values are the midpoints of their bounds,
    except in the fullest interval, whose values are shifted so that the mean is right.

    Parameters
    ----------
    counts : mapping of float to float
        Cumulative number of values by upper bound; the last bound is infinity.
    total : float
        Sum of the values.
    """
    bounds = sorted(counts)
    number = counts[bounds[-1]]
    below, lower, parts = 0.0, 0.0, []
    for bound in bounds:
        share = (counts[bound] - below) / number
        parts.append((share, lower, 2 * lower if bound == float("inf") else bound))
        below, lower = counts[bound], bound
    fullest = max(range(len(parts)), key=lambda place: parts[place][0])
    values = [(low + high) / 2 for _, low, high in parts]
    share, low, high = parts[fullest]
    rest = sum(part[0] * value for part, value in zip(parts, values, strict=True)) - share * values[fullest]
    values[fullest] = min(max((total / number - rest) / share, low + 1e-6 * (high - low)), high)
    ends, at = [], 0.0
    for share, _, _ in parts:
        at += share
        ends.append(at)
    return tuple(
        values[next(place for place, end in enumerate(ends) if end > (step + 0.5) / LIKELY - 1e-9)]
        for step in range(LIKELY)
    )

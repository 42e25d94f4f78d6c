"""A load test for a server: viewers arrive at random times, watch for a while, and record which chunks were late."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import av

from seko_runtime.host.end_signals import until_ended
from seko_serve.client import AsyncClient, is_address
from seko_serve.command_line import Parser, sentence
from seko_serve.errors import ServeError, UnreachableError
from seko_serve.protocol import MAX_BUFFER, Codec, Media
from seko_serve.security.keys import read_keys

PROMPT = "a small red disc bouncing and a large blue ring pulsing on a green gradient"
DECODERS = {Codec.H264: "h264", Codec.VP8: "vp8", Codec.MJPEG: "mjpeg"}
UNREACHABLE = "unreachable"  # refused because no server answered
CODECS = ("h264", "vp8", "mjpeg", "rgb24")


@dataclass(frozen=True)
class Load:
    """The settings of a load test: how many viewers arrive, how fast, and what they watch.

    Parameters
    ----------
    url : str
        Address of the server under test.
    sessions : int
        Number of viewers that arrive.
    arrivals : float
        Mean number of viewers per second of a Poisson process, whether or not earlier viewers are served; 0: all
        arrive at once.
    seconds : float
        Seconds of video that each viewer watches.
    buffer : int
        Number of chunks that each viewer collects before playback begins.
    codec : str
        Codec of the video, one of `CODECS`.
    opening : mapping of str to object
        Fields of ``POST /v1/sessions`` for the viewers' sessions.
    seed : int
        Seed of the arrival times and of the first viewer's video; later viewers' videos have the following seeds.
    api_key : str, optional
        API key; required if the server has keys.
    at_once : bool
        Whether viewers acknowledge a chunk when the chunk arrives, not when it was shown. A load test with ``at_once``
        measures the server's greatest speed.

    Raises
    ------
    ValueError
        If a setting is out of range, or ``url`` is no address of a server.
    """

    url: str
    sessions: int
    arrivals: float = 0.0
    seconds: float = 60.0
    buffer: int = 1
    codec: str = "h264"
    opening: dict[str, object] = field(default_factory=dict)
    seed: int = 0
    api_key: str | None = None
    at_once: bool = False

    def __post_init__(self) -> None:
        if not is_address(self.url):
            raise ValueError(
                f"{self.url} is no address of a server, expected one such as http://127.0.0.1:8000"
            )
        if self.sessions < 1:
            raise ValueError(f"--sessions {self.sessions}: expected 1 or more")
        if not 0 <= self.arrivals < math.inf:
            raise ValueError(f"--arrivals {self.arrivals}: expected viewers a second, or 0 for all at once")
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"--seconds {self.seconds}: expected a number above 0")
        if not 1 <= self.buffer <= MAX_BUFFER:
            raise ValueError(f"--buffer {self.buffer}: expected 1 to {MAX_BUFFER}")
        fps = self.opening.get("fps", 1.0)
        if isinstance(fps, int | float) and not 0 < fps < math.inf:
            raise ValueError(f"--fps {fps}: expected a number above 0")


@dataclass
class View:
    """The times that one viewer recorded, in seconds of the viewer's own clock."""

    opened_at: float
    fps: float = 0.0
    first_at: float | None = None
    """Time at which the viewer had decoded its first frame."""
    came_at: list[float] = field(default_factory=list)
    """Time at which each chunk had arrived."""
    frames: list[int] = field(default_factory=list)
    """Video frames of each chunk."""
    underruns: int = 0
    """Number of times that playback stopped because the next chunk had not arrived."""
    stall_s: float = 0.0
    """Seconds for which playback stood still."""
    refused: str = ""
    """Code of the error with which the viewer was refused."""
    reason: str = ""
    """Sentence of that error."""
    lost: str = ""
    """Reason for which the viewer's stream ended early."""

    def deadlines(self, buffer: int) -> list[float]:
        """Return the due time of each chunk after the first ``buffer`` chunks of a viewer.

        A due time is the time, from the beginning of playback, at which the frames of all earlier chunks have been
        shown. As in vllm-omni's benchmark, a late chunk does not delay the due times of later chunks.
        """
        if len(self.came_at) < buffer:
            return []
        begun, dues, before = self.came_at[buffer - 1], [], sum(self.frames[:buffer])
        for count in self.frames[buffer:]:
            dues.append(begun + before / self.fps)
            before += count
        return dues

    def late(self, buffer: int) -> list[float]:
        """Return the seconds by which each chunk of `deadlines` was late, 0 for a chunk that was on time."""
        came = self.came_at[buffer:]
        return [max(0.0, at - due) for at, due in zip(came, self.deadlines(buffer), strict=True)]


@dataclass(frozen=True)
class Report:
    """The results of a load test, as figures over all viewers.

    Parameters
    ----------
    sessions, served, lost : int
        Number of viewers that arrived, number of viewers that saw a frame, and number of viewers that saw a frame and
        whose stream then ended early.
    refused : mapping of str to int
        Number of viewers that were refused, by the error's code.
    chunks, late : int
        Number of chunks after the first ``buffer`` chunks of each viewer, and number of late chunks among these chunks.
    cpr : float or None
        Continuous playback rate: the share of the counted chunks that arrived on time, as the mean over viewers.
    ttfc_ms_p50, ttfc_ms_p99 : float or None
        Median and 99th percentile of the milliseconds from a viewer's request to the first decoded frame.
    rtf, rtf_spread : float or None
        Real-time factor: seconds in which one second of video arrived, from a viewer's first chunk to the last chunk,
        as the mean over viewers. The spread is the difference between the largest and the smallest factor of a viewer.
    worst_ms : float
        Milliseconds by which the latest chunk was late.
    underruns, stall_s : int, float
        Number of playback stalls of all viewers, and the sum of their durations in seconds.
    """

    sessions: int
    served: int
    lost: int
    refused: dict[str, int]
    chunks: int
    late: int
    cpr: float | None
    ttfc_ms_p50: float | None
    ttfc_ms_p99: float | None
    rtf: float | None
    rtf_spread: float | None
    worst_ms: float
    underruns: int
    stall_s: float

    @classmethod
    def of(cls, views: Sequence[View], buffer: int) -> Report:
        """Return the figures that follow from viewers' recorded times."""
        served = [view for view in views if view.first_at is not None]
        lates = [view.late(buffer) for view in served]
        shares = [sum(late == 0 for late in own) / len(own) for own in lates if own]
        ttfc = [(view.first_at - view.opened_at) * 1e3 for view in served if view.first_at is not None]
        factors = [
            (view.came_at[-1] - view.came_at[0]) * view.fps / sum(view.frames[1:])
            for view in served
            if len(view.came_at) > 1
        ]
        everything = [late for own in lates for late in own]
        return cls(
            sessions=len(views),
            served=len(served),
            lost=sum(bool(view.lost) for view in views),
            refused=dict(Counter(view.refused for view in views if view.refused)),
            chunks=len(everything),
            late=sum(late > 0 for late in everything),
            cpr=_mean(shares),
            ttfc_ms_p50=percentile(ttfc, 50),
            ttfc_ms_p99=percentile(ttfc, 99),
            rtf=_mean(factors),
            rtf_spread=max(factors) - min(factors) if factors else None,
            worst_ms=1e3 * max(everything, default=0.0),
            underruns=sum(view.underruns for view in views),
            stall_s=sum(view.stall_s for view in views),
        )

    def text(self) -> str:
        """Return the results of the load test as text for a terminal."""
        refused = ", ".join(f"{count} {code}" for code, count in self.refused.items()) or "none"
        lines = [
            f"viewers   {self.served} of {self.sessions} served, {self.lost} lost; refused: {refused}",
            f"chunks    {self.chunks}, {self.late} late, the worst by {self.worst_ms:.0f} ms",
            f"CPR       {shown(self.cpr, 4)}",
            f"TTFC      p50 {shown(self.ttfc_ms_p50, 0)} ms, p99 {shown(self.ttfc_ms_p99, 0)} ms",
            f"RTF       {shown(self.rtf, 3)}, spread {shown(self.rtf_spread, 3)}",
            f"stalls    {self.underruns}, {self.stall_s:.2f} s",
        ]
        return "\n".join(lines)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the nearest-rank percentile of some values; None if there are no values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def arrivals(count: int, per_second: float, seed: int) -> list[float]:
    """Return the seconds at which viewers arrive. The gaps are those of a Poisson process, and the first viewer arrives
    at once."""
    generator, at, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(at)
        at += generator.expovariate(per_second) if per_second > 0 else 0.0
    return times


async def run_load(load: Load) -> list[View]:
    """Put a load of viewers on a server; return the times that each viewer recorded."""
    views = await asyncio.gather(
        *(
            _view(load, number, after)
            for number, after in enumerate(arrivals(load.sessions, load.arrivals, load.seed))
        )
    )
    return list(views)


async def _view(load: Load, number: int, after: float) -> View:
    await asyncio.sleep(after)
    view = View(time.monotonic())
    async with AsyncClient(load.url, load.api_key) as client:
        try:
            opening = {"seed": load.seed + number, **load.opening}
            await client.open(codecs=[load.codec], buffer=load.buffer, **opening)  # type: ignore[arg-type]
        except ServeError as error:
            view.refused = UNREACHABLE if isinstance(error, UnreachableError) else error.kind.code
            view.reason = error.message
            return view
        try:
            await _watch(client, load, view)
        except ServeError as error:
            view.lost = error.kind.code
    return view


async def _watch(client: AsyncClient, load: Load, view: View) -> None:
    """Watch a stream until enough video was shown; note the times of messages, and acknowledge each chunk when it was
    shown."""
    view.fps = float(client.ready["fps"])
    came: asyncio.Queue[int] = asyncio.Queue()
    playing = asyncio.create_task(_play(client, load, view, came))
    reading = asyncio.create_task(_read(client, view, came))
    try:
        await asyncio.wait({playing, reading}, return_when=asyncio.FIRST_COMPLETED)
        if not playing.done():
            await reading  # raises why it ended
            view.lost = "closed"
        else:
            await playing
    finally:
        for task in (playing, reading):
            task.cancel()
        await asyncio.gather(playing, reading, return_exceptions=True)


async def _read(client: AsyncClient, view: View, came: asyncio.Queue[int]) -> None:
    """Read a stream's messages and note when they arrive."""
    async for received in client.messages():
        if isinstance(received, Media):
            if view.first_at is None and received.codec < Codec.PCM:
                await asyncio.to_thread(decoded, received)
                view.first_at = time.monotonic()
        elif received["type"] == "chunk":
            view.came_at.append(time.monotonic())
            view.frames.append(received["frames"])
            came.put_nowait(received["chunk"])


async def _play(client: AsyncClient, load: Load, view: View, came: asyncio.Queue[int]) -> None:
    """Show the received chunks one after the other, and acknowledge each at its end."""
    chunks = [await came.get() for _ in range(load.buffer)]
    shown, end = 0, time.monotonic()
    while shown < load.seconds * view.fps:
        if not chunks:
            if came.empty():
                chunks.append(await came.get())
                stall = time.monotonic() - end
                view.underruns += 1
                view.stall_s += stall
                end += stall
            else:
                chunks.append(came.get_nowait())
        chunk = chunks.pop(0)
        count = view.frames[chunk]
        end += count / view.fps
        shown += count
        if not load.at_once:
            await asyncio.sleep(end - time.monotonic())
        await client.send("ack", chunk=chunk)


def decoded(media: Media) -> Any:
    """Return the decoded frame of a message with a key frame."""
    if media.codec not in DECODERS:
        return media.payload
    context = av.CodecContext.create(DECODERS[media.codec], "r")
    assert isinstance(context, av.VideoCodecContext)  # the names are of video codecs
    frames = [*context.decode(av.Packet(media.payload)), *context.decode(None)]
    return frames[0].to_ndarray()


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def shown(value: float | None, digits: int) -> str:
    """Return a figure for a terminal; ``-`` if nothing was measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line of ``seko-serve load``."""
    argument_parser = Parser("seko-serve load", description="Put a load of viewers on a server.")
    argument_parser.add_argument("url", help="the server's address, such as http://127.0.0.1:8000")
    argument_parser.add_argument("--sessions", type=int, default=8, help="viewers that arrive (default: 8)")
    argument_parser.add_argument(
        "--arrivals",
        type=float,
        default=0.5,
        help="viewers a second, at random; 0: all at once (default: 0.5)",
    )
    argument_parser.add_argument(
        "--seconds", type=float, default=60.0, help="of video that each watches (default: 60)"
    )
    argument_parser.add_argument(
        "--buffer", type=int, default=1, help=f"chunks collected before playing, 1 to {MAX_BUFFER}"
    )
    argument_parser.add_argument("--codec", choices=CODECS, default="h264")
    argument_parser.add_argument("--prompt", default=PROMPT, help="of each viewer; empty: none")
    argument_parser.add_argument("--image", type=Path, help="the picture with which each video begins")
    argument_parser.add_argument("--fps", type=float, help="frames that viewers show a second")
    argument_parser.add_argument("--seed", type=int, default=0, help="of the arrivals and videos")
    argument_parser.add_argument("--api-key-file", type=Path, help="its first line is the key; mode 0600")
    argument_parser.add_argument(
        "--at-once", action="store_true", help="acknowledge chunks unshown: how fast the server can be"
    )
    argument_parser.add_argument("--json", action="store_true", help="one line of JSON")
    return argument_parser


def main(arguments: Sequence[str]) -> int:
    """Run ``seko-serve load``; return the exit code: 1 if no viewer was served, 2 if an option is impossible. A signal
    that ends it ends the viewers' sessions."""
    chosen = parser().parse_args(arguments)
    opening: dict[str, object] = {"prompt": chosen.prompt} if chosen.prompt else {}
    if chosen.fps is not None:
        opening["fps"] = chosen.fps
    try:
        if chosen.image is not None:
            opening["image"] = base64.b64encode(chosen.image.read_bytes()).decode()
        keys = read_keys([], chosen.api_key_file, {})
        load = Load(
            chosen.url,
            chosen.sessions,
            chosen.arrivals,
            chosen.seconds,
            chosen.buffer,
            chosen.codec,
            opening,
            chosen.seed,
            keys[0] if keys else None,
            chosen.at_once,
        )
    except (ValueError, OSError) as error:
        _tell(sentence(error))
        return 2
    return until_ended(lambda: _report(load, as_json=chosen.json), _tell)


def _report(load: Load, *, as_json: bool) -> int:
    if not as_json:
        _tell(f"viewers: {load.sessions}, each for {load.seconds:g} s of video; figures come at the end")
    views = asyncio.run(run_load(load))
    report = Report.of(views, load.buffer)
    if as_json:
        print(json.dumps(asdict(report)))
    elif set(report.refused) != {UNREACHABLE}:
        print(report.text())
    if report.served:
        return 0
    first = views[0]
    why = "" if first.refused == UNREACHABLE else "no viewer was served: "
    _tell(f"{why}{first.reason or first.lost}")
    return 1


def _tell(line: str) -> None:
    print(f"seko-serve: {line}", file=sys.stderr)

"""A fleet under kills, requests and viewers, on one machine; `fleet_simulation.py` has the simulation.

    python scripts/bench/fleet.py --rows docs/benchmarks/cpu.jsonl --parts soak,admit
    python scripts/bench/fleet.py --rows docs/benchmarks/cpu.jsonl --parts overhead --artifact ARTIFACT

    python -m seko_export build --fp4-kv --sessions 4 --batch 1,2,4 -o ARTIFACT          the sample, for CPU rows

Needs redis-server and `seko-serve[ray]`. Parts and their figures:

- ``soak``: boxes that are killed at random while three viewers watch (`tests/serve/fleet_soak.py`): ``fleet_resume_s``,
  from a socket's end to the next frame; ``fleet_lost_chunks``, the most chunks that came again behind the last
  snapshot; ``fleet_double``, chunks that a box sent when a later owner of the session had sent;
- ``admit``: ``fleet_admit_ms``, from a request for a session to the gateway's answer, 200 requests a second, beside a
  viewer whose socket is at the box;
- ``overhead``: ``fleet_overhead``, chunks a second through encoder, socket and client of a box in a fleet, as a share
  of those of the same server alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / name) for name in ("runtime", "kernels", "serve", "scripts/bench"))]

from rows import append_row  # noqa: E402

from seko_serve.fleet.box import Box  # noqa: E402
from seko_serve.fleet.directory import BoxFacts  # noqa: E402
from seko_serve.live.device import Device, pool_of  # noqa: E402
from seko_serve.live.manager import SessionManager  # noqa: E402
from seko_serve.load import percentile  # noqa: E402
from seko_serve.run import server  # noqa: E402
from seko_serve.settings import Settings  # noqa: E402
from seko_serve.video.facts import video_manifest  # noqa: E402
from serve import PROMPT, python  # noqa: E402

PARTS = ("soak", "admit", "overhead")
ADMIT_MS, OVERHEAD = 50.0, 0.98  # goals
# Asks for sessions at fixed times, whether earlier ones are answered or not, and ends those that it gets.
ASKING = """
import asyncio, json, sys, time
import aiohttp
url, per_second, count = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])

async def ask(client, at, began):
    await asyncio.sleep(began + at - time.monotonic())
    async with client.post(url + "/v1/sessions", json={"prompt": "a b"}) as answer:
        table = await answer.json()
        seconds = time.monotonic() - began - at
    if answer.status == 201:
        async with client.delete(url + "/v1/sessions/" + table["id"]) as ended:
            await ended.read()
    return seconds, answer.status

async def main():
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        began = time.monotonic() + 0.5
        return await asyncio.gather(*(ask(client, number / per_second, began) for number in range(count)))

print(json.dumps(asyncio.run(main())))
"""


@contextmanager
def redis() -> Iterator[tuple[str, Path]]:
    """The address of a Redis server, and a folder for snapshots."""
    from tests.serve.test_fleet_directory import RedisServer

    with tempfile.TemporaryDirectory() as folder:
        running = RedisServer(Path(folder))
        try:
            yield running.url, Path(folder, "store")
        finally:
            running.kill()


def soak(rows: Path, kills: int) -> None:
    """Append the figures of the soak."""
    from tests.serve import fleet_soak

    with redis() as (url, store):
        summary = fleet_soak.run(lambda: fleet_soak.soak(url, store, kills), 3600.0)
    shape = f"{kills} kills of three boxes, a snapshot every {fleet_soak.EVERY} chunks"
    more = {name: value for name, value in summary.items() if not isinstance(value, list)}
    for percent in ("p50", "p99"):
        append_row(
            rows, "fleet_resume_s", f"{shape}, {percent}", summary[f"resume_s_{percent}"], "s to the next frame", None,
            **more,
        )  # fmt: skip
    append_row(
        rows, "fleet_lost_chunks", shape, summary["lost_chunks"], "chunks that came again, the most", fleet_soak.EVERY,
        **more,
    )  # fmt: skip
    append_row(
        rows, "fleet_double", shape, summary["double"], "chunks sent when a later owner had sent", 0, **more
    )


def admit(rows: Path, per_second: float, seconds: float) -> None:
    """Append ``fleet_admit_ms``, its p99."""
    from seko_serve.client import AsyncClient
    from seko_serve.fleet.redis_directory import RedisDirectory
    from tests.serve import fleet_soak
    from tests.serve.fleets import Fleet

    async def measured(url: str, store: Path) -> tuple[list[tuple[float, int]], int]:
        with fleet_soak.box_process(url, store) as process:
            await fleet_soak.listed(url, [process])
            async with Fleet(store, lambda: RedisDirectory(url)).running() as fleet:
                viewer = await fleet_soak.Viewer(AsyncClient(fleet.url), 0).open()
                over = False
                watching = asyncio.create_task(viewer.watch(lambda: over))
                arguments = (fleet.url, per_second, round(per_second * seconds))
                answer = await asyncio.to_thread(python, "-c", ASKING, *arguments)
                over = True
                await watching
                await viewer.client.close()
                return json.loads(answer), len({media.chunk for media in viewer.media})

    with redis() as (url, store):
        answers, chunks = asyncio.run(measured(url, store))
    times = [1e3 * second for second, _ in answers]
    p99 = percentile(times, 99)
    assert p99 is not None  # there are times
    append_row(
        rows, "fleet_admit_ms", f"a box with a viewer, {per_second:g} requests a second", p99,
        "ms, p99 of a request's answer by the gateway", ADMIT_MS, p50_ms=percentile(times, 50), worst_ms=max(times),
        answers={str(status): count for status, count in Counter(status for _, status in answers).items()},
        viewers_chunks=chunks,
    )  # fmt: skip


class Served:
    """A server of an artifact in this process, alone or as a box with a gateway.

    Parameters
    ----------
    artifact : Path
        The artifact.
    directory : str
        Address of the Redis server; empty: the server is alone.
    store : Path
        Folder of snapshots.
    """

    def __init__(self, artifact: Path, directory: str, store: Path) -> None:
        self._settings = Settings(
            artifact, host="127.0.0.1", port=0, opens_per_s=1e5, videos=0, snapshots=str(store)
        )
        self._directory = directory
        self.device = Device(partial(pool_of, artifact))
        self.url = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        if not self._directory:
            alone = server(self._settings, SessionManager(self._settings, self.device))
            serving = asyncio.create_task(alone.serve())
            while not alone.started:
                await asyncio.sleep(0.05)
            (listener,) = alone.servers
            self.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            await asyncio.to_thread(self._over.wait)
            alone.should_exit = True
            await serving
            return
        from seko_serve.fleet.redis_directory import RedisDirectory
        from tests.serve.fleets import DIGEST, Fleet

        box = Box(self._settings, self.device, lambda: RedisDirectory(self._directory), DIGEST)
        serving = asyncio.create_task(box.serve())
        fleet = Fleet(Path(str(self._settings.snapshots)), lambda: RedisDirectory(self._directory))
        async with fleet.gateway() as url:
            while not box.started or not await has_boxes(self._directory, 1):
                await asyncio.sleep(0.05)
            self.url = url
            await asyncio.to_thread(self._over.wait)
            box.stop()
            await serving

    def __enter__(self) -> Served:
        self._thread.start()
        while not self.url:
            self._thread.join(0.05)
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


async def boxes(directory: str) -> list[BoxFacts]:
    """Return the rows of all boxes."""
    from tests.serve.fleet_soak import rows

    return await rows(directory)


async def has_boxes(directory: str, count: int) -> bool:
    """Return whether so many boxes have rows."""
    return len(await boxes(directory)) >= count


def load(url: str, *options: object) -> dict[str, Any]:
    """Put viewers on a server, in a process of their own; return what they noted."""
    summary: dict[str, Any] = json.loads(python("-m", "seko_serve", "load", url, "--json", *options))
    if not summary["served"] or summary["lost"]:
        raise RuntimeError(f"viewers were lost: {summary}")
    return summary


def overhead(artifact: Path, rows: Path, chunks: int, repeats: int) -> None:
    """Append ``fleet_overhead``: the two servers are measured in turn, and the medians are compared."""
    times: dict[bool, list[float]] = {False: [], True: []}
    shape = ""
    with redis() as (directory, store):
        for _ in range(repeats):
            for in_fleet in (False, True):
                with Served(artifact, directory if in_fleet else "", store) as served:
                    manifest = video_manifest(served.device.manifest)
                    stream, video = manifest.workload.stream, manifest.workload.video
                    assert video is not None  # else the server would not have started
                    seconds = chunks * video.chunk_frames / stream.fps
                    options = ("--sessions", 1, "--arrivals", 0, "--fps", stream.fps, "--at-once")
                    prompt = PROMPT if manifest.workload.text else ""
                    summary = load(served.url, *options, "--seconds", seconds, "--prompt", prompt)
                    times[in_fleet].append(summary["rtf"] * video.chunk_frames / stream.fps)
                    shape = f"{manifest.name}, {stream.height}x{stream.width}, chunk {stream.chunk_frames}, one viewer"
    alone_s, fleet_s = (statistics.median(times[in_fleet]) for in_fleet in (False, True))
    append_row(
        rows, "fleet_overhead", shape, alone_s / fleet_s, "of the chunks a second of the server alone", OVERHEAD,
        alone_ms=[1e3 * second for second in times[False]], fleet_ms=[1e3 * second for second in times[True]],
        chunks=chunks,
    )  # fmt: skip


def main() -> None:
    """Measure the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, required=True, help="jsonl file to append to")
    parser.add_argument("--parts", default="soak,admit", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--artifact", type=Path, help="of the part overhead")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--asked", type=float, default=200.0, help="sessions a second of `admit`")
    parser.add_argument("--asked-for", type=float, default=30.0, help="seconds of `admit`")
    parser.add_argument("--chunks", type=int, default=60, help="of a measurement of `overhead`")
    parser.add_argument("--repeats", type=int, default=5, help="of `overhead`")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}")
    if "overhead" in parts and options.artifact is None:
        parser.error("the part overhead needs --artifact")
    measures: dict[str, Callable[[], None]] = {
        "soak": lambda: soak(options.rows, options.kills),
        "admit": lambda: admit(options.rows, options.asked, options.asked_for),
        "overhead": lambda: overhead(options.artifact, options.rows, options.chunks, options.repeats),
    }
    for part in PARTS:
        if part in parts:
            measures[part]()


if __name__ == "__main__":
    main()

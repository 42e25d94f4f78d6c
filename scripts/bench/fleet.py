"""A fleet under kills, requests and viewers, on one machine, and the simulation beside it.

    python scripts/bench/fleet.py --rows docs/benchmarks/cpu.jsonl --parts soak,admit,simulation
    python scripts/bench/fleet.py --rows docs/benchmarks/cpu.jsonl --parts overhead --artifact ARTIFACT
    python scripts/bench/fleet.py --rows docs/benchmarks/cpu.jsonl --parts sizes,large        nothing but simulations

    python -m seko_export build --fp4-kv --sessions 4 --batch 1,2,4 -o ARTIFACT          the sample, for CPU rows

Needs redis-server and `seko-serve[ray,simulate]`. Parts and their figures:

- ``soak``: boxes that are killed at random while three viewers watch (`tests/serve/fleet_soak.py`): ``fleet_resume_s``,
  from a socket's end to the next frame; ``fleet_lost_chunks``, the most chunks that came again behind the last
  snapshot; ``fleet_double``, chunks that a box sent when a later owner of the session had sent;
- ``admit``: ``fleet_admit_ms``, from a request for a session to the gateway's answer, 200 requests a second, beside a
  viewer whose socket is at the box;
- ``overhead``: ``fleet_overhead``, chunks a second through encoder, socket and client of a box in a fleet, as a share
  of those of the same server alone;
- ``simulation``: ``fleet_simulated_cpr`` and ``fleet_simulated_ttfc``, how far the simulation is from three boxes on
  three loopback nodes of Ray with the same viewers, whose durations it takes. The boxes run the toy model of the
  tests, and their device's thread waits behind each call as for a GPU (`WAITS`): three boxes that compute would share
  one processor, which a fleet does not;
- ``sizes``, ``large``: ``fleet_size``, simulated fleets under growing load, and ``fleet_simulate_s``, what a simulation
  of 1,000 GPUs and 20,000 sessions takes; see `h200_times` for the durations.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / name) for name in ("runtime", "kernels", "serve", "scripts/bench"))]

from rows import append_row  # noqa: E402
from table import LARGE, newest_rows  # noqa: E402

from seko_runtime import Pool  # noqa: E402
from seko_serve.fleet.box import Box  # noqa: E402
from seko_serve.fleet.directory import BoxFacts  # noqa: E402
from seko_serve.live.device import Device, pool_of  # noqa: E402
from seko_serve.live.manager import SessionManager  # noqa: E402
from seko_serve.load import percentile  # noqa: E402
from seko_serve.run import server  # noqa: E402
from seko_serve.settings import Settings  # noqa: E402
from seko_serve.simulation.durations import BoxTimes, metrics_fields  # noqa: E402
from seko_serve.simulation.run import simulate  # noqa: E402
from seko_serve.simulation.scenario import Scenario  # noqa: E402
from serve import PROMPT, python  # noqa: E402

PARTS = ("soak", "admit", "overhead", "simulation", "sizes", "large")
NODES = 3
WAITS = {1: 0.3, 2: 0.4, 4: 0.6}  # seconds of a call of the part `simulation`, by its number of rows
PERIOD_S = 1.0  # for which its viewers show a chunk
POOL = "self-forcing-1.3b-fp4-sm_90, 480x832, ring 21, 9 sessions in calls of 4"
POOL_FIGURES = ("pool_open_ms", "pool_text_ms", "pool_pause_ms", "pool_resume_ms", "offload_bandwidth_share")
CPR_POINTS, TTFC_SHARE, ADMIT_MS, OVERHEAD, SIMULATE_S = 3.0, 0.2, 50.0, 0.98, 120.0  # goals
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
        told = fleet_soak.run(lambda: fleet_soak.soak(url, store, kills), 3600.0)
    shape = f"{kills} kills of three boxes, a snapshot every {fleet_soak.EVERY} chunks"
    more = {name: value for name, value in told.items() if not isinstance(value, list)}
    for percent in ("p50", "p99"):
        append_row(
            rows, "fleet_resume_s", f"{shape}, {percent}", told[f"resume_s_{percent}"], "s to the next frame", None,
            **more,
        )  # fmt: skip
    append_row(
        rows, "fleet_lost_chunks", shape, told["lost_chunks"], "chunks that came again, the most", fleet_soak.EVERY,
        **more,
    )  # fmt: skip
    append_row(
        rows, "fleet_double", shape, told["double"], "chunks sent when a later owner had sent", 0, **more
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
                told = await asyncio.to_thread(python, "-c", ASKING, *arguments)
                over = True
                await watching
                await viewer.client.close()
                return json.loads(told), len({media.chunk for media in viewer.media})

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
            while not box.started or not await _has_boxes(self._directory, 1):
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


async def _boxes(directory: str) -> list[BoxFacts]:
    from tests.serve.fleet_soak import rows

    return await rows(directory)


async def _has_boxes(directory: str, count: int) -> bool:
    return len(await _boxes(directory)) >= count


def load(url: str, *options: object) -> dict[str, Any]:
    """Put viewers on a server, in a process of their own; return what they noted."""
    told: dict[str, Any] = json.loads(python("-m", "seko_serve", "load", url, "--json", *options))
    if not told["served"] or told["lost"]:
        raise RuntimeError(f"viewers were lost: {told}")
    return told


def overhead(artifact: Path, rows: Path, chunks: int, repeats: int) -> None:
    """Append ``fleet_overhead``: the two servers are measured in turn, and the medians are compared."""
    times: dict[bool, list[float]] = {False: [], True: []}
    shape = ""
    with redis() as (directory, store):
        for _ in range(repeats):
            for in_fleet in (False, True):
                with Served(artifact, directory if in_fleet else "", store) as served:
                    manifest = served.device.video_manifest
                    stream, video = manifest.workload.stream, manifest.workload.video
                    assert video is not None  # else the server would not have started
                    seconds = chunks * video.chunk_frames / stream.fps
                    options = ("--sessions", 1, "--arrivals", 0, "--fps", stream.fps, "--at-once")
                    prompt = PROMPT if manifest.workload.text else ""
                    told = load(served.url, *options, "--seconds", seconds, "--prompt", prompt)
                    times[in_fleet].append(told["rtf"] * video.chunk_frames / stream.fps)
                    shape = f"{manifest.name}, {stream.height}x{stream.width}, chunk {stream.chunk_frames}, one viewer"
    alone_s, fleet_s = (statistics.median(times[in_fleet]) for in_fleet in (False, True))
    append_row(
        rows, "fleet_overhead", shape, alone_s / fleet_s, "of the chunks a second of the server alone", OVERHEAD,
        alone_ms=[1e3 * second for second in times[False]], fleet_ms=[1e3 * second for second in times[True]],
        chunks=chunks,
    )  # fmt: skip


@contextmanager
def waiting_pool() -> Iterator[Pool]:
    """The pool of the toy model, whose calls take `WAITS`."""
    from tests.runtime import toy_pool

    with toy_pool.open_pool() as pool:
        serve_next, record = pool.serve_next, pool.call_times.record

        def waiting(*arguments: Any, **options: Any) -> Any:
            began = time.monotonic()
            served = serve_next(*arguments, **options)
            if served:
                bucket = min(rows for rows in WAITS if rows >= len(served))
                time.sleep(max(0.0, began + WAITS[bucket] - time.monotonic()))
            return served

        pool.serve_next = waiting  # type: ignore[method-assign]
        pool.call_times.record = (  # type: ignore[method-assign]
            lambda variant, bucket, _: record(variant, bucket, WAITS[bucket])
        )
        yield pool


class WaitingReplica:
    """A replica of Ray Serve in place of `deployments.Replica`: a box of the toy model."""

    def __init__(self, config: Any, model: Any) -> None:
        from seko_serve.fleet import deployments
        from tests.runtime.toy_pool import pool_manifest
        from tests.serve.fleets import DIGEST

        deployments.artifact_folder = lambda source, _: Path(source)
        deployments.read_manifest = lambda _: (pool_manifest(), DIGEST)  # type: ignore[assignment, return-value]
        deployments.device = lambda _: Device(waiting_pool)
        self._replica = deployments.Replica(config, model)

    def check_health(self) -> None:
        """Raise a RuntimeError if the server has ended."""
        self._replica.check_health()

    async def __del__(self) -> None:
        """Save all sessions and end the server."""
        await self._replica.__del__()


@contextmanager
def nodes(directory: str, store: Path) -> Iterator[str]:
    """The address of a fleet of three boxes on three loopback nodes of Ray."""
    import os
    import socket

    import ray
    from ray.cluster_utils import Cluster

    from seko_serve.fleet import deployments
    from seko_serve.fleet.config import FleetConfig, ModelConfig

    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(NODES - 1):
        cluster.add_node(num_cpus=1)
    ray.init(cluster.address, namespace=deployments.NAMESPACE, log_to_driver=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    model = ModelConfig("toy", boxes=NODES, gpus=0, cpus=0.6, device="cpu")  # one fits on a node
    config = FleetConfig(
        (model,), str(store), directory, port=port, box_host="127.0.0.1", opens_per_second=1e4
    )
    deployments.Replica = WaitingReplica  # type: ignore[misc]
    try:
        deployments.apply(config)
        while not asyncio.run(_has_boxes(directory, NODES)):
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        deployments.remove()
    finally:
        ray.shutdown()
        cluster.shutdown()


def simulation(rows: Path, viewers: int, arrivals: float, seconds: float, buffer: int) -> None:
    """Append the differences between the simulation and three boxes."""
    from tests.runtime.toy_pool import pool_manifest

    video = pool_manifest().workload.video
    assert video is not None
    fps = video.chunk_frames / PERIOD_S
    common = ("--prompt", "a b", "--fps", fps, "--buffer", buffer)
    with redis() as (directory, store), nodes(directory, store) as url:
        lone = [
            load(url, *common, "--sessions", 1, "--seconds", PERIOD_S, "--seed", seed)["ttfc_ms_p50"]
            for seed in range(9)
        ]
        before = _metrics(directory)
        told = load(url, *common, "--sessions", viewers, "--arrivals", arrivals, "--seconds", seconds)
        after = _metrics(directory)
    given = {"fps": fps, "chunk_frames": video.chunk_frames, "first_frames": video.first_frames}
    connect_s = max(0.0, statistics.median(lone) / 1e3 - _mean_times(metrics_fields(before)))
    fields = metrics_fields(
        [_text_difference(text, earlier) for text, earlier in zip(after, before, strict=True)]
    )
    times = BoxTimes(**{**fields, **given, "connect_s": (connect_s,)})
    scenario = Scenario(
        boxes=NODES, sessions=viewers, arrivals=arrivals, seconds=seconds, lengths="fixed", buffer=buffer
    )
    figures = simulate(scenario, times)
    shape = f"three boxes of the toy model, {viewers} viewers, {arrivals:g} a second, {seconds:g} s, {buffer} collected"
    durations = {f"call of {count}": values for count, values in times.call_s.items()}
    durations |= {"open": times.open_s, "encode": times.encode_s, "connect": times.connect_s}
    kept = ("cpr", "ttfc_ms_p50", "ttfc_ms_p99", "served", "refused", "late")
    more = {
        "run": {name: told[name] for name in kept},
        "simulated": {name: value for name, value in asdict(figures).items() if "rps" not in name},
        "durations_ms": {name: 1e3 * statistics.mean(values) for name, values in durations.items()},
    }
    assert figures.cpr is not None
    assert figures.ttfc_ms_p50 is not None
    points = 100 * abs(figures.cpr - told["cpr"])
    append_row(rows, "fleet_simulated_cpr", shape, points, "points from the run's CPR", CPR_POINTS, **more)
    append_row(
        rows, "fleet_simulated_ttfc", shape, abs(figures.ttfc_ms_p50 / told["ttfc_ms_p50"] - 1),
        "of the run's median TTFC, away from it", TTFC_SHARE, **more,
    )  # fmt: skip


def _metrics(directory: str) -> list[str]:
    """Return the metrics of all boxes, in the order of their names."""
    texts = []
    for box in asyncio.run(_boxes(directory)):
        with urlopen(f"{box.inside}/metrics", timeout=10) as answer:
            texts.append(answer.read().decode())
    return texts


def _mean_times(fields: dict[str, Any]) -> float:
    """Return the mean seconds of the server's part of a lone viewer's first chunk."""
    calls = fields["call_s"]
    return sum(
        statistics.mean(values) for values in (calls[min(calls)], fields["open_s"], fields["encode_s"])
    )


def _text_difference(text: str, earlier: str) -> str:
    """Return metrics whose counters count from an earlier text on; gauges are those of the later text."""
    counted = dict(line.rsplit(" ", 1) for line in earlier.splitlines() if not line.startswith("#"))
    lines = []
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if not line.startswith("#") and any(end in name for end in ("_bucket{", "_sum", "_count", "_total")):
            line = f"{name} {float(value) - float(counted.get(name, 0))}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def h200_times() -> BoxTimes:
    """Return durations of the 1.3B model on an H200, at 480x832 with Wan's VAE.

    Rows of docs/benchmarks/h200.jsonl: a chunk with its video frames alone (``e2e_s1_vs_b3``), calls of two
    (``batch_scaling``), and taking, saving and restoring a row (``pool_open_ms``, ``pool_pause_ms``,
    ``pool_resume_ms``). Not measured and assumed: 1 GB/s to the store, 20 ms to encode a chunk, 50 ms for network and
    client, 60 s until another box has started.
    """
    newest = newest_rows()
    pool = {figure: newest["h200", figure, POOL] for figure in POOL_FIGURES}
    alone = (
        newest["h200", "e2e_s1_vs_b3", f"{LARGE}, 12 video frames, fp4_fp8_resident"]["overlapped_ms"] / 1e3
    )
    two = newest["h200", "batch_scaling", f"{POOL}, calls of 2"]["value"]
    store_s = pool["offload_bandwidth_share"]["session_bytes"] / 1e9
    return BoxTimes(
        rows=4,
        fps=16,
        chunk_frames=12,
        first_frames=9,
        call_s={1: (alone,), 2: (2 * two * alone,)},
        open_s=((pool["pool_open_ms"]["value"] + pool["pool_text_ms"]["value"]) / 1e3,),
        encode_s=(0.02,),
        connect_s=(0.05,),
        capture_s=(pool["pool_pause_ms"]["value"] / 1e3,),
        write_s=(store_s,),
        read_s=(store_s + pool["pool_resume_ms"]["value"] / 1e3,),
        start_s=(60.0,),
    )


def sizes(rows: Path, gpus: int, seconds: float) -> None:
    """Append ``fleet_size``: simulated fleets under growing load, whose viewers collect one or two chunks."""
    times = h200_times()
    for buffer in (1, 2):
        for load_share in (0.5, 0.7, 0.8, 0.9, 1.0, 1.1):
            arrivals = load_share * 2 * gpus / seconds  # two sessions are admitted at a time
            scenario = Scenario(
                boxes=gpus, sessions=round(arrivals * 15 * seconds), arrivals=arrivals, seconds=seconds, buffer=buffer,
                warm_up_s=3 * seconds, gateways=2,
            )  # fmt: skip
            figures = simulate(scenario, times)
            assert figures.cpr is not None
            append_row(
                rows, "fleet_size", f"{gpus} GPUs, load {load_share:g}, {buffer} collected", figures.cpr,
                "simulated CPR", None, load=load_share, buffer=buffer, **asdict(figures),
            )  # fmt: skip


def large(rows: Path, gpus: int, sessions: int) -> None:
    """Append ``fleet_simulate_s``: a simulation with failures of boxes and machines, and half of the boxes replaced."""
    times = h200_times()
    scenario = Scenario(
        boxes=gpus, sessions=sessions, arrivals=0.02 * gpus, seconds=60.0, buffer=2, gateways=4, warm_up_s=120.0,
        box_failure_h=100.0, machine_failure_h=500.0, drain_at_s=300.0, drained=gpus // 100,
    )  # fmt: skip
    began = time.process_time()
    figures = simulate(scenario, times)
    append_row(
        rows, "fleet_simulate_s", f"{gpus:,} GPUs, {sessions:,} sessions", time.process_time() - began,
        "s of one core", SIMULATE_S, arrivals=scenario.arrivals, box_failure_h=scenario.box_failure_h,
        machine_failure_h=scenario.machine_failure_h, drained=scenario.drained, gateways=scenario.gateways,
        **asdict(figures),
    )  # fmt: skip


def main() -> None:
    """Measure the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, required=True, help="jsonl file to append to")
    parser.add_argument("--parts", default="soak,admit,simulation,sizes,large", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--artifact", type=Path, help="of the part overhead")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--asked", type=float, default=200.0, help="sessions a second of `admit`")
    parser.add_argument("--asked-for", type=float, default=30.0, help="seconds of `admit`")
    parser.add_argument("--chunks", type=int, default=60, help="of a measurement of `overhead`")
    parser.add_argument("--repeats", type=int, default=5, help="of `overhead`")
    parser.add_argument("--viewers", type=int, default=60, help="of `simulation`")
    parser.add_argument("--arrivals", type=float, default=0.6, help="viewers a second of `simulation`")
    parser.add_argument("--seconds", type=float, default=20.0, help="that each of them watches")
    parser.add_argument("--buffer", type=int, default=1, help="chunks that they collect")
    parser.add_argument("--gpus", type=int, default=100, help="of `sizes`; ten times as many of `large`")
    parser.add_argument("--sessions", type=int, default=20_000, help="of `large`")
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
        "simulation": lambda: simulation(
            options.rows, options.viewers, options.arrivals, options.seconds, options.buffer
        ),
        "sizes": lambda: sizes(options.rows, options.gpus, 60.0),
        "large": lambda: large(options.rows, 10 * options.gpus, options.sessions),
    }
    for part in PARTS:
        if part in parts:
            measures[part]()


if __name__ == "__main__":
    main()

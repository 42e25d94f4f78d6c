"""The simulation of fleets beside a fleet that runs, and what it says of large ones.

    python scripts/bench/fleet_simulation.py --rows docs/benchmarks/cpu.jsonl --parts beside
    python scripts/bench/fleet_simulation.py --rows docs/benchmarks/cpu.jsonl --parts sizes,large     nothing runs

Needs `seko-serve[ray,simulate]`, and redis-server for `beside`. Parts and their figures:

- ``beside``: ``fleet_simulated_cpr`` and ``fleet_simulated_ttfc``, how far the simulation is from three boxes on three
  loopback nodes of Ray with the same viewers, whose durations it takes. The boxes run the toy model of the tests, and
  their device's thread waits behind each call as for a GPU (`WAITS`): three boxes that compute would share one
  processor, which a fleet does not. Which box a viewer gets is random, and a viewer that is once late stays late, so
  two runs of the same viewers differ. Therefore the means of several runs and of many simulations are compared;
- ``sizes``, ``large``: ``fleet_size``, simulated fleets under growing load, and ``fleet_simulate_s``, what a simulation
  of 1,000 GPUs and 20,000 sessions takes; see `h200_times` for the durations.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / name) for name in ("runtime", "kernels", "serve", "scripts/bench"))]

from fleet import boxes, has_boxes, load, redis  # noqa: E402
from rows import append_row  # noqa: E402
from table import LARGE, newest_rows  # noqa: E402

from seko_runtime import Pool  # noqa: E402
from seko_runtime.video.chunk_programs import variant_starts  # noqa: E402
from seko_serve.live.device import Device  # noqa: E402
from seko_serve.simulation.durations import BoxTimes, metrics_fields  # noqa: E402
from seko_serve.simulation.figures import Figures  # noqa: E402
from seko_serve.simulation.run import simulate  # noqa: E402
from seko_serve.simulation.scenario import Scenario  # noqa: E402

PARTS = ("beside", "sizes", "large")
NODES = 3
WAITS = {1: 0.3, 2: 0.4, 4: 0.6}  # seconds of a call of the part `beside`, by its number of rows
PERIOD_S = 1.0  # for which its viewers show a chunk
PINGS = 99  # of a viewer, from which the time of a message and its answer is measured
LONE = 9  # viewers, one after the other, from whom the time of network and client is measured
DRAWS = 64  # simulations of the viewers of a run
POOL = "self-forcing-1.3b-fp4-sm_90, 480x832, ring 21, 9 sessions in calls of 4"
POOL_FIGURES = ("pool_open_ms", "pool_text_ms", "pool_pause_ms", "pool_resume_ms", "offload_bandwidth_share")
CPR_POINTS, TTFC_SHARE, SIMULATE_S = 3.0, 0.2, 120.0  # goals


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
        "RAY_worker_niceness": "0",  # else any other work of the machine delays the boxes
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
        while not asyncio.run(has_boxes(directory, NODES)):
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        deployments.remove()
    finally:
        ray.shutdown()
        cluster.shutdown()


def beside(rows: Path, viewers: int, arrivals: float, seconds: float, buffer: int, runs: int) -> None:
    """Append the differences between the simulation and three boxes."""
    from tests.runtime.toy_pool import pool_manifest

    manifest = pool_manifest()
    video = manifest.workload.video
    assert video is not None
    fps = video.chunk_frames / PERIOD_S
    common = ("--prompt", "a b", "--fps", fps, "--buffer", buffer)
    counted = ("--sessions", viewers, "--arrivals", arrivals, "--seconds", seconds)
    with redis() as (directory, store), nodes(directory, store) as url:
        lone = [
            load(url, *common, "--sessions", 1, "--seconds", PERIOD_S, "--seed", seed)["ttfc_ms_p50"]
            for seed in range(LONE)
        ]
        ack_s = asyncio.run(_round_trip(url))
        before = _metrics(directory)
        ran = [load(url, *common, *counted, "--seed", seed) for seed in range(runs)]
        after = _metrics(directory)
    connect_s = max(0.0, statistics.median(lone) / 1e3 - _mean_times(metrics_fields(before)))
    measured = metrics_fields(
        [_text_difference(text, earlier) for text, earlier in zip(after, before, strict=True)]
    )
    of_stream = {"fps": fps, "chunk_frames": video.chunk_frames, "first_frames": video.first_frames}
    times = BoxTimes(**{**measured, **of_stream, "connect_s": (connect_s,), "ack_s": (ack_s,)})
    assert times.variant_starts == variant_starts(manifest)
    scenario = Scenario(
        boxes=NODES, sessions=viewers, arrivals=arrivals, seconds=seconds, lengths="fixed", buffer=buffer
    )
    drawn = [
        simulate(replace(scenario, seed=seed), times, draw) for seed in range(runs) for draw in range(DRAWS)
    ]
    shape = f"three boxes of the toy model, {viewers} viewers, {arrivals:g} a second, {seconds:g} s, "
    shape += f"{buffer} collected, {runs} runs"
    durations = {f"call of {count}": values for count, values in times.call_s.items()}
    durations |= {
        "open": times.open_s,
        "encode": times.encode_s,
        "connect": times.connect_s,
        "ack": times.ack_s,
    }
    columns = ("cpr", "ttfc_ms_p50", "ttfc_ms_p99", "served", "refused", "late")
    run_cpr, simulated_cpr = [run["cpr"] for run in ran], _each(drawn, "cpr")
    apart = _spread([run - mean for run, mean in zip(run_cpr, _by_run(simulated_cpr), strict=True)])
    more = {
        "run": [{name: run[name] for name in columns} for run in ran],
        "simulated_cpr": _by_run(simulated_cpr),
        "simulated_cpr_deviation": statistics.stdev(simulated_cpr[:DRAWS]),  # of a draw, for equal viewers
        "simulated": {name: value for name, value in asdict(drawn[0]).items() if "rps" not in name},
        "draws": DRAWS,
        "points_standard_error": None if apart is None else 100 * apart / math.sqrt(runs),
        "durations_ms": {name: 1e3 * statistics.mean(values) for name, values in durations.items()},
        "variant_starts": times.variant_starts,
    }
    points = 100 * abs(statistics.mean(simulated_cpr) - statistics.mean(run_cpr))
    append_row(rows, "fleet_simulated_cpr", shape, points, "points from the runs' CPR", CPR_POINTS, **more)
    ttfc = statistics.mean(_each(drawn, "ttfc_ms_p50")) / statistics.mean(run["ttfc_ms_p50"] for run in ran)
    append_row(
        rows, "fleet_simulated_ttfc", shape, abs(ttfc - 1), "of the runs' median TTFC, away from it",
        TTFC_SHARE, **more,
    )  # fmt: skip


def _each(drawn: Sequence[Figures], name: str) -> list[float]:
    """Return a figure of each simulation."""
    values = [getattr(figures, name) for figures in drawn]
    if None in values:
        raise RuntimeError(f"a simulation has no {name}: nobody was served")
    return values


def _by_run(values: Sequence[float]) -> list[float]:
    """Return the mean over the simulations of each run."""
    return [statistics.mean(values[at : at + DRAWS]) for at in range(0, len(values), DRAWS)]


def _spread(values: Sequence[float]) -> float | None:
    """Return the standard deviation of values; None of one value."""
    return statistics.stdev(values) if len(values) > 1 else None


async def _round_trip(url: str) -> float:
    """Return the median seconds from a message of a client to the box's answer."""
    from seko_serve.client import AsyncClient

    seconds = []
    async with AsyncClient(url) as client:
        await client.open(codecs=["h264"], prompt="a b")
        incoming = client.messages()
        for _ in range(PINGS):
            await asyncio.sleep(0.05)  # else the box refuses some as too many
            began = time.monotonic()
            await client.send("ping", t=began)
            received: Any = None
            while not (isinstance(received, dict) and received["type"] == "pong"):
                received = await anext(incoming)
            seconds.append(time.monotonic() - began)
        await client.close()
    return statistics.median(seconds)


def _metrics(directory: str) -> list[str]:
    """Return the metrics of all boxes, in the order of their names."""
    texts = []
    for box in asyncio.run(boxes(directory)):
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
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--viewers", type=int, default=60, help="of a run of `beside`")
    parser.add_argument("--arrivals", type=float, default=0.6, help="of these viewers a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="that each of them watches")
    parser.add_argument("--buffer", type=int, default=1, help="chunks that they collect")
    parser.add_argument("--runs", type=int, default=2, help="of `beside`")
    parser.add_argument("--gpus", type=int, default=100, help="of `sizes`; ten times as many of `large`")
    parser.add_argument("--sessions", type=int, default=20_000, help="of `large`")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}")
    measures: dict[str, Callable[[], None]] = {
        "beside": lambda: beside(
            options.rows, options.viewers, options.arrivals, options.seconds, options.buffer, options.runs
        ),
        "sizes": lambda: sizes(options.rows, options.gpus, 60.0),
        "large": lambda: large(options.rows, 10 * options.gpus, options.sessions),
    }
    for part in PARTS:
        if part in parts:
            measures[part]()


if __name__ == "__main__":
    main()

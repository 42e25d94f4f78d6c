"""The server over full-size models with random weights on one GPU: `serve.py`'s figures without an artifact.

    python scripts/bench/serve_full.py --work /tmp/seko-serve --rows docs/benchmarks/h200.jsonl --parts s1,s3

Engines are compiled as in a build into ``--work`` and used again from there, weights are drawn on the device, and the
server's own thread opens the pool. Parts:

- ``s1``: ``serve_ttfc_ms``, ``serve_overhead`` and ``serve_misses``: 1.3B, FP4 cache, fp8 matmuls, resident window,
  Wan's VAE, 480x832; two viewers at 15 fps for ``--misses-of`` chunks. ``unhurried``: the first two figures alone,
  ``misses``: the last;
- ``s3``: ``serve_misses_s3``: the same at 320x576 and 16 fps, as many viewers as are admitted, for ``--misses-s3-of``;
- ``key``: ``serve_key_to_picture``, lingbot v2, from a key's event until the first encoded frame of the chunk that
  follows the key is at the client, in chunk times;
- ``encode``: ``serve_encode_cores``.

``--eager`` runs every engine uncompiled, and with ``--preset tiny`` a CPU tries the script.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from full_model import FullModelBench, full_model_parser, measure
from rows import append_row

from seko_export import BuildOptions
from seko_export.config.video import VideoBuild
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.options.resolve import resolve_build
from seko_export.video.recording import golden_text
from seko_runtime import Pool
from seko_serve.load import percentile
from serve import Served, encode, misses, overhead, python, ttfc

FULL, TINY = "self-forcing-1.3b", "tiny"
WORLD, WORLD_TINY = "lingbot-v2-fast", "lingbot-tiny"
KEYS = """
import asyncio, json, sys, time
from seko_serve.client import AsyncClient
from seko_serve.protocol import Media

async def run(url, presses, image):
    fields = {"image": image} if image else {}
    async with AsyncClient(url) as client:
        await client.open(codecs=["h264"], **fields)
        sent, times = None, []
        async for message in client.messages():
            if isinstance(message, Media):
                if sent is not None and message.chunk == sent[2]:
                    times.append(1e3 * (time.monotonic() - sent[1]))
                    sent = None
                continue
            if message["type"] == "applied" and sent is not None and message["id"] == sent[0]:
                sent = (*sent[:2], message["chunk"])
            if message["type"] == "chunk" and message["chunk"] < 8:
                await client.send("ack", chunk=message["chunk"])
            elif message["type"] == "chunk" and message["chunk"] > 8:  # two are unshown: the row waits
                if len(times) >= presses:
                    break
                pressed = time.monotonic()
                name = await client.send("keys", held=["KeyJ" if len(times) % 2 else "KeyL"])
                sent = (name, pressed, None)
                await client.send("ack", chunk=message["chunk"] - 1)
        await client.close()
    print(json.dumps(times))

asyncio.run(run(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
"""


class Bench(FullModelBench):
    """The options, and the servers that are opened one after another."""

    @property
    def strict(self) -> bool:
        """Whether rows have bars: of the full model on a GPU."""
        return self.on_gpu and not self.tiny

    @property
    def tiny(self) -> bool:
        """Whether the script is only tried."""
        return bool(self.options.preset == TINY)

    def config(
        self, *, sessions: int, batch: tuple[int, ...], small: bool = False, world: bool = False
    ) -> VideoBuild:
        """Return a build with a VAE."""
        preset = (WORLD_TINY if world else TINY) if self.tiny else (WORLD if world else FULL)
        more: dict[str, Any] = {"sessions": sessions, "batch": batch} if sessions > 1 else {}
        if not self.tiny:
            more |= {
                "kv": "fp4",
                "fp8": True,
                "kernels": "fused",
                "attention": "fp8",
                "resident_window": True,
            }
            if small:
                more |= {"height": 320, "width": 576, "ring_frames": 12}
        resolved = resolve_build(BuildOptions(preset=preset, no_vae=True, no_text=True, **more))
        return resolved.config.changed(vae=WanVaeConfig(base_dim=8) if self.tiny else WanVaeConfig())

    def folder(self, config: VideoBuild) -> Path:
        """Return where a build's engines lie."""
        stream, rows = config.workload.stream, config.workload.rows
        return self.options.work / f"{config.model.name}-{stream.height}x{stream.width}-{rows}"

    @contextmanager
    def served(self, config: VideoBuild) -> Iterator[tuple[Served, str]]:
        """Open a server over a build; yield it and the rows' shape."""
        self.compile([config])
        with Served(lambda: self._with_text(config)) as served:
            stream = config.workload.stream
            kind = "tiny" if self.tiny else "fp4 cache, fp8 matmuls, resident window"
            shape = (
                f"{config.model.name}, {stream.height}x{stream.width}, chunk {stream.chunk_frames}, ring "
                f"{stream.ring_frames}, {kind}, Wan VAE, {served.device.capacity} rows"
            )
            yield served, shape

    @contextmanager
    def _with_text(self, config: VideoBuild) -> Iterator[Pool]:
        """Open a pool whose sessions begin with the same embeddings: there is no text encoder."""
        with self.pool(config) as pool:
            opened: Any = pool
            opened.open_session = partial(pool.open_session, text=golden_text(config))
            yield pool


def _s1(bench: Bench) -> None:
    _unhurried(bench)
    _misses(bench)


def _unhurried(bench: Bench) -> None:
    options = bench.options
    with bench.served(bench.config(sessions=2, batch=(1, 2))) as (served, shape):
        ttfc(served, shape, options.rows, most_chunks=2.0 if bench.strict else None)
        for sessions in (1, 2):
            overhead(
                served,
                shape,
                options.rows,
                sessions,
                options.overhead_seconds,
                0.97 if bench.strict else None,
            )


def _misses(bench: Bench) -> None:
    with bench.served(bench.config(sessions=2, batch=(1, 2))) as (served, shape):
        misses(
            served,
            shape,
            bench.options.rows,
            2,
            15.0,
            bench.options.misses_of,
            most=0.0 if bench.strict else None,
        )


def _s3(bench: Bench) -> None:
    sessions = 2 if bench.tiny else bench.options.sessions_s3
    config = bench.config(sessions=sessions, batch=(1, 2) if bench.tiny else (1, 2, 4), small=True)
    with bench.served(config) as (served, shape):
        chunks = bench.options.misses_s3_of
        misses(
            served,
            shape,
            bench.options.rows,
            sessions,
            16.0,
            chunks,
            "serve_misses_s3",
            0.0 if bench.strict else None,
        )


def _key(bench: Bench) -> None:
    config = bench.config(sessions=1, batch=(1,), world=True)
    with bench.served(config) as (served, shape):
        times = json.loads(python("-c", KEYS, served.url, bench.options.presses, _picture(config)))
        p99 = percentile(times, 99)
        assert p99 is not None  # there are presses
        chunk_s = served.alone(lambda pool: min(pool.call_times.expected().values()))
        append_row(
            bench.options.rows, "serve_key_to_picture", shape, p99 / 1e3 / chunk_s,
            "p99, from a key's event, where the row waits for its viewer, to the first frame that follows it / chunk",
            1.25 if bench.strict else None,
            p50_ms=percentile(times, 50), p99_ms=p99, chunk_ms=1e3 * chunk_s, presses=len(times),
        )  # fmt: skip


def _picture(config: VideoBuild) -> str:
    """Return a start picture as a data URL."""
    import av

    stream = config.workload.stream
    frame = av.VideoFrame.from_ndarray(
        np.full((stream.height, stream.width, 3), 127, np.uint8), format="rgb24"
    )
    encoder = av.CodecContext.create("png", "w")
    encoder.width, encoder.height, encoder.pix_fmt = stream.width, stream.height, "rgb24"
    packets = [*encoder.encode(frame), *encoder.encode(None)]
    file = io.BytesIO(b"".join(bytes(packet) for packet in packets))
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _encode(bench: Bench) -> None:
    if not bench.options.prepare:  # it builds nothing
        encode(bench.options.rows)


PARTS: dict[str, Callable[[Bench], None]] = {
    "s1": _s1,
    "unhurried": _unhurried,
    "s3": _s3,
    "misses": _misses,
    "key": _key,
    "encode": _encode,
}


def main() -> int:
    """Measure the parts that were asked for; return the exit code."""
    parser = full_model_parser(__doc__, list(PARTS), (FULL, TINY), "s1,s3")
    parser.add_argument("--overhead-seconds", type=float, default=20.0, help="of each of its two figures")
    parser.add_argument("--misses-of", type=int, default=1_200, help="chunks of two viewers: 480 s")
    parser.add_argument("--misses-s3-of", type=int, default=3_000, help="chunks of all admitted viewers")
    parser.add_argument("--sessions-s3", type=int, default=8, help="rows of the pool at 320x576")
    parser.add_argument("--presses", type=int, default=50, help="of keys")
    return measure(Bench(parser.parse_args()), PARTS)


if __name__ == "__main__":
    sys.exit(main())

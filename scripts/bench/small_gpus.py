"""What a small GPU would take, on a large one of which only so much memory is free: `fits_8gb_1p3b` and its like.

`build --fit` chooses the options. Another process then holds all memory but what such a card has, and the artifact,
with text encoder and VAE, makes video from a prompt in what is left, its CUDA context included. The speed is this
GPU's: a small card is slower. Artifacts of larger cards are opened there, too: each must refuse, and say what is
missing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from scripts.bench import built
from scripts.bench.children import last_json
from scripts.bench.rows import append_row

# MiB that nvidia-smi shows of GeForce cards with so much memory; the first is the trial's.
VISIBLE_MIB = {"1GB": 1024, "8GB": 8188, "12GB": 12282, "16GB": 16376, "24GB": 24564}


@dataclass(frozen=True)
class Card:
    """A memory size, and the model that is to fit: its preset, VAE and text encoder, all of random weights."""

    memory: str
    preset: str
    vae: str
    text: str = "umt5-xxl"

    @property
    def visible_bytes(self) -> int:
        """What programs find on such a card."""
        return VISIBLE_MIB[self.memory] << 20

    @property
    def shape(self) -> str:
        """What rows call it."""
        return f"{self.preset}, {self.vae}, {self.text}, --fit {self.memory}"


CARDS: Mapping[str, Card] = {
    "8gb_1p3b": Card("8GB", "self-forcing-1.3b", "taew2_1"),
    "12gb_1p3b": Card("12GB", "self-forcing-1.3b", "wan-2.1"),
    "16gb_5b": Card("16GB", "wan-5b", "taew2_2"),  # with Wan's VAE, cache and layers are on the host
    "24gb_14b": Card("24GB", "wan-14b", "wan-2.1"),
    "24gb_lingbot": Card("24GB", "lingbot-v2-fast", "wan-2.1"),
}
TRIAL = Card("1GB", "tiny", "wan-2.1-tiny", "umt5-tiny")
# Holds all of a GPU's memory but so many bytes, until its input ends.
_HOLD = """
import sys
import torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""
_STREAM = """
import json, statistics, sys, time
import numpy as np
import torch
from seko_runtime import open_artifact
from seko_runtime.errors import SekoRuntimeError
from seko_runtime.video.contract import begins_with_picture
on_gpu, ms, frames = torch.cuda.is_available(), [], 0
before = torch.cuda.mem_get_info()[0] if on_gpu else 0  # its CUDA context is there
try:
    with open_artifact(sys.argv[1]) as artifact:
        stream = artifact.manifest.workload.stream
        given = {"prompt": "a red disc bouncing"}
        if begins_with_picture(artifact.manifest):
            given["image"] = np.zeros((stream.height, stream.width, 3), np.uint8)
        with artifact.open_session(**given) as session:
            if "camera" in session.controls:
                session.controls["camera"].take({"held": ["w"]})
            for _ in range(int(sys.argv[2])):
                begun = time.perf_counter()
                video = session.run_chunk().video()
                ms.append(1e3 * (time.perf_counter() - begun))
                frames = video.shape[1]
            held = before - torch.cuda.mem_get_info()[0] if on_gpu else 0
        host = sum(weight.nbytes for weight in artifact.manifest.weights if weight.on_host)
        kv = artifact.manifest.workload.kv.scheme
    print(json.dumps({"chunk_ms": statistics.median(ms[-5:]), "frames": frames, "held_bytes": held, "kv": kv,
                      "host_weight_bytes": host}))
except SekoRuntimeError as fault:
    print(json.dumps({"refused": f"{type(fault).__name__}: {fault}"[:400], "chunks": len(ms)}))
"""


def run(options: argparse.Namespace) -> int:
    """Build and measure the cards of the case; return how many of them ran out of memory or failed otherwise."""
    cards = {"trial": TRIAL} if options.trial else {name: CARDS[name] for name in options.parts}
    artifacts = {name: _built(options.work, name, card) for name, card in cards.items()}
    if options.prepare:
        return 0
    failed = 0
    for name, card in cards.items():
        larger = [other for other, its in cards.items() if its.visible_bytes > card.visible_bytes]
        with _held_but(card.visible_bytes):
            result = last_json("-c", _STREAM, str(artifacts[name]), str(options.chunks))
            refused = {
                other: last_json("-c", _STREAM, str(artifacts[other]), "1").get("refused", "it ran")
                for other in larger
            }
        if "refused" in result:
            print(f"{card.shape}: {result['refused']}", flush=True)
            failed += 1
            continue
        append_row(
            options.rows,
            f"fits_{name}",
            card.shape,
            1e3 * result["frames"] / result["chunk_ms"],
            "video frames a second, with no more memory than the card's",
            None,
            held_bytes=result["held_bytes"],
            visible_bytes=card.visible_bytes,
            chunk_ms=result["chunk_ms"],
            host_weight_bytes=result["host_weight_bytes"],
            kv=result["kv"],
            larger_refused=refused,
        )
    return failed


def _built(work: Path, name: str, card: Card) -> Path:
    vae, text = built.vae_file(work, card.vae), built.text_encoder(work, card.text)
    # A checkpoint would be another 28 GB on the disk.
    drawn = () if card.preset == "tiny" else ("--random-weights", "0")
    return built.artifact(
        work / name, "--preset", card.preset, *drawn, "--fit", card.memory, "--vae", str(vae),
        "--text-encoder", str(text),
    )  # fmt: skip


@contextmanager
def _held_but(left: int) -> Iterator[None]:
    """Hold all of the GPU's memory but ``left`` bytes; on a CPU nothing."""
    if not torch.cuda.is_available():
        yield
        return
    command = [sys.executable, "-c", _HOLD, str(left)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        if holder.stdout.readline() != "held\n":
            raise SystemExit("the GPU's memory cannot be held")
        try:
            yield
        finally:
            holder.stdin.close()

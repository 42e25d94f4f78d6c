"""From measurements to the rows of docs/benchmarks: names, ratios, bars. A figure that lacks a part says which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scripts.bench.peers.shapes import SHAPES

TINY = "end to end, tiny decoder"  # an artifact with TAEHV in place of Wan's VAE
VAE_FP8 = "end to end, fp8 decoder"  # an artifact with Wan's VAE, decoding with fp8 convolutions
Results = Mapping[str, Mapping[str, Any]]  # by shape, then by what was measured

# Bars of the comparison: what a figure must not exceed.
BARS = {
    "s1_exact_vs_b3": 0.90,
    "s1_fp4_vs_b3": 0.70,
    "s1_fp4_fp8_vs_b3": 0.565,
    "s5_fp4_fp8_vs_b3": 0.62,
    "s6_fp4_fp8_vs_b3": 0.62,
    "s3_vs_eager": 0.35,
    "batch4_s1": 1.0,
    "batch4_s3": 0.9,
    "e2e_s1_vs_b3": 0.475,
    "e2e_s1_tiny_vs_b3": 0.39,
    "e2e_s1_vae_fp8_vs_b3": 0.45,
}
_ASKED_DECODERS = {  # measurements with a decoder that is measured where it is named, and their figures
    TINY: "e2e_s1_tiny_vs_b3",
    VAE_FP8: "e2e_s1_vae_fp8_vs_b3",
}
_STEPS = (  # figure, shape, engine, what it is divided by
    ("s1_exact_vs_b3", "S1", "exact", "B3"),
    ("s1_fp4_vs_b3", "S1", "fp4", "B3"),
    ("s1_fp4_fp8_vs_b3", "S1", "fp4_fp8", "B3"),
    ("s1_fp4_fp8_vs_b3", "S1", "fp4_fp8_resident", "B3"),
    ("s5_fp4_fp8_vs_b3", "S5", "fp4_fp8", "B3"),
    ("s5_fp4_fp8_vs_b3", "S5", "fp4_fp8_resident", "B3"),
    ("s6_fp4_fp8_vs_b3", "S6", "fp4_fp8", "B3"),
    ("s6_fp4_fp8_vs_b3", "S6", "fp4_fp8_resident", "B3"),
    ("s3_vs_eager", "S3", "exact", "B0"),
    ("s3_vs_eager", "S3", "fp4", "B0"),
    ("s3_vs_eager", "S3", "fp4_fp8", "B0"),
)


@dataclass(frozen=True)
class Figure:
    """One row to be, or why it is none.

    Parameters
    ----------
    name, shape : str
        As rows have them.
    missing : tuple of str
        Measurements that it lacks; then there is no value.
    value : float
        The ratio.
    unit : str
        What of what.
    more : dict
        Its parts.
    """

    name: str
    shape: str
    missing: tuple[str, ...] = ()
    value: float = float("nan")
    unit: str = ""
    more: dict[str, Any] = field(default_factory=dict)


def figures(results: Results, shapes: tuple[str, ...], engines: tuple[str, ...]) -> Iterator[Figure]:
    """Yield every figure of these shapes and engines, with its value or with what it lacks."""
    for name, shape, engine, peer in _STEPS:
        if shape in shapes and engine in engines:
            yield _step_ratio(results.get(shape, {}), name, shape, engine, peer)
    for shape in ("S1", "S3"):
        if shape in shapes:
            yield from (_batch(results.get(shape, {}), shape, engine) for engine in engines[-1:])
    if "S1" in shapes:
        for engine in engines[-1:]:
            yield _end_to_end(results.get("S1", {}), "e2e_s1_vs_b3", "end to end", engine)
            for measured, name in _ASKED_DECODERS.items():
                if measured in results.get("S1", {}):
                    yield _end_to_end(results["S1"], name, measured, engine)


def _step_ratio(results: Mapping[str, Any], name: str, shape: str, engine: str, peer: str) -> Figure:
    row = f"{SHAPES[shape].text}, {engine}"
    missing = _missing(results, engine, peer)
    if missing:
        return Figure(name, row, missing)
    ours, theirs = results[engine]["step_ms"], results[peer]["step_ms"]
    parts = {
        "engine_step_ms": ours["median"], "engine_step_p90_ms": ours["p90"],
        "peer_step_ms": theirs["median"], "peer_step_p90_ms": theirs["p90"], "peer": results[peer]["what"],
        "peer_host_load": results[peer].get("host_load"),
        "engine_kv_bytes": results[engine]["kv_bytes"], "peer_kv_bytes": results[peer]["kv_bytes"],
    }  # fmt: skip
    return Figure(name, row, (), ours["median"] / theirs["median"], f"engine / {peer}, a step", parts)


def _batch(results: Mapping[str, Any], shape: str, engine: str) -> Figure:
    name, row = f"batch4_{shape.lower()}", f"{SHAPES[shape].text}, B=4, {engine}"
    missing = _missing(results, engine, "batch4")
    if missing:
        return Figure(name, row, missing)
    four, single = results["batch4"]["chunk_ms"]["median"], results[engine]["chunk_ms"]["median"]
    parts = {
        "batch_chunk_ms": four,
        "one_chunk_ms": single,
        "first_frames": results["batch4"]["first_frames"],
    }
    return Figure(name, row, (), four / (4 * single), "of 4 x B=1, rows at different chunks", parts)


def _end_to_end(results: Mapping[str, Any], name: str, measured: str, engine: str) -> Figure:
    row = f"{SHAPES['S1'].text}, 12 video frames, {engine}"
    missing = _missing(results, "B3", measured, "eager VAE")
    if missing:
        return Figure(name, row, missing)
    ours, theirs = results[measured], results["B3"]["chunk_ms"]["median"]
    decode = results["eager VAE"]["decode_ms"]
    parts = {
        "serial_ms": ours["serial_ms"], "overlapped_ms": ours["overlapped_ms"], "peer_chunk_ms": theirs,
        "peer_decode_ms": decode, "overlapped_ratio": ours["overlapped_ms"] / (theirs + decode),
        "decoder": results["eager VAE"]["what"],
    }  # fmt: skip
    unit = "engine, decoding after the chunk / (B3 + eager decoding)"
    return Figure(name, row, (), ours["serial_ms"] / (theirs + decode), unit, parts)


def _missing(results: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    """Return what was not measured, or is not right: a stream that fails its check has no time."""
    return tuple(
        name if name not in results else f"{name} (failed its check)"
        for name in names
        if name not in results or not results[name].get("verdict", {"ok": True})["ok"]
    )

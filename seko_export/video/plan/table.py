"""Text output of `seko-export plan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from seko_export.config.stream import REBUILD, REUSE, StreamConfig

_WEIGHTS = {
    "transformer": "transformer",
    "text": "text encoder",
    "vae": "VAE",
    "vae_encoder": "VAE that encodes",
    "audio": "audio encoder",
    "image": "image encoder",
}
_SESSION = {
    "kv": "KV cache",
    "prompt": "prompt",
    "prompt_cache": "prompt cache, when full",
    "latents": "latents and positions",
    "window": "computed once a chunk",
    "decode": "VAE caches and video",
    "scratch_step": "scratch of a step",
    "scratch_decode": "scratch of decoding",
    "scratch_prompt": "scratch of prompt and picture",
    "seats": "places of weights on the host",
    "workspace": "cuBLAS workspaces",
}
_CALLS = _SESSION | {
    "kv": "spare row of the KV cache",
    "prompt": "spare row of the prompt",
    "latents": "a call's chunk",
}
_LABEL, _COLUMN = 31, 9  # columns
_CONTEXT = " and the context pass"


def show(report: Mapping[str, Any]) -> str:
    """Return the report of `predict`, which `seko-export plan` prints, as lines of text."""
    return "\n".join((*_head(report), "", *_memory(report), "", *_time(report), *_notes(report)))


def _head(report: Mapping[str, Any]) -> Iterator[str]:
    s = report["stream"]
    gpus = "" if report["ranks"] == 1 else f"{report['ranks']} x "
    yield f"{report['preset']} on {gpus}{report['gpu_title']}, predicted"
    reference = f"reference {s['reference_frames']}, " if s["reference_frames"] else ""
    past = f" to {report['past_share']:g} of the cached keys" if report["past_share"] < 1 else ""
    yield (
        f"{s['height']}x{s['width']}, chunk {s['chunk_frames']}, {reference}sink {s['sink_frames']}, "
        f"ring {s['ring_frames']}, {_rows(report)}, KV {report['kv']}, matmuls {'fp8' if report['fp8'] else 'bf16'}, "
        f"attention {report['attention']}{past}, kernels {report['kernels']}, {report['passes']} passes"
        + _cached(s)
    )


def _cached(stream: Mapping[str, Any]) -> str:
    """Return in words which passes write the cache, behind the number of denoise passes."""
    if stream["pass_caches"]:
        return ", a cache each"
    if stream["rolling"]:
        return f" over several chunks{_CONTEXT}"
    return ", the last one's cache kept" if stream["context"] == REUSE else _CONTEXT


def _memory(report: Mapping[str, Any]) -> Iterator[str]:
    for title, sizes, labels in (
        ("weights, for all sessions", report["weight_bytes"], _WEIGHTS),
        ("the pool, for all its calls", report["call_bytes"], _CALLS),
        ("a session", report["session_bytes"], _SESSION),
    ):
        if sizes:
            yield _row(title, "MB")
        yield from (_row(f"  {labels[name]}", f"{size / 1e6:.1f}") for name, size in sizes.items() if size)
    if report["host_bytes"]:
        yield _row("a session, on the host", "MB")
        yield _row("  KV cache", f"{report['host_bytes'] / 1e6:.1f}")
    if report["host_weight_bytes"]:
        yield _row("weights on the host", f"{report['host_weight_bytes'] / 1e6:.1f}")
    peak, memory = report["peak_bytes"] / 1e9, report["memory_bytes"] / 1e9
    pool, fit = report["pool"], _sessions(report["sessions_fit"])
    all_of_it = "one session" if pool is None else f"a pool of {pool['sessions']}"
    yield _row(f"weights and {all_of_it}", f"{peak * 1e3:.1f}")
    if report["fits"]:
        yield f"fits into {memory:.0f} GB: {fit}" + (" would" if pool is not None else "")
    else:
        would = f"; {fit} would fit" if report["sessions_fit"] else ""
        yield f"does not fit into {memory:.0f} GB: {peak - report['room_bytes'] / 1e9:.2f} GB too much{would}"
        for other in report["would_fit"]:
            yield f"  would fit: {other['options']}, {other['peak_bytes'] / 1e9:.1f} GB"
        if not report["would_fit"]:
            yield "  neither what --fit adds, nor fewer --ring-frames or --no-vae fits; take a larger GPU"


def _time(report: Mapping[str, Any]) -> Iterator[str]:
    pool = report["pool"]
    rows = "" if pool is None else f" of {pool['buckets'][-1]}"
    yield _row(f"a step{rows}, the cache full", "launches", "TFLOP", "GB", "ms")
    for name, part in report["step"].items():
        yield _row(
            f"  {name}",
            f"{part['launches']:.0f}",
            f"{part['flops'] / 1e12:.3f}",
            f"{part['bytes'] / 1e9:.3f}",
            f"{part['seconds'] * 1e3:.2f}",
        )
    blank = ("", "", "")
    yield _row("  all", *blank, f"{report['step_s'] * 1e3:.2f}")
    yield _row("a step while the cache fills", *blank, f"{report['fill_step_s'] * 1e3:.2f}")
    if report["decode_s"]:
        yield _row("decoding a chunk", *blank, f"{report['decode_s'] * 1e3:.2f}")
    if report["encode_s"]:
        again = report["stream"]["context"] == REBUILD
        what = "encoding a frame again" if again else "encoding the input video"
        yield _row(what, *blank, f"{report['encode_s'] * 1e3:.2f}")
    steps = report["passes"] + StreamConfig(**report["stream"]).has_context
    media = ", decoding" * bool(report["decode_s"]) + ", encoding" * bool(report["encode_s"])
    yield _row(f"a chunk: {steps} steps{media}", *blank, f"{report['chunk_s'] * 1e3:.2f}")
    if report["stream_bytes"]:
        moved, seconds = report["stream_bytes"] / 1e9, report["stream_s"] * 1e3
        yield _row("  layers over PCIe, beside it", "", "", f"{moved:.3f}", f"{seconds:.2f}")
    if pool is not None:
        yield _row("a chunk, by size of the call", *blank[:2], "all", "each")
        for size, call in report["calls"].items():
            all_of_it = call["chunk_s"] * 1e3
            yield _row(f"  {size}", *blank[:2], f"{all_of_it:.2f}", f"{all_of_it / int(size):.2f}")
    yield f"{report['video_s'] * 1e3:.0f} ms of video at {report['stream']['fps']} fps: {_pace(report)}"


def _pace(report: Mapping[str, Any]) -> str:
    pool, keep_up = report["pool"], report["sessions_real_time"]
    if pool is None:
        verdict = f"so {_sessions(keep_up)} in real time" if report["real_time"] else "too slow"
        return f"{report['real_time_factor']:.2f} x real time, {verdict}"
    verdict = "in real time" if report["real_time"] else "too slow"
    factor = f"{report['real_time_factor']:.2f} x real time"
    return f"{_sessions(pool['sessions'])} at {factor}, {verdict}; {keep_up} would keep up"


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"note: {note}" for note in report["notes"])


def _row(label: str, *cells: str) -> str:
    return (label.ljust(_LABEL) + "".join(cell.rjust(_COLUMN) for cell in cells)).rstrip()


def _rows(report: Mapping[str, Any]) -> str:
    pool = report["pool"]
    if pool is None:
        return f"batch {report['stream']['batch']}"
    return f"{_sessions(pool['sessions'])} in calls of {', '.join(map(str, pool['buckets']))}"


def _sessions(count: int) -> str:
    return f"{count} session{'s' * (count != 1)}"

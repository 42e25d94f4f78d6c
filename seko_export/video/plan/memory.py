"""GPU memory that a build needs, for `seko-export plan`, computed from its table of buffers and the work counts of its
engines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from seko_export.config.video import VideoBuild
from seko_export.engines.piece import Piece
from seko_export.families.registry import graph_of
from seko_export.media.pieces import (
    AUDIO_ENCODER,
    IMAGE_ENCODER,
    TEXT_WEIGHTS,
    VAE_ENCODER_WEIGHTS,
    VAE_WEIGHTS,
)
from seko_export.roofline.gpus import CUBLAS_WORKSPACE, room_of
from seko_export.roofline.work import Work, weight_sizes
from seko_export.video.plan.offload import home_bytes, host_weights, seat_bytes
from seko_runtime.format.manifest import Buffer
from seko_runtime.video.clocks import RowClocks
from seko_runtime.video.contract import DECODE_PROGRAMS, ENCODE_VIDEO, ENCODE_VIDEO_FIRST, TEXT_ENCODED
from seko_runtime.video.options import PROMPT_CACHE
from seko_runtime.video.ring import Ring

_CHUNK = ("begin", "denoise", "context")


def memory_report(config: VideoBuild, memory_bytes: int, work: Work) -> dict[str, Any]:
    """Return the memory figures in bytes that `seko-export plan` reports for a GPU of so many bytes."""
    weights = weight_bytes(config, work.pieces)
    once, each = rows_bytes(config, work)
    fixed, session = sum(weights.values()) + sum(once.values()), sum(each.values())
    peak = fixed + session * (1 if config.workload.pool is None else config.workload.pool.sessions)
    room = room_of(memory_bytes, config.target.device)
    # An artifact of several ranks has one open session or pool at a time.
    most = 1 if config.target.ranks > 1 and config.workload.pool is None else sys.maxsize
    return {
        "weight_bytes": weights,
        "call_bytes": once,
        "session_bytes": each,
        "peak_bytes": peak,
        "memory_bytes": memory_bytes,
        "room_bytes": room,
        "fits": peak <= room,
        "sessions_fit": min(most, max(0, (room - fixed) // session)),
        "host_bytes": config.target.ranks * home_bytes(config),
        "host_weight_bytes": sum(host_weights(work.pieces).values()),
    }


def peak_bytes(config: VideoBuild) -> int:
    """Return the bytes of a GPU that a build's artifact takes with one session, or with its pool."""
    size: int = memory_report(config, 0, Work.of(config))["peak_bytes"]
    return size


def least_bytes(config: VideoBuild) -> int:
    """Return the bytes of a GPU without which a build's artifact cannot run, with one session or with its pool:
    weights, what is allocated at the start, and the tensors of the largest call."""
    work = Work.of(config)
    held = _held_bytes(config, work)
    at_start = sum(held[name] for name in ("kv", "prompt", "latents", "window", "decode", "seats"))
    return sum(weight_bytes(config, work.pieces).values()) + at_start + work.least_scratch_bytes()


def weight_bytes(config: VideoBuild, pieces: Mapping[str, Piece]) -> dict[str, int]:
    """Return the bytes of the artifact's weights by part. The parts are ``transformer`` (with tables and scales),
    ``text``, ``vae``, and ``audio``, ``image`` or ``vae_encoder`` of a build with such an encoder.
    """
    tables = config.workload.schedule.tables(config.workload.stream)
    sizes = weight_sizes(pieces) | {name: table.nbytes for name, table in tables.items()}
    on_host = host_weights(pieces)
    sizes = {name: size for name, size in sizes.items() if name not in on_host}
    shares = {"text": TEXT_WEIGHTS, "vae": VAE_WEIGHTS}
    if config.workload.audio is not None:
        shares["audio"] = f"{AUDIO_ENCODER}."
    if config.workload.vae_encoder is not None:
        shares["vae_encoder"] = VAE_ENCODER_WEIGHTS
    if config.workload.image is not None:
        shares["image"] = f"{IMAGE_ENCODER}."
    total = {
        share: sum(size for name, size in sizes.items() if name.startswith(prefix))
        for share, prefix in shares.items()
    }
    return {"transformer": sum(sizes.values()) - sum(total.values()), **total}


def rows_bytes(config: VideoBuild, work: Work) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that are allocated besides the weights, by purpose.

    Returns
    -------
    dict of str to int
        Bytes that a pool allocates once, for its calls and the spare row; empty without a pool.
    dict of str to int
        Bytes that each session adds; without a pool all bytes that a session allocates.
    """
    kinds_bytes = _held_bytes(config, work)
    if config.workload.pool is None:
        return {}, kinds_bytes
    sessions = config.workload.pool.sessions
    larger = _held_bytes(config.changed(pool=replace(config.workload.pool, sessions=sessions + 1)), work)
    each = {name: larger[name] - size for name, size in kinds_bytes.items()}
    return {name: size - sessions * each[name] for name, size in kinds_bytes.items()}, each


def _held_bytes(config: VideoBuild, work: Work) -> dict[str, int]:
    """Return the number of bytes that a session without a pool, or a whole pool, allocates."""
    buffers = graph_of(config).buffers

    def of(*roles: str) -> int:
        return sum(buffer.on_device.nbytes for buffer in buffers if buffer.role in roles)

    s = config.workload.stream
    window = sum(buffer.nbytes for buffer in buffers if buffer.role == "state" and buffer.row_axis)
    latents = next(buffer for buffer in buffers if buffer.name == "latents")
    kept_slots = RowClocks(
        Ring(s.sink_frames, s.ring_frames, s.chunk_frames), config.workload.rows
    ).kept_slots
    return {
        "kv": of("cache"),
        "prompt": of("session"),
        "prompt_cache": PROMPT_CACHE * _prompt_entry(config, buffers),
        "latents": of("host", "state")
        - window
        + kept_slots * config.workload.rows * latents.nbytes // config.workload.call_rows,
        "window": window,
        "decode": of("lane"),
        "scratch_step": work.scratch_bytes(_CHUNK),
        "scratch_decode": work.scratch_bytes((*DECODE_PROGRAMS, ENCODE_VIDEO_FIRST, ENCODE_VIDEO)),
        "scratch_prompt": work.scratch_bytes(("prompt", "text", "encode", "condition")),
        "seats": seat_bytes(work.pieces),
        "workspace": CUBLAS_WORKSPACE * (1 + (config.workload.vae is not None)),
    }


def _prompt_entry(config: VideoBuild, buffers: tuple[Buffer, ...]) -> int:
    """Return the number of bytes of an entry of the prompt cache: a prompt's embeddings."""
    return 0 if config.workload.text is None else next(b.nbytes for b in buffers if b.name == TEXT_ENCODED)

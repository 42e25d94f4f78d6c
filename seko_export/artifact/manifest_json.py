"""Serialises a manifest, in the oldest format version that can express it."""

from __future__ import annotations

import dataclasses
import json

from seko_runtime.executor.buffers_check import PICTURE_LEVELS
from seko_runtime.format.manifest import (
    COPIES_VERSION,
    FIRST_LAYER_VERSION,
    INPUT_VERSION,
    LEVELS_VERSION,
    OFFLOADED_VERSION,
    PASS_CACHE_VERSION,
    POOL_VERSION,
    RANK_VERSION,
    REFERENCE_VERSION,
    SHARED_DECODE_VERSION,
    WINDOW_VERSION,
    Buffer,
    Manifest,
)
from seko_runtime.video.ring import Ring


def least_version(manifest: Manifest) -> int:
    """Return the oldest format version that has every feature this manifest uses."""
    return max(_least_of_fields(manifest), 1 if manifest.has_context else PASS_CACHE_VERSION)


def manifest_json(manifest: Manifest) -> bytes:
    """Return a manifest as UTF-8 JSON with sorted keys; equal manifests give equal bytes.

    Fields that an older format lacks are left out when they are empty, so that older runtimes can read the file.
    """
    table = dataclasses.asdict(manifest)
    table["format_version"] = max(manifest.format_version, _least_of_fields(manifest))
    if manifest.pool is None:
        del table["pool"]
    if table["format_version"] < INPUT_VERSION:
        del table["workload"], table["inputs"]
    if manifest.ranks == 1:
        del table["ranks"]
    for name in ("rings", "reference_frames"):
        if not table["stream"][name]:
            del table["stream"][name]
    for buffer in table["buffers"]:
        for name in ("device_layers", "rank_axis"):
            if not buffer[name]:
                del buffer[name]
    if manifest.golden is not None and manifest.golden.reference is None:
        del table["golden"]["reference"]
    for call in (call for calls in table["programs"].values() for call in calls):
        for first in ("first_layer", "first_place"):
            if not call[first]:
                del call[first]
    text = json.dumps(table, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8") + b"\n"


def made_by_begin(buffer: Buffer) -> bool:
    """Return whether a buffer is a resident window, which the program ``begin`` computes from the caches
    (`WINDOW_VERSION`).
    """
    return buffer.role == "state" and buffer.layered


def _least_of_fields(manifest: Manifest) -> int:
    """Return the oldest format version whose readers know every field that is not empty."""
    calls = (call for calls in manifest.programs.values() for call in calls)
    s = manifest.stream
    ring = Ring(s.sink_frames, s.ring_frames, s.chunk_frames, s.reference_frames)
    needed = (
        (LEVELS_VERSION, any(one.name == PICTURE_LEVELS for one in manifest.buffers)),
        (SHARED_DECODE_VERSION, manifest.shares_decoding),
        (COPIES_VERSION, ring.repeats_references),
        (RANK_VERSION, manifest.ranks > 1),
        (INPUT_VERSION, bool(manifest.inputs)),
        (WINDOW_VERSION, any(made_by_begin(one) for one in manifest.buffers)),
        (REFERENCE_VERSION, bool(s.reference_frames)),
        (
            FIRST_LAYER_VERSION,
            bool(s.rings) or any(one.first_layer or one.first_place for one in calls),
        ),
        (OFFLOADED_VERSION, manifest.offloads_cache),
        (POOL_VERSION, manifest.pool is not None),
    )
    return max((version for version, so in needed if so), default=1)

"""What the stream's table says of frames fits what the caches hold, and the text's table what its engine looks up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seko_runtime.cli.commands import main
from seko_runtime.errors import ManifestError
from seko_runtime.format.manifest import Buffer
from seko_runtime.video.contract import resolve_video
from seko_runtime.video.manifest import VideoManifest

from . import toy, toy_pool, toy_whole
from .conftest import Edit

HUGE = 1 << 31


@pytest.mark.parametrize(
    "change",
    [
        {"ring_frames": 18},
        {"ring_frames": toy.RING + 1},
        {"ring_frames": toy.RING - 1},
        {"ring_frames": toy.CACHE},
        {"ring_frames": HUGE},
        {"sink_frames": 0},
        {"sink_frames": toy.CACHE},
        {"sink_frames": HUGE},
        {"sink_frames": HUGE, "ring_frames": HUGE},
        {"reference_frames": 1},
        {"frame_tokens": toy.TOKENS + 1},
        {"frame_tokens": 1},
        {"frame_tokens": HUGE},
        {"rings": {"small": toy.RING - 1}},
    ],
    ids=str,
)
def test_frames_that_the_caches_do_not_hold_are_refused_before_anything_is_loaded(
    whole_folder: Path, edit_manifest: Edit, change: Mapping[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    edit_manifest(
        whole_folder,
        lambda manifest: toy.changed(manifest, stream=replace(manifest.workload.stream, **change)),
    )
    assert main(["verify", str(whole_folder)]) == 4
    assert "cache buffer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "manifest",
    [toy.toy_manifest(2), toy_whole.whole_manifest(3), toy_pool.pool_manifest()],
    ids=["2", "3", "pool"],
)
def test_whole_caches_are_taken_and_longer_rings_refused(manifest: VideoManifest) -> None:
    resolve_video(manifest)
    for ring in (toy.RING - 1, toy.RING + 1, 18, HUGE):
        with pytest.raises(ManifestError, match=r"cache buffer (kv )?holds"):
            resolve_video(toy.changed(manifest, stream=replace(manifest.workload.stream, ring_frames=ring)))


def apart(**frames: int) -> VideoManifest:
    """The toy with a cache of its own for each of these numbers of frames, beside that of all."""
    manifest = toy.toy_manifest()
    more = tuple(
        Buffer(name, (toy.LAYERS, count * toy.TOKENS, 2), "uint8", "cache", row_axis=1)
        for name, count in frames.items()
    )
    pool_bytes = manifest.workload.kv.pool_bytes + sum(buffer.nbytes for buffer in more)
    return toy.changed(
        manifest, buffers=(*manifest.buffers, *more), kv=replace(manifest.workload.kv, pool_bytes=pool_bytes)
    )


def test_the_frames_before_the_ring_and_the_ring_may_lie_apart() -> None:
    resolve_video(apart(sink=toy.SINK, ring=toy.RING))
    with pytest.raises(ManifestError, match="cache buffer ring holds 9 entries a row"):
        resolve_video(apart(sink=toy.SINK, ring=toy.RING - 1))
    numbers = Buffer("kv.slot_frames", (toy.CACHE,), "int64", "cache")
    manifest = apart()
    slots = replace(manifest, buffers=(*manifest.buffers, numbers))
    kv = slots.workload.kv
    slots = toy.changed(slots, kv=replace(kv, pool_bytes=kv.pool_bytes + numbers.nbytes))
    resolve_video(slots)


def test_a_ring_that_no_cache_holds_is_refused() -> None:
    manifest = toy.toy_manifest()
    stream = replace(manifest.workload.stream, sink_frames=toy.CACHE)
    with pytest.raises(ManifestError, match="no cache buffer holds a ring of 4 frames"):
        resolve_video(toy.changed(manifest, stream=stream))
    stream = replace(manifest.workload.stream, ring_frames=toy.CACHE)  # the sink is nowhere then
    with pytest.raises(ManifestError, match="no cache buffer holds a ring of 5 frames"):
        resolve_video(toy.changed(manifest, stream=stream))


@pytest.mark.parametrize("name", ["text.embeddings", "conditioning.latents", "prompt.mean", "decode.latents"])
def test_a_buffer_of_rows_that_is_said_to_be_of_layers_is_refused(name: str) -> None:
    """The host would cut it along another axis than the programs do."""
    manifest = toy_pool.pool_manifest()
    buffers = tuple(
        replace(buffer, row_axis=1) if buffer.name == name else buffer for buffer in manifest.buffers
    )
    with pytest.raises(ManifestError, match=f"{name} .*(row_axis|cannot be cut)"):
        resolve_video(replace(manifest, buffers=buffers))


@pytest.mark.parametrize("pad_id", [len(toy_whole.WORDS), HUGE])
def test_a_pad_id_beyond_the_text_engines_table_is_refused(
    whole_folder: Path, edit_manifest: Edit, pad_id: int, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_manifest(
        whole_folder, lambda manifest: toy.changed(manifest, text=replace(toy_whole.TABLE, pad_id=pad_id))
    )
    assert main(["verify", str(whole_folder)]) == 4
    assert f"text.pad_id is {pad_id}, the text engine looks up ids below 12" in capsys.readouterr().err


def test_the_last_row_of_the_table_may_pad() -> None:
    table = replace(toy_whole.TABLE, pad_id=len(toy_whole.WORDS) - 1)
    resolve_video(toy_whole.whole_manifest(text=table))


@pytest.mark.parametrize("axis", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", ["kv", "latents", "frames", "seeds"])
def test_rows_on_an_axis_that_calls_do_not_leave_to_them_are_refused(name: str, axis: int) -> None:
    """Also where one row could be cut along any axis."""
    for manifest in (toy.toy_manifest(), toy_pool.pool_manifest()):
        changed = replace(
            manifest,
            buffers=tuple(replace(b, row_axis=axis) if b.name == name else b for b in manifest.buffers),
        )
        if changed == manifest:
            resolve_video(changed)
        else:
            with pytest.raises(ManifestError, match=rf"{name}.*(row_axis|axis {axis}|entries a row)"):
                resolve_video(changed)


def test_a_program_without_calls_is_refused() -> None:
    manifest = toy.toy_manifest()
    for name in manifest.programs:
        with pytest.raises(ManifestError, match=f"program {name} has no calls"):
            resolve_video(replace(manifest, programs={**manifest.programs, name: ()}))

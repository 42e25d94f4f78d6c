"""The resident window of the second attention: cached frames under their cameras in 8 bits, once a chunk."""

from __future__ import annotations

import torch

from seko_export.families.layers.choice import INTRINSICS, POSES
from seko_export.families.layers.past_window import TurnedWindow, quantise_past
from seko_kernels.formats import KEY_TILE
from tests.minwm.streams import MODEL, cameras_of, look, minwm_config, random_checkpoint
from tests.truth.eager_stream import EagerStream, random_text, same_bytes

RESIDENT = {"fused": True, "attention": "fp8", "resident_window": True}
BYTES_OF_NAN = 0x7F  # e4m3's NaN: what is not written must not be read


def test_denoise_passes_read_two_windows_and_no_cache() -> None:
    config = minwm_config("fp4", **RESIDENT)
    stream = EagerStream(config, random_checkpoint(), random_text(MODEL, 1))
    called = [call.engine for call in stream.programs["begin"]]
    assert called == ["noise", "chunk_matrices", "places", *["window"] * MODEL.layers]
    taken = {argument.name for argument in stream.pieces["block"].inputs}
    assert not any(name.startswith("caches.") for name in taken)
    own, extra = {"k", "k_scale", "v"}, {"extra_k", "extra_k_scale", "extra_v", "extra_v_scale"}
    assert {name.removeprefix("window.") for name in taken if name.startswith("window.")} == own | extra
    assert {name for name in stream.buffers if name.startswith("window.")} == {
        f"window.{name}" for name in own | extra
    }


def test_a_rows_window_is_its_own() -> None:
    """Two rows, the second begun anew behind the second chunk, once with cameras that are far apart: the first row does
    not see it, though both share a call and its windows."""
    config = minwm_config("fp4", layout={"batch": 2}, **RESIDENT)
    found: list[list[torch.Tensor]] = []
    for apart in (1.0, 40.0):
        stream = EagerStream(config, random_checkpoint(), random_text(MODEL, 2))
        for name, buffer in stream.buffers.items():
            if name.startswith("window"):
                buffer.view(torch.uint8).fill_(BYTES_OF_NAN)
        rows = []
        for number in range(5):
            cameras = cameras_of(config, number)
            cameras[POSES][1, :, :, 3] *= apart
            look(stream, cameras)
            second = number if number < 2 else number - 2
            passes = stream.run_chunk([4 * number, 4 * second], [3, 8])
            rows += [done.latents.clone() for done in passes]
        assert all(latents.isfinite().all() for latents in rows)
        found.append(rows)
    for near, far in zip(*found, strict=True):
        assert same_bytes(near[0], far[0])
    assert not same_bytes(found[0][-1][1], found[1][-1][1])


def test_its_scales_are_those_of_its_numbers() -> None:
    """Rows of sizes a thousand apart, tokens that are not filled and NaN, more tokens than a tile has."""
    heads, size, past = 2, 32, 2 * KEY_TILE + 3
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, past, heads, size, generator=generator) for _ in range(2))
    k, v = (x * torch.tensor([1.0, 1000.0])[:, None, None, None] for x in (k, v))
    cached = torch.arange(past) < torch.tensor([past, KEY_TILE + 5])[:, None]
    k, v = (x.masked_fill(~cached[:, :, None, None], float("nan")) for x in (k, v))
    stream = minwm_config("fp4").workload.stream
    empty = TurnedWindow.empty(heads, size, stream, 2)
    window = TurnedWindow(
        torch.empty(2, -(-past // 16) * 16, heads, size, dtype=torch.int8),
        torch.empty(2, heads, 4),
        torch.empty(2, heads, size, 4 * KEY_TILE, dtype=empty.v.dtype),
        torch.empty(2, heads),
    )
    quantise_past(window, k, v, cached)
    scale = window.k_scale.repeat_interleave(KEY_TILE, 2)[..., :past].transpose(1, 2)  # [B, P, H]
    keys = window.k[:, :past].float() * scale.unsqueeze(-1)
    values = (window.v.float() * window.v_scale[:, :, None, None])[..., :past].permute(0, 3, 1, 2)
    for row in range(2):
        there = cached[row]
        wanted = k[row, there]
        of_tile = scale[row, there].unsqueeze(-1)
        assert ((keys[row, there] - wanted).abs() <= 0.5001 * of_tile).all()
        assert of_tile.max() <= wanted.abs().max() / 127 * 1.0001
        wanted = v[row, there]
        assert (
            (values[row, there] - wanted).abs() <= wanted.abs() / 16 + wanted.abs().max() * 2.0**-17
        ).all()
        assert wanted.abs().max() / 448 <= window.v_scale[row].max() < 2 * wanted.abs().max() / 448
        assert not window.k[row, :past][~there].any()
    assert torch.equal(window.v_scale.log2(), window.v_scale.log2().round())


def test_cameras_far_from_where_the_stream_began_change_nothing() -> None:
    """Windows hold what is relative to the chunk's first camera, so its scales do not grow with the distance."""
    config = minwm_config("fp4", **RESIDENT)
    scales = []
    for far in (0.0, 1000.0):
        stream = EagerStream(config, random_checkpoint(), random_text(MODEL, 1))
        for number in range(4):
            cameras = cameras_of(config, number)
            look(stream, {POSES: cameras[POSES] + far * torch.eye(4)[3], INTRINSICS: cameras[INTRINSICS]})
            stream.run_chunk([4 * number], [3])
        scales.append(stream.buffers["window.extra_v_scale"].clone())
    assert torch.equal(*scales)

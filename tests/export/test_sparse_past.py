"""Streams that attend to a share of the cached keys: against an attention of their own in float64, and as builds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from click.testing import Result
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from scripts.random_checkpoint import write_random_checkpoint
from seko_export import BuildOptions
from seko_export.build_steps import build_artifact
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.errors import UsageError
from seko_export.families.layers.fused_block import FusedBlock
from seko_export.families.layers.layer_ops import LayerOps
from seko_export.families.layers.pieces import make_pieces
from seko_export.families.wan.presets import PRESETS
from seko_export.lowering.trace import trace
from seko_export.video.plan.predict import PlanRequest, predict
from seko_export.video.plan.table import show
from seko_kernels.attention import OwnTokens
from seko_kernels.formats import KEY_TILE
from seko_kernels.sparse_past import QUERY_TILE
from seko_runtime import read_manifest
from tests.support.asked import resolved, wished
from tests.support.hopper import on_hopper
from tests.support.tolerances import FP8_PASS, relative_error
from tests.support.uncompiled import programs_as_they_are
from tests.truth.eager_stream import EagerStream, random_text, random_wan_weights, same_bytes, small_config

# 72 tokens a frame: two lists of queries, and frames that begin within tiles; 16 cached frames are 9 tiles.
STREAM = StreamConfig(128, 144, chunk_frames=3, sink_frames=1, ring_frames=18, batch=2)
TILES, COUNT = 9, 5
WIDTHS = {"batch": 2, "scheme": "fp4", "passes": 2}


def dense(*, resident: bool = False) -> VideoBuild:
    config = small_config(3, 1, 18, **WIDTHS)
    return config.changed(stream=replace(STREAM), fused=True, attention="fp8", resident_window=resident)


def sparse(share: float = 0.4, *, resident: bool = False) -> VideoBuild:
    return dense(resident=resident).changed(past_share=share)


class TrueOps(LayerOps):
    """The choice and the attention anew, in float64, from the frames that the test knows to be cached."""

    def __init__(self) -> None:
        self.firsts: list[int] = []  # of the rows' present chunks
        self.left_out = 0  # tiles, counted once a list

    def choose_past(self, *given: Any) -> Tensor:
        """Only to be handed to the attention: none of it is computed here."""
        layout, count = given[-2:]
        assert (layout.tiles, count) == (TILES, COUNT)
        return torch.tensor(count)

    def attention_fp8(
        self,
        q: Tensor,
        k: Tensor,
        k_scale: Tensor,
        v_t: Tensor,
        v_scale: Tensor,
        valid: Tensor,
        own: OwnTokens,
        *,
        chosen: Tensor,
    ) -> Tensor:
        """The attention with a mask of whole tiles."""
        del valid  # the frames say it
        batch, queries, heads, size = q.shape
        out = torch.empty(batch, queries, heads, size, dtype=torch.float64)
        number = torch.arange(k.shape[1])
        for row, first in enumerate(self.firsts):
            frames = self._in_order(first)
            cached = len(frames) * STREAM.frame_tokens
            always = torch.zeros(TILES, dtype=torch.bool)
            for token in range(cached):
                newest = first - STREAM.chunk_frames <= frames[token // STREAM.frame_tokens] < first
                pinned = frames[token // STREAM.frame_tokens] < STREAM.sink_frames
                always[token // KEY_TILE] |= newest or pinned or token == cached - 1
            real = (
                k[row] * k_scale[row].repeat_interleave(KEY_TILE, 1)[:, : k.shape[1]].T.unsqueeze(-1)
            ).double()
            for head in range(heads):
                keys = torch.cat((real[:cached, head], own.k[row, :, head].double()))
                old = (v_t[row, head, :, :cached].float() * v_scale[head]).T.double()
                values = torch.cat((old, own.v[row].unflatten(-1, (heads, size))[:, head].double()))
                for begin in range(0, queries, QUERY_TILE):
                    asks = q[row, begin : begin + QUERY_TILE, head].double()
                    likeness = torch.tensor(
                        [
                            float(asks.mean(0) @ real[tile * KEY_TILE : (tile + 1) * KEY_TILE, head].mean(0))
                            for tile in range(-(-cached // KEY_TILE))
                        ],
                        dtype=torch.float64,
                    )
                    likeness[always[: len(likeness)]] = torch.inf
                    best = {*likeness.argsort(descending=True)[: int(chosen)].tolist()}
                    self.left_out += len(likeness) - len(best)
                    live = torch.tensor(
                        [int(n) // KEY_TILE in best for n in number[:cached]], dtype=torch.bool
                    )
                    coarse = self._as_int8(asks)
                    scores = torch.cat((coarse @ keys[:cached].T, asks @ keys[cached:].T), 1) * size**-0.5
                    scores[:, :cached].masked_fill_(~live, -torch.inf)
                    out[row, begin : begin + QUERY_TILE, head] = F.softmax(scores, 1) @ values
        return out.flatten(2).to(q.dtype)

    @staticmethod
    def _as_int8(x: Tensor) -> Tensor:
        """Queries as 8 bits hold them: the largest of a row has a code from 64 to 127."""
        step = 2.0 ** (x.abs().amax(1, keepdim=True).log2().floor() - 6)
        return (x / step).round().clamp(-127, 127) * step

    @staticmethod
    def _in_order(first: int) -> list[int]:
        """The cached frames in the order of their slots, without those that the present chunk takes."""
        held: dict[int, int] = {}
        for frame in range(first + STREAM.chunk_frames):
            behind = frame - STREAM.sink_frames
            held[frame if behind < 0 else STREAM.sink_frames + behind % STREAM.ring_frames] = frame
        return [held[slot] for slot in sorted(held) if held[slot] < first]


@pytest.mark.shows("past-share")
def test_every_pass_is_that_of_a_masked_attention() -> None:
    """Two rows, the second begun anew behind the fourth chunk; the ring goes round. Attention to all keys of the same
    cache gives something else."""
    config = sparse()
    weights, text = random_wan_weights(config.model), random_text(config.model, 2)
    ours, every = EagerStream(config, weights, text), EagerStream(dense(), weights, text)
    truth, ops = EagerStream(config, weights, text), TrueOps()
    for name in ("block", "block_context"):
        module = truth.pieces[name].module
        assert isinstance(module, FusedBlock)
        module.ops = ops
    bound = FP8_PASS / 20  # a code next to a border may fall otherwise
    for number in range(8):
        ops.firsts = [3 * number, 3 * (number if number < 4 else number - 4)]
        for name in every.buffers.keys() & {"kv.slot_frames", *every.caches()}:
            every.buffers[name].copy_(ours.buffers[name])
        wanted = truth.run_chunk(ops.firsts, [1, 2])
        feed = [step.latents for step in wanted]
        results = ours.run_chunk(ops.firsts, [1, 2], feed=feed)
        for step, other in zip(wanted[:-1], results[:-1], strict=True):
            assert relative_error(other.velocity, step.velocity) <= bound
        if number in range(1, 3):  # both rows have room for all of their tiles
            assert ops.left_out == 0
    assert ops.left_out > 100
    whole = every.run_chunk(ops.firsts, [1, 2], feed=feed)
    pairs = zip(whole[:-1], wanted[:-1], strict=True)
    apart = [relative_error(all_keys.velocity, step.velocity) for all_keys, step in pairs]
    assert max(apart) > 20 * bound


def test_a_resident_window_gives_the_same_bytes() -> None:
    configs = (sparse(), sparse(resident=True))
    weights, text = random_wan_weights(configs[0].model), random_text(configs[0].model, 2)
    anew, ours = (EagerStream(config, weights, text) for config in configs)
    for number in range(7):
        first = [3 * number, 3 * (number if number < 4 else number - 4)]
        for step, other in zip(*(stream.run_chunk(first, [1, 2]) for stream in (anew, ours)), strict=True):
            assert same_bytes(other.latents, step.latents)


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_lists_that_would_hold_every_tile_leave_layers_as_they_were(share: float) -> None:
    """0.9 of 9 tiles are 9."""
    with_share, without = make_pieces(sparse(share, resident=True)), make_pieces(dense(resident=True))
    assert with_share["block"].inputs == without["block"].inputs
    module = with_share["block"].module
    assert isinstance(module, FusedBlock)
    assert module.sparse_past is None
    assert {a.name for a in make_pieces(sparse(resident=True))["block"].inputs} == {
        "write_slots",
        *(a.name for a in without["block"].inputs),
    }


def test_a_gpu_build_launches_the_kernel_for_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced at full size for sm_90 with tensors that have no memory; no op of it waits for the host."""
    on_hopper(monkeypatch)
    preset = PRESETS["self-forcing-1.3b"]
    config = VideoBuild(
        preset.model,
        VideoConfig(preset.stream, Schedule.warped(), "fp4"),
        TargetConfig("cuda", fused=True, attention="fp8", resident_window=True, past_share=0.4),
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = trace(make_pieces(config)["block"], "cuda").graph
    called = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    ours = [target._schema.name for target in called if target.namespace == "seko"]
    row = "seko::row_norm"
    assert ours == [row, "seko::qk_norm_rope", "seko::sparse_attention_fp8", *[row] * 2]
    assert not {"_local_scalar_dense", "nonzero", "item"} & {
        target._schema.name.removeprefix("aten::") for target in called
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention": "torch", "kernels": "fused", "past_share": 0.4}, "attention is torch"),
        ({"kernels": "plain", "past_share": 0.4}, "attention is torch"),
        ({"attention": "fp8", "kernels": "fused", "past_share": 0.0}, "above 0, and at most 1"),
        ({"attention": "fp8", "kernels": "fused", "past_share": 1.5}, "above 0, and at most 1"),
        ({"attention": "fp8", "kernels": "fused", "past_share": float("nan")}, "above 0, and at most 1"),
    ],
)
def test_what_is_refused(options: dict, words: str) -> None:
    with pytest.raises(UsageError, match=f"--past-share .*{words}"):
        resolved("tiny", "fp4", **options)


def test_plans_of_tensorrt_are_refused() -> None:
    with pytest.raises(
        UsageError, match="no attention to a share of the cached keys yet: leave --past-share"
    ):
        resolved("tiny", "fp4", attention="fp8", past_share=0.4, backend="tensorrt-rtx", target="sm_120")


def test_all_of_the_past_may_be_asked_for_anywhere() -> None:
    asked = resolved("tiny", "fp4", past_share=1.0)
    assert asked == resolved("tiny", "fp4")


def test_the_command_refuses_it_in_a_sentence(invoke: Callable[..., Result], tmp_path: Path) -> None:
    asked = invoke(
        "build", "--preset", "tiny", "--target", "cpu", "--past-share", "0.4", "-o", tmp_path / "artifact"
    )
    assert (asked.exit_code, asked.stdout) == (2, "")
    assert "--past-share 0.4: " in asked.stderr


def test_the_plan_counts_the_smaller_attention_and_the_choice() -> None:
    wish = PlanRequest(
        BuildOptions(preset="wan-14b", fp4_kv=True, resident_window=True, no_vae=True, no_text=True), "h200"
    )
    every, some = predict(wish), predict(wished(wish, past_share=0.4))
    kind = "self-attention"
    cached, own = 28_080, 4_680
    share = some["step"][kind]["flops"] / every["step"][kind]["flops"]
    assert share == pytest.approx((88 * KEY_TILE + own) / (cached + own), rel=0.01)
    rows = [report["step"]["row kernels"]["seconds"] for report in (every, some)]
    assert rows[0] < rows[1] < rows[0] + 0.1 * (every["step_s"] - some["step_s"])
    assert "attention fp8 to 0.4 of the cached keys" in show(some)
    assert "of the cached keys" not in show(every)
    assert predict(wished(wish, past_share=1.0)) == every


@pytest.mark.slow
def test_a_build_for_this_cpu_keeps_its_goldens(tmp_path: Path) -> None:
    """Model, lowering, manifest, and replay by the runtime, which verifies it: the second golden's lists cannot hold
    every tile."""
    model = replace(PRESETS["tiny"].model, layers=2, dim=64, heads=2, ffn_dim=64)
    stream = StreamConfig(128, 144, 1, 0, 7)  # 432 cached tokens are 4 tiles, of which 3 are taken
    target = TargetConfig("cpu", fused=True, attention="fp8", resident_window=True, past_share=0.1)
    config = VideoBuild(model, VideoConfig(stream, Schedule.warped(1), "fp4"), target)
    write_random_checkpoint(tmp_path / "tiny.pt", model, format="self-forcing", seed=0, dtype=torch.float32)
    folder = tmp_path / "artifact"
    with programs_as_they_are():
        build_artifact(config, tmp_path / "tiny.pt", folder, backend="compile", compiler_cache=False)
    manifest, _ = read_manifest(folder)
    assert json.loads((folder / manifest.extra["kernels"]).read_text())["past_share"] == 0.1

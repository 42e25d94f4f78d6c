"""Which kernels a build takes: by its options, by the GPU, and as artifact and doctor tell it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from seko_export.config.attention import BF16, FP8
from seko_export.config.pool import PoolConfig
from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.engines import kernel_table
from seko_export.errors import UsageError
from seko_export.families.wan.presets import PRESETS
from seko_export.host.environment import Target, has_fp8
from seko_kernels import hopper_attention_bf16, tuned, tuned_bf16
from seko_kernels.tuned import SAFE, SPECIALISED, AttentionTiles, measured_tiles, shape_class, tiles_for
from tests.support.asked import resolved


def test_what_the_options_mean() -> None:
    def planned(
        kernels: str = "auto", *, kv: str = "fp4", gpu: bool | None = None, **more: object
    ) -> VideoBuild:
        device = {} if gpu is None else {"device": "cuda", "arch": "sm_89" if gpu else "sm_80"}
        return resolved("tiny", kv, kernels=kernels, **device, **more).config

    assert not planned().target.fused
    assert planned("fused").target.fused
    assert [planned(gpu=gpu).target.fused for gpu in (True, False)] == [True, True]
    assert not planned("plain", gpu=True).target.fused
    assert planned(gpu=False, kv="bf16").target.fused
    assert planned(gpu=True, kv="int8-fp4").target.fused
    assert not planned(gpu=True, backend="compile").target.fused
    # No tiles were measured for sm_89, so 8-bit attention comes by name alone there.
    assert planned(gpu=True).target.attention == "torch"
    assert planned(gpu=True, attention="fp8").target.attention == "fp8"
    assert planned(gpu=True, fp8=True).target.attention == "torch"
    assert planned(gpu=True, fp8=True, attention="fp8").target.attention == "fp8"
    refused: list[tuple[dict[str, object], str]] = [
        ({"gpu": False, "attention": "fp8"}, "no fp8 numbers"),
        ({"gpu": False, "fp8": True, "kv": "bf16"}, "no fp8 numbers"),
        ({"kernels": "fused", "kv": "int8", "attention": "fp8"}, "reads an FP4 cache, this build's is int8"),
        ({"kernels": "plain", "gpu": True, "attention": "fp8"}, "layers|build's are plain"),
        ({"fp8": True}, "--fp8 needs a GPU"),
        ({"kernels": "plain", "gpu": True, "fp8": True}, "layers are plain"),
        ({"kernels": "fused", "backend": "onnx"}, "onnx has no fused kernels yet"),
        ({"kernels": "fast"}, "auto, plain, fused"),
        ({"gpu": True, "attention": "bf16"}, "for sm_90, this GPU is sm_89"),
        ({"kernels": "plain", "attention": "bf16"}, "of fused layers"),
        ({"attention": "fast"}, "auto, torch, bf16, fp8"),
    ]
    for options, words in refused:
        with pytest.raises(UsageError, match=words):
            planned(**options)  # type: ignore[arg-type]


def test_attention_in_8_bits_is_taken_where_its_tiles_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(arch: str = "sm_90", kv: str = "fp4", attention: str = "auto", **more: Any) -> bool:
        plan = resolved("self-forcing-1.3b", kv, device="cuda", arch=arch, attention=attention, **more)
        return plan.config.target.attention == "fp8"

    monkeypatch.setattr(tuned, "tuned_table", lambda: {("sm_90", 128, "some"): SAFE})
    assert taken()
    assert not taken(attention="torch")
    assert not taken(kv="bf16")
    assert not taken(kv="fp4-int8")
    assert not taken("sm_89")
    assert not taken("sm_80")
    assert taken("sm_89", attention="fp8")
    assert taken(sessions=4, batch=(1, 2))
    assert not taken(sessions=4, batch=(1, 4))  # calls of four are of another class

    # The kernel of specialised warpgroups reads groups of 16 keys: a past of 18 frames of 390 tokens is filled up.
    monkeypatch.setattr(tuned_bf16, "faster_table", frozenset)
    monkeypatch.setattr(
        tuned, "tuned_table", lambda: {("sm_90", 128, "some"): SPECIALISED, ("sm_90", 128, "few"): SAFE}
    )
    assert taken()
    monkeypatch.setattr(
        tuned, "tuned_table", lambda: {("sm_90", 128, name): SPECIALISED for name in ("few", "some")}
    )
    plan = resolved("self-forcing-1.3b", "fp4", height=208, width=480, device="cuda", arch="sm_90")
    assert plan.config.target.attention == "fp8"
    assert plan.config.workload.stream.frame_tokens == 390
    (tiles,) = kernel_table.attention_tiles(plan.config, Target("cuda", "sm_90"))
    assert tiles["past_tokens"] == 18 * 390 + 4


def test_16_bit_attention_is_taken_where_it_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(arch: str = "sm_90", kv: str = "bf16", wish: str = "auto", **more: object) -> str:
        build = resolved("self-forcing-1.3b", kv, device="cuda", arch=arch, attention=wish, **more)
        return build.config.target.attention

    monkeypatch.setattr(tuned, "tuned_table", lambda: {("sm_90", 128, "some"): SAFE})
    monkeypatch.setattr(tuned_bf16, "faster_table", lambda: frozenset({("sm_90", 128, "some")}))
    assert taken() == taken(kv="int8") == taken(wish="bf16") == "bf16"
    assert taken(kv="fp4") == "fp8"
    assert taken(kv="fp4", wish="bf16") == "bf16"
    assert taken(wish="torch") == taken("sm_89") == taken(kernels="plain") == "torch"
    assert taken(sessions=4, batch=(1, 2)) == "bf16"
    assert taken(sessions=4, batch=(1, 4)) == "torch"  # calls of four are of another class
    monkeypatch.setattr(tuned_bf16, "faster_table", frozenset)
    assert taken() == "torch"
    assert taken(wish="bf16") == "bf16"


def test_what_16_bit_attention_does_not_take() -> None:
    preset = PRESETS["self-forcing-1.3b"]
    config = VideoBuild(
        preset.model, VideoConfig(preset.stream, Schedule.warped(), "bf16"), TargetConfig("cuda", fused=True)
    )
    assert (BF16.arch, BF16.head_dim) == (hopper_attention_bf16.ARCH, hopper_attention_bf16.HEAD_DIM)
    assert config.no_attention(BF16) is None
    assert "of fused layers" in str(config.changed(fused=False).no_attention(BF16))
    narrow = config.changed(model=replace(preset.model, heads=2 * preset.model.heads))
    assert "heads of 128 channels, not 64" in str(narrow.no_attention(BF16))
    with pytest.raises(UsageError, match="--attention bf16: it takes heads"):
        narrow.changed(attention="bf16")
    with pytest.raises(UsageError, match="--attention 'fp4' is not known: expected one of torch, bf16, fp8"):
        config.changed(attention="fp4")


@pytest.mark.parametrize(
    ("arch", "words"),
    [
        (None, "torch's own: there is no GPU"),
        ("sm_80", "no fp8, since sm_80 has no such numbers"),
        ("sm_90", "tiles measured for heads of 128 channels, "),
        ("sm_89", "no tiles measured for sm_89; else safe ones, 64 x 64"),
    ],
)
def test_the_doctor_says_which_kernels(arch: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_table, "local_gpu_arch", lambda: arch)
    monkeypatch.setattr(tuned, "tuned_table", lambda: {("sm_90", 128, "some"): SAFE})
    line = kernel_table.examine_kernels()
    assert words in line.found
    assert line.ok  # each GPU has some


def test_the_table_of_kernels_says_what_the_op_picks() -> None:
    preset = PRESETS["self-forcing-1.3b"]
    config = VideoBuild(
        preset.model,
        VideoConfig(preset.stream, Schedule.warped(), "fp4"),
        TargetConfig("cuda", fused=True, fp8=True, attention="fp8"),
    )
    pool = config.changed(pool=PoolConfig(4, (1, 4)), fp8_except=(3,))
    table = kernel_table.kernel_table(pool, Target("cuda", "sm_90"))
    assert (table["layers"], table["matmuls"], table["fp8_except"]) == ("fused", "fp8", [3])
    assert [entry["rows"] for entry in table["attention_tiles"]] == [1, 4]
    for entry in table["attention_tiles"]:
        shape = shape_class(entry["rows"], 12, preset.stream.chunk_tokens)
        assert entry["past_tokens"] == preset.stream.cache_tokens - preset.stream.chunk_tokens
        assert AttentionTiles(**entry["tiles"]) == tiles_for("sm_90", 128, shape, entry["past_tokens"])
        assert entry["measured"] == (measured_tiles("sm_90", 128, shape, entry["past_tokens"]) is not None)
    assert not kernel_table.kernel_table(config, Target("cuda", "sm_120"))["attention_tiles"][0]["measured"]
    exact = config.changed(kv_scheme="bf16", fp8=False, attention="torch")
    assert kernel_table.kernel_table(exact, Target("cuda", "sm_90"))["attention_tiles"] == []


def test_which_gpus_have_fp8() -> None:
    archs = {"sm_80": False, "sm_86": False, "sm_89": True, "sm_90": True, "sm_100": True, "sm_120": True}
    assert {arch: has_fp8(Target("cuda", arch)) for arch in archs} == archs
    assert not has_fp8(Target("cpu", "x86_64"))


def test_what_fp8_attention_does_not_take() -> None:
    preset = PRESETS["self-forcing-1.3b"]

    def refused(**stream: int) -> str | None:
        layout = replace(preset.stream, **stream)
        config = VideoBuild(
            preset.model, VideoConfig(layout, Schedule.warped(), "fp4"), TargetConfig("cuda", fused=True)
        )
        return config.no_attention(FP8)

    chunk = preset.stream.chunk_frames
    assert refused() is None
    assert refused(reference_frames=chunk) is None
    assert refused(reference_frames=1) is None  # a chunk of it is filled up with copies
    assert "reference frames" in str(refused(reference_frames=chunk - 1))
    assert "reference frames" in str(refused(reference_frames=chunk + 1))
    assert "the chunk alone" in str(refused(sink_frames=0, ring_frames=chunk))

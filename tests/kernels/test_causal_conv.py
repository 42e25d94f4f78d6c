"""causal_conv: the reference against float64, streams, refusals, what compiles, its table, its admission."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from scripts.kernel_admission import conv as admission_conv
from scripts.kernel_admission.conv import ConvCase, admit_conv, conv_inputs
from seko_kernels import causal_conv, tuned_conv
from seko_kernels.causal_conv import DOUBLED_TAPS, doubled_filters, packed_filters
from seko_kernels.conv_reference import e4m3_filters
from seko_kernels.errors import KernelsError, TilesError
from seko_kernels.fused_reference import FP8, e4m3_cast
from seko_kernels.hopper_conv import REGISTERS, WARPS
from seko_kernels.outlines import kernel_of
from seko_kernels.triton.causal_conv import causal_conv_kernel
from seko_kernels.tuned_conv import (
    SHARED_BYTES,
    Convolution,
    ConvTiles,
    has_fp8_convolutions,
    measured_tiles,
    read_table,
    size_class,
    write_table,
)
from tests.kernels.captured import run_and_replay
from tests.kernels.conftest import OTHERS
from tests.support.hopper import on_hopper
from tests.support.tiers import first_is_fast
from tests.support.tolerances import FUSED, relative_error
from tests.truth.naive_conv import doubled_frames, naive_causal_conv, some_convolution

TILES = ConvTiles(8, 16, 64, 32, 32, stages=4, warps=4, resident=2)
MARGIN = ConvTiles(6, 64, 64, 32, 32, stages=4, warps=4, margin=True)
FILTERS_FIRST = ConvTiles(16, 16, 128, 0, 32, stages=4, warps=8, filters_first=True)
TAPS = [(3, 3, 3), (3, 1, 1), (1, 3, 3), (1, 1, 1)]
SIDES = (2, 3, 4, 5, 6, 7)  # rows, frames, height, width, channels, filters


def convolved(given: dict[str, Tensor], *, cached: bool = True, added: bool = True) -> Tensor:
    return causal_conv.causal_conv(
        given["x"],
        given["earlier"] if cached else None,
        packed_filters(given["weight"]),
        given["bias"],
        given["residual"] if added else None,
        tiles=TILES,
    )


@pytest.mark.parametrize("taps", TAPS, ids=str)
@pytest.mark.parametrize(("cached", "added"), [(True, True), (False, False)])
def test_the_reference_is_the_convolution(taps: tuple[int, int, int], cached: bool, added: bool) -> None:
    inputs = some_convolution(*SIDES, taps)
    truth = naive_causal_conv(
        inputs["x"],
        inputs["earlier"] if cached else None,
        inputs["weight"],
        inputs["bias"],
        inputs["residual"] if added else None,
    )
    assert relative_error(convolved(inputs, cached=cached, added=added), truth) <= FUSED[torch.float32]


def test_the_reference_of_doubling_is_the_convolution_of_doubled_frames() -> None:
    inputs = some_convolution(*SIDES, (1, 3, 3))
    truth = naive_causal_conv(doubled_frames(inputs["x"]), None, inputs["weight"], inputs["bias"])
    out = causal_conv.doubled_conv(inputs["x"], *doubled(inputs), tiles=TILES)
    assert out.is_contiguous()
    assert relative_error(out, truth) <= FUSED[torch.float32]


def doubled(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Weight and bias of `doubled_conv`."""
    return doubled_filters(inputs["weight"].squeeze(2)), inputs["bias"]


def test_a_stream_of_calls_is_the_whole() -> None:
    """The first call without earlier frames, then more than 30 of one frame or two."""
    inputs = some_convolution(1, 52, 4, 5, 6, 7, (3, 3, 3))
    whole = convolved(inputs, cached=False)
    joined, parts, earlier = inputs["x"], [], None
    weight = packed_filters(inputs["weight"])
    cut = [2, *[1, 2] * 16, 2]
    assert sum(cut) == joined.shape[1]
    for x, residual in zip(joined.split(cut, 1), inputs["residual"].split(cut, 1), strict=True):
        given_now = (x.contiguous(), earlier, weight, inputs["bias"], residual.contiguous())
        parts.append(causal_conv.causal_conv(*given_now, tiles=TILES))
        past = x if earlier is None else torch.cat((earlier, x), dim=1)
        earlier = past[:, -2:].contiguous()
    assert relative_error(torch.cat(parts, 1), whole) <= FUSED[torch.float32]


def test_e4m3_is_as_near_as_its_numbers() -> None:
    """Products of numbers that are each off by 2**-4 at most, 2.6 % in norm."""
    inputs = some_convolution(1, 3, 5, 6, 32, 16, (3, 3, 3))
    values, scale = e4m3_filters(packed_filters(inputs["weight"]))
    x, earlier = (e4m3_cast(inputs[name] * 16) for name in ("x", "earlier"))
    out = causal_conv.causal_conv(
        x, earlier, values, inputs["bias"], inputs["residual"], scale=scale / 16, tiles=TILES
    )
    exact = naive_causal_conv(
        x.float() / 16,
        earlier.float() / 16,
        (values.float() * scale[:, None]).permute(3, 4, 0, 1, 2),
        inputs["bias"],
        inputs["residual"],
    )
    assert relative_error(out, exact) <= FUSED[torch.float32]
    truth = naive_causal_conv(*(inputs[name] for name in ("x", "earlier", "weight", "bias", "residual")))
    assert 0.001 < relative_error(out, truth) < 0.04


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {**a, "x": a["x"][0]}, "expected \\[batch, frames"),
        (lambda a: {**a, "x": a["x"].transpose(2, 3)}, "strided"),
        (lambda a: {**a, "x": a["x"].half()}, "x is torch.float16"),
        (lambda a: {**a, "bias": a["bias"].half()}, "bias is torch.float16"),
        (lambda a: {**a, "earlier": a["earlier"][:, :1].contiguous()}, "earlier has shape"),
        (lambda a: {**a, "weight": a["weight"][:, :5]}, "weight has shape"),
        (lambda a: {**a, "weight": a["weight"][..., :2]}, "odd numbers"),
        (lambda a: {**a, "residual": a["residual"][..., :3].contiguous()}, "residual has shape"),
        (lambda a: {name: x.to("meta") for name, x in a.items()}, "meta"),
    ],
)
def test_refusals(change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str) -> None:
    with pytest.raises(KernelsError, match=message):
        convolved(change(some_convolution(*SIDES, (3, 3, 3))))


def test_refusals_of_doubling() -> None:
    inputs = some_convolution(*SIDES, (1, 3, 3))
    x, (weight, bias) = inputs["x"], doubled(inputs)
    for wrong, message in (
        ((x[0], weight, bias), "expected \\[batch, frames"),
        ((x.half(), weight, bias), "x is torch.float16"),
        ((x, weight[:1], bias), "weight has shape"),
        ((x, packed_filters(inputs["weight"]), bias), "weight has shape"),
        ((x, weight, bias[:3].contiguous()), "bias has shape"),
        ((x.to("meta"), weight.to("meta"), bias.to("meta")), "meta"),
    ):
        with pytest.raises(KernelsError, match=message):
            causal_conv.doubled_conv(*wrong, tiles=TILES)


@pytest.mark.parametrize(
    ("channels", "filters", "tiles", "kind"),
    first_is_fast(
        [
            (96, 96, TILES, "*bf16"),
            (192, 192, ConvTiles(8, 16, 128, 64, 64, stages=4, warps=8), "*bf16"),
            (24, 48, ConvTiles(8, 16, 32, 16, 32, stages=4, warps=4, resident=3), "*bf16"),
            (192, 192, ConvTiles(8, 16, 128, 64, 64, stages=4, warps=8), "*fp8e4nv"),
            (96, 96, ConvTiles(16, 16, 128, 0, 32, stages=6, warps=8, filters_first=True), "*bf16"),
            (192, 192, ConvTiles(16, 16, 128, 64, 64, stages=3, warps=8, filters_first=True), "*fp8e4nv"),
        ]
    ),
)
def test_the_kernel_compiles_for_hopper_without_spills(
    channels: int,
    filters: int,
    tiles: ConvTiles,
    kind: str,
    cross_compile: Callable[..., Any],
    sass_of: Callable[[Any], list[str]],
    loops_of: Callable[[Any], list[list[str]]],
) -> None:
    """Boxes come from tensor descriptors, and each loop's products are the matrix unit's. With filters first no loop
    copies a factor to registers, or waits for a product before all are under way."""
    kernel = cross_compile(
        causal_conv_kernel, *signature(channels, filters, tiles, kind), 90, tiles.warps, ("height", "width")
    )
    assert kernel.metadata.shared * tiles.resident <= SHARED_BYTES
    opcodes = sass_of(kernel)
    assert {"QGMMA" if kind == "*fp8e4nv" else "HGMMA", "UTMALDG"} <= set(opcodes)
    loops = [loop for loop in loops_of(kernel) if {"HGMMA", "QGMMA"} & set(loop)]
    assert len(loops) == 2
    copies = {"LDSM"} if tiles.filters_first else set()
    assert not any(({"LDL", "STL"} | copies) & set(loop) for loop in loops)
    if tiles.filters_first:  # a fence in front of each part's products, and a wait behind all
        assert [loop.count("WARPGROUP") for loop in loops] == [2 + bool(tiles.more_filters)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "filters", "tiles"),
    [
        (192, 96, TILES),
        (384, 192, ConvTiles(8, 32, 128, 64, 64, stages=3, warps=8, filters_first=True)),
    ],
)
def test_the_kernel_that_doubles_compiles_for_hopper_without_spills(
    channels: int,
    filters: int,
    tiles: ConvTiles,
    cross_compile: Callable[..., Any],
    loops_of: Callable[[Any], list[list[str]]],
) -> None:
    types, constants = signature(channels, filters, tiles, "*bf16")
    taps = dict(zip(("TAPS_T", "TAPS_H", "TAPS_W"), DOUBLED_TAPS, strict=True))
    constants |= {**taps, "CACHED": False, "ADD": False, "DOUBLED": True}
    kernel = cross_compile(causal_conv_kernel, types, constants, 90, tiles.warps, ("height", "width"))
    assert kernel.metadata.shared * tiles.resident <= SHARED_BYTES
    (loop,) = [loop for loop in loops_of(kernel) if "HGMMA" in loop]
    assert not {"LDL", "STL"} & set(loop)
    assert tiles.filters_first == ("LDSM" not in loop)


def test_each_step_frees_the_stage_before_it(cross_compile: Callable[..., Any]) -> None:
    """A barrier that was chosen outside the loop would be the same one in each step: the loader would wait for ever."""
    types, constants = signature(96, 96, MARGIN, "*bf16")
    of_triton = ("TAPS_H", "TAPS_W", "BH", "FILTERS_FIRST", "DOUBLED")
    constants = {name: value for name, value in constants.items() if name not in of_triton}
    kernel = cross_compile(
        kernel_of("causal_conv_outline"), types, {**constants, "REGISTERS": REGISTERS}, 90, WARPS
    )
    lines = kernel.asm["ttgir"].splitlines()
    arrivals = [place for place, line in enumerate(lines) if "ttng.arrive_barrier" in line]
    assert len(arrivals) == 2 * 3  # in a step and behind the last one, of three warpgroups
    for place in arrivals:
        barrier = lines[place].split("ttng.arrive_barrier ")[1].split(",")[0]
        (stage,) = re.findall(rf"{barrier} = ttg.memdesc_index %\w+\[(%\w+)\]", lines[place - 1])
        loop = max(number for number, line in enumerate(lines[:place]) if "scf.for" in line)
        assert any(f"{stage} = " in line for line in lines[loop + 1 : place])


@pytest.mark.slow
def test_the_kernel_compiles_for_every_gpu(cross_compile: Callable[..., Any]) -> None:
    tiles = ConvTiles(8, 8, 32, 16, 32, stages=2, warps=4)
    for arch in OTHERS:
        cross_compile(causal_conv_kernel, *signature(96, 96, tiles, "*bf16"), arch, 4)


def signature(
    channels: int, filters: int, tiles: ConvTiles, kind: str
) -> tuple[dict[str, str], dict[str, Any]]:
    """Types and constants of `causal_conv_kernel` with cached frames and a residual."""
    types = {
        **dict.fromkeys(("X", "EARLIER", "W"), kind),
        "SCALE": "*fp32",
        **dict.fromkeys(("BIAS", "RESIDUAL", "OUT"), "*bf16"),
        **dict.fromkeys(("batch", "frames", "height", "width"), "i32"),
    }
    constants = {
        "CHANNELS": channels,
        "FILTERS": filters,
        "TAPS_T": 3,
        "TAPS_H": 3,
        "TAPS_W": 3,
        "CACHED": True,
        "SCALED": kind != "*bf16",
        "ADD": True,
        "BH": tiles.rows,
        "BW": tiles.columns,
        "BN": tiles.filters,
        "BN_MORE": tiles.more_filters,
        "BK": tiles.channels,
        "STAGES": tiles.stages,
        "FILTERS_FIRST": tiles.filters_first,
        "DOUBLED": False,
    }
    return types, constants


# -- where it is taken -----------------------------------------------------------------------------------------


def row(**change: object) -> dict[str, Any]:
    sizes = {
        "rows": 8,
        "columns": 16,
        "filters": 64,
        "more_filters": 32,
        "channels": 32,
        "stages": 4,
        "warps": 4,
    }
    known = {
        "arch": "sm_90",
        "channels": 96,
        "filters": 96,
        "taps": [3, 3, 3],
        "shape_class": "many",
        "fp8": False,
    }
    return {**known, "tiles": sizes, "error": 0.01, "bound": 0.02, "ms": 1.0, "torch_ms": 1.2, **change}


def test_an_op_takes_tile_sizes_as_numbers() -> None:
    for tiles in (TILES, MARGIN):
        assert ConvTiles.of_numbers(tiles.numbers) == tiles


def test_tiles_with_a_margin_need_gluon_and_three_rows_of_taps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the Gluon of triton 3.6, torch's convolution is used."""
    write_table(tmp_path / "table.json", [row(tiles=asdict(MARGIN))])
    monkeypatch.setattr(tuned_conv, "faster_table", lambda: read_table(tmp_path / "table.json"))
    place = Convolution(96, 96, (3, 3, 3), "many")
    assert measured_tiles("sm_90", place) == MARGIN
    monkeypatch.setattr(tuned_conv, "gluon_fault", lambda: ImportError("no Gluon"))
    assert measured_tiles("sm_90", place) is None
    on_hopper(monkeypatch)
    with FakeTensorMode():
        x, weight, bias = (
            torch.empty(*shape, 96, dtype=torch.bfloat16, device="cuda")
            for shape in ((1, 2, 8, 8), (3, 1, 1, 96), ())
        )
        with pytest.raises(KernelsError, match="3 x 3 taps"):
            causal_conv.causal_conv(x, None, weight, bias, tiles=MARGIN)


def test_the_table_that_ships_can_be_read() -> None:
    read_table(tuned_conv.TABLE)


def test_only_what_was_faster_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "table.json"
    write_table(file, [row(), row(channels=192, taps=[1, 3, 3])])
    write_table(file, [row(ms=0.9)])
    assert [line["ms"] for line in json.loads(file.read_text())] == [0.9, 1.0]
    place = Convolution(96, 96, (3, 3, 3), "many")
    assert read_table(file)["sm_90", place].more_filters == 32
    monkeypatch.setattr(tuned_conv, "faster_table", lambda: read_table(file))
    assert size_class(12, 480, 832) == place.shape_class
    assert measured_tiles("sm_90", place) == read_table(file)["sm_90", place]
    assert measured_tiles("sm_90", place._replace(channels=192, taps=(1, 3, 3))) is not None
    for other in (
        place._replace(shape_class=size_class(1, 60, 832)),  # a smaller call
        place._replace(taps=(1, 3, 3)),
        place._replace(fp8=True),
    ):
        assert measured_tiles("sm_90", other) is None
    assert measured_tiles("sm_100", place) is None
    assert not has_fp8_convolutions("sm_90", {96})
    write_table(file, [row(fp8=True, tiles={**row()["tiles"], "stages": 5})])
    stages = [measured_tiles("sm_90", place._replace(fp8=fp8)).stages for fp8 in (False, True)]
    assert stages == [4, 5]
    assert has_fp8_convolutions("sm_90", {48, 96})
    assert not has_fp8_convolutions("sm_90", {192})
    assert not has_fp8_convolutions("sm_100", {96})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"error": float("nan")}, "above its bound"),
        ({"ms": 1.2}, "no less than torch's"),
        ({"shape_class": "huge"}, "no shape class"),
        ({"taps": [3, 3]}, "no table"),
        ({"tiles": {"rows": 8}}, "no table"),
        ({"tiles": {**row()["tiles"], "filters": 96}}, "power of two"),
        ({"tiles": {**row()["tiles"], "rows": 2}}, "64 pixels"),
        ({"tiles": {**row()["tiles"], "filters_first": True}}, "more_filters must be .* at least 64"),
        ({"tiles": {**row()["tiles"], "margin": True}}, "6 x 64 pixels"),
        ({"tiles": {**row()["tiles"], "stages": 0}}, "at least 1"),
        ({"tiles": {**row()["tiles"], "warps": 16}}, "16 warps, expected 4 or 8"),
        ({"tiles": {**asdict(MARGIN), "warps": 8}}, "8 warps, expected .* 4 with a margin"),
    ],
)
def test_tables_that_cannot_be(change: dict[str, object], message: str, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text(json.dumps([row(**change)]))
    with pytest.raises(TilesError, match=message):
        read_table(file)


Launches = list[tuple[str, list[str]]]


@pytest.mark.parametrize("channels", [96, 20])
@pytest.mark.parametrize("tiles", [TILES, MARGIN], ids=["box", "margin"])
def test_the_op_on_a_gpu_is_one_launch(
    channels: int, tiles: ConvTiles, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames whose pixels take no multiple of 16 bytes are padded in front of it."""
    padded, pad = list[Tensor](), torch.nn.functional.pad

    def noted(x: Tensor, *sides: Any) -> Tensor:
        padded.append(x)
        return pad(x, *sides)

    monkeypatch.setattr(causal_conv.F, "pad", noted)
    x, earlier, weight, bias = on_gpu(channels)
    assert causal_conv.causal_conv(x, earlier, weight, bias, tiles=tiles).shape == (1, 4, 6, 8, 96)
    kernel = "causal_conv_outline" if tiles.margin else "causal_conv_kernel"
    assert launches == [(kernel, ["OUT"])]
    assert [tensor.shape for tensor in padded] == (
        [x.shape, weight.shape, earlier.shape] if channels == 20 else []
    )


def test_doubling_on_a_gpu_is_one_launch(launches: Launches) -> None:
    x, weight, bias = (
        torch.empty(*shape, dtype=torch.bfloat16, device="cuda")
        for shape in ((1, 4, 6, 8, 192), (4, 2, 2, 96, 192), (96,))
    )
    assert causal_conv.doubled_conv(x, weight, bias, tiles=TILES).shape == (1, 4, 12, 16, 96)
    assert launches == [("causal_conv_kernel", ["OUT"])]
    with pytest.raises(KernelsError, match="3 x 3 taps"):
        causal_conv.doubled_conv(x, weight, bias, tiles=MARGIN)


def test_refusals_on_a_gpu(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    x, earlier, weight, bias = on_gpu(96)
    with pytest.raises(KernelsError, match="margin are for bfloat16 and e4m3 numbers, got float32"):
        causal_conv.causal_conv(x.float(), earlier.float(), weight.float(), bias.float(), tiles=MARGIN)
    scale = torch.empty(96, dtype=torch.float32, device="cuda")
    narrow = (tensor.to(FP8) for tensor in on_gpu(24)[:3])
    with pytest.raises(KernelsError, match="multiple of 16 channels on a GPU, got 24"):
        causal_conv.causal_conv(*narrow, bias, scale=scale, tiles=TILES)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    e4m3 = (tensor.to(FP8) for tensor in (x, earlier, weight))
    with pytest.raises(KernelsError, match="fp8"):
        causal_conv.causal_conv(*e4m3, bias, scale=scale, tiles=TILES)
    assert launches == []


def on_gpu(channels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fake frames, earlier frames, weight and bias of a convolution with 96 filters."""
    shapes = (1, 4, 6, 8, channels), (1, 2, 6, 8, channels), (3, 3, 3, 96, channels), (96,)
    x, earlier, weight, bias = (torch.empty(*shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    return x, earlier, weight, bias


# -- admission -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True])
def test_admission_admits_what_is_right(fp8: bool) -> None:
    passed = admit_conv(TILES, 6, 5, (3, 3, 3), "cpu", fp8=fp8)
    assert passed.refusal == ""
    assert 0 <= passed.error <= passed.bound


def test_admission_of_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    assert admit_conv(TILES, 6, 5, DOUBLED_TAPS, "cpu").refusal == ""
    right = causal_conv.doubled_conv

    def shifted(x: Tensor, *rest: Any, **named: Any) -> Tensor:
        return right(x, *rest, **named).roll(1, dims=3)

    monkeypatch.setattr(admission_conv, "doubled_conv", shifted)
    assert "above" in admit_conv(TILES, 6, 5, DOUBLED_TAPS, "cpu").refusal


def test_admission_refuses_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = causal_conv.causal_conv

    def refusal(wrong: Callable[..., Tensor]) -> str:
        monkeypatch.setattr(admission_conv, "causal_conv", wrong)
        return admit_conv(TILES, 6, 5, (3, 3, 3), "cpu").refusal

    def no_past(x: Tensor, _: Tensor | None, *rest: Any, **named: Any) -> Tensor:
        return right(x, None, *rest, **named)

    def edge_lost(x: Tensor, *rest: Any, **named: Any) -> Tensor:
        return right(torch.cat((x[:, :, :, :-1], 0 * x[:, :, :, -1:]), 3), *rest, **named)

    def unwritten(*given: Any, **named: Any) -> Tensor:
        out = right(*given, **named)
        out[0, -1, -1, -1, -1] = torch.nan
        return out

    def no_code(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("PassManager::run failed")

    assert "above" in refusal(no_past)
    assert "above" in refusal(edge_lost)
    assert "error nan" in refusal(unwritten)
    assert "two runs differ" in refusal(lambda *a, **n: right(*a, **n) * (1 + torch.rand(()) * 1e-3))
    assert "PassManager" in refusal(no_code)


# -- on a GPU --------------------------------------------------------------------------------------------------


class ConvModule(torch.nn.Module):
    """The convolution as an engine's graph sees it."""

    def __init__(self, tiles: ConvTiles) -> None:
        super().__init__()
        self.tiles = tiles

    def forward(self, x: Tensor, earlier: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return causal_conv.causal_conv(x * 1.0, earlier, packed_filters(weight), bias, tiles=self.tiles) + 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("taps", TAPS, ids=str)
@pytest.mark.parametrize(
    ("channels", "filters", "fp8"),
    [(96, 96, False), (16, 384, False), (20, 36, False), (96, 3, False), (96, 96, True)],
)
def test_gpu_admits_it(channels: int, filters: int, fp8: bool, taps: tuple[int, int, int]) -> None:
    for tiles in (TILES, FILTERS_FIRST, MARGIN) if taps[1:] == (3, 3) else (TILES, FILTERS_FIRST):
        assert admit_conv(tiles, channels, filters, taps, full=(3, 60, 104), fp8=fp8).refusal == ""


@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "filters"), [(192, 96), (384, 192), (20, 36), (96, 3)])
def test_gpu_admits_doubling(channels: int, filters: int) -> None:
    for tiles in (TILES, FILTERS_FIRST):
        assert admit_conv(tiles, channels, filters, DOUBLED_TAPS, full=(3, 60, 104)).refusal == ""


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [TILES, FILTERS_FIRST, MARGIN], ids=["box", "filters first", "margin"])
def test_gpu_package_is_the_reference(tiles: ConvTiles, package_runner: Callable[..., Any]) -> None:
    case = ConvCase("engine", 1, 4, 61, 90, cached=True, added=False)
    inputs = conv_inputs(case, 96, 96, (3, 3, 3), "cuda")
    assert inputs.earlier is not None
    weight = inputs.weight.permute(3, 4, 0, 1, 2).contiguous()
    arguments = (inputs.x, inputs.earlier, weight, inputs.bias)
    engine = package_runner(ConvModule(tiles), arguments)
    (direct,), (captured,) = run_and_replay(engine, arguments)
    assert torch.equal(direct, causal_conv.causal_conv(*inputs[:3], inputs.bias, tiles=tiles))
    assert torch.equal(direct, captured)

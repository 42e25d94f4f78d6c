"""The VAE whose convolutions are Seko's kernel: which of them, the same video, and no change without measured tiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from seko_export.engines.piece import on_meta
from seko_export.errors import UsageError
from seko_export.host.environment import Target
from seko_export.media.wan_vae import layers, own_convolution
from seko_export.media.wan_vae.config import VAE_PRESETS, WanVaeConfig
from seko_export.media.wan_vae.layers import (
    CausalConv3d,
    FrameCaches,
    ResidualBlock,
    Upsample,
    as_clip,
    as_images,
    run,
)
from seko_export.media.wan_vae.modules import (
    VaeDecode,
    VaeEncode,
    decoder_cache_shapes,
    encoder_cache_shapes,
)
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import resolve_build
from seko_kernels import tuned_conv
from seko_kernels.causal_conv import causal_conv, tiles_on
from seko_kernels.tuned_conv import Convolution, ConvTiles, read_table, write_table
from tests.export.test_wan_vae import Flat
from tests.export.vae_oracle import SMALL, SMALL_2_2, VaeOracle, stream
from tests.tiers import first_is_fast
from tests.tolerances import VAE, relative_error

TILES = ConvTiles(8, 16, 64, 32, 32, stages=4, warps=4)
FP8_PLACE = Convolution(96, 96, (3, 3, 3), "many", fp8=True)
HEIGHT, WIDTH = 3, 5  # latent cells, odd on both sides
LIGHT = VAE_PRESETS["lightvae"]
CALLS_OF_33 = (2, *[1, 2] * 16)  # latent frames of each call


@pytest.fixture
def convolved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights, [t, r, c, O, C], with which the kernel's reference was called."""
    shapes: list[tuple[int, ...]] = []

    def noted(x: Tensor, earlier: Tensor | None, weight: Tensor, *rest: Any, **named: Any) -> Tensor:
        shapes.append(tuple(weight.shape))
        return causal_conv(x, earlier, weight, *rest, **named)

    monkeypatch.setattr(own_convolution, "causal_conv", noted)
    return shapes


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every convolution is the kernel's."""
    monkeypatch.setattr(layers, "tiles_on", everywhere)


def everywhere(x: Tensor, *_: Tensor, **__: bool) -> ConvTiles | None:
    return None if x.is_meta else TILES


def clip(config: WanVaeConfig, kind: type[nn.Module], frames: int) -> Tensor:
    """Random latents or video of this many latent frames from the start of a stream."""
    generator = torch.Generator().manual_seed(frames)
    if kind is VaeDecode:
        return torch.randn(1, config.z_dim, frames, HEIGHT, WIDTH, generator=generator)
    side = config.spatial_stride
    shape = (1, 3, config.video_frames(frames, first=True), side * HEIGHT, side * WIDTH)
    return torch.rand(shape, generator=generator) * 2 - 1


@pytest.mark.usefixtures("admitted")
@pytest.mark.parametrize(
    ("config", "cut"),
    first_is_fast(
        [
            (SMALL, (2, 1, 2)),
            (SMALL, (1, 1, 3)),
            (SMALL, CALLS_OF_33),
            (SMALL_2_2, (2, 1)),
            (SMALL_2_2, (1, 2)),
            (LIGHT, (1, 2, 1)),
        ]
    ),
)
def test_a_stream_is_diffusers_on_the_whole_clip(
    config: WanVaeConfig, cut: tuple[int, ...], convolved: list[tuple[int, ...]]
) -> None:
    """FIRST, then STEADY, 32 chunks of it; odd sides; widths of LightVAE and of Wan 2.2."""
    oracle = VaeOracle(torch.float32, config)
    latents, video = clip(config, VaeDecode, sum(cut)), clip(config, VaeEncode, sum(cut))
    decoded = stream(oracle, VaeDecode, latents, cut)
    count = sum(
        isinstance(m, CausalConv3d | Upsample) for m in VaeDecode(config, first=True, frames=1).modules()
    )
    idle = sum(m.time_conv is not None for m in oracle_upsamples(config)) if cut[0] == 1 else 0
    assert len(convolved) == len(cut) * count - idle
    assert relative_error(decoded, oracle.decode(latents)) <= VAE[torch.float32]
    assert relative_error(stream(oracle, VaeEncode, video, cut), oracle.encode(video)) <= VAE[torch.float32]


def oracle_upsamples(config: WanVaeConfig) -> list[Upsample]:
    return [m for m in VaeDecode(config, first=True, frames=1).modules() if isinstance(m, Upsample)]


@pytest.mark.usefixtures("admitted")
def test_the_last_of_many_chunks_is_as_near_as_the_first(convolved: list[tuple[int, ...]]) -> None:
    """The plain modules are compared, chunk by chunk: no drift."""
    oracle = VaeOracle(torch.float32)
    latents = clip(SMALL, VaeDecode, sum(CALLS_OF_33))
    ours = stream(oracle, VaeDecode, latents, CALLS_OF_33)
    whole = VaeOracle(torch.float64).decode(latents.double())
    errors = [relative_error(*pair) for pair in zip(ours.split(12, 2), whole.split(12, 2), strict=True)]
    assert convolved
    assert max(errors) <= VAE[torch.float32]


@pytest.mark.parametrize("first", [True, False])
def test_some_convolutions_of_a_call_may_be_the_kernels(
    first: bool, convolved: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wide_only(x: Tensor, weight: Tensor, **_: bool) -> ConvTiles | None:
        return everywhere(x, weight) if len(weight) == 4 * SMALL.base_dim else None

    oracle = VaeOracle(torch.float32)
    half = oracle.half(VaeDecode, first=first, frames=2)
    shapes = () if first else decoder_cache_shapes(SMALL, 1, HEIGHT, WIDTH)
    given = (clip(SMALL, VaeDecode, 2), *(torch.randn(shape) for shape in shapes))
    monkeypatch.setattr(layers, "tiles_on", lambda *_, **__: None)
    expected = half(*given)
    assert not convolved
    monkeypatch.setattr(layers, "tiles_on", wide_only)
    found = half(*given)
    assert {shape[3] for shape in convolved} == {4 * SMALL.base_dim}
    assert all(relative_error(*pair) <= VAE[torch.float32] for pair in zip(found, expected, strict=True))
    assert all(cache.is_contiguous() for cache in found[1:])
    assert all(cache.untyped_storage().nbytes() == cache.nbytes for cache in found[1:])


def test_ranks_that_share_a_picture_use_torchs_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "tiles_on", everywhere)
    layer, x = CausalConv3d(4, 4, side=3), torch.empty(1, 4, 2, 3, 5)
    assert layer.tiles(x, FrameCaches(None)) == TILES
    assert layer.tiles(x, FrameCaches(None, split=SimpleNamespace())) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("fp8", [True, False])
def test_e4m3_is_for_a_decoders_blocks_where_it_was_measured(
    fp8: bool, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `fp8` in the config; encoders, upsampling and the last convolution stay as they are."""
    dtypes: list[torch.dtype] = []

    def noted(x: Tensor, earlier: Tensor | None, weight: Tensor, *rest: Any, **named: Any) -> Tensor:
        dtypes.append(weight.dtype)
        return causal_conv(x, earlier, weight, *rest, **named)

    def tiles(x: Tensor, _: Tensor, *, fp8: bool = False) -> ConvTiles | None:
        return None if x.is_meta or (fp8 and not measured) else TILES

    monkeypatch.setattr(own_convolution, "causal_conv", noted)
    monkeypatch.setattr(layers, "tiles_on", tiles)
    config = replace(SMALL, fp8=fp8)
    oracle = VaeOracle(torch.float32)
    plain = stream(oracle, VaeDecode, clip(SMALL, VaeDecode, 3), (1, 2))
    dtypes.clear()
    oracle.config = config
    ours = stream(oracle, VaeDecode, clip(SMALL, VaeDecode, 3), (1, 2))
    in_e4m3 = [dtype for dtype in dtypes if dtype is torch.float8_e4m3fn]
    assert len(in_e4m3) == (2 * 2 * 14 if fp8 and measured else 0)
    assert torch.equal(ours, plain) == (not in_e4m3)
    assert relative_error(ours, plain) < 0.3
    dtypes.clear()
    stream(oracle, VaeEncode, clip(SMALL, VaeEncode, 1), (1,))
    assert set(dtypes) == {torch.float32}


# -- the option --------------------------------------------------------------------------------------------------


def asked(**options: Any) -> BuildOptions:
    return BuildOptions(preset="sample", vae_fp8=True, **options)


def test_vae_fp8_is_refused_where_nothing_would_be_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = Target("cuda", "sm_90")
    for options, machine, message in (
        (asked(), Target("cpu", "x86_64"), "no fp8 convolution was measured on x86_64"),
        (asked(), hopper, "no fp8 convolution was measured on sm_90"),
        (asked(no_vae=True), hopper, "this build has no VAE"),
        (asked(ranks=2), hopper, "contradicts --ranks 2"),
    ):
        with pytest.raises(UsageError, match=f"--vae-fp8.*{message}"):
            resolve_build(options, machine=machine)
    monkeypatch.setattr(tuned_conv, "faster_table", lambda: {("sm_90", FP8_PLACE): TILES})
    vae = resolve_build(asked(), machine=hopper).config.workload.vae
    assert isinstance(vae, WanVaeConfig)
    assert vae.fp8
    assert vae.title.endswith(", fp8 convolutions")
    with pytest.raises(
        UsageError, match="--backend compile has no fp8 convolutions yet: leave --vae-fp8 out"
    ):
        resolve_build(asked(backend="compile"), machine=hopper)


# -- graphs ---------------------------------------------------------------------------------------------------


class PlainConvolution(CausalConv3d):
    """The convolution without the kernel."""

    def forward(self, x: Tensor, caches: FrameCaches) -> Tensor:
        joined = torch.cat((caches.before(x, 2), x), dim=2)
        padding = (self._beside, self._beside)
        caches.keep(joined[:, :, -2:])
        if caches.starts and x.shape[2] == 1:
            return self._convolved(x, self.weight[:, :, -1:], padding)
        return self._convolved(joined, self.weight, padding)


class PlainBlock(ResidualBlock):
    def forward(self, x: Tensor, caches: FrameCaches) -> Tensor:
        beside: Tensor = self.shortcut(x)
        return beside + run(self.residual, x, caches)


class PlainUpsample(Upsample):
    def forward(self, x: Tensor, caches: FrameCaches) -> Tensor:
        if self.time_conv is not None:
            if not caches.starts:
                x = layers._interleaved(self.time_conv(x, caches))
            elif x.shape[2] == 1:
                caches.keep(caches.before(x, 2))
            else:
                x = torch.cat((x[:, :, :1], layers._interleaved(self.time_conv(x[:, :, 1:], caches))), dim=2)
        return as_clip(self.resample(as_images(x)), x.shape[0])


PLAIN = {CausalConv3d: PlainConvolution, ResidualBlock: PlainBlock, Upsample: PlainUpsample}
CALLS = [
    (VaeDecode, False, 3),
    (VaeDecode, True, 3),
    (VaeDecode, True, 1),
    (VaeEncode, False, 1),
    (VaeEncode, True, 1),
]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices of a build on a GPU, of graphs on a CPU."""

    def tiles(x: Tensor, weight: Tensor, *, fp8: bool = False) -> ConvTiles | None:
        if x.is_meta:
            return tiles_on(x, weight, fp8=fp8)
        there = SimpleNamespace(
            shape=x.shape, dim=x.dim, dtype=x.dtype, is_cuda=True, device=torch.device("cuda")
        )
        return tiles_on(there, weight, fp8=fp8)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(layers, "by_cudnn", lambda _: True)
    monkeypatch.setattr(layers, "tiles_on", tiles)


def graph_of(kind: type[VaeDecode] | type[VaeEncode], first: bool, frames: int, *, plain: bool) -> str:
    """The code of a call of Wan's VAE in bfloat16 at 480x832."""
    config = VAE_PRESETS["wan-2.1"]
    table = decoder_cache_shapes if kind is VaeDecode else encoder_cache_shapes
    shapes = () if first else table(config, 1, 60, 104)
    half = on_meta(lambda: kind(config, first=first, frames=frames, dtype=torch.bfloat16))
    for module in half.modules():
        if plain and type(module) in PLAIN:
            module.__class__ = PLAIN[type(module)]
    x = (1, 16, frames, 60, 104) if kind is VaeDecode else (1, 3, half.video_frames, 480, 832)
    with FakeTensorMode():
        weights = [torch.empty(weight.shape, dtype=weight.dtype) for weight in half.parameters()]
        caches = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
        traced = make_fx(Flat(half))(*weights, torch.empty(x), *caches)
    return str(traced.code)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("kind", "first", "frames"), CALLS)
def test_without_a_row_for_this_gpu_the_graph_is_as_if_there_were_no_kernel(
    kind: type[VaeDecode] | type[VaeEncode],
    first: bool,
    frames: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuned_conv, "faster_table", dict)
    plain = graph_of(kind, first, frames, plain=True)
    assert "convolution" in plain
    assert graph_of(kind, first, frames, plain=False) == plain
    file = tmp_path / "table.json"
    write_table(file, [row(96, 96, arch="sm_100"), row(96, 96, shape_class="few")])
    monkeypatch.setattr(tuned_conv, "faster_table", lambda: read_table(file))
    assert graph_of(kind, first, frames, plain=False) == plain


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("first", [True, False])
def test_with_rows_the_graph_has_the_kernel_there(
    first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, convolved: list[tuple[int, ...]]
) -> None:
    """Six convolutions of 96 channels, and one of pictures behind the last upsampling."""
    file = tmp_path / "table.json"
    write_table(file, [row(96, 96), row(192, 96, taps=[1, 3, 3])])
    monkeypatch.setattr(tuned_conv, "faster_table", lambda: read_table(file))
    plain = graph_of(VaeDecode, first, 3, plain=True)
    assert not convolved
    ours = graph_of(VaeDecode, first, 3, plain=False)
    assert convolved == [(1, 3, 3, 96, 192), *[(3, 3, 3, 96, 96)] * 6]
    # torch's convolutions are one for each tap in time; the reference of the kernel is one in float32
    assert convolutions_in(ours) == convolutions_in(plain) - 6 * (3 - 1)


def convolutions_in(code: str) -> int:
    return code.count("aten.convolution.default(")


def row(channels: int, filters: int, **change: object) -> dict[str, Any]:
    tiles = {name: getattr(TILES, name) for name in TILES.__dataclass_fields__}
    known = {
        "arch": "sm_90",
        "channels": channels,
        "filters": filters,
        "taps": [3, 3, 3],
        "shape_class": "many",
        "fp8": False,
    }
    return {**known, "tiles": tiles, "error": 0.01, "bound": 0.02, "ms": 1.0, "torch_ms": 1.2, **change}

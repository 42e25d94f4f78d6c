"""The VAE whose convolutions are Seko's kernel: which of them, the same video, the weights that a build writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.engines.piece import FlatModule
from seko_export.errors import UsageError
from seko_export.families.wan.presets import PRESETS
from seko_export.host.environment import Target
from seko_export.media.pieces import media_pieces, shared_vae_module
from seko_export.media.wan_vae import own_convolution
from seko_export.media.wan_vae.config import VAE_PRESETS, WanVaeConfig
from seko_export.media.wan_vae.layers import CausalConv3d, ResidualBlock, RmsNorm, Upsample
from seko_export.media.wan_vae.modules import (
    VaeDecode,
    VaeEncode,
    VaeTensors,
    decoder_cache_shapes,
    encoder_cache_shapes,
)
from seko_export.media.wan_vae.own_convolution import NormSilu, TilesOf, packed_weights, use_own_convolutions
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import resolve_build
from seko_export.roofline.kinds import CONVOLUTION, OWN_CONVOLUTION
from seko_export.roofline.op_count import Launch, count_piece
from seko_kernels import conv_reference, tuned_conv
from seko_kernels.causal_conv import causal_conv, doubled_conv
from seko_kernels.ops import stand_ins
from seko_kernels.tuned_conv import Convolution, ConvTiles, read_table, write_table
from tests.export.vae_oracle import SMALL, SMALL_2_2, VaeOracle, stream
from tests.support.tiers import first_is_fast
from tests.support.tolerances import VAE, relative_error

TILES = ConvTiles(8, 16, 64, 32, 32, stages=4, warps=4)
FP8_PLACE = Convolution(64, 64, (3, 3, 3), "few", fp8=True)  # of the sample's VAE
HEIGHT, WIDTH = 3, 5  # latent cells, odd on both sides
LIGHT = VAE_PRESETS["lightvae"]
MANY_CALLS = (2, *[1, 2] * 6)  # latent frames of each call


@pytest.fixture
def convolved(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights, [t, r, c, O, C], with which the kernel's reference was called."""
    weights: list[Tensor] = []

    def noted(x: Tensor, earlier: Tensor | None, weight: Tensor, *rest: Any, **named: Any) -> Tensor:
        weights.append(weight)
        return causal_conv(x, earlier, weight, *rest, **named)

    def noted_doubled(x: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Tensor:
        weights.append(weight)
        return doubled_conv(x, weight, *rest, **named)

    monkeypatch.setattr(own_convolution, "causal_conv", noted)
    monkeypatch.setattr(own_convolution, "doubled_conv", noted_doubled)
    return weights


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A function that writes the table of measured convolutions, which otherwise does not change in a process."""
    file = tmp_path / "table.json"
    monkeypatch.setattr(tuned_conv, "faster_table", lambda: read_table(file))

    def write(*rows: dict[str, Any]) -> None:
        write_table(file, [*rows])
        shared_vae_module.cache_clear()

    yield write
    shared_vae_module.cache_clear()


class OwnOracle(VaeOracle):
    """Our halves have the kernel in the places for which `tiles_of` has tiles."""

    def __init__(
        self, dtype: torch.dtype, config: WanVaeConfig = SMALL, tiles_of: TilesOf = lambda _: TILES
    ) -> None:
        super().__init__(dtype, config)
        self.tiles_of = tiles_of

    def half(self, kind: type[VaeDecode] | type[VaeEncode], *, first: bool, frames: int) -> nn.Module:
        half = super().half(kind, first=first, frames=frames)
        use_own_convolutions(half, inputs_of(half), self.tiles_of)
        return half


def inputs_of(half: VaeDecode | VaeEncode) -> list[Tensor]:
    """Inputs of a call, zeros."""
    config, decodes = half.config, isinstance(half, VaeDecode)
    side, z = config.spatial_stride, config.z_dim
    shape = (
        (1, z, half.frames, HEIGHT, WIDTH)
        if decodes
        else (1, 3, half.video_frames, side * HEIGHT, side * WIDTH)
    )
    table = decoder_cache_shapes if decodes else encoder_cache_shapes
    shapes = () if half.first else table(config, 1, HEIGHT, WIDTH)
    return [torch.zeros(shape), *(torch.zeros(cache, dtype=half.dtype) for cache in shapes)]


def clip(config: WanVaeConfig, kind: type[nn.Module], frames: int) -> Tensor:
    """Random latents or video of this many latent frames from the start of a stream."""
    generator = torch.Generator().manual_seed(frames)
    if kind is VaeDecode:
        return torch.randn(1, config.z_dim, frames, HEIGHT, WIDTH, generator=generator)
    side = config.spatial_stride
    shape = (1, 3, config.video_frames(frames, first=True), side * HEIGHT, side * WIDTH)
    return torch.rand(shape, generator=generator) * 2 - 1


@pytest.mark.parametrize(
    ("config", "cut"),
    first_is_fast(
        [
            (SMALL, (2, 1, 2)),
            (SMALL_2_2, (1, 2)),
            (LIGHT, (1, 2, 1)),
        ]
    ),
)
def test_a_stream_is_diffusers_on_the_whole_clip(
    config: WanVaeConfig, cut: tuple[int, ...], convolved: list[Tensor]
) -> None:
    """FIRST, then STEADY; odd sides; widths of LightVAE and of Wan 2.2."""
    oracle = OwnOracle(torch.float32, config)
    latents, video = clip(config, VaeDecode, sum(cut)), clip(config, VaeEncode, sum(cut))
    decoded = stream(oracle, VaeDecode, latents, cut)
    count = sum(
        isinstance(m, CausalConv3d | Upsample) for m in VaeDecode(config, first=True, frames=1).modules()
    )
    idle = sum(m.time_conv is not None for m in oracle_upsamples(config)) if cut[0] == 1 else 0
    assert len(convolved) == len(cut) * count - idle
    assert relative_error(decoded, oracle.decode(latents)) <= VAE[torch.float32]
    assert relative_error(stream(oracle, VaeEncode, video, cut), oracle.encode(video)) <= VAE[torch.float32]


@pytest.mark.parametrize("fp8", [False, True])
def test_norms_before_the_kernel_are_the_kernels_too(fp8: bool) -> None:
    """Unless it multiplies e4m3 numbers, or has a number of channels that the norm cannot take."""
    for channels in (SMALL.base_dim, 40):
        oracle = OwnOracle(torch.float32, replace(SMALL, base_dim=channels, fp8=fp8))
        half = oracle.half(VaeDecode, first=False, frames=1)
        blocks = [module for module in half.modules() if isinstance(module, ResidualBlock)]
        kinds = {type(block.residual[number]) for block in blocks for number in (0, 3)}
        assert kinds == {RmsNorm if fp8 or channels == 40 else NormSilu}


def oracle_upsamples(config: WanVaeConfig) -> list[Upsample]:
    return [m for m in VaeDecode(config, first=True, frames=1).modules() if isinstance(m, Upsample)]


@pytest.mark.slow
def test_the_last_of_many_chunks_is_as_near_as_the_first(convolved: list[Tensor]) -> None:
    """The plain modules are compared, chunk by chunk: no drift."""
    latents = clip(SMALL, VaeDecode, sum(MANY_CALLS))
    ours = stream(OwnOracle(torch.float32), VaeDecode, latents, MANY_CALLS)
    whole = VaeOracle(torch.float64).decode(latents.double())
    errors = [relative_error(*pair) for pair in zip(ours.split(12, 2), whole.split(12, 2), strict=True)]
    assert convolved
    assert max(errors) <= VAE[torch.float32]


@pytest.mark.parametrize("first", [True, False])
def test_some_convolutions_of_a_call_may_be_the_kernels(first: bool, convolved: list[Tensor]) -> None:
    """The others keep the weights of the checkpoint's layout."""

    def wide_only(place: Convolution) -> ConvTiles | None:
        return TILES if place.filters == 4 * SMALL.base_dim else None

    plain = VaeOracle(torch.float32).half(VaeDecode, first=first, frames=2)
    half = OwnOracle(torch.float32, tiles_of=wide_only).half(VaeDecode, first=first, frames=2)
    convolved.clear()
    shapes = () if first else decoder_cache_shapes(SMALL, 1, HEIGHT, WIDTH)
    arguments = (clip(SMALL, VaeDecode, 2), *(torch.randn(shape) for shape in shapes))
    expected = plain(*arguments)
    assert not convolved
    results = half(*arguments)
    assert {weight.shape[3] for weight in convolved} == {4 * SMALL.base_dim}
    names = dict(half.named_parameters())
    for name, weight in plain.named_parameters():
        if name not in names:
            assert name.removesuffix("weight") + "filters" in names
            assert len(weight) == 4 * SMALL.base_dim
    assert all(relative_error(*pair) <= VAE[torch.float32] for pair in zip(results, expected, strict=True))
    assert all(cache.is_contiguous() for cache in results[1:])
    assert all(cache.untyped_storage().nbytes() == cache.nbytes for cache in results[1:])


def in_fp8(place: Convolution) -> ConvTiles | None:
    """Tiles for e4m3 alone."""
    return TILES if place.fp8 else None


@pytest.mark.parametrize(("fp8", "measured"), [(True, True), (True, False), (False, True)])
def test_e4m3_is_for_a_decoders_blocks_where_it_was_measured(
    fp8: bool, measured: bool, convolved: list[Tensor]
) -> None:
    """With `fp8` in the config; encoders, upsampling and the last convolution stay as they are."""

    def tiles_of(place: Convolution) -> ConvTiles | None:
        return None if place.fp8 and not measured else TILES

    plain = stream(OwnOracle(torch.float32), VaeDecode, clip(SMALL, VaeDecode, 3), (1, 2))
    oracle = OwnOracle(torch.float32, tiles_of=tiles_of)
    oracle.config = replace(SMALL, fp8=fp8)
    convolved.clear()
    ours = stream(oracle, VaeDecode, clip(SMALL, VaeDecode, 3), (1, 2))
    in_e4m3 = [weight for weight in convolved if weight.dtype is torch.float8_e4m3fn]
    assert len(in_e4m3) == (2 * 2 * 14 if fp8 and measured else 0)
    assert torch.equal(ours, plain) == (not in_e4m3)
    assert relative_error(ours, plain) < 0.3
    convolved.clear()
    stream(oracle, VaeEncode, clip(SMALL, VaeEncode, 1), (1,))
    assert {weight.dtype for weight in convolved} == {torch.float32}


def test_a_stream_in_e4m3_is_the_whole_in_e4m3(convolved: list[Tensor]) -> None:
    """A cache keeps numbers that are quantised in the next call as they were in this one."""
    oracle = OwnOracle(torch.float32, tiles_of=in_fp8)
    oracle.config = replace(SMALL, fp8=True)
    cut = (2, 1, 2)
    latents = clip(SMALL, VaeDecode, sum(cut))
    whole = stream(oracle, VaeDecode, latents, (sum(cut),))
    streamed = stream(oracle, VaeDecode, latents, cut)
    assert {weight.dtype for weight in convolved} == {torch.float8_e4m3fn}
    # sums in another order move single numbers to the next e4m3 number
    assert relative_error(streamed, whole) < 0.01


# -- weights of the artifact -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles_of", [lambda _: TILES, in_fp8])
@pytest.mark.parametrize("config", [SMALL, SMALL_2_2])
def test_a_build_writes_the_weights_of_the_modules(config: WanVaeConfig, tiles_of: TilesOf) -> None:
    """By name, shape and number; a weight that is packed is not written in the checkpoint's layout, too."""
    config = replace(config, fp8=True)
    for kind in (VaeDecode, VaeEncode):
        checkpoint = VaeOracle(torch.float32, config).half(kind, first=True, frames=2).state_dict()
        tensors = VaeTensors(checkpoint, config)
        half = OwnOracle(torch.float32, config, tiles_of).half(kind, first=True, frames=2)
        packed = [name for name, _ in half.named_parameters() if name not in checkpoint]
        assert bool(packed) == (kind is VaeDecode or tiles_of is not in_fp8)
        for name, parameter in half.named_parameters():
            assert tensors[name].dtype == parameter.dtype
            assert torch.equal(tensors[name].float(), parameter.float())
        gone = [name for name in checkpoint if name not in dict(half.named_parameters())]
        assert {name.removesuffix(".weight") for name in gone} == {name.rpartition(".")[0] for name in packed}


def test_a_weight_is_packed_once_for_all_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build reads weights in the order of the modules' parameters."""
    config = replace(SMALL, fp8=True)
    checkpoint = VaeOracle(torch.float32, config).half(VaeDecode, first=True, frames=2).state_dict()
    half = OwnOracle(torch.float32, config, in_fp8).half(VaeDecode, first=True, frames=2)
    packed: list[Tensor] = []

    def noted(weight: Tensor, gamma: Tensor | None = None) -> dict[str, Tensor]:
        packed.append(weight)
        return packed_weights(weight, gamma)

    monkeypatch.setattr(own_convolution, "packed_weights", noted)
    tensors = VaeTensors(checkpoint, config)
    names = [name for name, _ in half.named_parameters() if name not in checkpoint]
    for name in names:
        assert tensors[name].numel()
    assert len(packed) == len({name.rpartition(".")[0] for name in names}) == len(names) / 3


def test_e4m3_weights_are_the_checkpoints_within_their_rounding() -> None:
    weight, gamma = torch.randn(20, 16, 3, 3, 3), torch.randn(16, 1, 1, 1)
    packed = packed_weights(weight, gamma)
    scale = packed["sum_scale"] / packed["frames_scale"]
    restored = (packed["filters_fp8"].float() * scale[:, None]).permute(3, 4, 0, 1, 2)
    assert 0.005 < relative_error(restored, weight) < 0.04
    assert float(packed["frames_scale"]) == pytest.approx(4 * float(gamma.abs().max()) / 448)


def build_of(convolutions: str = "", *, fp8: bool = False, ranks: int = 1) -> VideoBuild:
    """A build of Wan's VAE at 480x832 for a GPU."""
    preset = PRESETS["self-forcing-1.3b"]
    return VideoBuild(
        preset.model,
        VideoConfig(preset.stream, Schedule.warped(), "bf16", vae=replace(VAE_PRESETS["wan-2.1"], fp8=fp8)),
        TargetConfig("cuda", convolutions=convolutions, ranks=ranks),
    )


def vae_parameters(config: VideoBuild) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the VAE's weights in an artifact, by name."""
    return {
        argument.ref: (argument.shape, argument.dtype)
        for piece in media_pieces(config)
        for argument in piece.parameters
    }


def test_an_artifact_holds_packed_weights_of_the_rows_of_its_gpu(
    measured: Callable[..., None],
) -> None:
    measured(row(96, 96), row(96, 96, fp8=True), row(192, 96, taps=[1, 3, 3]), row(384, 384, arch="sm_100"))
    plain = vae_parameters(build_of())
    assert vae_parameters(build_of("sm_80")) == plain
    # those of ranks that share a picture are those of one GPU
    assert vae_parameters(build_of("sm_90", ranks=2)) == vae_parameters(build_of("sm_90"))
    for fp8 in (False, True):
        packed = vae_parameters(build_of("sm_90", fp8=fp8))
        new = {name: spec for name, spec in packed.items() if name not in plain}
        leaf = "filters_fp8" if fp8 else "filters"
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        blocks = {f"weight:vae.decoder.upsamples.{n}.residual.{c}." for n in (12, 13, 14) for c in (2, 6)}
        assert {name for name in new if name.endswith(leaf)} >= {block + leaf for block in blocks}
        for block in blocks:
            assert block + "weight" not in packed
            assert new.pop(block + leaf) == ((3, 3, 3, 96, 96), dtype)
            assert packed[block + "bias"] == ((96,), torch.bfloat16)
            if fp8:
                assert new.pop(block + "sum_scale") == ((96,), torch.float32)
                assert new.pop(block + "frames_scale") == ((1,), torch.float32)
        assert new.pop("weight:vae.decoder.upsamples.11.resample.1.filters") == (
            (1, 3, 3, 96, 192), torch.bfloat16,
        )  # fmt: skip
        assert all(name.startswith("weight:vae.encoder.") for name in new)


def test_an_artifact_holds_four_weights_of_a_convolution_behind_doubling(
    measured: Callable[..., None],
) -> None:
    """Where the table has both forms of the convolution behind an upsampling; `plan` counts its fewer products."""
    name = "weight:vae.decoder.upsamples.11.resample.1."
    measured(row(192, 96, taps=[1, 3, 3]))
    operations = own_operations(build_of("sm_90"))
    measured(row(192, 96, taps=[1, 2, 2]))
    weights = vae_parameters(build_of("sm_90"))
    assert {ref for ref in weights if ref.startswith(name)} == {name + "filters_doubled", name + "bias"}
    assert weights[name + "filters_doubled"] == ((4, 2, 2, 96, 192), torch.bfloat16)
    assert own_operations(build_of("sm_90")) == [count * 4 // 9 for count in operations]


def own_operations(config: VideoBuild) -> list[int]:
    """Operations of each convolution of Seko's kernel in the decoder's steady call."""
    (piece,) = (piece for piece in media_pieces(config) if piece.name == "vae_decode")
    return [launch.flops for launch in count_piece(piece).launches if launch.kind == OWN_CONVOLUTION]


def test_plan_counts_a_convolution_of_the_kernel_as_one(measured: Callable[..., None]) -> None:
    """The operations of the call are those of torch's convolutions; half the weights' bytes in e4m3."""
    measured(row(96, 96, fp8=True))

    def counted(config: VideoBuild) -> list[Launch]:
        (piece,) = (piece for piece in media_pieces(config) if piece.name == "vae_decode")
        return [
            launch for launch in count_piece(piece).launches if launch.kind in (CONVOLUTION, OWN_CONVOLUTION)
        ]

    plain, ours = counted(build_of()), counted(build_of("sm_90", fp8=True))
    assert len(ours) == len(plain)
    assert sum(launch.flops for launch in ours) == sum(launch.flops for launch in plain)


# -- the option --------------------------------------------------------------------------------------------------


def asked(**options: Any) -> BuildOptions:
    return BuildOptions(preset="sample", vae_fp8=True, **options)


def test_vae_fp8_is_refused_where_nothing_would_be_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = Target("cuda", "sm_90")
    monkeypatch.setattr(tuned_conv, "faster_table", dict)
    for options, machine, message in (
        (
            asked(),
            Target("cpu", "x86_64"),
            "no fp8 convolution of a Wan 2.1 VAE of base_dim 16 was measured on x86_64",
        ),
        (asked(), hopper, "was measured on sm_90"),
        (asked(no_vae=True), hopper, "this build has no VAE"),
        (asked(ranks=2), hopper, "contradicts --ranks 2"),
    ):
        with pytest.raises(UsageError, match=f"--vae-fp8.*{message}"):
            resolve_build(options, machine=machine)
    wide = FP8_PLACE._replace(channels=96, filters=96)
    monkeypatch.setattr(tuned_conv, "faster_table", lambda: {("sm_90", wide): TILES})
    with pytest.raises(UsageError, match="VAE of base_dim 16 was measured on sm_90"):
        resolve_build(asked(), machine=hopper)
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


@pytest.mark.parametrize(("first", "fp8"), [(True, False), (False, True)])
def test_a_call_rearranges_and_quantises_no_weight(
    first: bool, fp8: bool, measured: Callable[..., None]
) -> None:
    """In an engine of the full size, weight and scale go into the kernel as the artifact holds them."""
    measured(row(96, 96, fp8=fp8), row(192, 96, taps=[1, 3, 3]))
    role = "vae_decode_first" if first else "vae_decode"
    (piece,) = (piece for piece in media_pieces(build_of("sm_90", fp8=fp8)) if piece.name == role)
    stored = piece.example_inputs("meta")
    names = {id(tensor): argument.name for tensor, argument in zip(stored, piece.signature, strict=True)}
    used: list[str] = []

    def kernel(
        x: Tensor, earlier: Tensor | None, weight: Tensor, bias: Tensor, *_: Any, scale: Any, **__: Any
    ) -> Tensor:
        tensors = [weight, bias] if scale is None else [weight, bias, scale]
        used.extend(names[id(tensor)].rpartition(".")[2] for tensor in tensors)
        assert (earlier is None) == (first or weight.shape[0] == 1)
        return torch.empty((*x.shape[:4], weight.shape[3]), dtype=bias.dtype, device=x.device)

    with stand_ins({"causal_conv": kernel, "norm_silu": conv_reference.norm_silu}):
        FlatModule(piece)(*stored)
    blocks = ["filters_fp8", "bias", "sum_scale"] if fp8 else ["filters", "bias"]
    assert used == ["filters", "bias", *(6 * blocks)]  # the first is behind the last upsampling


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

"""The VAE as a stream against diffusers on the whole clip, its caches and its engine; not its keys."""

from __future__ import annotations

import math
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from seko_export.errors import UsageError
from seko_export.lowering.check import check_replayable
from seko_export.media.wan_vae.config import VAE_PRESETS, WanVaeConfig
from seko_export.media.wan_vae.modules import (
    VaeDecode,
    VaeEncode,
    decoder_cache_shapes,
    encoder_cache_shapes,
)
from tests.export.vae_oracle import SMALL, SMALL_2_2, VaeOracle, stream
from tests.support.tiers import first_is_fast
from tests.support.tolerances import VAE, relative_error

ROWS, HEIGHT, WIDTH = 2, 3, 5  # latent cells, odd on both sides
TIME_CONV_SLOTS = (11, 18)  # of the decoder, for the four levels of Wan 2.1
CUTS = [(1, 3, 2, 1), (2, 2, 2)]


@pytest.fixture(scope="module")
def oracle() -> VaeOracle:
    return VaeOracle(torch.float64)


@pytest.fixture(scope="module")
def single() -> VaeOracle:
    return VaeOracle(torch.float32)


def some_latents(frames: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(frames)
    return torch.randn(ROWS, SMALL.z_dim, frames, HEIGHT, WIDTH, generator=generator, dtype=dtype)


def some_video(frames: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Frames of ``frames`` latent frames from the start of a stream."""
    generator = torch.Generator().manual_seed(frames)
    shape = (ROWS, 3, SMALL.video_frames(frames, first=True), 8 * HEIGHT, 8 * WIDTH)
    return torch.rand(shape, generator=generator, dtype=dtype) * 2 - 1


@pytest.mark.shows("wan-vae")
@pytest.mark.parametrize("cut", CUTS)
def test_a_stream_decodes_as_the_whole_clip(cut: tuple[int, ...], oracle: VaeOracle) -> None:
    """However the latents are cut: FIRST on the first call, STEADY on all others."""
    latents = some_latents(sum(cut))
    video = stream(oracle, VaeDecode, latents, cut)
    expected = oracle.decode(latents)
    assert video.shape == expected.shape == (ROWS, 3, 4 * sum(cut) - 3, 8 * HEIGHT, 8 * WIDTH)
    assert relative_error(video, expected) <= VAE[torch.float64]
    assert (video.abs() < 1).double().mean() > 0.5  # the clamp hides little


@pytest.mark.parametrize("cut", CUTS)
def test_a_stream_encodes_as_the_whole_clip(cut: tuple[int, ...], oracle: VaeOracle) -> None:
    video = some_video(sum(cut))
    latents = stream(oracle, VaeEncode, video, cut)
    assert latents.shape == (ROWS, SMALL.z_dim, sum(cut), HEIGHT, WIDTH)
    assert relative_error(latents, oracle.encode(video)) <= VAE[torch.float64]


def test_single_precision(single: VaeOracle) -> None:
    latents, video = some_latents(6, torch.float32), some_video(6, torch.float32)
    decoded, encoded = stream(single, VaeDecode, latents, (3, 3)), stream(single, VaeEncode, video, (3, 3))
    assert decoded.dtype == encoded.dtype == torch.float32
    assert relative_error(decoded, single.decode(latents)) <= VAE[torch.float32]
    assert relative_error(encoded, single.encode(video)) <= VAE[torch.float32]


def test_half_precision_keeps_the_statistics_whole(single: VaeOracle) -> None:
    latents = some_latents(2, torch.float32)
    decode = VaeDecode(SMALL, first=True, frames=2, dtype=torch.bfloat16).requires_grad_(False)
    decode.load_state_dict(single.half(VaeDecode, first=True, frames=2).state_dict())
    video, *caches = decode(latents)
    assert {t.dtype for t in (video, *caches)} == {torch.bfloat16}
    assert {decode.latents_mean.dtype, decode.latents_std.dtype} == {torch.float32}
    # 30 layers in a row, each rounded to 8 bits: no bar of its own, only that nothing is off by a factor.
    assert relative_error(video, single.decode(latents)) < 0.1
    encode = VaeEncode(SMALL, first=True, frames=1, dtype=torch.bfloat16).requires_grad_(False)
    encode.load_state_dict(single.half(VaeEncode, first=True, frames=1).state_dict())
    assert encode(some_video(1, torch.float32))[0].dtype == torch.float32


@pytest.mark.parametrize("kind", [VaeDecode, VaeEncode])
def test_every_slot_counts(kind: type[VaeDecode] | type[VaeEncode]) -> None:
    """The control: a stale slot, or two that are swapped, is a difference that the tests above would see."""
    oracle = VaeOracle(torch.float64, replace(SMALL, num_res_blocks=1))
    clip = (some_latents(3) if kind is VaeDecode else some_video(3))[:1]
    per_call = 1 if kind is VaeDecode else 4
    first, steady = (oracle.half(kind, first=start, frames=1) for start in (True, False))
    _, *stale = first(clip[:, :, :1])
    _, *caches = steady(clip[:, :, 1 : 1 + per_call], *stale)
    last = clip[:, :, 1 + per_call :]
    expected = steady(last, *caches)[0]
    for slot, old in enumerate(stale):
        wrong = [*caches[:slot], old, *caches[slot + 1 :]]
        assert relative_error(steady(last, *wrong)[0], expected) > 1e3 * VAE[torch.float64], slot
        other = slot + 1
        if other < len(caches) and caches[slot].shape == caches[other].shape:
            wrong = list(caches)
            wrong[slot], wrong[other] = caches[other], caches[slot]
            assert relative_error(steady(last, *wrong)[0], expected) > 1e3 * VAE[torch.float64], slot


def test_a_steady_call_from_zeros_is_how_a_stream_goes_on(oracle: VaeOracle) -> None:
    """The trick that leaves two graphs: after one latent frame the time convolutions still know nothing but zeros."""
    _, *caches = oracle.half(VaeDecode, first=True, frames=1)(some_latents(1))
    zero = [slot for slot, cache in enumerate(caches) if not cache.any()]
    assert tuple(zero) == TIME_CONV_SLOTS
    assert not any(
        cache[:, 0].any() for cache in caches
    )  # and the frame before the first is zeros everywhere


@pytest.mark.parametrize("kind", [VaeDecode, VaeEncode])
@pytest.mark.parametrize("frames", first_is_fast([2, 1]))
def test_calls_are_pure(kind: type[VaeDecode] | type[VaeEncode], frames: int, oracle: VaeOracle) -> None:
    """No input is written; each cache is memory of its own, dense, of the table's shape, and no larger inside."""
    table = (decoder_cache_shapes if kind is VaeDecode else encoder_cache_shapes)(SMALL, ROWS, HEIGHT, WIDTH)
    clip = some_latents(2 * frames) if kind is VaeDecode else some_video(2 * frames)
    first, steady = (oracle.half(kind, first=start, frames=frames) for start in (True, False))
    begin = frames if kind is VaeDecode else first.video_frames
    _, *caches = first(clip[:, :, :begin])
    before = [cache.clone() for cache in caches]
    again = steady(clip[:, :, begin:], *caches)[1:]
    assert all(torch.equal(*pair) for pair in zip(caches, before, strict=True))
    for tensors in (caches, again):
        assert tuple(tuple(cache.shape) for cache in tensors) == table
        assert all(cache.is_contiguous() for cache in tensors)
        assert all(cache.untyped_storage().nbytes() == cache.nbytes for cache in tensors)
    storages = {tensor.untyped_storage().data_ptr() for tensor in (*caches, *again)}
    assert len(storages) == 2 * len(table)
    assert len(table) == steady.cache_count


def test_cache_tables_of_wan() -> None:
    """At 480x832, against the shapes that were read off diffusers' own caches."""
    wan = VAE_PRESETS["wan-2.1"]
    levels = [(1, (60, 104, 16)), (11, (60, 104, 384)), (1, (120, 208, 192)), (6, (120, 208, 384))]
    levels += [(6, (240, 416, 192)), (7, (480, 832, 96))]
    expected = tuple((1, 2, *shape) for count, shape in levels for _ in range(count))
    assert decoder_cache_shapes(wan, 1, 60, 104) == expected
    assert sum(map(math.prod, expected)) == 944_286_720
    encoder = encoder_cache_shapes(wan, 1, 60, 104)
    assert len(encoder) == 24
    assert [slot for slot, shape in enumerate(encoder) if shape[1] == 1] == [9, 14]
    light = decoder_cache_shapes(VAE_PRESETS["lightvae"], 1, 60, 104)
    assert {a[-1] / b[-1] for a, b in zip(expected[1:], light[1:], strict=True)} == {4}


@pytest.mark.parametrize(("kind", "first"), [(VaeDecode, True), (VaeDecode, False), (VaeEncode, False)])
def test_every_convolution_works_in_channels_last_memory(
    kind: type[VaeDecode] | type[VaeEncode], first: bool, oracle: VaeOracle
) -> None:
    """Or a GPU would turn each activation around, twice a convolution."""
    seen: list[bool] = []

    class Keeping(TorchFunctionMode):
        """Convolutions that keep the memory order of their input, as cuDNN's do; a CPU's do by size and dtype."""

        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if getattr(function, "__name__", "") not in ("conv2d", "conv3d"):
                return result
            order = torch.channels_last if result.dim() == 4 else torch.channels_last_3d
            seen.append(args[0].stride(1) == 1)  # the channels of a place lie side by side
            return result.contiguous(memory_format=order if seen[-1] else torch.contiguous_format)

    half = oracle.half(kind, first=first, frames=2)
    clip = some_latents(2) if kind is VaeDecode else some_video(3)[:, :, : half.video_frames]
    table = decoder_cache_shapes if kind is VaeDecode else encoder_cache_shapes
    shapes = () if first else table(SMALL, ROWS, HEIGHT, WIDTH)
    with Keeping():
        half(clip, *(torch.randn(shape, dtype=torch.float64) for shape in shapes))
    assert len(seen) > 30
    assert all(seen)


def test_calls_that_cannot_be_are_refused(oracle: VaeOracle) -> None:
    first, steady = (oracle.half(VaeDecode, first=start, frames=2) for start in (True, False))
    latents = some_latents(2)
    _, *caches = first(latents)
    with pytest.raises(ValueError, match=r"first=True, frames=2\) got 32 caches, expected 0"):
        first(latents, *caches)
    with pytest.raises(ValueError, match="got 31 caches, expected 32"):
        steady(latents, *caches[1:])
    with pytest.raises(ValueError, match=r"got \[2, 16, 3, 3, 5\], expected \[B, 16, 2, rows, columns\]"):
        steady(some_latents(3), *caches)
    with pytest.raises(ValueError, match="expected multiples of 8"):
        oracle.half(VaeEncode, first=True, frames=1)(some_video(1)[..., 1:])
    with pytest.raises(UsageError, match="at least 1 latent frame, got 0"):
        VaeDecode(SMALL, first=True, frames=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base_dim": 0}, "base_dim must be a whole number of 1 to"),
        ({"dim_mult": ()}, "dim_mult must be 1 to 8 factors"),
        ({"temporal_downsample": (True,)}, "has 1 steps, expected 3"),
        ({"base_dim": 3, "dim_mult": (1, 1, 1, 1)}, "3 channels, an odd number"),
        ({"z_dim": 8}, "latents_mean must be 8 finite numbers"),
        ({"latents_mean": (float("nan"),) * 16}, "latents_mean must be 16 finite"),
        ({"latents_std": (0.0,) * 16}, "latents_std must be above 0"),
    ],
)
def test_configs_that_contradict_themselves_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        WanVaeConfig(**fields)


class Flat(nn.Module):
    """A half as a function of its parameters and inputs: what becomes an engine."""

    def __init__(self, half: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "half", half)  # not a submodule: its parameters are inputs
        self.names = tuple(name for name, _ in half.named_parameters())

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights = dict(zip(self.names, tensors, strict=False))
        return torch.func.functional_call(self.half, weights, tensors[len(self.names) :])


def traced(
    kind: type[VaeDecode] | type[VaeEncode], *, first: bool, frames: int, config: WanVaeConfig
) -> tuple[ExportedProgram, Flat, tuple[Tensor, ...]]:
    """Trace with random inputs, which are given back too."""
    generator = torch.Generator().manual_seed(1)
    half = kind(config, first=first, frames=frames).eval().requires_grad_(False)
    decodes = kind is VaeDecode
    x = (
        (1, config.z_dim, frames, HEIGHT, WIDTH)
        if decodes
        else (1, 3, half.video_frames, config.spatial_stride * HEIGHT, config.spatial_stride * WIDTH)
    )
    table = (decoder_cache_shapes if decodes else encoder_cache_shapes)(config, 1, HEIGHT, WIDTH)
    weights = [torch.rand(p.shape, generator=generator) * 0.2 - 0.1 for p in half.parameters()]
    weights[:2] = [p.detach() for p in (half.latents_mean, half.latents_std)]
    inputs = (*weights, *(torch.randn(s, generator=generator) for s in (x, *(() if first else table))))
    with torch.no_grad():
        program = torch.export.export(Flat(half), inputs, strict=False)
    return program, Flat(half), inputs


@pytest.mark.parametrize("kind", [VaeDecode, VaeEncode])
@pytest.mark.parametrize(("first", "size"), first_is_fast([(False, SMALL), (True, SMALL_2_2)]))
def test_the_traced_call_can_be_replayed(
    kind: type[VaeDecode] | type[VaeEncode], first: bool, size: WanVaeConfig
) -> None:
    """Static, without constants (they would be the engine's own, which the runtime refuses), nothing written."""
    config = replace(size, num_res_blocks=1)
    program, _, inputs = traced(kind, first=first, frames=2, config=config)
    # Carried frames are plain inputs, taken by numbers that are right for every call: no ring, no slots.
    check_replayable(program, "vae", cache_inputs=())
    assert len(program.graph_signature.user_inputs) == len(inputs)
    assert not program.constants
    assert not program.graph_signature.user_inputs_to_mutate


@pytest.mark.slow
def test_the_engine_equals_the_eager_call(tmp_path) -> None:
    """A steady chunk of two of Wan 2.2's, built ahead of time for the CPU and opened by the runtime's loader; an
    encoder of Wan 2.1 is in test_media_build.py."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    config = replace(SMALL_2_2, num_res_blocks=1)
    program, eager, inputs = traced(VaeDecode, first=False, frames=2, config=config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, of its parts
        import torch._inductor.config

        with torch.no_grad(), torch._inductor.config.patch(compile_threads=1):
            package = torch._inductor.aoti_compile_and_package(
                program, package_path=str(tmp_path / "vae.pt2")
            )
    loader = torch._C._aoti.AOTIModelPackageLoader(package, "model", True, 1, -1)
    assert not loader.get_constant_fqns()
    found, expected = loader.boxed_run(list(inputs)), eager(*inputs)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.is_contiguous()
        assert ours.untyped_storage().nbytes() == ours.nbytes  # a view would keep a whole activation alive
        assert relative_error(ours, theirs) <= VAE[torch.float32]

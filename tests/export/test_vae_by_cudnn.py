"""What the VAE asks of cuDNN, on a CPU: other calls than a CPU's own, the same maths. How fast they are is not here."""

from __future__ import annotations

import math
import re
import shutil
import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch.overrides import TorchFunctionMode

from seko_export.lowering.check import check_replayable
from seko_export.media.wan_vae import layers as wan_vae_layers
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.media.wan_vae.layers import CausalConv3d, FrameCaches, channels_last, conv_of_few_filters
from seko_export.media.wan_vae.modules import VaeDecode, VaeEncode
from tests.export.test_wan_vae import some_latents, some_video, traced
from tests.export.vae_oracle import VaeOracle, stream
from tests.support.tolerances import VAE, relative_error

HEIGHT, WIDTH = 5, 7
CUTS = [(1, 1, 2), (2, 3, 1)]  # frames of each call from the beginning of a stream


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wan_vae_layers, "by_cudnn", lambda _: True)


def random_layer(channels_in: int, channels_out: int, side: int, dtype: torch.dtype) -> CausalConv3d:
    layer = CausalConv3d(channels_in, channels_out, side).to(dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(channels_out)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


def streamed(layer: CausalConv3d, clip: Tensor, cut: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """What the layer makes of the parts of a clip, and the frames that it carries from each."""
    made, carried, earlier = [], [], None
    for part in clip.split(cut, dim=2):
        caches = FrameCaches(earlier)
        made.append(layer(wan_vae_layers.channels_last(part), caches))
        earlier = caches.kept
        carried += earlier
    return made, carried


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("channels_in", "channels_out", "side"),
    [(6, 3, 3), (192, 3, 3), (16, 7, 3), (6, 8, 3), (192, 12, 3), (200, 9, 3), (6, 3, 1), (12, 24, 1)],
)
def test_a_stream_is_the_plain_convolution(
    channels_in: int,
    channels_out: int,
    side: int,
    rows: int,
    cut: tuple[int, ...],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of few filters and many, tap by tap and in time; the first call, one frame or more, and those behind it."""
    layer = random_layer(channels_in, channels_out, side, dtype)
    shape = (rows, channels_in, sum(cut), HEIGHT, WIDTH)
    clip = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    plain, plainly_kept = streamed(layer, clip, cut)
    monkeypatch.setattr(wan_vae_layers, "by_cudnn", lambda _: True)
    ours, kept = streamed(layer, clip, cut)
    for frames, expected in zip(ours, plain, strict=True):
        assert frames.shape == expected.shape
        assert relative_error(frames, expected) <= VAE[dtype]
    assert all(torch.equal(*pair) for pair in zip(kept, plainly_kept, strict=True))


def some_convolution(
    rows: int, frames: int, side: tuple[int, int], taps: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Activations with their past, the weight and the bias of three filters over twelve channels."""
    generator = torch.Generator().manual_seed(sum(side))
    shapes = ((rows, 12, frames + taps[0] - 1, *side), (3, 12, *taps), (3,))
    x, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return channels_last(x.to(dtype)), weight.to(dtype), bias.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("taps", [(3, 3, 3), (1, 3, 3), (3, 1, 1), (2, 3, 5)])
@pytest.mark.parametrize("side", [(1, 1), (1, 4), (5, 7), (6, 9)])
@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_few_filters_are_a_matmul(
    rows: int, frames: int, side: tuple[int, int], taps: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x, weight, bias = some_convolution(rows, frames, side, taps, dtype)
    expected = F.conv3d(x, weight, bias, padding=(0, taps[1] // 2, taps[2] // 2))
    y = conv_of_few_filters(x, weight, bias)
    assert y.shape == expected.shape
    assert y.dtype is dtype
    assert relative_error(y, expected) <= VAE[dtype]


def test_the_sum_of_taps_is_not_rounded_on_the_way() -> None:
    """FlashAttention's rule: off by at most twice what the convolution in the same dtype is, which rounds once."""
    x, weight, bias = some_convolution(1, 3, (25, 31), (3, 3, 3), torch.bfloat16)
    expected = F.conv3d(x.double(), weight.double(), bias.double(), padding=(0, 1, 1))
    same_dtype = relative_error(F.conv3d(x, weight, bias, padding=(0, 1, 1)), expected)
    assert relative_error(conv_of_few_filters(x, weight, bias), expected) <= 2 * same_dtype


def test_the_matmul_takes_activations_where_they_lie() -> None:
    """A copy of them would cost as much as the matmul."""
    operands = []

    class Keeping(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if getattr(function, "__name__", "") == "mm":
                operands.append(args[1])
            return function(*args, **(kwargs or {}))

    x, weight, bias = some_convolution(2, 3, (5, 7), (3, 3, 3), torch.float32)
    with Keeping():
        conv_of_few_filters(x, weight, bias)
    assert [operand.data_ptr() for operand in operands] == [x.data_ptr()]


def test_compiled_the_products_lie_in_memory_once(tmp_path, monkeypatch) -> None:
    """Neither their copy with margins nor sums on the way: the compiler takes both into the loop of the sum."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    arguments = some_convolution(1, 3, (5, 7), (3, 3, 3), torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, of its parts
        from torch._inductor import config
        from torch._inductor.utils import run_and_get_code

        with config.patch(compile_threads=1):
            found, (code,) = run_and_get_code(torch.compile(conv_of_few_filters, fullgraph=True), *arguments)
    assert relative_error(found, conv_of_few_filters(*arguments)) <= VAE[torch.float32]
    allocated = re.findall(r"= empty_strided_cpu\(\(([\d, ]+)\)", code)
    numbers = [math.prod(map(int, filter(None, shape.split(", ")))) for shape in allocated]
    weight, products, result = 81 * 12, 81 * 5 * 35, found.numel()
    assert sorted(numbers) == sorted((weight, products, result))


class Asked(TorchFunctionMode):
    """Takes down the convolutions and matmuls: the name and the weight's shape."""

    WEIGHT_AT = {"conv2d": 1, "conv3d": 1, "mm": 0}  # noqa: RUF012 - nobody writes it

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if (name := getattr(function, "__name__", "")) in self.WEIGHT_AT:
            self.calls.append((name, tuple(args[self.WEIGHT_AT[name]].shape)))
        return function(*args, **(kwargs or {}))


def asked_of(channels_in: int, channels_out: int, side: int = 3, rows: int = 1, first: int = 0) -> list:
    """The calls for a call of two frames in a stream, or of the ``first`` ones of it."""
    with torch.device("meta"), Asked() as asked:
        layer = CausalConv3d(channels_in, channels_out, side)
        past = None if first else [torch.empty(rows, 2, HEIGHT, WIDTH, channels_in)]
        x = wan_vae_layers.channels_last(torch.empty(rows, channels_in, first or 2, HEIGHT, WIDTH))
        layer(x, FrameCaches(past))
    return asked.calls


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_cudnn_is_asked_for() -> None:
    """Wan's own widths, in the order of the decoder."""
    for channels_in, channels_out in ((16, 384), (384, 384), (96, 96)):
        assert asked_of(channels_in, channels_out) == [("conv2d", (channels_out, channels_in, 3, 3))] * 3
    for channels_out in (384, 192):
        assert asked_of(192, channels_out) == [("conv3d", (channels_out, 192, 3, 3, 3))]
    for first, rows in ((0, 1), (0, 2), (2, 1)):
        assert asked_of(96, 3, first=first, rows=rows) == [("mm", (27 * 3, 96))]
    assert asked_of(96, 3, first=1) == [("mm", (9 * 3, 96))]
    assert asked_of(384, 768, side=1) == [("conv3d", (768, 384, 3, 1, 1))]
    assert asked_of(96, 8) == [("conv2d", (8, 96, 3, 3))] * 3


def test_a_cpu_is_asked_for_one_convolution_in_2d_where_one_in_3d_is_slow() -> None:
    least = wan_vae_layers.MOST_WITHOUT_ONEDNN // (4 * HEIGHT)  # four frames: two from the cache
    assert asked_of(least, 3) == [("conv2d", (3, 3 * least, 3, 3))]
    assert asked_of(least + 1, 3) == [("conv3d", (3, least + 1, 3, 3, 3))]
    assert asked_of(96, 3, first=1) == [("conv2d", (3, 96, 3, 3))]
    assert asked_of(96, 3, rows=2) == [("conv3d", (3, 96, 3, 3, 3))]
    assert asked_of(96, 192, side=1) == [("conv3d", (192, 96, 3, 1, 1))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_where_torch_itself_convolves_slowly(dtype: torch.dtype) -> None:
    """Torch's own choice on either side of the limit: it is no part of its interface and may change."""
    if dtype == torch.float32 and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    weight, bias = torch.empty(8, 64, 3, 3, 3, dtype=dtype), torch.empty(8, dtype=dtype)
    for rows, ours in ((64, True), (65, False)):
        x = torch.empty(1, 64, 5, rows, WIDTH, dtype=dtype)
        chosen = torch._C._select_conv_backend(
            x, weight, bias, (1, 1, 1), (0, 1, 1), (1, 1, 1), False, (0, 0, 0), 1, [8]
        )
        slow = chosen == torch._C._ConvBackend.Slow3d
        assert slow == (ours or dtype == torch.float64)
        assert wan_vae_layers.without_onednn(x) == (ours and dtype == torch.float32)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("channels_in", "channels_out"), [(6, 3), (16, 7), (6, 8)])
def test_a_small_convolution_on_a_cpu_is_the_plain_one(
    channels_in: int, channels_out: int, cut: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = random_layer(channels_in, channels_out, 3, torch.float32)
    clip = torch.randn((1, channels_in, sum(cut), HEIGHT, WIDTH), generator=torch.Generator().manual_seed(1))
    ours, kept = streamed(layer, clip, cut)
    monkeypatch.setattr(wan_vae_layers, "without_onednn", lambda _: False)
    plain, plainly_kept = streamed(layer, clip, cut)
    for frames, expected in zip(ours, plain, strict=True):
        assert frames.shape == expected.shape
        assert relative_error(frames, expected) <= VAE[torch.float32]
    assert all(torch.equal(*pair) for pair in zip(kept, plainly_kept, strict=True))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("cut", [(1, 1, 1), (2, 2)])
def test_the_whole_vae_is_diffusers(cut: tuple[int, ...]) -> None:
    """One row: several are not done tap by tap."""
    oracle = VaeOracle(torch.float64)
    latents, video = some_latents(sum(cut))[:1], some_video(sum(cut))[:1]
    with Asked() as asked:
        decoded = stream(oracle, VaeDecode, latents, cut)
    assert {name for name, _ in asked.calls} == {"conv2d", "conv3d", "mm"}
    assert relative_error(decoded, oracle.decode(latents)) <= VAE[torch.float64]
    assert relative_error(stream(oracle, VaeEncode, video, cut), oracle.encode(video)) <= VAE[torch.float64]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_traced_call_can_be_replayed() -> None:
    """Without constants: they would be the engine's own, which the runtime refuses."""
    config = WanVaeConfig(base_dim=8, num_res_blocks=1)
    program, eager, inputs = traced(VaeDecode, first=False, frames=2, config=config)
    check_replayable(program, "vae", cache_inputs=())
    assert not program.constants
    assert not program.graph_signature.user_inputs_to_mutate
    (last,) = (node for node in program.graph.nodes if node.target is torch.ops.aten.mm.default)
    assert last.args[0].meta["val"].shape == (27 * 3, 8)
    for result, expected in zip(program.module()(*inputs), eager(*inputs), strict=True):
        assert relative_error(result, expected) <= VAE[torch.float32]

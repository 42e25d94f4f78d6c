"""What the VAE asks of cuDNN, on a CPU: other calls than a CPU's own, the same maths. How fast they are is not here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from seko_export.lowering.check import check_replayable
from seko_export.models import wan_vae_layers
from seko_export.models.wan_vae import VaeConfig, VaeDecode, VaeEncode
from seko_export.models.wan_vae_layers import CausalConv3d, FrameCaches
from tests.export.test_wan_vae import some_latents, some_video, traced
from tests.export.vae_oracle import VaeOracle, stream
from tests.tolerances import VAE, relative_error

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
    made, carried, kept = [], [], None
    for part in clip.split(cut, dim=2):
        caches = FrameCaches(kept)
        made.append(layer(wan_vae_layers.channels_last(part), caches))
        kept = caches.kept
        carried += kept
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
    for found, expected in zip(ours, plain, strict=True):
        assert found.shape == expected.shape
        assert relative_error(found, expected) <= VAE[dtype]
    assert all(torch.equal(*pair) for pair in zip(kept, plainly_kept, strict=True))


class Asked(TorchFunctionMode):
    """Takes down the convolutions: the name and the weight's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if (name := getattr(function, "__name__", "")) in ("conv2d", "conv3d"):
            self.calls.append((name, tuple(args[1].shape)))
        return function(*args, **(kwargs or {}))


def asked_of(channels_in: int, channels_out: int, side: int = 3, rows: int = 1, first: int = 0) -> list:
    """The convolutions of a call of two frames in a stream, or of the ``first`` ones of it."""
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
    assert asked_of(96, 3) == [("conv2d", (8, 96, 3, 3))] * 3
    assert asked_of(96, 3, rows=2) == [("conv3d", (8, 96, 3, 3, 3))]
    assert asked_of(96, 3, first=1) == [("conv3d", (8, 96, 1, 3, 3))]
    assert asked_of(96, 3, first=2) == [("conv2d", (8, 96, 3, 3))] * 3
    assert asked_of(384, 768, side=1) == [("conv3d", (768, 384, 3, 1, 1))]
    assert asked_of(96, 8) == [("conv2d", (8, 96, 3, 3))] * 3


def test_a_cpu_is_asked_for_the_convolution_as_it_is() -> None:
    assert asked_of(96, 3) == [("conv3d", (3, 96, 3, 3, 3))]
    assert asked_of(96, 3, first=1) == [("conv3d", (3, 96, 1, 3, 3))]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("cut", [(1, 1, 1), (2, 2)])
def test_the_whole_vae_is_diffusers(cut: tuple[int, ...]) -> None:
    """One row: several are not done tap by tap."""
    oracle = VaeOracle(torch.float64)
    latents, video = some_latents(sum(cut))[:1], some_video(sum(cut))[:1]
    with Asked() as asked:
        decoded = stream(oracle, VaeDecode, latents, cut)
    assert {name for name, _ in asked.calls} == {"conv2d", "conv3d"}
    assert relative_error(decoded, oracle.decode(latents)) <= VAE[torch.float64]
    assert relative_error(stream(oracle, VaeEncode, video, cut), oracle.encode(video)) <= VAE[torch.float64]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("first", [True, False])
def test_the_traced_call_can_be_replayed(first: bool) -> None:
    """The zeros beside the filters are computed: a constant would be the engine's own, which the runtime refuses."""
    config = VaeConfig(base_dim=8, num_res_blocks=1)
    program, eager, inputs = traced(VaeDecode, first=first, frames=2, config=config)
    check_replayable(program, "vae", cache_inputs=())
    assert not program.constants
    assert not program.graph_signature.user_inputs_to_mutate
    last = [node for node in program.graph.nodes if "conv2d" in str(node.target)][-1]
    assert last.args[1].meta["val"].shape[0] == 8
    for found, expected in zip(program.module()(*inputs), eager(*inputs), strict=True):
        assert relative_error(found, expected) <= VAE[torch.float32]

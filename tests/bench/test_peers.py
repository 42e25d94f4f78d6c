"""Every peer against the naive reference past the wrap, the check that guards their times, and what is counted."""

from __future__ import annotations

import json
from collections import deque

import pytest
import torch

from scripts.bench.peers import child, counting
from scripts.bench.peers.check import judge, slots_in_time, write_reference
from scripts.bench.peers.network import RandomWan, device_weights, make_network
from scripts.bench.peers.peers import PEERS, Compiler
from scripts.bench.peers.shapes import Shape
from scripts.bench.peers.stores import NVFP4_AMAX, Int4Store, Nvfp4Store, int4_decode, int4_encode
from seko_export.goldens.record import golden_text
from seko_kernels.reference import nvfp4_decode, nvfp4_encode, nvfp4_global_scale
from tests.bench.peer_streams import CHUNKS, naive_chunks, peer_chunks, small_network
from tests.tolerances import STEP, relative_error
from tests.truth.eager_stream import SMALL, small_config

BAR = STEP[torch.float32]
SHAPE = Shape("small", SMALL, small_config(3, 1, 6).stream, None)
ALIGNED, MISALIGNED = (
    (3, 1, 6),
    (2, 3, 5),
)  # chunk, sink, ring; the second evicts in the middle of a chunk's frames
# Compilers without code generation: Dynamo and the functional form of in-place writes are what can go wrong on a CPU.
EAGER_COMPILERS = {"B2": Compiler("eager"), "B3": Compiler("aot_eager"), "B7": Compiler("aot_eager")}
# Raised by torch's own modules when its compiler is first imported.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Each test compiles and counts for itself, and leaves the compiler as it was."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def small_reference(tmp_path_factory):
    """The exact model's latents and cache at the small shape."""
    path = tmp_path_factory.mktemp("reference") / "small.safetensors"
    write_reference(SHAPE, "cpu", path)
    return path


def shape_network():
    config = SHAPE.config("cpu")
    return make_network(config, device_weights(config, RandomWan(SMALL, "cpu")), golden_text(config))


def measured(name, reference, compiler=None, **job):
    job = {"reference": str(reference), "chunks": 3, "busy": 0, "first_only": False} | job
    with torch.no_grad():
        return child.measure_peer(PEERS[name], shape_network(), compiler or EAGER_COMPILERS.get(name), job)


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, ALIGNED) for name in ("B0", "B1", "B2", "B3", "B4", "B7")]
    + [(name, MISALIGNED) for name in ("B0", "B1", "B4", "B3")],
)
def test_exact_peers_are_the_naive_reference(name, layout):
    """Float32, 12 chunks of 4 passes and the context pass, latents fed by the stream's own cache alone."""
    network, wan, text = small_network(small_config(*layout))
    stream = PEERS[name].make(network, EAGER_COMPILERS.get(name, Compiler("eager")))
    wanted = naive_chunks(network, wan, text, CHUNKS)
    for number, found in enumerate(peer_chunks(stream, network, CHUNKS)):
        assert relative_error(found, wanted[number]) <= BAR, number
    assert stream.next_frame > 2 * network.config.stream.cache_frames


@pytest.mark.parametrize("layout", [ALIGNED, MISALIGNED])
@pytest.mark.parametrize("name", ["B5", "B6"])
def test_lossy_peers_are_the_reference_through_their_format(name, layout, monkeypatch):
    """The reference gets the keys and values that the peer holds, once they are known to be its own through the format.

    If it rounded for itself, the last bit of a sum would move a few numbers over a border, and all that reads them: by
    how much depends on the CPU.
    """
    network, wan, text = small_network(small_config(*layout))
    store, through = {"B5": (Int4Store, through_int4), "B6": (Nvfp4Store, through_nvfp4)}[name]
    frame_tokens, attend = network.config.stream.frame_tokens, store.attend
    made: deque[torch.Tensor] = (
        deque()
    )  # of each frame keys, then values: [2, n, H, D], as computed and as held

    def watched(self, layer, q, k, v, place):
        y = attend(self, layer, q, k, v, place)
        number = next(i for i, one in enumerate(self.layers) if one is layer)
        sides = zip((k, v), self.tokens(number), strict=True)
        both = [torch.stack((new[0], held[0, place.index])).split(frame_tokens, 1) for new, held in sides]
        made.extend(part for frame in zip(*both, strict=True) for part in frame)
        return y

    def held_by_the_peer(x):
        computed, held = made.popleft()
        assert relative_error(computed, x) <= BAR
        assert torch.equal(held, through(computed))
        return held

    monkeypatch.setattr(store, "attend", watched)
    found = peer_chunks(PEERS[name].make(network, Compiler("eager")), network, CHUNKS)
    wanted = naive_chunks(network, wan, text, CHUNKS, held_by_the_peer)
    exact = naive_chunks(network, wan, text, CHUNKS)
    assert not made
    for number in range(CHUNKS):
        assert relative_error(found[number], wanted[number]) <= BAR, number
        assert relative_error(exact[number], wanted[number]) > 100 * BAR, number


def through_int4(x):
    """The naive form of int4: group by group, 64 channels each."""
    out = torch.empty_like(x)
    for begin in range(0, x.shape[-1], 64):
        group = x[..., begin : begin + 64]
        low, high = group.min(-1, keepdim=True).values, group.max(-1, keepdim=True).values
        scale = (high - low) / 15
        out[..., begin : begin + 64] = low + scale * torch.round((group - low) / scale)
    return out


def through_nvfp4(x):
    """What the kernels' reference keeps of it."""
    scale = nvfp4_global_scale(torch.full((x.shape[1],), NVFP4_AMAX))
    return nvfp4_decode(*nvfp4_encode(x, scale), scale, torch.float32)


def test_int4_keeps_constants_and_ends_and_is_off_by_half_a_step():
    x = torch.randn(5, 2, 128, generator=torch.Generator().manual_seed(0))
    x[0, 0, :64], x[1, 1, 64:] = 0.5, 0.0
    x[2, 0, 3] = 100.0  # an outlier
    codes, scale, low = int4_encode(x)
    assert codes.shape == (5, 2, 64)
    assert codes.dtype == torch.uint8
    assert scale.shape == low.shape == (5, 2, 2)
    back = int4_decode(codes, scale, low)
    assert torch.equal(back[0, 0, :64], x[0, 0, :64])
    assert torch.equal(back[1, 1, 64:], x[1, 1, 64:])
    assert bool(((back - x).abs() <= 0.5001 * scale.repeat_interleave(64, -1) + 1e-6).all())
    assert abs(float(back[2, 0, 3]) - 100.0) < 1e-4


def test_bytes_of_the_caches():
    """Two exact tensors, 4.5 bits a number for NVFP4, 4 and two scales of 32 bits in 64 numbers for int4 in float32."""
    network, _, _ = small_network(small_config(*ALIGNED))
    numbers = 2 * SMALL.layers * 7 * 24 * SMALL.dim
    found = {
        name: PEERS[name].make(network, Compiler("eager")).store.kv_bytes for name in ("B1", "B3", "B5", "B6")
    }
    assert found == {
        "B1": 4 * numbers,
        "B3": 4 * numbers,
        "B5": numbers // 2 + numbers // 8,
        "B6": numbers * 9 // 16,
    }


def test_slots_in_time_are_sink_then_the_last_of_the_others():
    stream = small_config(*MISALIGNED).stream  # sink 3, ring 5
    assert slots_in_time(stream, 10) == [0, 1, 2, 5, 6, 7, 3, 4]  # frames 0 1 2 | 5 6 7 8 9


def test_a_right_peer_passes_the_check_and_its_syncs_are_counted(small_reference):
    """B0 reads two counters a layer and pass; with Python ints nothing is read."""
    counted = measured("B0", small_reference)
    assert counted["verdict"]["ok"]
    assert counted["verdict"]["cache"] <= 10 * BAR
    assert counted["host_syncs_per_chunk"] == 2 * SMALL.layers * 5
    assert counted["chunk_ms"]["count"] == 3
    assert counted["step_ms"]["median"] == counted["chunk_ms"]["median"] / 5
    assert measured("B1", small_reference)["host_syncs_per_chunk"] == 0
    json.dumps(counted)


@pytest.mark.parametrize("fault", ["stale chunk", "doubled chunk", "NaN", "other noise"])
def test_a_wrong_peer_fails_the_check(small_reference, fault):
    network = shape_network()
    stream = PEERS["B1"].make(network, Compiler("eager"))
    with torch.no_grad():
        chunks = [stream.run_chunk(network.noise([0], 3 * i)).clone() for i in range(SHAPE.wrapped_chunk + 1)]
    first, wrapped = chunks[0], chunks[-1]
    good = judge(stream, first, wrapped, small_reference, lossy=False)
    assert good.ok, good
    k, tokens = stream.store.layers[1].k, SHAPE.stream.chunk_tokens
    if fault == "stale chunk":  # the newest chunk was never written
        k[:, -tokens:] = k.roll(tokens, 1)[:, -tokens:].clone()
    elif fault == "doubled chunk":
        k[:, -2 * tokens : -tokens] = k[:, -tokens:]
    elif fault == "NaN":
        k[:, -1] = torch.nan
        k[:, -tokens] = torch.nan
    else:
        wrapped = wrapped + 0.01 * torch.randn_like(wrapped)
    assert not judge(stream, first, wrapped, small_reference, lossy=False).ok
    assert judge(stream, first, wrapped, small_reference, lossy=True).ok == (fault == "other noise")


def test_recompiles_of_growing_ints_are_counted_and_a_static_step_has_none(small_reference):
    growing = measured("B2", small_reference)
    assert growing["graphs_by_first_chunk"] == 1
    assert growing["recompiles_after_first_chunk"] > 0
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    static = measured("B3", small_reference)
    assert static["graphs_by_first_chunk"] == 3  # before, behind and one block for all layers
    assert static["recompiles_after_first_chunk"] == static["host_syncs_per_chunk"] == 0


def test_a_whole_static_step_is_one_graph_and_reads_nothing(small_reference):
    whole = measured("B7", small_reference)
    assert whole["verdict"]["ok"]
    assert whole["graphs_by_first_chunk"] == 1
    assert whole["recompiles_after_first_chunk"] == whole["host_syncs_per_chunk"] == 0


def test_planted_syncs_are_counted():
    x = torch.arange(4.0)
    assert counting.count_syncs(lambda: [x[i].item() for i in range(3)]) == 3
    assert counting.count_syncs(lambda: bool(x.sum() > 0)) == 1
    assert counting.count_syncs(lambda: x + 1) == 0


@pytest.mark.parametrize(
    ("later", "share"),
    [
        ("30 0 10 80 0 0 0 0 0 0", 0.2),
        ("10 0 10 40 30 10 20 0 0 0", 0.3),  # waiting for a disk is no work, serving interrupts is
        ("10 0 10 0 0 0 0 0 0 0", None),
    ],
)
def test_how_busy_the_host_was_is_of_all_its_processors(later, share, monkeypatch):
    lines = iter(["cpu  10 0 10 0 0 0 0 0 0 0", f"cpu  {later}"])
    monkeypatch.setattr(counting.Path, "read_text", lambda _: next(lines) + "\ncpu0 1 1 1 1 1 1 1 1 1 1")
    found = counting.busy_share(counting.processor_ticks())
    assert found == (share if share is None else pytest.approx(share))


def test_planted_recompiles_are_counted():
    @torch.compile(backend="eager", dynamic=False)
    def scaled(x, factor):
        return x * factor

    before = counting.graphs_compiled()
    scaled(torch.ones(2), 3)
    scaled(torch.ones(2), 3)
    assert counting.graphs_compiled() - before == 1
    scaled(torch.ones(2), 4)
    assert counting.graphs_compiled() - before == 2


@needs_cuda
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of complex numbers, and of more as versions go
@pytest.mark.parametrize("name", list(PEERS))
def test_peers_on_a_gpu(name, tmp_path):
    """Small shape, bf16, real compilers and captures: right, and no host sync where there should be none."""
    config = SHAPE.config("cuda")
    write_reference(SHAPE, "cuda", tmp_path / "reference.safetensors")
    job = {"reference": str(tmp_path / "reference.safetensors"), "chunks": 20, "busy": 0, "first_only": False}
    with torch.no_grad():
        weights = device_weights(config, RandomWan(SMALL, "cuda"))
        network = make_network(config, weights, golden_text(config))
        report = child.measure_peer(PEERS[name], network, Compiler(), job)
    assert report["verdict"]["ok"], report["verdict"]
    assert report["host_syncs_per_chunk"] == (2 * SMALL.layers * 5 if name == "B0" else 0)
    assert report["cudagraph_skips"] == 0
    assert (report["recompiles_after_first_chunk"] > 0) == (name == "B2")


@needs_cuda
@pytest.mark.gpu
def test_planted_syncs_are_counted_on_a_gpu():
    x = torch.arange(4.0, device="cuda")
    assert counting.count_syncs(lambda: [x[i].item() for i in range(3)]) == 3
    assert counting.count_syncs(lambda: x + 1) == 0

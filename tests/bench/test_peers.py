"""Both peers against the naive reference past the wrap, the check that guards their times, and what is counted."""

from __future__ import annotations

import json

import pytest
import torch

from scripts.bench.peers import child
from scripts.bench.peers.check import judge, slots_in_time, write_reference
from scripts.bench.peers.network import RandomWan, device_weights, make_network
from scripts.bench.peers.peers import PEERS, Compiler
from scripts.bench.peers.shapes import Shape
from seko_export.video.recording import golden_text
from tests.bench.peer_streams import CHUNKS, naive_chunks, peer_chunks, small_network
from tests.support.tolerances import STEP, relative_error
from tests.truth.eager_stream import SMALL, small_config

BAR = STEP[torch.float32]
SHAPE = Shape("small", SMALL, small_config(3, 1, 6).workload.stream, "tiny")
ALIGNED, MISALIGNED = (
    (3, 1, 6),
    (2, 3, 5),
)  # chunk, sink, ring; the second evicts in the middle of a chunk's frames
# Without code generation: Dynamo and the functional form of in-place writes are what can go wrong on a CPU.
COMPILER = Compiler("aot_eager")
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


def measured(name, reference):
    job = {"reference": str(reference), "chunks": 3}
    with torch.no_grad():
        return child.measure_peer(PEERS[name], shape_network(), COMPILER, job)


@pytest.mark.parametrize("layout", [ALIGNED, MISALIGNED])
@pytest.mark.parametrize("name", list(PEERS))
def test_peers_are_the_naive_reference(name, layout):
    """Float32, 12 chunks of 4 passes and the context pass, latents fed by the stream's own cache alone."""
    network, wan, text = small_network(small_config(*layout))
    stream = PEERS[name].make(network, COMPILER)
    wanted = naive_chunks(network, wan, text, CHUNKS)
    for number, latents in enumerate(peer_chunks(stream, network, CHUNKS)):
        assert relative_error(latents, wanted[number]) <= BAR, number
    assert stream.next_frame > 2 * network.config.workload.stream.cache_frames


def test_bytes_of_the_caches():
    """Keys and values of every layer, in float32."""
    network, _, _ = small_network(small_config(*ALIGNED))
    tensor_bytes = SMALL.layers * 7 * 24 * SMALL.dim * 4
    for name, peer in PEERS.items():
        assert peer.make(network, COMPILER).store.kv_bytes == 2 * tensor_bytes, name


def test_slots_in_time_are_sink_then_the_last_of_the_others():
    stream = small_config(*MISALIGNED).workload.stream  # sink 3, ring 5
    assert slots_in_time(stream, 10) == [0, 1, 2, 5, 6, 7, 3, 4]  # frames 0 1 2 | 5 6 7 8 9


def test_a_right_peer_passes_the_check(small_reference):
    counted = measured("B0", small_reference)
    assert counted["verdict"]["ok"]
    assert counted["verdict"]["cache"] <= 10 * BAR
    assert counted["chunk_ms"]["count"] == 3
    assert counted["step_ms"]["median"] == counted["chunk_ms"]["median"] / 5
    json.dumps(counted)


@pytest.mark.parametrize("fault", ["stale chunk", "doubled chunk", "NaN", "other noise"])
def test_a_wrong_peer_fails_the_check(small_reference, fault):
    network = shape_network()
    stream = PEERS["B0"].make(network, COMPILER)
    with torch.no_grad():
        chunks = [stream.run_chunk(network.noise([0], 3 * i)).clone() for i in range(SHAPE.wrapped_chunk + 1)]
    first, wrapped = chunks[0], chunks[-1]
    good = judge(stream, first, wrapped, small_reference)
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
    assert not judge(stream, first, wrapped, small_reference).ok


@needs_cuda
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of complex numbers, and of more as versions go
@pytest.mark.parametrize("name", list(PEERS))
def test_peers_on_a_gpu(name, tmp_path):
    """Small shape, bf16, real compilers and captures."""
    config = SHAPE.config("cuda")
    write_reference(SHAPE, "cuda", tmp_path / "reference.safetensors")
    job = {"reference": str(tmp_path / "reference.safetensors"), "chunks": 20}
    with torch.no_grad():
        weights = device_weights(config, RandomWan(SMALL, "cuda"))
        network = make_network(config, weights, golden_text(config))
        report = child.measure_peer(PEERS[name], network, Compiler(), job)
    assert report["verdict"]["ok"], report["verdict"]

"""B0 and B3: a stream of chunks over the shared network, each in its system's way. No code of theirs is copied.

Kept equal for both: weights, inputs, noise as a tensor from outside, attention's backend, the package's maths (norms,
modulation and rotation in float32, hidden state in the compute dtype), keys and values of the prompt computed once.
Where a description leaves a choice, the faster one was taken for the peer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scripts.bench.peers.network import (
    Layer,
    Network,
    PassInputs,
    Pending,
    advance,
    nothing_pending,
    run_block,
)
from scripts.bench.peers.stores import CountedKv, Kv, RingStore, ShiftedStore
from seko_export.families.layers.block import fill_bias, gated_residual

MOST_RECOMPILES = (
    64  # torch falls back to eager in silence behind its own limit of 8; a peer must not lose by that
)
_WARM_RUNS = 3  # before a capture: compile, warm up


@dataclass(frozen=True)
class Compiler:
    """Compiles block and surroundings of B3: one graph for the block, which all layers share, two for what is around.

    Parameters
    ----------
    backend : str
        Of torch.compile; ``inductor`` where speed counts.
    """

    backend: str = "inductor"

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled function."""
        torch._dynamo.config.recompile_limit = MOST_RECOMPILES
        if self.backend == "inductor" and torch.cuda.is_available():
            # Finding out what vector code the C++ compiler can make takes half a minute; a GPU has no use for it.
            torch._inductor.config.cpp.vec_isa_ok = False
        compiled: Callable[..., Any] = torch.compile(function, backend=self.backend)
        return compiled


class EagerPeer:
    """B0: a stream whose passes are run by the host, layer by layer; keys and queries are turned by complex numbers.

    Parameters
    ----------
    network : Network
        Weights and prompt.
    """

    def __init__(self, network: Network) -> None:
        self.network, self.store = network, ShiftedStore(network.config)
        self.next_frame = 0

    def prepare(self) -> None:
        """Do nothing: an eager stream needs no preparation."""

    def run_chunk(self, noise: Tensor) -> Tensor:
        """Make the next chunk.

        Parameters
        ----------
        noise : Tensor
            [P+1, B, C, F, h, w] float32, on the device.

        Returns
        -------
        Tensor
            [B, C, F, h, w] float32, clean latents; the next call may overwrite them.
        """
        network = self.network
        latents = noise[0]
        for number in range(network.passes):
            velocity = self._run_pass(latents, number)
            sigmas = network.sigma[number], network.sigma_next[number]
            latents = advance(latents, velocity, *sigmas, noise[number + 1])
        self._run_pass(latents, network.passes)
        self.next_frame += network.config.workload.stream.chunk_frames
        return latents

    def _run_pass(self, latents: Tensor, number: int) -> Tensor:
        network, frames = self.network, self._frames()
        # The slots that the embedding turns into an index are the package's; a shifted cache has none.
        nothing = torch.zeros_like(frames[:, 0])
        hidden, modulation, time, cos, sin, _ = network.embed(
            latents, network.times[number], frames, torch.zeros_like(frames), nothing, network.context_time
        )
        inputs = PassInputs(modulation, (torch.complex(cos, sin),))
        place = self.store.place(self.next_frame)
        pending: Pending | None = None
        for layer, cache in zip(network.layers, self.store.layers, strict=True):
            attend = partial(self._attend, cache, place)
            hidden, pending = run_block(
                network.config.model, layer, hidden, pending, inputs, attend, fused_qkv=False
            )
        assert pending is not None  # a model has layers
        velocity: Tensor = network.head(gated_residual(hidden, *pending), time)
        return velocity

    def _attend(self, cache: CountedKv, place: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.store.attend(cache, q, k, v, place)

    def _frames(self) -> Tensor:
        s = self.network.config.workload.stream
        frames = torch.arange(s.chunk_frames, device=self.network.config.target.device) + self.next_frame
        return frames.expand(s.batch, -1)


class StaticStep(nn.Module):
    """One pass over a ring of fixed size, every position a tensor. Parameters and caches are the module's own.

    Parameters
    ----------
    network : Network
        Weights and prompt.
    store : RingStore
        The cache.
    compiler : Compiler or None
        Compiles block and surroundings apart; None: nothing is compiled here.
    """

    def __init__(self, network: Network, store: RingStore, compiler: Compiler | None = None) -> None:
        super().__init__()
        self.network, self.store = network, store
        for number, (layer, cache) in enumerate(zip(network.layers, store.layers, strict=True)):
            for name, tensor in (*layer._asdict().items(), *cache._asdict().items()):
                self.register_buffer(f"layer{number}_{name}", tensor, persistent=False)
        compiled: Callable[..., Any] = compiler if compiler is not None else lambda function: function
        self._parts = tuple(compiled(part) for part in (self._enter, self._block, self._leave))

    def forward(
        self, latents: Tensor, times: Tensor, frames: Tensor, slots: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return the velocity [B, C, F, h, w]; bias: [B, 1, 1, N] while the cache fills."""
        enter, block, leave = self._parts
        hidden, inputs, time, place = enter(latents, times, frames, slots)
        pending = nothing_pending(hidden, inputs.modulation)
        for number in range(self.network.config.model.layers):
            layer = Layer(*(self._own(number, name) for name in Layer._fields))
            cache = Kv(*(self._own(number, name) for name in Kv._fields))
            hidden, pending = block(layer, cache, hidden, pending, inputs, (place, bias))
        velocity: Tensor = leave(hidden, pending, time)
        return velocity

    def _own(self, number: int, name: str) -> Tensor:
        tensor: Tensor = getattr(self, f"layer{number}_{name}")
        return tensor

    def _enter(
        self, latents: Tensor, times: Tensor, frames: Tensor, slots: Tensor
    ) -> tuple[Tensor, PassInputs, Tensor, Tensor]:
        nothing = torch.zeros_like(frames[:, 0])
        hidden, modulation, time, cos, sin, index = self.network.embed(
            latents, times, frames, slots, nothing, self.network.context_time
        )
        return hidden, PassInputs(modulation, (cos, sin)), time, index

    def _block(
        self, layer: Layer, cache: Kv, hidden: Tensor, pending: Pending, inputs: PassInputs, place: Any
    ) -> tuple[Tensor, Pending]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.store.attend(cache, q, k, v, place)

        model = self.network.config.model
        return run_block(model, layer, hidden, pending, inputs, attend, fused_qkv=True)

    def _leave(self, hidden: Tensor, pending: Pending, time: Tensor) -> Tensor:
        velocity: Tensor = self.network.head(gated_residual(hidden, *pending), time)
        return velocity


class StaticPeer:
    """B3: a stream over a static step, eager with a bias while the cache fills, then compiled.

    The five passes of a full chunk and the sampler are captured by hand as one CUDA graph.

    Parameters
    ----------
    network : Network
        Weights and prompt.
    compiler : Compiler
        How to compile.
    """

    def __init__(self, network: Network, compiler: Compiler) -> None:
        self.network, self.store = network, RingStore(network.config)
        self.next_frame = 0
        self._eager = StaticStep(network, self.store)
        self._step = StaticStep(network, self.store, compiler)
        s, m, device = network.config.workload.stream, network.config.model, network.config.target.device
        self._positions = torch.zeros(2, s.batch, s.chunk_frames, dtype=torch.int64, device=device)
        latent = (s.batch, m.in_channels, s.chunk_frames, s.latent_height, s.latent_width)
        self._noise = torch.zeros(network.passes + 1, *latent, device=device)
        self._replay: Callable[[], object] | None = None
        self._result: Tensor = self._noise[0]

    def prepare(self) -> None:
        """Compile, warm up, capture: before the first chunk, so that no later one waits.

        Runs write to the first chunk's slots, which the first chunk overwrites before they are read.
        """
        self._send_positions()
        if self.network.config.target.device != "cuda":
            for _ in range(_WARM_RUNS):
                self._chunk(self._step, None)
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_RUNS):
                self._chunk(self._step, None)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._result = self._chunk(self._step, None)
        self._replay = graph.replay

    def run_chunk(self, noise: Tensor) -> Tensor:
        """Make the next chunk; see `EagerPeer.run_chunk`."""
        s = self.network.config.workload.stream
        self._send_positions()
        self._noise.copy_(noise)
        valid = self.store.ring.valid_frames(self.next_frame) * s.frame_tokens
        self.next_frame += s.chunk_frames
        if valid < s.cache_tokens:
            counts = torch.full((s.batch,), valid, device=noise.device)
            return self._chunk(
                self._eager, fill_bias(counts, s.cache_tokens, self.network.config.target.dtype)
            )
        if self._replay is None:
            return self._chunk(self._step, None)
        self._replay()
        return self._result

    def _send_positions(self) -> None:
        s, first = self.network.config.workload.stream, self.next_frame
        frames = list(range(first, first + s.chunk_frames))
        positions = torch.tensor([[frames] * s.batch, [self.store.ring.write_slots(first)] * s.batch])
        if self._positions.is_cuda:
            positions = positions.pin_memory()
        self._positions.copy_(positions, non_blocking=True)

    def _chunk(self, step: Callable[..., Tensor], bias: Tensor | None) -> Tensor:
        network, (frames, slots) = self.network, self._positions
        latents = self._noise[0]
        for number in range(network.passes):
            velocity = step(latents, network.times[number], frames, slots, bias)
            sigmas = network.sigma[number], network.sigma_next[number]
            latents = advance(latents, velocity, *sigmas, self._noise[number + 1])
        step(latents, network.times[-1], frames, slots, bias)
        return latents


Stream = EagerPeer | StaticPeer


@dataclass(frozen=True)
class Peer:
    """One baseline.

    Parameters
    ----------
    what : str
        In a line, with the choices that its description leaves open.
    make : callable
        Network and compiler to a stream at frame 0.
    """

    what: str
    make: Callable[[Network, Compiler], Stream]


PEERS: dict[str, Peer] = {
    "B0": Peer(
        "Self-Forcing eager: counters on the device read with .item(), slice writes and reads, clone-and-shift roll, "
        "complex RoPE (complex64, table made once a pass)",
        lambda network, _: EagerPeer(network),
    ),
    "B3": Peer(
        "torch.compile + one hand-captured CUDA graph of all passes of a chunk and the sampler; fixed [sink|window] "
        "cache written by index_copy, so no roll; fused qkv; real RoPE; the last residual of a block fused across "
        "layers; noise made before the replay",
        StaticPeer,
    ),
}

"""Engines of a VAE on one device with the buffers of one row, and what benches of them share.

Shared are compiling, random weights, diffusers' VAE with the same weights, times and differences. What is measured is
in vae.py.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.bench import built
from scripts.bench.counting import chunk_times
from scripts.random_vae import vae_diffusers_config
from seko_export.backends.aoti import compile_piece
from seko_export.backends.workers import make_engine
from seko_export.config.video import VideoBuild
from seko_export.engines.piece import FlatModule, Piece
from seko_export.families.registry import graph_of
from seko_export.media.vaes import vae_of
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.media.wan_vae.keys import vae_diffusers_names, vae_shapes

DECODERS = ("vae_decode_first", "vae_decode")


@dataclass(frozen=True)
class Reference:
    """An eager decoder or encoder of whole clips.

    Parameters
    ----------
    name : str
        What it is, for the row.
    run : callable
        From latents to video, or from video to latents.
    """

    name: str
    run: Callable[[Tensor], Tensor]


def build(config: VideoBuild, work: Path, names: Sequence[str] = DECODERS) -> dict[str, float]:
    """Compile engines side by side into ``work``, unless this commit has done so, and return the seconds of each."""

    def compile_all() -> dict[str, dict[str, float]]:
        with ProcessPoolExecutor(len(names), multiprocessing.get_context("spawn")) as pool:
            started = {
                name: pool.submit(make_engine, compile_piece, config, name, work / f"{name}.pt2")
                for name in names
            }
            return {"seconds": {name: future.result() for name, future in started.items()}}

    work.mkdir(parents=True, exist_ok=True)
    facts = built.build_once(work, (config, *names), compile_all)
    assert facts is not None
    seconds: dict[str, float] = facts["seconds"]
    return seconds


class EngineSession:
    """Engines of a VAE with the buffers of one row, captured where there is a GPU.

    Parameters
    ----------
    config : VideoBuild
        The build.
    weights : mapping of str to Tensor
        By the VAE's names, on the CPU.
    work : Path
        Where the engines lie.
    names : sequence of str
        Names of the engines, in an order in which each reads what earlier ones wrote.
    rank : int
        This process's number, where several share the pictures; they have joined their groups.
    eager : bool
        Whether the pieces' modules run instead, uncompiled.
    """

    def __init__(
        self,
        config: VideoBuild,
        weights: Mapping[str, Tensor],
        work: Path,
        names: Sequence[str],
        rank: int = 0,
        *,
        eager: bool = False,
    ) -> None:
        self.device = config.target.device
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        vae = config.workload.vae
        assert vae is not None
        pieces, packed = graph_of(config).pieces, vae_of(vae).weights(weights, vae)
        self.buffers: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        self.runs: dict[str, Callable[[], None]] = {}
        for name in names:
            piece = pieces[name]
            for argument in (*piece.inputs, *piece.outputs):
                place = torch.zeros(argument.shape, dtype=argument.dtype, device=self.device)
                self.buffers.setdefault(argument.ref, place)
            for argument in piece.parameters:
                key = argument.ref.removeprefix("weight:vae.")
                self.tensors.setdefault(argument.ref, packed[key].to(self.device, argument.dtype))
            if "buffer:rank" in self.buffers:
                self.buffers["buffer:rank"].fill_(rank)
            self.runs[name] = self._run_of(piece, None if eager else work / f"{name}.pt2")
        if self.device == "cuda":
            self._capture()

    def peak_bytes(self) -> int:
        """Most that was allocated on the GPU since the session began, weights and buffers included."""
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else 0

    def _run_of(self, piece: Piece, package: Path | None) -> Callable[[], None]:
        """Return what runs a package, or the piece's module without one."""
        engine: Callable[[list[Tensor]], Sequence[Tensor]]
        if package is None:
            module = FlatModule(piece)
            engine = lambda tensors: module(*tensors)  # noqa: E731
        else:
            engine = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", True, 1, -1).boxed_run
        inputs = [self.tensors[a.ref] for a in piece.parameters] + [self.buffers[a.ref] for a in piece.inputs]
        outputs = [self.buffers[a.ref] for a in piece.outputs]

        def run() -> None:
            for target, result in zip(outputs, engine(list(inputs)), strict=True):
                target.copy_(result)

        return run

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        for name, run in list(self.runs.items()):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    run()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                run()
            self.runs[name] = graph.replay
        torch.cuda.synchronize()


class DecodeSession(EngineSession):
    """The decoder's two engines, and how far the stream is; parameters of `EngineSession`."""

    def __init__(
        self,
        config: VideoBuild,
        weights: Mapping[str, Tensor],
        work: Path,
        rank: int = 0,
        *,
        eager: bool = False,
    ) -> None:
        super().__init__(config, weights, work, DECODERS, rank, eager=eager)
        self._decoded = 0  # chunks of the stream

    def decode(self, latents: Tensor) -> Tensor:
        """Return the pictures [T, H, W, 3] uint8 of the stream's next chunk [1, z, F, h, w]."""
        name = DECODERS[min(1, self._decoded)]
        self._decoded += 1
        self.buffers["buffer:decode.latents[row]"].copy_(latents[0])
        self.runs[name]()
        video = "video.first" if name == DECODERS[0] else "video"
        return self.buffers[f"buffer:{video}[row]"]


def diffusers_vae(vae: WanVaeConfig, weights: Mapping[str, Tensor]) -> tuple[str, Any] | None:
    """Return the name of diffusers' VAE for rows, and the VAE with these weights in float32 on the CPU; None without
    diffusers, which is reported."""
    try:
        import diffusers
        from diffusers import AutoencoderKLWan
    except ImportError as fault:
        print(f"diffusers is not importable ({fault}): our own eager modules stand in", flush=True)
        return None
    theirs: Any = AutoencoderKLWan  # untyped
    model = theirs.from_config(vae_diffusers_config(vae))
    names = vae_diffusers_names(vae)
    model.load_state_dict({names[name]: weights[name] for name in names})
    return f"diffusers {diffusers.__version__}, eager", model.eval().requires_grad_(False)


def clip_times(
    run: Callable[[Tensor], object], clip: Tensor, first: int, later: int, repeats: int
) -> tuple[float, float, int]:
    """Return the milliseconds of a stream's first call and of a later one, and the most that was allocated.

    Parameters
    ----------
    run : callable
        Codes whole clips.
    clip : Tensor
        The clip, with its frames along dimension 2.
    first : int
        Frames of the first call.
    later : int
        Number of later calls. The time of one is what each of them adds to the clip: ``run`` alone is timed.
    repeats : int
        Calls of ``run`` of which a time is the median.
    """
    if clip.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    first_ms = timed(lambda: run(clip[:, :, :first]), repeats)
    whole_ms = timed(lambda: run(clip), repeats)
    peak = torch.cuda.max_memory_allocated() if clip.is_cuda else 0
    return first_ms, (whole_ms - first_ms) / later, peak


def timed(run: Callable[[], object], repeats: int) -> float:
    """Return the median milliseconds of one call."""
    for _ in range(2):
        run()
    return statistics.median(chunk_times(run, repeats))


def random_weights(vae: WanVaeConfig) -> dict[str, Tensor]:
    """Return weights that keep activations near 1, by Wan's names."""
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {}
    for name, shape in vae_shapes(vae, "both").items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("gamma"):
            weights[name] = 1 + 0.1 * noise
        elif name.endswith("bias"):
            weights[name] = 0.02 * noise
        else:
            weights[name] = noise * math.prod(shape[1:]) ** -0.5
    return weights


def rms(a: Tensor, b: Tensor) -> float:
    """Return the root of the mean squared difference."""
    return float((a - b).square().mean().sqrt())


def forget() -> None:
    """Give back what the last part held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

"""The pieces of one build: each with its module, its signature and the calls that the runtime makes of it.

Everything that both sides of the wall must agree on (buffer table, engine signatures, programs) is made here,
from the configs, and travels as data in the manifest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seko_export.config import ModelConfig, StreamConfig
from seko_export.models.causal_dit import Block, Embed, Head, Prompt, PromptKv
from seko_export.models.sampler import Advance, Noise, Schedule
from seko_kernels.kv_formats import KvFormat, kv_format
from seko_runtime.manifest import Buffer, Call, TensorSpec

_LAYER = "blocks.{layer}."
_WEIGHTS = "weights."  # before a parameter's name in an engine's signature: inputs may have the same name


@dataclass(frozen=True)
class BuildConfig:
    """What one artifact is made for.

    Parameters
    ----------
    model, stream, schedule
        Dimensions, layout and times.
    kv_scheme : str
        ``bf16``, ``fp32`` (the exact formats) or ``fp4``.
    device : str
        ``cpu`` or ``cuda``.
    """

    model: ModelConfig
    stream: StreamConfig
    schedule: Schedule
    kv_scheme: str
    device: str

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype: bfloat16 on a GPU, float32 on a CPU."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def exact_scheme(self) -> str:
        """The exact format of this device."""
        return "bf16" if self.device == "cuda" else "fp32"

    @property
    def kv(self) -> KvFormat:
        """The cache format."""
        return kv_format(self.kv_scheme, self.model.heads, self.model.head_dim, self.dtype)


@dataclass(frozen=True)
class Argument:
    """One tensor of a piece's signature and where the runtime takes it from, or puts it.

    Parameters
    ----------
    name : str
        Name within the piece; ``group.name`` becomes an entry of the mapping argument ``group``.
    ref : str
        ``weight:``, ``buffer:`` or ``value:`` reference, as the manifest's programs write them.
    shape, dtype
        As the engine sees the tensor.
    """

    name: str
    ref: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def spec(self) -> TensorSpec:
        """The manifest's form."""
        return TensorSpec(self.name, self.shape, dtype_name(self.dtype))


@dataclass(frozen=True)
class Piece:
    """One engine to be: a module on the meta device, its inputs, its outputs.

    Parameters
    ----------
    name : str
        Engine name.
    module : nn.Module
        On the meta device; its parameters are inputs of the engine, in ``named_parameters`` order, first.
    prefix : str
        What stands before the module's parameter names in the artifact; may hold ``{layer}``.
    layers : int
        0: called once. n: called once a layer, n times.
    inputs, outputs : tuple of Argument
        Inputs after the parameters, then outputs.
    mutates : tuple of str
        Inputs that are written in place.
    """

    name: str
    module: nn.Module
    prefix: str
    layers: int
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    mutates: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[Argument, ...]:
        """The weights, as inputs."""
        return tuple(
            Argument(f"{_WEIGHTS}{name}", f"weight:{self.prefix}{name}", tuple(p.shape), p.dtype)
            for name, p in self.module.named_parameters()
        )

    @property
    def signature(self) -> tuple[Argument, ...]:
        """Every input of the engine, in order."""
        return self.parameters + self.inputs

    @property
    def call(self) -> Call:
        """The call of this piece in a program."""
        return Call(
            engine=self.name,
            layers=self.layers,
            inputs=tuple(a.ref for a in self.signature),
            outputs=tuple(a.ref for a in self.outputs),
        )

    def example_inputs(self, device: str) -> tuple[Tensor, ...]:
        """Return inputs to trace and compile with, [shapes of `signature`]: zeros, which are valid indices too."""
        return tuple(torch.zeros(a.shape, dtype=a.dtype, device=device) for a in self.signature)


class FlatModule(nn.Module):
    """A piece as a function of a flat list of tensors: what is traced, compiled and called."""

    def __init__(self, piece: Piece) -> None:
        super().__init__()
        object.__setattr__(self, "_inner", piece.module)  # not a submodule: its parameters are inputs here
        self._parameter_names = tuple(a.name.removeprefix(_WEIGHTS) for a in piece.parameters)
        self._input_names = tuple(a.name for a in piece.inputs)
        self._groups = ("caches", "scales") if isinstance(piece.module, Block) else ()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Call the piece with its parameters and inputs in signature order; return its outputs as a tuple."""
        split = len(self._parameter_names)
        weights = dict(zip(self._parameter_names, tensors[:split], strict=True))
        groups: dict[str, dict[str, Tensor]] = {group: {} for group in self._groups}
        plain: dict[str, Tensor] = {}
        for name, tensor in zip(self._input_names, tensors[split:], strict=True):
            group, _, entry = name.rpartition(".")
            (groups[group] if group else plain)[entry] = tensor
        module: nn.Module = self.__dict__["_inner"]
        result = torch.func.functional_call(module, weights, (), plain | groups)
        return result if isinstance(result, tuple) else (result,)


def make_pieces(config: BuildConfig) -> dict[str, Piece]:
    """Return every piece of a build by name, modules on the meta device."""
    m, s, dtype, kv = config.model, config.stream, config.dtype, config.kv
    b, f, t = s.batch, s.chunk_frames, s.chunk_tokens
    latent = (b, m.in_channels, f, s.latent_height, s.latent_width)
    text = (b, m.text_tokens, m.heads, m.head_dim)
    i64, f32 = torch.int64, torch.float32

    latents = Argument("latents", "buffer:latents", latent, f32)
    seeds = Argument("seeds", "buffer:seeds", (b,), i64)
    frames = Argument("frames", "buffer:frames", (b, f), i64)
    hidden = Argument("hidden", "value:hidden", (b, t, m.dim), dtype)
    time = Argument("time", "value:time", (b, f, m.dim), f32)
    velocity = Argument("velocity", "value:velocity", (b, m.out_channels, *latent[2:]), f32)
    draw = Argument("draw", "weight:schedule.draw[pass]", (1,), i64)
    context = Argument("context", "value:context", (b, m.text_tokens, m.dim), dtype)
    text_kv = (
        Argument("text_k", "buffer:text.k[layer]", text, dtype),
        Argument("text_v", "buffer:text.v[layer]", text, dtype),
    )
    embedded = (
        Argument("modulation", "value:modulation", (b, f, 6, m.dim), f32),
        Argument("cos", "value:cos", (b, t, m.head_dim // 2), f32),
        Argument("sin", "value:sin", (b, t, m.head_dim // 2), f32),
        Argument("token_index", "value:token_index", (b * t,), i64),
    )
    caches = tuple(
        Argument(
            f"caches.{c.name}", f"buffer:kv.{c.name}[layer]", (b * s.cache_tokens, *c.token_shape), c.dtype
        )
        for c in kv.cache_tensors
    )
    scales = tuple(
        Argument(f"scales.{c.name}", f"weight:{_LAYER}kv.{c.name}", c.shape, c.dtype)
        for c in kv.scale_tensors
    )

    def block(name: str, *, masked: bool) -> Piece:
        module = _on_meta(lambda: Block(m, s, kv, dtype, masked=masked))
        valid = Argument("valid_tokens", "buffer:valid_tokens", (b,), i64)
        inputs = (hidden, *embedded, valid, *text_kv, *caches, *scales)
        return Piece(name, module, _LAYER, m.layers, inputs, (hidden,), tuple(c.name for c in caches))

    pieces = [
        Piece(
            "embed",
            _on_meta(lambda: Embed(m, s, dtype)),
            "",
            0,
            (
                latents,
                Argument("timestep", "weight:schedule.timestep[pass]", (b, f), f32),
                frames,
                Argument("write_slots", "buffer:write_slots", (b, f), i64),
            ),
            (hidden, embedded[0], time, *embedded[1:]),
        ),
        block("block", masked=True),
        Piece("head", _on_meta(lambda: Head(m, s)), "head.", 0, (hidden, time), (velocity,)),
        Piece(
            "prompt",
            _on_meta(lambda: Prompt(m, dtype)),
            "",
            0,
            (Argument("text", "buffer:text.embeddings", (b, m.text_tokens, m.text_dim), dtype),),
            (context,),
        ),
        Piece(
            "prompt_kv",
            _on_meta(lambda: PromptKv(m, dtype)),
            f"{_LAYER}cross_attn.",
            m.layers,
            (context,),
            text_kv,
        ),
        Piece(
            "noise",
            Noise(m, s),
            "",
            0,
            (seeds, frames, Argument("draw", "weight:schedule.first_draw", (1,), i64)),
            (latents,),
        ),
        Piece(
            "advance",
            Advance(m, s),
            "",
            0,
            (
                latents,
                velocity,
                Argument("sigma", "weight:schedule.sigma[pass]", (1,), f32),
                Argument("sigma_next", "weight:schedule.sigma_next[pass]", (1,), f32),
                seeds,
                frames,
                draw,
            ),
            (latents,),
        ),
    ]
    if (
        config.device == "cuda"
    ):  # a bias costs cuDNN's attention half its speed, so full rows get their own block
        pieces.append(block("block_full", masked=False))
    return {piece.name: piece for piece in pieces}


def make_programs(pieces: dict[str, Piece]) -> dict[str, tuple[Call, ...]]:
    """Return the programs that the runtime runs: per prompt, per chunk, per pass."""

    def calls(*names: str) -> tuple[Call, ...]:
        return tuple(pieces[name].call for name in names)

    programs = {
        "prompt": calls("prompt", "prompt_kv"),
        "begin": calls("noise"),
        "denoise": calls("embed", "block", "head", "advance"),
        "context": calls("embed", "block"),
    }
    if "block_full" in pieces:
        programs["denoise_full"] = calls("embed", "block_full", "head", "advance")
        programs["context_full"] = calls("embed", "block_full")
    return programs


def make_buffers(config: BuildConfig) -> tuple[Buffer, ...]:
    """Return the buffer table: what the runtime allocates for a session, and what each part is for."""
    m, s, dtype = config.model, config.stream, dtype_name(config.dtype)
    b, f = s.batch, s.chunk_frames
    text = (m.layers, b, m.text_tokens, m.heads, m.head_dim)
    caches = tuple(
        Buffer(
            f"kv.{c.name}", (m.layers, b * s.cache_tokens, *c.token_shape), dtype_name(c.dtype), "cache", True
        )
        for c in config.kv.cache_tensors
    )
    return (
        *caches,
        Buffer("text.embeddings", (b, m.text_tokens, m.text_dim), dtype, "prompt", False),
        Buffer("text.k", text, dtype, "prompt", True),
        Buffer("text.v", text, dtype, "prompt", True),
        Buffer("seeds", (b,), "int64", "chunk", False),
        Buffer("frames", (b, f), "int64", "chunk", False),
        Buffer("write_slots", (b, f), "int64", "chunk", False),
        Buffer("valid_tokens", (b,), "int64", "chunk", False),
        Buffer("latents", (b, m.in_channels, f, s.latent_height, s.latent_width), "float32", "state", False),
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the manifest's name of a dtype: torch's own, without the module."""
    return str(dtype).removeprefix("torch.")


def _on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make().eval().requires_grad_(False)

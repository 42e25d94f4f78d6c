"""The engines of a VoxCPM2 build: engines of a step, of a prefill, and of the voice encoder.

A step calls the engines of four groups, one group after the other. First come ``noise`` and ``condition``. For each
solver step with a velocity follow ``solver_tokens``, ``solver_layer`` for each layer, and ``solver_step``. For the new
patch follow ``patch_tokens``, ``patch_layer`` for each layer, and ``patch_embedding``. For the language models follow
``positions``, ``base_layer`` for each layer, ``fusion``, ``residual_layer`` for each layer, and ``keep_state``. The
last engine of a step is ``decode``.

A prefill calls the engines from ``patch_tokens`` to ``patch_embedding`` over all tokens. After the engines for patches
a prefill calls ``prompt_tokens``, and the engines from ``positions`` to ``keep_state``.

The parts of a step are separate programs, because the second part runs once for each solver step. Buffers carry the
results of a part to the next part. A step's buffers have the rows of the largest step; in a buffer reference,
``[bucket]`` selects the leading rows. A prefill's buffers hold one row with the tokens of the largest prefill;
``[bucket]`` selects the leading tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from seko_export.engines.key import EngineKey
from seko_export.engines.piece import OF_LAYER, Argument, Piece, on_meta
from seko_export.errors import UsageError
from seko_export.families.voxcpm2 import modules, weights
from seko_export.families.voxcpm2.config import NetConfig, VoxCpm2Config
from seko_export.families.voxcpm2.fused_layers import (
    FusedLocalLayer,
    FusedQuantisedStepLayer,
    FusedStepLayer,
    StepPositions,
)
from seko_export.families.voxcpm2.keys import DECODER, ENCODER
from seko_export.families.voxcpm2.layers import CachedLayer, LocalLayer, Positions, QuantisedCachedLayer
from seko_export.media.audio_vae.modules import DecodeRows, EncodeChunk, state_size
from seko_kernels.few_tokens import STEP_FACTORS
from seko_kernels.formats import NumberFormat
from seko_runtime.speech import contract

I64, F32 = torch.int64, torch.float32
PREFILL = "prefill"  # in the names of a prefill's engines and host buffers


@dataclass(frozen=True)
class SpeechLayout:
    """Sizes of a speech build's caches and calls, and number formats of its engines.

    Parameters
    ----------
    rows : int
        Number of rows of the pool, including the last row, which serves batch indices without a session.
    places : int
        Number of places in each cache, including the last place, to which padding is written.
    dtype : torch.dtype
        Dtype of weights, activations and caches; the audio VAE is float32.
    voice_patches : int
        Number of patches of a voice that one call encodes.
    fused : bool
        Whether layers run in Seko's own kernels. A prefill's layers with a cache always run in torch, because they have
        many tokens.
    fp8 : bool
        Whether the layers' weight matrices are stored in e4m3, with a factor for each output channel.
    form : NumberFormat or None
        Number format of keys and values in the caches, one of `STEP_FACTORS`; None: keys and values are stored exactly.
    """

    rows: int
    places: int
    dtype: torch.dtype
    voice_patches: int = 8
    fused: bool = False
    fp8: bool = False
    form: NumberFormat | None = None

    def __post_init__(self) -> None:
        if self.form is not None and self.form.name not in STEP_FACTORS:
            raise UsageError(
                f"caches of {self.form.name}: expected one of {', '.join(STEP_FACTORS)}, or exact ones"
            )
        if self.rows < 2 or self.places < 2 or self.voice_patches < 1:
            raise UsageError(
                f"{self.rows} rows and {self.places} places of the cache: one of each is for padding, so at least 2; "
                f"{self.voice_patches} patches of a voice: at least 1"
            )


def step_pieces(config: VoxCpm2Config, layout: SpeechLayout, batch: int, length: int) -> dict[str, Piece]:
    """Return the engines of a step of ``batch`` rows that reads ``length`` positions, by name.

    Fused layers read exactly the tokens that a row has in the cache, so their engines are the same for every length.
    """
    pieces = _Pieces(config, layout, batch, tokens=1, length=length)
    return {piece.name: piece for piece in (*pieces.solver(), *pieces.local_encoder(), *pieces.models())}


def prefill_pieces(config: VoxCpm2Config, layout: SpeechLayout, tokens: int, length: int) -> dict[str, Piece]:
    """Return the engines of a prefill of ``tokens`` tokens of one row, by name.

    ``length`` is at least the positions before the call plus ``tokens``; a long prompt may take several calls.
    """
    if tokens < 2 or length < tokens:
        raise UsageError(f"a prefill of {tokens} tokens that reads {length}: at least 2, and as many read")
    pieces = _Pieces(config, layout, 1, tokens, length, PREFILL)
    return {
        piece.name: piece for piece in (*pieces.local_encoder(), pieces.prompt_tokens(), *pieces.models())
    }


def voice_piece(config: VoxCpm2Config, layout: SpeechLayout) -> Piece:
    """Return the engine that encodes a stretch of a voice recording; the encoder's states are zeros before the first
    stretch.
    """
    module = on_meta(lambda: EncodeChunk(config.vae))
    assert isinstance(module, EncodeChunk)
    latents = layout.voice_patches * config.patch_size
    samples = latents * config.vae.encoder_stride
    states = ("states", f"buffer:{contract.VOICE_STATES}", (1, state_size(module)), F32)
    return Piece(
        EngineKey("voice"),
        module,
        f"{weights.VAE}encoder.",
        0,
        (Argument("samples", f"buffer:{contract.VOICE}", (1, samples), F32), Argument(*states)),
        (
            Argument("latents", f"buffer:{contract.VOICE_LATENTS}", (1, latents, config.latent_dim), F32),
            Argument(*states),
        ),
    )


class _Pieces:
    """The engines of one size of call, such as a step of 8 rows."""

    def __init__(
        self,
        config: VoxCpm2Config,
        layout: SpeechLayout,
        batch: int,
        tokens: int,
        length: int,
        variant: str = "",
    ) -> None:
        self.config, self.layout, self.dtype = config, layout, layout.dtype
        self.batch, self.tokens, self.length = batch, tokens, length
        self.variant = (variant,) if variant else ()
        self.in_place = (
            layout.fused and not variant
        )  # whether layers read what a row holds of a cache where it lies
        d = config.base.dim
        self.hidden = Argument("hidden", "value:hidden", (batch, tokens, d), self.dtype)
        self.features = Argument("features", "value:features", (batch, tokens, d), self.dtype)
        self.embedded = Argument("embedded", "value:embedded", (batch * tokens, 1, d), self.dtype)
        self.rows, self.count = self._of_rows("rows", contract.ROWS), self._of_rows("count", contract.COUNT)
        self.patch = Argument(
            "patch", f"buffer:{contract.PATCH}[bucket]", (batch, *config.patch_shape), self.dtype
        )
        self.states = (
            Argument("base_state", f"buffer:{contract.BASE_STATE}", (layout.rows, d), self.dtype),
            Argument("residual_state", f"buffer:{contract.RESIDUAL_STATE}", (layout.rows, d), self.dtype),
            Argument(
                "last_patch", f"buffer:{contract.LAST_PATCH}", (layout.rows, *config.patch_shape), self.dtype
            ),
        )

    def solver(self) -> list[Piece]:
        """Return the engines that generate a patch from the rows' states and decode the patch to samples."""
        config, dtype, b = self.config, self.dtype, self.batch
        width = config.decoder.dim
        mu = Argument("mu", f"buffer:{contract.MU}[bucket]", (b, 2, 2, width), dtype)
        cond = Argument("cond", f"buffer:{contract.COND}[bucket]", (b, 2, config.patch_size, width), dtype)
        tokens = Argument("hidden", "value:tokens", (2 * b, config.solver_tokens, width), dtype)
        time = Argument("time", f"weight:{weights.TIMES}[pass]", (width,), dtype)
        size = Argument("size", f"weight:{weights.SIZES}[pass]", (1,), dtype)
        drawn = (
            self._of_rows("seeds", contract.SEEDS),
            self._of_rows("patch_numbers", contract.PATCH_NUMBERS),
            self._of_rows("temperature", contract.TEMPERATURE, F32),
        )
        stop = (
            Argument("stop_logits", f"buffer:{contract.STOP_LOGITS}[bucket]", (b, 2), F32),
            Argument("stop", f"buffer:{contract.STOP}[bucket]", (b,), torch.uint8),
        )
        module = on_meta(lambda: DecodeRows(config.vae))
        assert isinstance(module, DecodeRows)
        states = Argument(
            "states", f"buffer:{contract.VAE_STATES}", (self.layout.rows, state_size(module)), F32
        )
        samples = Argument("samples", f"buffer:{contract.SAMPLES}[bucket]", (b, config.patch_samples), F32)
        guidance = self._of_rows("guidance", contract.GUIDANCE, F32)
        step = (Argument("tokens", tokens.ref, tokens.shape, dtype), self.patch, guidance, size)
        return [
            self._piece("noise", modules.PatchNoise, drawn, (self.patch,)),
            self._piece("condition", modules.Condition, (self.rows, *self.states), (mu, cond, *stop)),
            self._piece("solver_tokens", modules.SolverTokens, (self.patch, mu, time, cond), (tokens,)),
            self._local("solver_layer", DECODER, config.decoder, tokens, weights.SOLVER_ROTARY),
            self._piece("solver_step", modules.SolverStep, step, (self.patch,)),
            Piece(
                self._key("decode"),
                module,
                f"{weights.VAE}decoder.",
                0,
                (Argument("latents", self.patch.ref, self.patch.shape, dtype), self.rows, states),
                (samples,),
                ("states",),
            ),
        ]

    def local_encoder(self) -> list[Piece]:
        """Return the engines of the local encoder, which compute one embedding for each patch of a call."""
        config, dtype = self.config, self.dtype
        count = self.batch * self.tokens
        shape = (count, config.patch_tokens, config.encoder.dim)
        hidden, tokens = (Argument(name, "value:patch_tokens", shape, dtype) for name in ("hidden", "tokens"))
        make: type[nn.Module] = modules.PatchEmbedding if self.variant else modules.NextToken
        outputs = (self.embedded,) if self.variant else (self.features, self.hidden)
        return [
            self._piece("patch_tokens", modules.PatchTokens, (self._patches(),), (hidden,)),
            self._local("patch_layer", ENCODER, config.encoder, hidden, weights.PATCH_ROTARY),
            self._piece("patch_embedding", make, (tokens,), outputs),
        ]

    def prompt_tokens(self) -> Piece:
        """Return the engine that computes the language models' input embeddings for a prompt."""
        ids = Argument("ids", f"buffer:{contract.IDS}[bucket]", (self.tokens,), I64)
        outputs = (self.hidden, self.features)
        return self._piece(
            "prompt_tokens", modules.PromptTokens, (ids, self._is_audio(), self.embedded), outputs
        )

    def models(self) -> list[Piece]:
        """Return the engines that run both language models over the call's tokens."""
        config, dtype, b, t = self.config, self.dtype, self.batch, self.tokens
        layout, pairs = self.layout, len(config.rope.factors)
        base = Argument("base", "value:base", self.hidden.shape, dtype)
        rows = (self._of_rows("starts", contract.STARTS), self._of_rows("first", contract.FIRST))
        tables = (
            Argument("inverse_factors", f"weight:{weights.INVERSE_FACTORS}", (pairs,), F32),
            Argument("frequencies", f"weight:{weights.FREQUENCIES}", (pairs,), F32),
        )
        write_index = Argument("write_index", "value:write_index", (b * t,), I64)
        rotary = tuple(Argument(name, f"value:{name}", (b, t, 2 * pairs), F32) for name in ("cos", "sin"))
        audio = (self._is_audio(),) if self.variant else ()
        read = (
            Argument("read_index", "value:read_index", (b * self.length,), I64),
            Argument("mask", "value:mask", (b, t, self.length), torch.bool),
        )
        positions: nn.Module = Positions(t, self.length, layout.places, config.rope.amplitude)
        inputs: tuple[Argument, ...] = (*rows, self.count, *tables)
        places: tuple[Argument, ...] = (write_index, *read)
        outputs = (*places, *rotary)
        if self.in_place:
            positions = StepPositions(config.rope.amplitude)
            inputs, outputs, places = (*rows, *tables), (write_index, *rotary), (*rows, write_index)
        return [
            Piece(self._key("positions", reads=True), positions, "", 0, inputs, outputs),
            self._cached("base_layer", "base_lm", config.base, places, rotary),
            self._piece("fusion", modules.Fusion, (self.hidden, self.features, *audio), (base, self.hidden)),
            self._cached(
                "residual_layer",
                "residual_lm",
                config.residual,
                places,
                rotary if config.residual_rope else (),
            ),
            self._piece(
                "keep_state",
                modules.KeepState,
                (self.hidden, base, self._patches(), self.count, self.rows, *self.states),
                tuple(
                    Argument(name, f"value:{name}", (b, config.base.dim), dtype)
                    for name in ("last_base", "last_residual")
                ),
                mutates=tuple(state.name for state in self.states),
            ),
        ]

    def _patches(self) -> Argument:
        """Return the patches of the call's tokens: those of the prompt, or the patch that the step made."""
        ref = f"buffer:{contract.PROMPT_PATCHES}[bucket]" if self.variant else self.patch.ref
        return Argument("patches", ref, (self.batch * self.tokens, *self.config.patch_shape), self.dtype)

    def _is_audio(self) -> Argument:
        """Return whether each token of a prompt is a patch."""
        return Argument("is_audio", f"buffer:{contract.IS_AUDIO}[bucket]", (self.tokens,), torch.bool)

    def _of_rows(self, name: str, buffer: str, dtype: torch.dtype = I64) -> Argument:
        """Return the arguments that the host fills for each row of a call; a prefill has buffers of its own, for one
        row."""
        ref = f"buffer:{PREFILL}.{buffer}" if self.variant else f"buffer:{buffer}[bucket]"
        return Argument(name, ref, (self.batch,), dtype)

    def _local(
        self, role: str, prefix: str, net: NetConfig, hidden: Argument, names: tuple[str, str]
    ) -> Piece:
        tables = tuple(
            Argument(name, f"weight:{table}", (hidden.shape[1], net.head_dim), F32)
            for name, table in zip(("cos", "sin"), names, strict=True)
        )
        make = FusedLocalLayer if self.layout.fused else LocalLayer
        module = on_meta(lambda: make(net, self.dtype, fp8=self.layout.fp8))
        return Piece(
            self._key(role), module, f"{prefix}.layers.{{layer}}.", net.layers, (hidden, *tables), (hidden,)
        )

    def _cached(
        self,
        role: str,
        prefix: str,
        net: NetConfig,
        places: tuple[Argument, ...],
        rotary: tuple[Argument, ...],
    ) -> Piece:
        caches = tuple(self._caches(prefix, net))
        return Piece(
            self._key(role, reads=True),
            on_meta(lambda: self._cached_layer(net)),
            f"{prefix}.layers.{{layer}}.",
            net.layers,
            (self.hidden, *caches, *places, *rotary),
            (self.hidden,),
            tuple(cache.name for cache in caches),
        )

    def _cached_layer(self, net: NetConfig) -> nn.Module:
        fp8, form = self.layout.fp8, self.layout.form
        if form is not None:
            make = FusedQuantisedStepLayer if self.in_place else QuantisedCachedLayer
            return make(net, self.dtype, form=form, fp8=fp8)
        return (FusedStepLayer if self.in_place else CachedLayer)(net, self.dtype, fp8=fp8)

    def _caches(self, prefix: str, net: NetConfig) -> Iterator[Argument]:
        """Yield the caches of a transformer's layers: keys and values, or their codes and scales."""
        form, heads, head_dim = self.layout.form, net.kv_heads, net.head_dim
        for part in "kv":
            tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
                "cache": ((heads, head_dim), self.dtype)
            }
            if form is not None:
                tensors = {
                    "codes": (form.codes_shape(heads, head_dim), form.code_dtype),
                    "scales": (form.scales_shape(heads, head_dim), torch.uint8),
                }
            for kind, (shape, dtype) in tensors.items():
                name = part if kind == "cache" else f"{part}_{kind}"
                ref = f"buffer:{prefix}.{name}{OF_LAYER}"
                yield Argument(f"{part}_{kind}", ref, (self.layout.places, *shape), dtype)

    def _piece(
        self,
        role: str,
        make: Callable[[VoxCpm2Config, torch.dtype], nn.Module],
        inputs: tuple[Argument, ...],
        outputs: tuple[Argument, ...],
        mutates: tuple[str, ...] = (),
    ) -> Piece:
        module = on_meta(lambda: make(self.config, self.dtype))
        return Piece(self._key(role), module, f"{role}.", 0, inputs, outputs, mutates)

    def _key(self, role: str, *, reads: bool = False) -> EngineKey:
        length = (str(self.length),) if reads and not self.in_place else ()
        bucket = self.tokens if self.variant else self.batch
        return EngineKey(role, bucket=bucket, variant=(*self.variant, *length))

"""One transformer layer with Seko's own kernels: the layer of `block.Block` in fewer launches, optionally with fp8
attention.

`RowFusedBlock` works with any cache: it fuses norms, modulation, residuals and RoPE, and uses 16-bit attention.
`RowFusedBlock` rounds where `Block` does, except that on a GPU it does not round between the first matmul of the
feed-forward network and GELU.

`FusedBlock` needs an FP4 cache: the cached frames are expanded to an 8-bit scratch (keys int8, values fp8), and one
kernel attends to this scratch and to the chunk's own unquantised keys and values (docs/adr/0004). The 8-bit scratch
lives for one call, so all layers share its memory. With a resident window, `past_window.WindowExpand` expands the
cached frames once a chunk, not in every pass. Attention reads the number of filled tokens on the device, so one engine
serves rows with full caches and rows whose caches are still filling.

Shapes use the letters that `causal_dit` defines. Without a GPU each op runs its reference in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig
from seko_export.families.layers.block import (
    FRONT_K,
    BlockWeights,
    LayerInputs,
    RmsNormWeight,
    behind_front,
    rms_norm,
    window_attention,
)
from seko_export.families.layers.layer_ops import LayerOps
from seko_export.families.layers.past_window import (
    PastWindow,
    SparsePast,
    TurnedWindow,
    at_slots,
    expand_past,
    past_window,
    turned_window,
)
from seko_export.families.layers.rank_split import Ranked
from seko_export.families.layers.rotary import rotate
from seko_kernels.attention import OwnTokens
from seko_kernels.fused_reference import FP8
from seko_kernels.kv_formats import KvFormat
from seko_kernels.rows import Modulation, Rows

# Indices into axis 2 of a layer's modulation [B, F, 6, d].
SHIFT_1, SCALE_1, GATE_1, SHIFT_2, SCALE_2, GATE_2 = range(6)


class Fp8Linear(nn.Module):
    """Weights of an fp8 matmul: e4m3 with a scale for each output channel. The input of the fp8 matmul is already
    quantised, with one scale for each row.
    """

    def __init__(self, inner: int, outer: int, dtype: torch.dtype, *, bias: bool = True) -> None:
        super().__init__()
        self.weight_fp8 = nn.Parameter(torch.empty(outer, inner, dtype=FP8), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(outer, 1))
        self.bias = nn.Parameter(torch.empty(outer, dtype=dtype)) if bias else None

    def product(self, ops: LayerOps, rows: Rows, dtype: torch.dtype) -> Tensor:
        """Return the matmul's result [B, T, out] for quantised rows; without a bias the kernel adds zeros."""
        bias = (
            self.weight_scale.new_zeros(len(self.weight_fp8), dtype=dtype) if self.bias is None else self.bias
        )
        y: Tensor = ops.fp8_linear(rows, self.weight_fp8, self.weight_scale, bias, dtype)
        return y


class QuantisingLinear(Fp8Linear):
    """A linear layer in fp8 that quantises its input, with one scale for each row, before it multiplies."""

    def __init__(self, inner: int, outer: int, dtype: torch.dtype, *, bias: bool = True) -> None:
        super().__init__(inner, outer, dtype, bias=bias)
        self.ops = LayerOps()

    def forward(self, x: Tensor) -> Tensor:
        """Return the linear layer's result [B, T, out] for x [B, T, in]."""
        return self.product(self.ops, self.ops.quantise_rows(x), x.dtype)


def set_fp8(module: nn.Module | None) -> None:
    """Replace the linear layers that a family module names in its attribute ``fp8_linears``, by their dotted names, by
    fp8 linear layers."""
    if module is None:
        return
    for name in getattr(module, "fp8_linears", ()):
        plain = module.get_submodule(name)
        if not isinstance(plain, nn.Linear):
            raise TypeError(f"{name} is a {type(plain).__name__}, expected a Linear")
        sizes = (plain.in_features, plain.out_features, plain.weight.dtype)
        home, _, own = name.rpartition(".")
        setattr(module.get_submodule(home), own, QuantisingLinear(*sizes, bias=plain.bias is not None))


class FusedLayer(BlockWeights):
    """Base class of fused layers; subclasses add self-attention.

    Parameters
    ----------
    fp8 : bool
        Whether weights and activations of the layer's matmuls are fp8. `PromptKv`, which computes the text's keys and
        values, is not affected.
    """

    groups = (*BlockWeights.groups, "window")

    def __init__(
        self,
        model: ModelConfig,
        stream: StreamConfig,
        kv: KvFormat,
        dtype: torch.dtype,
        *,
        fp8: bool,
    ) -> None:
        super().__init__(model, stream, kv, dtype)
        self.fp8, self.ops = fp8, LayerOps()
        self.before = nn.Parameter(torch.empty(1, 6, model.dim))  # modulation of the previous layer
        if fp8:
            d, inner = model.dim, model.ffn_dim
            self.self_attn.qkv, self.self_attn.o = Fp8Linear(d, 3 * d, dtype), Fp8Linear(d, d, dtype)
            self.cross_attn.q, self.cross_attn.o = Fp8Linear(d, d, dtype), Fp8Linear(d, d, dtype)
            self.ffn[0], self.ffn[2] = Fp8Linear(d, inner, dtype), Fp8Linear(inner, d, dtype)

    def add(self, modules: Mapping[str, nn.Module | None], extra_text: tuple[str, ...]) -> None:
        """Add the modules of a model family to the layer; with fp8, convert the linear layers that these modules name
        in ``fp8_linears``."""
        super().add(modules, extra_text)
        if self.fp8:
            for module in modules.values():
                set_fp8(module)

    def forward(
        self,
        hidden: Tensor,
        update: Tensor,
        modulation: Tensor,
        cos: Tensor,
        sin: Tensor,
        valid_tokens: Tensor,
        text_k: Tensor,
        text_v: Tensor,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        places: Mapping[str, Tensor],
        window: Mapping[str, Tensor],
        write_slots: Tensor | None = None,
        token_index: Tensor | None = None,
        rows: Tensor | None = None,
        conditioning: Mapping[str, Tensor] | None = None,
        recall: Mapping[str, Tensor] | None = None,
        rank: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Advance the hidden state by one layer; if ``token_index`` is passed, also write this layer's K and V.

        ``hidden`` does not include the previous layer's FFN output ``update``. `FusedLayer` adds the gated residual of
        ``update`` to ``hidden``, fused with the norm.

        Parameters
        ----------
        hidden, modulation, cos, sin : Tensor
            The results of `Embed` with the same names.
        update : Tensor
            FFN output of the previous layer, [B, T, d]. Zeros before the first layer. Also zeros after a layer with a
            module behind its feed-forward (`tail`), because the module has already added the layer's FFN output.
        valid_tokens, text_k, text_v, caches, places, rows : Tensor or mapping
            The parameters of `Block.forward` with the same names.
        scales : Mapping[str, Tensor]
            The cache format's constants, such as quantisation scales; for an FP4 cache also the constants that
            `scratch.scratch_scales` returns.
        window : Mapping[str, Tensor]
            The layer's resident windows (cached keys and values in 8 bits), by the names of `window_tensors`; empty for
            a build without resident windows.
        write_slots : Tensor, optional
            Cache slot of each latent frame of the chunk, int64 [B, F]; for layers that expand an FP4 cache, and for
            modules with a `Recall`.
        token_index : Tensor, optional
            Index of each token into the flat cache, int64 [B*T] from `Embed`, if the layer writes its keys and values.
        conditioning : mapping of str to Tensor, optional
            Tensors of the model family by name: inputs of the modules `after_attention`, `after_cross` and `tail`, and
            the further keys and values that `extra_text` names.
        recall : mapping of str to Tensor, optional
            The family's tensors that are kept for each latent frame; see `Recall`. Every pass writes them.
        rank : Tensor, optional
            Number of this rank, int64 [1]; only if several ranks (GPUs) share a chunk, see `Block.forward`.

        Returns
        -------
        hidden, update : Tensor
            The arguments ``hidden`` and ``update`` of the next layer.
        """
        if self.split is not None and rank is not None:
            scales = self.split.heads_of_each(scales, rank)
        more, kept = conditioning or {}, recall or {}
        inputs = LayerInputs(
            *(text_k, text_v, caches, rows, valid_tokens, scales, places, window),
            *(token_index, write_slots, more, kept),
        )
        attend = partial(self._attend, cos=cos, sin=sin, inputs=inputs)
        return self._layer(hidden, update, modulation, inputs, attend)

    def _project(self, hidden: Tensor, update: Tensor, modulation: Modulation) -> tuple[Tensor, Tensor]:
        """Return the hidden state with the previous layer's FFN output, and q, k and v as one [B, T, 3*d]."""
        before = self.before.squeeze(0)
        norm = (modulation, SHIFT_1, SCALE_1, self.model.norm_eps)
        hidden, x = self.ops.gated_residual_norm_modulate(hidden, update, before, GATE_2, *norm, fp8=self.fp8)
        return hidden, self._matmul(self.self_attn.qkv, x, hidden.dtype)

    def _layer(
        self,
        hidden: Tensor,
        update: Tensor,
        modulation: Tensor,
        inputs: LayerInputs,
        attend: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return the next hidden state and update. ``attend`` maps q, k and v [B, T, 3*d] to the self-attention
        [B, T, d], before the last projection."""
        ops, eps, dtype = self.ops, self.model.norm_eps, hidden.dtype
        shift_scale_gate = Modulation(modulation, self.modulation.squeeze(0))
        hidden, qkv = self._project(hidden, update, shift_scale_gate)
        added = self.added_attention(qkv, inputs)  # before the layer writes its cache
        y = attend(qkv)
        y = self._matmul(self.self_attn.o, self._own_rows(y.to(dtype)), dtype)
        y = y if added is None else y + added
        if self.after_attention is not None:
            hidden = ops.gated_residual(hidden, y, shift_scale_gate, GATE_1)
            hidden, y = (
                self.after_attention(hidden, inputs.conditioning),
                torch.zeros_like(y),
            )  # zeros, so that the norm adds nothing
        hidden, x = ops.gated_residual_norm(
            hidden, y, shift_scale_gate, GATE_1, self.norm3.weight, self.norm3.bias, eps, fp8=self.fp8
        )

        q = rms_norm(self._matmul(self.cross_attn.q, x, dtype), self.cross_attn.norm_q)
        y = self.cross_attend(self.split_heads(q).to(dtype), inputs)
        y = self._matmul(self.cross_attn.o, self._as_rows(y), dtype)
        hidden, y = self.behind_cross(hidden, y, inputs)
        hidden, x = ops.residual_norm_modulate(
            hidden, y, shift_scale_gate, SHIFT_2, SCALE_2, eps, fp8=self.fp8
        )

        widen = self.ffn[0]
        if isinstance(widen, nn.Linear):
            x = _plain_rows(ops.gelu_linear(x.values, widen.weight, widen.bias))
        else:
            x = ops.gelu_quantise(self._matmul(widen, x, dtype))
        update = self._matmul(self.ffn[2], x, dtype)
        if self.tail is None:
            return hidden, update
        hidden = ops.gated_residual(hidden, update, shift_scale_gate, GATE_2)
        return self.tail(hidden, inputs.conditioning), torch.zeros_like(update)

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, inputs: LayerInputs) -> Tensor:
        """Return the attention to cache and chunk, [B, T, d], and write keys and values if there is a ``token_index``;
        with `split` only for the rank's heads.
        """
        raise NotImplementedError

    def _norm_rope(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, plain_keys: str, frames: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k and v for attention, [B, T, H, D], and the keys that `plain_keys` selects; with `split` only for
        the rank's heads. ``frames`` is the number of equal parts of the tokens; default: the chunk's frames.
        """
        batch, tokens = qkv.shape[:2]
        frames = frames or self.stream.chunk_frames
        weights = (self.self_attn.norm_q.weight, self.self_attn.norm_k.weight)
        if self.split is not None:
            sent = self.ops.qk_norm_rope_shares(
                qkv, *weights, cos, sin, self.model.heads, self.split.ranks, self.model.norm_eps, plain_keys
            )
            q, k, v, *rest = self.split.shares_to_heads(sent)
            return q, k, v, rest[0] if rest else qkv.new_empty(0)
        # The keys are written to a tensor of the chunk and not to the cache, because the compiler would copy the
        # whole cache for a write through a view.
        k = qkv.new_empty((batch, tokens, self.model.heads, self.model.head_dim))
        slots = torch.arange(frames, device=qkv.device).expand(batch, -1).contiguous()
        q, keys = self.ops.qk_norm_rope(
            qkv, *weights, cos, sin, slots, tokens // frames, self.model.norm_eps, k, plain_keys
        )
        return q, k, self.split_heads(qkv.chunk(3, dim=-1)[2]), keys

    def _matmul(self, layer: nn.Module, x: Rows, dtype: torch.dtype) -> Tensor:
        """Return the result [B, T, out] of a matmul in `dtype`."""
        if isinstance(layer, Fp8Linear):
            return layer.product(self.ops, x, dtype)
        y: Tensor = layer(x.values)
        return y

    def _as_rows(self, x: Tensor) -> Rows:
        return self.ops.quantise_rows(x) if self.fp8 else _plain_rows(x)

    def _own_rows(self, x: Tensor) -> Rows:
        """Return the rows of attention [B, T, d]; with `split` of this rank's tokens, from its heads of all."""
        if self.split is None:
            return self._as_rows(x)
        if self.fp8:
            return self.ops.quantise_row_shares(self.split.to_shares_of_tokens(x))
        return _plain_rows(self.split.to_tokens(x))


class FusedBlock(FusedLayer):
    """One transformer layer over an NVFP4 cache: attention reads cached frames in 8 bits, and the chunk's own tokens
    unquantised.

    Parameters
    ----------
    writes : bool
        Whether the layer writes its keys and values to the cache. Only layers of the context pass write keys and
        values, since nothing would read the keys and values of a denoise pass.
    fp8 : bool
        Whether the layer's matmuls are fp8; see `FusedLayer`.
    past_share : float
        Share of the cached keys to which queries attend; see `TargetConfig`.
    """

    def __init__(
        self,
        model: ModelConfig,
        stream: StreamConfig,
        kv: KvFormat,
        dtype: torch.dtype,
        *,
        writes: bool,
        fp8: bool = False,
        past_share: float = 1.0,
    ) -> None:
        super().__init__(model, stream, kv, dtype, fp8=fp8)
        self.writes, self.sparse_past = writes, SparsePast.of(stream, past_share)

    def attend_window(self, q: Tensor, k: Tensor, v: Tensor, valid_tokens: Tensor) -> Tensor:
        """Return the attention [B, T, d] of a family's module to the filled part of the cache, by Seko's 16-bit kernel
        where the GPU has one for such heads."""
        if self.ops.has_attention_bf16(q):
            return self.ops.attention_bf16(q.contiguous(), k.contiguous(), v.contiguous(), valid_tokens)
        return super().attend_window(q, k, v, valid_tokens)

    def attend_turned(self, q: Tensor, k: Tensor, v: Tensor, of_slots: Tensor, inputs: LayerInputs) -> Tensor:
        """Return the extra attention, of cached frames in 8 bits if there is a resident window of them."""
        window, turn = turned_window(inputs.window), self.extra_turn
        if window is None or turn is None:
            return super().attend_turned(q, k, v, of_slots, inputs)
        of_own = at_slots(of_slots, inputs.kept.write_slots)
        # The kernel takes a scale for each head, so those of rows are applied outside.
        scale = window.v_scale.unsqueeze(1).unsqueeze(3)  # [B, 1, H, 1]
        own_v = (turn.turned(of_own, v) / scale).to(v.dtype)
        own = OwnTokens(turn.turned(of_own, k).contiguous(), own_v.flatten(2))
        cached = (window.k, window.k_scale, window.v, scale.new_ones(q.shape[2]))
        chosen = self._chosen(q, window, inputs)
        y = self.ops.attention_fp8(q.contiguous(), *cached, inputs.valid_tokens, own, chosen=chosen)
        attended: Tensor = (y.unflatten(-1, q.shape[2:]) * scale).to(q.dtype).flatten(2)
        return attended

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, inputs: LayerInputs) -> Tensor:
        token_index, write_slots = inputs.token_index, inputs.write_slots
        if self.writes != (token_index is not None):
            raise TypeError("a layer over an FP4 cache takes token_index if it writes, and only then")
        q, k, v, keys = self._norm_rope(qkv, cos, sin, "before_rope" if self.writes else "none")
        scales = inputs.scales
        if inputs.window:
            window = past_window(inputs.window)
        elif write_slots is None:
            raise TypeError("a layer without a resident window expands its own, and takes write_slots for it")
        else:
            window = PastWindow.empty(q.shape[2], q.shape[3], self.stream, len(qkv), qkv.device)
            of_rows, valid, key_rotary = inputs.of_rows, inputs.valid_tokens, inputs.places
            expand_past(self.ops, window, of_rows, scales, key_rotary, write_slots, valid, self.stream)
        if FRONT_K in inputs.caches:
            own_k, own_v, _ = behind_front(inputs.of_rows, k, v, inputs.valid_tokens)
            own = OwnTokens(own_k, own_v.flatten(2))
        else:
            own = OwnTokens(k, qkv.chunk(3, dim=-1)[2] if self.split is None else v.flatten(2))
        chosen = self._chosen(q, window, inputs)
        y = self.ops.attention_fp8(q, *window, scales["v_fp8_scale"], inputs.valid_tokens, own, chosen=chosen)
        # written after the attention has read the cache, so that the attention sees the engine's inputs
        # unchanged
        if token_index is not None:
            self.kv.write(inputs.caches, scales, token_index, keys.flatten(0, 1), v.flatten(0, 1))
        return y

    def _chosen(self, q: Tensor, window: PastWindow | TurnedWindow, inputs: LayerInputs) -> Tensor | None:
        """Return the tiles of a window to which queries attend, as `attention_fp8` takes them; None: to all."""
        if self.sparse_past is None:
            return None
        if inputs.write_slots is None:
            raise TypeError("a layer that attends to a share of the cached keys takes write_slots")
        seen = (inputs.valid_tokens, inputs.write_slots)
        chosen: Tensor = self.ops.choose_past(q, window.k, window.k_scale, *seen, *self.sparse_past)
        return chosen


class RowFusedBlock(FusedLayer):
    """One transformer layer with 16-bit attention over any cache. The layer rounds where `Block` does; on a GPU it does
    not round the argument of the feed-forward's GELU.

    Parameters
    ----------
    masked : bool
        Whether attention sees only the filled part of the cache; see `Block`.
    kernel : bool
        Whether attention runs in Seko's kernel, which needs no mask. If False, attention is torch's.
    fp8 : bool
        Whether the layer's matmuls are fp8; see `FusedLayer`.
    """

    def __init__(
        self,
        model: ModelConfig,
        stream: StreamConfig,
        kv: KvFormat,
        dtype: torch.dtype,
        *,
        masked: bool,
        kernel: bool = False,
        fp8: bool = False,
    ) -> None:
        super().__init__(model, stream, kv, dtype, fp8=fp8)
        self.masked, self.kernel = masked, kernel

    def attend_window(self, q: Tensor, k: Tensor, v: Tensor, valid_tokens: Tensor) -> Tensor:
        """Return the attention [B, T, d] to the filled part of the cache, by the kernel or torch."""
        if self.kernel:
            return self.ops.attention_bf16(q.contiguous(), k.contiguous(), v.contiguous(), valid_tokens)
        return window_attention(q, k, v, valid_tokens if self.masked else None)

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, inputs: LayerInputs) -> Tensor:
        before = self.kv.keys_before_rope
        q, k, v, unturned = self._norm_rope(qkv, cos, sin, "before_rope" if before else "none")
        return self.attend_cached(q, k, v, unturned if before else None, inputs)


class _KeysAndValuesWeights(nn.Module):
    """The weights of `SelfAttentionWeights` that keys and values need, by the same names."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, *, fp8: bool) -> None:
        super().__init__()
        d = model.dim
        self.qkv = Fp8Linear(d, 3 * d, dtype) if fp8 else nn.Linear(d, 3 * d, dtype=dtype)
        self.norm_k = RmsNormWeight(model)


class KeysAndValues(Ranked):
    """The last transformer layer in the context pass. `KeysAndValues` only computes and writes the layer's keys and
    values, because nothing reads the layer's output.
    """

    groups = ("caches", "scales")  # arguments that are mappings

    def __init__(
        self, model: ModelConfig, stream: StreamConfig, kv: KvFormat, dtype: torch.dtype, *, fp8: bool
    ) -> None:
        super().__init__()
        self.model, self.stream, self.kv, self.fp8, self.ops = model, stream, kv, fp8, LayerOps()
        d = model.dim
        self.modulation, self.before = (nn.Parameter(torch.empty(1, 6, d)) for _ in range(2))
        self.self_attn = _KeysAndValuesWeights(model, dtype, fp8=fp8)

    def forward(
        self,
        hidden: Tensor,
        update: Tensor,
        modulation: Tensor,
        token_index: Tensor,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        rank: Tensor | None = None,
    ) -> tuple[()]:
        """Write this layer's keys and values to the cache. `FusedLayer.forward` documents the parameters. The tables
        ``cos`` and ``sin`` are passed only if keys are stored after RoPE.
        """
        m, dtype = self.model, hidden.dtype
        shift_scale_gate = Modulation(modulation, self.modulation.squeeze(0))
        _, x = self.ops.gated_residual_norm_modulate(
            hidden,
            update,
            self.before.squeeze(0),
            GATE_2,
            shift_scale_gate,
            SHIFT_1,
            SCALE_1,
            m.norm_eps,
            fp8=self.fp8,
        )
        layer, norm = self.self_attn.qkv, self.self_attn.norm_k
        if isinstance(layer, Fp8Linear):
            # q is computed and dropped, because torch 2.11 cannot lower a scaled matmul with a part of a weight.
            wide = layer.product(self.ops, x, dtype)
            _, k, v = wide.chunk(3, dim=-1)  # each [B, T, d]
        else:
            weight, bias = (part.narrow(0, m.dim, 2 * m.dim) for part in (layer.weight, layer.bias))
            k, v = F.linear(x.values, weight, bias).chunk(2, dim=-1)
        heads = (m.heads, m.head_dim)
        keys = rms_norm(k, norm).unflatten(-1, heads)
        if cos is not None and sin is not None:
            keys = rotate(keys, cos, sin)
        own: tuple[Tensor, ...] = (keys.to(dtype), v.unflatten(-1, heads))  # [B, T, H, D]
        if self.split is not None and rank is not None:
            own, scales = self.split.to_heads(own), self.split.heads_of_each(scales, rank)
        keys, values = (part.flatten(0, 1) for part in own)
        self.kv.write(caches, scales, token_index, keys, values)
        return ()


class LastUpdate(nn.Module):
    """A module that adds the last layer's gated FFN output to the hidden state, before the head."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.modulation, self.ops = nn.Parameter(torch.empty(1, 6, model.dim)), LayerOps()

    def forward(self, hidden: Tensor, update: Tensor, modulation: Tensor) -> Tensor:
        """Return the hidden state [B, T, d] after the last layer; `FusedLayer.forward` documents the parameters."""
        return self.ops.gated_residual(
            hidden, update, Modulation(modulation, self.modulation.squeeze(0)), GATE_2
        )


def _plain_rows(x: Tensor) -> Rows:
    return Rows(x, x.new_empty(0, dtype=torch.float32))

"""Ops that remain one node in the ONNX form of an engine: their names, shapes and bodies.

A node calls the function ``seko::NAME`` with the op's tensors. In a TensorRT plan the node is a plugin, or TensorRT's
own attention. A function's body is traced from the reference in `seko_kernels` or from the sampler. The body of
attention is written out in standard ops. A change of a number format affects the module `kept_ops` only if an op then
takes or returns other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch.overrides import TorchFunctionMode

from seko_export.errors import LoweringError
from seko_export.families.layers import sampler
from seko_kernels import fused_reference, reference, scratch
from seko_kernels.fused_reference import FP8
from seko_kernels.ops import stand_ins

DOMAIN = "seko"
# Functions of which an engine may contain several with different shapes; the second is called NAME.2. No plugin
# replaces these functions.
MANY = frozenset({"attention", "full_attention"})
VERSION = 1  # version of the domain, raised when a function's tensors or their meaning change
Body = Callable[..., Tensor | tuple[Tensor, ...]]
_SCRATCH_DTYPES = {"k": torch.int8, "k_scale": torch.float32, "v": FP8}
# Tensors of `fp8_expand`.
_PAST = (
    *("k_codes", "k_scales", "k_global_scale", "v_codes", "v_scales", "v_global_scale", "v_fp8_scale"),
    *("write_slots", "valid_tokens", *scratch.KeyRotation._fields),
)
Spec = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class KeptOp:
    """One call of an op that remains one node in the ONNX form.

    Parameters
    ----------
    name : str
        Name of the op's function in the ONNX domain `DOMAIN`.
    arguments, results : tuple of str
        Names of the tensors that the op takes and returns.
    body : callable
        Function that makes the same computation in torch.
    inputs, outputs : tuple of Spec
        Shape and dtype of each tensor that the op takes and returns.
    """

    name: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    body: Body
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]


class KeptOps:
    """A context manager in which tracing keeps Seko's ops and torch's attention as one node each. Afterwards `ops` has
    the kept ops by name.

    Parameters
    ----------
    bodiless : collection of str
        Names of functions without a body. Nodes of an attention without a body have the attribute ``scale``.
    """

    def __init__(self, bodiless: Collection[str] = ()) -> None:
        self.ops: dict[str, KeptOp] = {}
        self._bodiless = frozenset(bodiless)
        self._stack = ExitStack()

    def __enter__(self) -> KeptOps:
        self._stack.enter_context(_AttentionAsOneNode(self))
        self._stack.enter_context(
            stand_ins(
                {
                    "nvfp4_write": self._write,
                    "nvfp4_expand": self._expand,
                    "nvfp4_expand_keys": self._expand_keys,
                    "gaussian": self._gaussian,
                    "fp8_expand": self._expand_past,
                    "attention_fp8": self._attend_past,
                }
            )
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _write(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Keep one write to the cache as a node: ``nvfp4_write_keys`` if it subtracts a mean, otherwise
        ``nvfp4_write``."""
        names = ("x", "token_index", "codes", "scales", "global_scale", "mean")
        results = {"new_codes": _spec(tensors[2]), "new_scales": _spec(tensors[3])}
        by_name = dict(zip(names, tensors, strict=False))
        return self._keep(
            "nvfp4_write_keys" if "mean" in by_name else "nvfp4_write", by_name, results, nvfp4_write
        )

    def _expand(self, codes: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
        tensors = {"codes": codes, "scales": scales, "global_scale": global_scale}
        return self._expanded("nvfp4_expand", tensors, dtype, reference.nvfp4_decode)

    def _expand_keys(
        self,
        codes: Tensor,
        scales: Tensor,
        global_scale: Tensor,
        mean: Tensor,
        slot_rotary: Tensor,
        patch_rotary: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        tensors = {"codes": codes, "scales": scales, "global_scale": global_scale, "mean": mean}
        tensors |= {"slot_rotary": slot_rotary, "patch_rotary": patch_rotary}
        return self._expanded("nvfp4_expand_keys", tensors, dtype, reference.nvfp4_decode_keys)

    def _expand_past(self, *tensors: Tensor) -> Sequence[Tensor]:
        by_name = dict(zip(_PAST, tensors, strict=True))
        return self._keep("fp8_expand", by_name, _scratch(by_name), fp8_expand)

    def _attend_past(self, *tensors: Tensor) -> Tensor:
        names = ("q", "k", "k_scale", "v", "v_scale", "valid_tokens", "k_own", "v_own")
        q = tensors[0]
        results = {"y": ((*q.shape[:2], q.shape[2] * q.shape[3]), q.dtype)}
        by_name = dict(zip(names, tensors, strict=True))
        return self._keep("attention_fp8", by_name, results, fused_reference.attention_fp8)[0]

    def _gaussian(
        self, seeds: Tensor, frames: Tensor, draw: Tensor, latent_shape: tuple[int, int, int]
    ) -> Tensor:
        channels, *plane = latent_shape
        results = {"noise": ((frames.shape[0], channels, frames.shape[1], *plane), torch.float32)}
        body = partial(sampler.gaussian, latent_shape=latent_shape)
        return self._keep("gaussian", {"seeds": seeds, "frames": frames, "draw": draw}, results, body)[0]

    def _expanded(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype, decode: Body) -> Tensor:
        tokens, heads, half_dim = tensors["codes"].shape
        results = {"expanded": ((tokens, heads, half_dim * 2), dtype)}
        return self._keep(name, tensors, results, partial(decode, dtype=dtype))[0]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Keep one call of torch's attention as a node, which is called ``attention`` with a bias, and
        ``full_attention`` without a bias."""
        tensors = {"q": q, "k": k, "v": v} | ({} if attn_mask is None else {"bias": attn_mask})
        name = "full_attention" if attn_mask is None else "attention"
        results = {"y": ((*q.shape[:-1], v.shape[-1]), q.dtype)}
        attributes = (
            {"scale": q.shape[-1] ** -0.5 if scale is None else scale} if name in self._bodiless else {}
        )
        return self._keep(name, tensors, results, partial(attend, scale=scale), attributes)[0]

    def _keep(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        results: Mapping[str, Spec],
        body: Body,
        attributes: Mapping[str, float] | None = None,
    ) -> Sequence[Tensor]:
        op_kept = KeptOp(
            name,
            tuple(tensors),
            tuple(results),
            body,
            tuple(map(_spec, tensors.values())),
            tuple(results.values()),
        )
        if name in MANY and name not in self._bodiless:
            alike = [op for op in self.ops.values() if op.name.partition(".")[0] == name]
            same = [op.name for op in alike if _meaning(op) == _meaning(op_kept)]
            name = same[0] if same else f"{name}.{len(alike) + 1}" if alike else name
            op_kept = replace(op_kept, name=name)
        first = self.ops.setdefault(name, op_kept)
        if _meaning(first) != _meaning(op_kept) and not (name in MANY and name in self._bodiless):
            raise LoweringError(
                f"function {DOMAIN}::{name} is called with {op_kept.inputs} and with {first.inputs}, or with another "
                "constant: its body is made for one of them; give the second one a name of its own in kept_ops.py"
            )
        shapes, dtypes = zip(*results.values(), strict=True)
        nodes: Sequence[Tensor] = torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::{name}",
            list(tensors.values()),
            dict(attributes or {}),
            dtypes=list(dtypes),
            shapes=list(shapes),
            version=VERSION,
        )
        return nodes


class _AttentionAsOneNode(TorchFunctionMode):
    """Redirects each call of torch's attention to `KeptOps`."""

    def __init__(self, ops: KeptOps) -> None:
        super().__init__()
        self._kept = ops

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._kept.attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def nvfp4_write(
    x: Tensor,
    token_index: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    mean: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a cache after writing `x` minus `mean`: the values that `seko_kernels.kv_write`
    stores."""
    new_codes, new_scales = reference.nvfp4_encode(x, global_scale, mean)
    return codes.index_copy(0, token_index, new_codes), scales.index_copy(0, token_index, new_scales)


def fp8_expand(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the scratch that `seko_kernels.scratch.fp8_expand` fills, with zeros where `fp8_expand` writes nothing.

    The arguments are those of the op without the scratch buffer, followed by the tensors of the RoPE rotation
    (`KeyRotation`). The op `fp8_expand` has no ONNX form: only TensorRT plans use it, as a function without a body.
    """
    by_name = dict(zip(_PAST, tensors, strict=True))
    rotation = scratch.KeyRotation(*(by_name.pop(name) for name in scratch.KeyRotation._fields))
    patches = len(rotation.patch_rotary)
    outputs = {
        name: torch.zeros(shape, dtype=dtype)
        for name, (shape, dtype) in _scratch(by_name | rotation._asdict()).items()
    }
    scratch.fp8_expand(
        **by_name,
        frame_tokens=patches,
        k_out=outputs["k"],
        k_out_scale=outputs["k_scale"],
        v_out=outputs["v"],
        rotation=rotation,
    )
    return tuple(outputs.values())


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Return softmax(q k^T * scale + bias) v; q [B, H, T, D], k and v [B, H, N, D], bias [B, 1 or H, 1 or T, N].

    Attention is written in standard ops, because most runtimes lack ONNX's Attention op, and onnxruntime 1.31 refuses a
    bias with one row.
    """
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
    return torch.softmax(scores if bias is None else scores + bias, dim=-1) @ v


def _scratch(by_name: Mapping[str, Tensor]) -> dict[str, Spec]:
    tokens, heads, half_dim = by_name["k_codes"].shape
    batch, frames = by_name["write_slots"].shape
    cached = scratch.past_of(tokens // batch, frames, len(by_name["patch_rotary"]))
    shapes = scratch.scratch_shapes(batch, heads, half_dim * 2, cached)
    return {name: (shapes[name], dtype) for name, dtype in _SCRATCH_DTYPES.items()}


def _spec(tensor: Tensor) -> Spec:
    return tuple(tensor.shape), tensor.dtype


def _meaning(op: KeptOp) -> tuple[object, ...]:
    constants = op.body.keywords if isinstance(op.body, partial) else {}
    return op.inputs, op.outputs, constants

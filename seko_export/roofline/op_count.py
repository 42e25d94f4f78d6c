"""Cost of one call of an engine, from its shapes: launches with FLOPs and bytes, and scratch memory.

The module runs once on the meta device, where nothing is computed. Matmuls, attention, convolutions and cache accesses
are launches of their own. All other ops are fused as far as their data dependencies allow. Each tensor that passes
between launches is written once and read once. The module `seconds` turns the counts into time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from seko_export.engines.piece import FlatModule, Piece
from seko_export.families.layers.block import BlockWeights
from seko_export.families.layers.few_row_ops import FewRowOps
from seko_export.families.layers.fused_block import FusedLayer, KeysAndValues, LastUpdate, QuantisingLinear
from seko_export.families.layers.past_window import WindowExpand
from seko_export.families.layers.sink_average import SinkAverage
from seko_export.roofline.kinds import (
    ATTENTION,
    CACHE_WRITE,
    CONVOLUTION,
    EXCHANGE,
    EXPAND,
    GATHER,
    MASKED_ATTENTION,
    MATMUL,
    OWN_CONVOLUTION,
    ROWS,
)
from seko_export.roofline.op_count_few_rows import CountedFewRowOps
from seko_export.roofline.op_count_fused import CountedOps, tensors_of
from seko_kernels import conv_reference
from seko_kernels.kv_formats import ExactKv
from seko_kernels.ops import stand_ins
from seko_kernels.over_time import over_time_reference
from seko_kernels.tuned_conv import ConvTiles

_GATHERS = ("aten::index_select",)
_SCATTERS = ("aten::index_copy_", "aten::index_copy")
_EXCHANGES = ("_c10d_functional::all_to_all_single", "_c10d_functional::all_gather_into_tensor")
_WAIT = "_c10d_functional::wait_tensor"
_UNFILLED = ("aten::empty", "aten::new_empty")  # empty, empty_like, empty_strided: memory without content


@dataclass(frozen=True)
class Launch:
    """The counts of one kernel launch of a call.

    Parameters
    ----------
    kind : str
        Kind of the launch, one of those of `kinds`. A launch of the kind `ROWS` has fused ops between launches
        of other kinds.
    dtype : torch.dtype
        Dtype of the launch's first result.
    flops : int
        Number of multiplications and additions; 0 if the launch only moves bytes.
    bytes_read, bytes_written : int
        Bytes of every tensor, or of the part that is accessed, counted once; a collective also writes the bytes that
        other ranks send.
    inputs : frozenset of str
        Names of the engine's inputs that the launch reads, in whole or in part.
    """

    kind: str
    dtype: torch.dtype
    flops: int
    bytes_read: int
    bytes_written: int
    inputs: frozenset[str]


@dataclass(frozen=True)
class PieceCount:
    """Cost of one call of an engine.

    Parameters
    ----------
    launches : tuple of Launch
        The launches of the call, in an order in which they can run.
    scratch_bytes : int
        Largest sum of the sizes of tensors that are alive between two launches, results included.
    """

    launches: tuple[Launch, ...]
    scratch_bytes: int


@lru_cache(maxsize=256)
def count_piece(piece: Piece) -> PieceCount:
    """Count one call of ``piece``, which `make_pieces` made for a GPU. Builds that share a piece's module, which is
    never changed, share its count."""
    tensors = piece.example_inputs("meta")
    recorder = _Recorder(tensors, [argument.name for argument in piece.signature])
    counted = stand_ins(
        {
            "causal_conv": partial(_count_convolution, recorder),
            "doubled_conv": partial(_count_doubled, recorder),
            "norm_silu": conv_reference.norm_silu,
            "attention_over_time": over_time_reference,
        }
    )
    with (
        torch.no_grad(),
        recorder,
        _AttentionAsOne(recorder),
        _counted_kv(piece.module, recorder),
        counted,
    ):
        results = FlatModule(piece)(*tensors)
    return recorder.count(results)


def _count_convolution(
    recorder: _Recorder,
    x: Tensor,
    earlier: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    *,
    scale: Tensor | None,
    tiles: ConvTiles,
) -> Tensor:
    """Record a convolution of `causal_conv.causal_conv`, and return an empty tensor for its result. Without ``earlier``
    the kernel leaves out the products of taps before the first entry in time."""
    del tiles
    out = torch.empty((*x.shape[:4], weight.shape[3]), dtype=bias.dtype, device=x.device)
    ins = [t for t in (x, earlier, weight, bias, residual, scale) if t is not None]
    length, taps = x.shape[1], weight.shape[0]
    times = length * taps if earlier is not None else sum(min(time + 1, taps) for time in range(length))
    products = weight.shape[1:3].numel() * times * x.shape[4]
    recorder.add(OWN_CONVOLUTION, ins, [out], flops=2 * out[:, 0].numel() * products)
    return out


def _count_doubled(
    recorder: _Recorder, x: Tensor, weight: Tensor, bias: Tensor, *, tiles: ConvTiles
) -> Tensor:
    """Record a convolution of `causal_conv.doubled_conv`, and return an empty tensor for its result."""
    del tiles
    sides = (2 * side for side in x.shape[2:4])
    out = torch.empty((*x.shape[:2], *sides, weight.shape[3]), dtype=bias.dtype, device=x.device)
    taps = weight.shape[1:3].numel()
    recorder.add(OWN_CONVOLUTION, [x, weight, bias], [out], flops=2 * out.numel() * taps * x.shape[4])
    return out


_OverCache = BlockWeights | KeysAndValues | SinkAverage | WindowExpand  # modules that read or write a cache


@contextmanager
def _counted_kv(module: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Replace a block's lossy cache and fused ops by counting stand-ins, because their kernels cannot run on the meta
    device.
    """
    replaced: list[tuple[nn.Module, str, object]] = []
    if isinstance(module, _OverCache) and not isinstance(module.kv, ExactKv):
        replaced.append((module, "kv", module.kv))
        object.__setattr__(module, "kv", _CountedKv(module, recorder))
    for part in module.modules():
        if isinstance(part, FusedLayer | KeysAndValues | LastUpdate | QuantisingLinear | WindowExpand):
            replaced.append((part, "ops", part.ops))
            part.ops = CountedOps(recorder.add)
        elif isinstance(own := getattr(part, "ops", None), FewRowOps):
            replaced.append((part, "ops", own))
            object.__setattr__(part, "ops", CountedFewRowOps(recorder.add))
    try:
        yield
    finally:
        for part, name, own in replaced:
            object.__setattr__(part, name, own)


@dataclass(frozen=True)
class _Read:
    """A tensor, or a part of one, that an op reads."""

    maker: int | None  # the op that wrote the tensor last; None for an input
    storage: int
    part: tuple[object, ...]
    nbytes: int


@dataclass
class _Op:
    kind: str
    dtype: torch.dtype
    flops: int
    reads: list[_Read]
    writes: dict[int, int]  # storage -> bytes
    level: int  # number of launches other than `ROWS` on the longest path to the op, including the op


class _Recorder(TorchDispatchMode):
    """Records every op that runs in this context."""

    def __init__(self, inputs: Sequence[Tensor], names: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ops: list[_Op] = []
        self._maker: dict[int, int] = {}  # storage -> the op that wrote it last
        self._alias: dict[int, int] = {}
        self._size: dict[int, int] = {}
        # keeps tensors alive, because an address identifies a storage
        self._alive: list[Tensor] = list(inputs)
        self._inputs = {self._storage(t): name for t, name in zip(inputs, names, strict=True)}
        self._names = dict(self._inputs)  # tensors with the parts that were gathered from them

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        ins, outs = tensors_of((args, kwargs)), tensors_of(out)
        self._alive += outs
        name = func._schema.name
        if name.startswith(_UNFILLED):
            return out
        if name == _WAIT:
            self._alias[_address(out)] = self._storage(args[0])
        elif name in _EXCHANGES:
            ranks = args[1] if isinstance(args[1], int) else len(args[1])
            self.add(EXCHANGE, ins, [], parts=[(out, _nbytes(out) * (ranks - 1) // ranks)])
        elif name in _SCATTERS:
            target, _, index, source = args
            self._alias[_address(out)] = self._storage(target)  # compilers do this op in place
            self.add(CACHE_WRITE, [index, source], [], parts=[(target, _nbytes(source))])
        elif name in _GATHERS:
            source, _, index = args
            self.add(GATHER, [index], outs, taken=[(source, _nbytes(out))])
            if (storage := self._storage(source)) in self._names:
                self._names[self._storage(out)] = self._names[storage]
        elif func._overloadpacket in flop_registry:
            kind = CONVOLUTION if func._overloadpacket is torch.ops.aten.convolution else MATMUL
            flops = flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
            self.add(kind, ins, outs, flops=flops)
        elif func._schema.is_mutable or not {*map(self._storage, outs)} <= {*map(self._storage, ins)}:
            self.add(ROWS, ins, outs)  # every other op that is no view
        return out

    def add(
        self,
        kind: str,
        ins: Iterable[Tensor],
        outs: Sequence[Tensor],
        *,
        flops: int = 0,
        parts: Sequence[tuple[Tensor, int]] = (),
        taken: Sequence[tuple[Tensor, int]] = (),
    ) -> None:
        """Record an op. ``parts`` and ``taken`` give the bytes of tensors that it writes, or reads, only in part."""
        number = len(self._ops)
        reads = [self._read(t, _nbytes(t)) for t in ins] + [self._read(t, 0) for t, _ in parts]
        reads += [self._read(t, nbytes) for t, nbytes in taken]
        writes = {self._storage(t): nbytes for t, nbytes in (*((t, _nbytes(t)) for t in outs), *parts)}
        before = [self._ops[read.maker] for read in reads if read.maker is not None]
        level = max((op.level for op in before), default=0) + (kind != ROWS)
        dtype = next((t.dtype for t in outs), torch.uint8)
        self._ops.append(_Op(kind, dtype, flops, reads, writes, level))
        self._maker.update(dict.fromkeys(writes, number))

    def count(self, results: Iterable[Tensor]) -> PieceCount:
        """Return the launches of the recorded ops; ``results`` are the engine's outputs."""
        results = list(results)
        self._delay({self._maker.get(self._storage(t)) for t in results})
        groups = self._fused()
        order = sorted(
            groups, key=lambda first: (self._ops[first].level, self._ops[first].kind == ROWS, first)
        )
        end = len(order)
        # Tensors that leave their group of fused ops, by the op that wrote them.
        last_use = {(self._maker.get(self._storage(t)), self._storage(t)): end for t in results}
        for turn, group in enumerate(order):
            for read in self._outside(groups[group]):
                maker = read.maker, read.storage
                last_use[maker] = max(turn, last_use.get(maker, 0))
        launches, alive, most = [], dict[int, int](), 0
        for turn, group in enumerate(order):
            written = {n: [s for s in self._ops[n].writes if (n, s) in last_use] for n in groups[group]}
            leaving = [number for number, storages in written.items() if storages]
            for number in leaving:
                for storage in written[number]:
                    if storage not in self._inputs:
                        alive[storage] = max(last_use[number, storage], alive.get(storage, 0))
            most = max(most, sum(self._size[storage] for storage in alive))
            alive = {storage: last for storage, last in alive.items() if last > turn}
            launches.append(self._launch(groups[group], leaving))
        return PieceCount(tuple(launches), most)

    def _delay(self, given_back: set[int | None]) -> None:
        """Move an op of the kind `ROWS` to the first op that needs its result, because compilers compute a cast where
        it is used."""
        latest: dict[int | None, int] = {}
        for number in reversed(range(len(self._ops))):
            op = self._ops[number]
            if op.kind == ROWS and number not in given_back:
                op.level = max(op.level, latest.get(number, op.level))
            for read in op.reads:
                here = op.level - (op.kind != ROWS)
                latest[read.maker] = min(here, latest.get(read.maker, here))

    def _fused(self) -> dict[int, list[int]]:
        """Return the ops of each launch, by its first op; ops of the kind `ROWS` on one level that share data are one
        launch."""
        group = list(range(len(self._ops)))
        for number, op in enumerate(self._ops):
            for read in op.reads:
                other = None if read.maker is None else self._ops[read.maker]
                if other is not None and op.kind == other.kind == ROWS and op.level == other.level:
                    remaining, gone = sorted((group[read.maker or 0], group[number]))
                    group = [
                        remaining if number_of_group == gone else number_of_group for number_of_group in group
                    ]
        return {first: [n for n, g in enumerate(group) if g == first] for first in sorted(set(group))}

    def _launch(self, numbers: Sequence[int], leaving: Sequence[int]) -> Launch:
        first, outside = self._ops[numbers[0]], self._outside(numbers)
        parts: dict[int, dict[tuple[object, ...], int]] = {}
        for read in outside:
            parts.setdefault(read.storage, {})[read.part] = read.nbytes
        return Launch(
            first.kind,
            first.dtype,
            first.flops,
            sum(min(sum(sizes.values()), self._size[storage]) for storage, sizes in parts.items()),
            sum(
                sum(self._ops[number].writes.values())
                for number in (leaving if first.kind == ROWS else numbers)  # other results stay in registers
            ),
            frozenset(self._names[storage] for storage in parts if storage in self._names),
        )

    def _outside(self, numbers: Sequence[int]) -> list[_Read]:
        """Return the tensors that a launch's ops read and that none of these ops computed."""
        own = set(numbers)
        return [read for number in numbers for read in self._ops[number].reads if read.maker not in own]

    def _read(self, tensor: Tensor, nbytes: int) -> _Read:
        storage = self._storage(tensor)
        part = (tensor.storage_offset(), *tensor.shape)
        return _Read(self._maker.get(storage), storage, part, nbytes)

    def _storage(self, tensor: Tensor) -> int:
        address = _address(tensor)
        storage = self._alias.get(address, address)
        self._size.setdefault(storage, tensor.untyped_storage().nbytes())
        return storage


class _AttentionAsOne(TorchFunctionMode):
    """Keeps attention as one op: on the meta device it would decompose into matmuls with a score matrix that no
    kernel writes.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        whole = func is F.scaled_dot_product_attention
        return (self._attention if whole else func)(*args, **(kwargs or {}))

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        out = torch.empty_like(q)  # q's memory order, as in the result of the fused kernels
        ins = [q, k, v] if attn_mask is None else [q, k, v, attn_mask]
        kind = ATTENTION if attn_mask is None else MASKED_ATTENTION
        self._recorder.add(kind, ins, [out], flops=4 * q.numel() * k.shape[-2])  # q k^T, then the weighted v
        return out


class _CountedKv:
    """A quantised cache format that records the bytes that its kernels move, one launch each for write and read; see
    `KvFormat`.
    """

    def __init__(self, block: _OverCache, recorder: _Recorder) -> None:
        self._kv, self._model, self._recorder = block.kv, block.model, recorder
        self._heads = block.model.heads // (1 if block.split is None else block.split.ranks)  # of this rank

    @property
    def keys_before_rope(self) -> bool:
        """Whether keys are stored before RoPE in the KV cache format that is counted."""
        return self._kv.keys_before_rope

    @property
    def exact(self) -> tuple[bool, bool]:
        """Whether keys, and values, are exact in the KV cache format that is counted."""
        return self._kv.exact

    def write(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        token_index: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> None:
        """Record the write of ``token_index`` tokens to every cache tensor except an exact sink, which is full by
        then.
        """
        tokens = token_index.numel()
        stored = [c for c in self._kv.cache_tensors if c.part != "sink"]
        parts = [(caches[c.name], tokens * c.token_bytes) for c in stored]
        self._recorder.add(CACHE_WRITE, [k, v, token_index, *scales.values()], [], parts=parts)

    def expand(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        key_rotary: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Record the expansion of the quantised tensors, and return empty tensors for the results."""
        windows, outputs = [], []
        for side, exact in zip(("k", "v"), self.exact, strict=True):
            if exact:
                windows.append(caches[side])
                continue
            own = [c for c in self._kv.cache_tensors if c.name == side or c.name.startswith(f"{side}_")]
            tokens = sum(
                {c.part: len(caches[c.name]) for c in own}.values()
            )  # codes and scales belong to the same tokens
            shape = (tokens, self._heads, self._model.head_dim)
            windows.append(torch.empty(shape, dtype=dtype, device="meta"))
            outputs.append(windows[-1])
        read = [cache for name, cache in caches.items() if name not in ("k", "v")]
        self._recorder.add(EXPAND, [*read, *scales.values(), *key_rotary.values()], outputs)
        return windows[0], windows[1]


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _nbytes(tensor: Tensor) -> int:
    """Return the number of bytes of a tensor's distinct values; a broadcast axis counts once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return prod(sizes) * tensor.itemsize

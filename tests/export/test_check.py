"""The replay check: every rule has planted offenders, each named with op, file and line; honest graphs pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from seko_export.engines.key import EngineKey
from seko_export.engines.piece import Argument, Piece
from seko_export.errors import LoweringError
from seko_export.lowering.check import check_replayable
from seko_export.lowering.trace import trace
from seko_kernels.ops import KERNEL_OPS

BODY_LINE = 5  # of the planted modules below
CACHE, K, INDEX = torch.zeros(8, 2, 4), torch.ones(2, 2, 4), torch.tensor([1, 2])


def planted(folder: Path, body: str) -> nn.Module:
    """Write a module whose forward(cache, k, index) has this body, and return one: its lines are known."""
    path = folder / "offender.py"
    lines = "".join(f"        {line}\n" for line in body.split("\n"))
    path.write_text(
        f"import torch\n\nclass Offender(torch.nn.Module):\n    def forward(self, cache, k, index):\n{lines}"
    )
    namespace: dict[str, type[nn.Module]] = {"__name__": "offender"}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    return namespace["Offender"]()


def export(module: nn.Module, *inputs: torch.Tensor, **options: object) -> ExportedProgram:
    return torch.export.export(module, inputs, strict=False, **options)


def refusal(program: ExportedProgram, cache_inputs: tuple[int, ...] = (0,)) -> str:
    with pytest.raises(LoweringError) as raised:
        check_replayable(program, "planted", cache_inputs)
    assert str(raised.value).startswith("piece 'planted' cannot be replayed:")
    return str(raised.value)


CACHE_PARTS = {
    "slice read": ("return cache[2:4] + k", "aten.slice", 0),
    "slice write": ("cache[2:4] = k\nreturn k + 1", "aten.slice", 0),
    "slice from the end": ("return cache[-2:] + k", "aten.slice", 0),
    "strided slice": ("return cache[::4] + k", "aten.slice", 0),
    "slice of a view": ("return cache.view(4, 2, 2, 4)[1] + k", "aten.select", 0),
    "slice of an unflattened cache": (
        "rows = cache.unflatten(0, (2, 4))\nreturn rows[:, 1:3] + 1",
        "aten.slice",
        1,
    ),
    "slice of a transposed cache": ("return cache.transpose(0, 1)[:, 2:4] + 1", "aten.slice", 0),
    "slice of a permuted cache": ("return cache.movedim(0, 1)[:, 2:4] + 1", "aten.slice", 0),
    "slice after a write": ("cache.index_copy_(0, index, k)\nreturn cache[:2] + k", "aten.slice", 1),
    "slice of what a write returns": ("x = cache.index_copy(0, index, k)\nreturn x[:2] + k", "aten.slice", 1),
    "slice after arithmetic in place": ("cache.mul_(2)\nreturn cache[:2] + k", "aten.slice", 1),
    "slice of a copy": ("return cache.clone()[:2] + k", "aten.slice", 0),
    "slice of a cast": ("return cache.to(torch.bfloat16)[:2] + k", "aten.slice", 0),
    "slice of a concatenation": ("return torch.cat([cache, k])[2:] + 1", "aten.slice", 0),
    "select": ("return cache[3] + k", "aten.select", 0),
    "unbind": ("return cache.unbind(0)[1] + k", "aten.unbind", 0),
    "narrow": ("return cache.narrow(0, 2, 2) + k", "aten.narrow", 0),
    "split": ("return cache.split(2)[1] + k", "aten.split", 0),
    "tensor_split": ("return cache.tensor_split(4)[1] + k", "aten.tensor_split", 0),
    "vsplit": ("return torch.vsplit(cache, 4)[1] + k", "aten.vsplit", 0),
    "chunk": ("return cache.chunk(4)[1] + k", "aten.chunk", 0),
    "chunk of tokens that lie innermost": ("return cache.movedim(0, 2).chunk(2, -1)[0] + 1", "aten.chunk", 0),
    "roll": ("return cache.roll(2, 0) + 1", "aten.roll", 0),
    "unfold": ("return cache.unfold(0, 2, 2) + 1", "aten.unfold", 0),
    "negative padding": ("return torch.nn.functional.pad(cache, (0, 0, 0, 0, -2, -4)) + k", "aten.pad", 0),
    "as_strided": ("return torch.as_strided(cache, (2, 2, 4), (8, 4, 1), 8) + k", "aten.as_strided", 0),
    "a list of numbers": ("return cache[[1, 2]] + k", "aten.index", 0),
    "a write at a list of numbers": ("cache[[1, 2]] = k\nreturn k + 1", "aten.index_put_", 0),
    "a constant index tensor": ("return cache[torch.tensor([1, 2])] + k", "aten.index", 0),
    "an arange": ("return cache.index_select(0, torch.arange(2) + 1) + k", "aten.index_select", 0),
}


@pytest.mark.parametrize(("body", "op", "line"), CACHE_PARTS.values(), ids=CACHE_PARTS.keys())
def test_a_part_of_a_cache_by_numbers_is_refused(tmp_path, body, op, line):
    message = refusal(export(planted(tmp_path, body), CACHE, K, INDEX))
    source = body.split("\n")[line]
    place = f"{tmp_path / 'offender.py'}:{BODY_LINE + line} in forward ({source})"
    assert f"[cache-slice] {op} at {place}: " in message, message


@pytest.mark.parametrize(
    "body",
    [
        "return cache[:] + 1",
        "return cache[:, :, :] + 1",
        "return cache[0:8] + 1",
        "cache.index_copy_(0, index, k)\nreturn cache.view(2, 4, 2, 4).transpose(1, 2) * 2",
        "cache[index] = k\nreturn cache[index] + 1",
        "return cache.gather(0, index[:, None, None].expand(2, 2, 4)) + k",
        "return cache.index_select(0, index)[:1] + k",  # a slice of what was read by tensor
        "return k[0:1] + k.unbind(0)[0] + k.roll(1, 0) + k[torch.tensor([0, 1])]",  # no cache
        "return (cache * 2)[:1] + 1",  # computed from the cache
        "a, b = cache.chunk(2, dim=-1)\nreturn a + b",  # channels of every token
        "even, odd = cache.unflatten(-1, (-1, 2)).unbind(-1)\nreturn even + odd",
        "k.index_copy_(0, index - 1, cache.index_select(0, index))\nreturn k[:1] + 1",  # a copy out of the cache
        "rows = torch.arange(2)\nreturn cache.view(2, 4, 2, 4)[rows, index] + k",  # a row's own place
    ],
)
def test_honest_graphs_pass(tmp_path, body):
    check_replayable(export(planted(tmp_path, body), CACHE, K.clone(), INDEX), "honest", (0,))


@pytest.mark.parametrize(
    ("body", "op"),
    [
        ("return k * index[0].item()", "aten.item"),
        ("return k.nonzero()", "aten.nonzero"),
        ("return k.unique()", "aten._unique2"),
        ("return k.masked_select(k > 0)", "aten.masked_select"),
        ("return k[k > 0]", "aten.index"),
        ("k[k > 0] = index[0].float()\nreturn k", "aten.index_put_"),
        ("return torch.argwhere(k)", "aten.argwhere"),
    ],
)
def test_an_op_that_waits_for_the_host_is_refused(tmp_path, body, op):
    message = refusal(export(planted(tmp_path, body), CACHE, K.clone(), INDEX))
    assert f"[host-sync] {op} at {tmp_path / 'offender.py'}:{BODY_LINE} in forward (" in message, message


def test_a_copy_between_devices_is_refused(tmp_path):
    module = planted(tmp_path, "return k.to('cpu') + 1")
    message = refusal(export(module, *(x.to("meta") for x in (CACHE, K, INDEX))))
    assert f"[host-sync] aten.to at {tmp_path / 'offender.py'}:{BODY_LINE} in forward (" in message


@pytest.mark.parametrize(
    "body",
    [
        "if index[0] > 0:\n    return k + 1\nreturn k",
        "return k if torch.equal(k, k + 1) else k * 2",
        "return torch.narrow(cache, 0, index[0], 2) + k",
    ],
)
def test_what_torch_export_refuses_itself_is_a_lowering_error_too(tmp_path, body):
    """With piece, file and line, and not as a page of torch's own frames."""
    inputs = [
        Argument(n, f"value:{n}", tuple(x.shape), x.dtype)
        for n, x in (("cache", CACHE), ("k", K), ("index", INDEX))
    ]
    piece = Piece(
        EngineKey("planted"), planted(tmp_path, body), "", 0, tuple(inputs), (inputs[1],), ("cache",)
    )
    with pytest.raises(LoweringError) as raised:
        trace(piece, "cpu")
    assert "piece 'planted' cannot be traced: [host-sync] at " in str(raised.value)
    assert f"{tmp_path / 'offender.py'}:{BODY_LINE} in forward (" in str(raised.value)


def test_trace_marks_the_mutated_inputs_as_caches(tmp_path):
    inputs = [
        Argument(n, f"value:{n}", tuple(x.shape), x.dtype)
        for n, x in (("cache", CACHE), ("k", K), ("index", INDEX))
    ]
    module = planted(tmp_path, "cache[0:2] = k\nreturn k[0:1] + 1")
    with pytest.raises(LoweringError, match=r"\[cache-slice\] aten.slice at .*offender.py:5 in forward"):
        trace(Piece(EngineKey("planted"), module, "", 0, tuple(inputs), (inputs[1],), ("cache",)), "cpu")


def test_a_symbolic_size_is_refused(tmp_path):
    module = planted(tmp_path, "return k + 1")
    program = export(module, CACHE, K, INDEX, dynamic_shapes=(None, {0: Dim("tokens")}, None))
    message = refusal(program)
    assert "[symbolic-int] k at the piece's inputs: every size must come from the frozen config" in message
    assert message.count("[symbolic-int]") == 1  # not again for every op that follows


@pytest.mark.parametrize("op", ["nonzero()", "repeat_interleave(index, 0)"])
def test_a_size_that_depends_on_data_is_refused_where_it_arises(tmp_path, op):
    message = refusal(export(planted(tmp_path, f"x = k + 1\nreturn x.{op} + 1"), CACHE, K, INDEX))
    assert (
        f"[symbolic-int] {op.split('(')[0]} at {tmp_path / 'offender.py'}:{BODY_LINE + 1} in forward ("
        in message
    )
    assert message.count("[symbolic-int]") == 1


def test_a_python_custom_op_is_refused(tmp_path):
    @torch.library.custom_op("seko_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    message = refusal(export(planted(tmp_path, "return torch.ops.seko_test.twice(k) + 1"), CACHE, K, INDEX))
    assert f"[no-kernel] seko_test.twice at {tmp_path / 'offender.py'}:{BODY_LINE} in forward (" in message
    assert "torch.library.triton_op" in message


def test_a_branch_on_the_device_is_refused(tmp_path):
    body = "return torch.cond(k.sum() > 0, lambda x: x + 1, lambda x: x - 1, (k,))"
    message = refusal(export(planted(tmp_path, body), CACHE, K, INDEX))
    assert f"[no-kernel] cond at {tmp_path / 'offender.py'}:{BODY_LINE} in forward (" in message


def test_a_triton_op_has_a_kernel(tmp_path):
    for register in KERNEL_OPS:
        register()
    body = "return torch.ops.seko.nvfp4_expand(cache, k, index, torch.float32, 8, 0)"
    codes, scales = torch.zeros(4, 2, 64, dtype=torch.uint8), torch.zeros(4, 2, 8, dtype=torch.uint8)
    program = export(planted(tmp_path, body), codes, scales, torch.ones(2))
    assert any("seko.nvfp4_expand" in str(node.target) for node in program.graph.nodes)
    check_replayable(program, "honest", (0, 1))


def test_every_offender_is_listed(tmp_path):
    body = "a = cache[:2]\nb = cache[3]\nreturn a + b + k * index[0].item()"
    message = refusal(export(planted(tmp_path, body), CACHE, K, INDEX))
    for line, op in enumerate(("aten.slice", "aten.select", "aten.item")):
        assert f"{op} at {tmp_path / 'offender.py'}:{BODY_LINE + line} " in message

"""gelu_linear: a linear layer and the tanh form of GELU, in one op of torch in bfloat16 on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from seko_kernels.errors import KernelsError
from seko_kernels.matmul import gelu_linear
from seko_kernels.ops import plain_torch, stand_ins
from tests.support.tolerances import relative_error

ONE_OP = torch.ops.aten._addmm_activation.default


def layer(rows: int, tokens: int, inner: int, outer: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(inner)
    return torch.randn(rows, tokens, inner), torch.randn(outer, inner) * inner**-0.5, torch.randn(outer)


def in_float64(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = x.double() @ weight.double().T + bias.double()
    return 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)))


def test_it_is_gelu_of_the_layer() -> None:
    arguments = layer(2, 7, 96, 48)
    y = gelu_linear(*arguments)
    assert y.shape == (2, 7, 48)
    assert relative_error(y, in_float64(*arguments)) < 1e-6


def traced_ops(dtype: torch.dtype) -> list[object]:
    """The ops that an engine for a GPU would hold; no GPU is needed."""
    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=dtype, device="cuda") for shape in ((2, 7, 96), (48, 96), (48,))]
        graph = make_fx(gelu_linear)(*tensors)
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_on_a_gpu_it_is_one_op_in_bfloat16_alone() -> None:
    assert ONE_OP in traced_ops(torch.bfloat16)
    assert ONE_OP not in traced_ops(torch.float32)


def test_a_graph_in_another_language_has_ops_that_it_knows() -> None:
    with stand_ins({"attention_fp8": F.linear}):
        assert ONE_OP not in traced_ops(torch.bfloat16)
    with plain_torch():
        assert ONE_OP not in traced_ops(torch.bfloat16)


def test_wrong_tensors_are_refused() -> None:
    x, weight, bias = layer(1, 7, 96, 48)
    with pytest.raises(KernelsError, match="weight has shape"):
        gelu_linear(x, weight[:, :80], bias)
    with pytest.raises(KernelsError, match="bias is"):
        gelu_linear(x, weight, bias.bfloat16())
    with pytest.raises(KernelsError, match="x has shape"):
        gelu_linear(x[0], weight, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 4680, 1536, 8960), (2, 880, 3072, 14336), (1, 37, 96, 48)], ids=str)
def test_on_a_gpu_it_rounds_no_worse_than_two_ops(shape: tuple[int, int, int, int]) -> None:
    exact = layer(*shape)
    x, weight, bias = (tensor.cuda().bfloat16() for tensor in exact)
    wanted = in_float64(x.float().cpu(), weight.float().cpu(), bias.float().cpu())
    together = relative_error(gelu_linear(x, weight, bias).float().cpu(), wanted)
    apart = relative_error(F.gelu(F.linear(x, weight, bias), approximate="tanh").float().cpu(), wanted)
    assert together < 1.02 * apart

"""The collective operations (communication between GPUs) inside engines of several ranks; see
`families.layers.rank_split` and `media.row_split`."""

from __future__ import annotations

import torch
from torch import Tensor

from seko_export.engines.piece import Argument
from seko_runtime.executor.contract import RANK

# name of the buffer with the rank's number
RANK_ARGUMENT = Argument("rank", f"buffer:{RANK}", (1,), torch.int64)


def gathered(x: Tensor, ranks: int, group: str) -> Tensor:
    """Gather the tensor x of each of R ranks through the named process group; return the tensors as [R, *x.shape], in
    the order of ranks."""
    sent = torch.ops._c10d_functional.all_gather_into_tensor(x.unsqueeze(0).contiguous(), ranks, group)
    received: Tensor = torch.ops._c10d_functional.wait_tensor(sent)
    return received

"""The first picture's condition: a table of 30 latent frames stands for a stream without end."""

from __future__ import annotations

import torch

from seko_export.families.wan_layout.picture_condition import ROWS, TABLE, ConditionFrames
from seko_export.families.wan_layout.picture_sizes import TABLE_FRAMES
from seko_export.media.wan_vae.modules import VaeEncode
from tests.export.vae_oracle import SMALL, VaeOracle, stream
from tests.lingbot.condition_table import condition_table
from tests.lingbot.streams import lingbot_config
from tests.support.tolerances import VAE, relative_error

FRAMES = 33  # of the clip: some behind the table's end


def test_the_table_is_the_encoders_whole_clip_and_constant_behind_its_end(worst) -> None:
    """diffusers' VAE over the picture and 4 * 32 grey frames at once; what lies behind row 29 equals it, bit by bit."""
    oracle = VaeOracle(torch.float64)
    picture = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 - 1
    clip = torch.zeros(1, 3, 4 * (FRAMES - 1) + 1, 16, 16, dtype=torch.float64)
    clip[0, :, 0] = picture
    with torch.no_grad():
        whole = oracle.encode(clip)[0]  # [z, frames, h, w]
    weights = oracle.half(VaeEncode, first=True, frames=1).state_dict()
    table = condition_table(weights, SMALL, picture)
    assert table.shape == (20, TABLE_FRAMES, 2, 2)
    error = relative_error(table[4:], whole[:, :TABLE_FRAMES])
    worst("condition table against the whole clip", error)
    assert error <= VAE[torch.float64]
    assert torch.equal(table[:4, 0], torch.ones(4, 2, 2))
    assert not table[:4, 1:].any()
    assert not torch.equal(table[4:, 3], table[4:, 2])
    with torch.no_grad():
        longer = stream(oracle, VaeEncode, clip, [1] * FRAMES)[0]
    assert torch.equal(longer[:, :TABLE_FRAMES], table[4:])
    assert all(torch.equal(longer[:, frame], table[4:, -1]) for frame in range(TABLE_FRAMES, FRAMES))


def test_a_frame_takes_its_row_and_later_ones_the_last() -> None:
    table = torch.arange(2 * TABLE_FRAMES, dtype=torch.float32).view(2, 1, TABLE_FRAMES, 1, 1)
    taken = ConditionFrames(lingbot_config())
    frames = torch.tensor([[28, 29, 30, 10**9], [0, 1, 2, 3]])
    rows = taken({TABLE: table}, frames)[:, 0, :, 0, 0]
    assert rows.tolist() == [[28, 29, 29, 29], [30, 31, 32, 33]]
    swapped = taken({TABLE: table}, frames, rows=torch.tensor([1, 0]))[:, 0, :, 0, 0]
    assert swapped.tolist() == [[58, 59, 59, 59], [0, 1, 2, 3]]
    assert ROWS != TABLE

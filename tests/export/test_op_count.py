"""What `seko-export plan` counts is what a build makes: arithmetic, traffic, scratch, bytes of an artifact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from seko_export.config.pool import PoolConfig
from seko_export.engines.key import EngineKey
from seko_export.engines.piece import Argument, Piece
from seko_export.families.layers.pieces import make_pieces
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.roofline.kinds import (
    ATTENTION,
    CACHE_WRITE,
    EXCHANGE,
    EXPAND,
    FP8_ATTENTION,
    FP8_EXPAND,
    FP8_MATMUL,
    GATHER,
    MASKED_ATTENTION,
    MATMUL,
    ROWS,
)
from seko_export.roofline.op_count import PieceCount, count_piece
from seko_export.video.plan.memory import weight_bytes
from seko_kernels.attention import v_columns
from seko_kernels.kv_formats import KvFormat
from seko_runtime.video.manifest import parse_video_manifest
from tests.export.planned import on_gpu
from tests.support.asked import resolved

BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(("preset", "batch"), [("self-forcing-1.3b", 1), ("wan-14b", 1), ("tiny", 3)])
def test_flops_of_a_block_are_those_of_its_formula(preset, batch):
    config = on_gpu(preset, batch=batch)
    m, s = config.model, config.workload.stream
    tokens = batch * s.chunk_tokens
    flops: dict[str, int] = {}
    for launch in count_piece(make_pieces(config)["block"]).launches:
        flops[launch.kind] = flops.get(launch.kind, 0) + launch.flops
    assert flops[MATMUL] == 2 * tokens * (6 * m.dim * m.dim + 2 * m.dim * m.ffn_dim)
    assert flops[MASKED_ATTENTION] == 4 * tokens * s.cache_tokens * m.dim
    assert flops[ATTENTION] == 4 * tokens * m.text_tokens * m.dim
    assert flops[ROWS] == flops[CACHE_WRITE] == 0


def test_flops_of_decoding_are_torchs_own_count():
    """Attention, which torch's counter does not see on this device, is one head over the places of each frame."""
    vae = WanVaeConfig(base_dim=16)
    config = on_gpu("tiny").changed(vae=vae)
    piece = make_pieces(config)["vae_decode"]
    from torch.utils.flop_counter import FlopCounterMode

    from seko_export.engines.piece import FlatModule

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        FlatModule(piece)(*piece.example_inputs("meta"))
    assert sum(launch.flops for launch in count_piece(piece).launches) == counter.get_total_flops()


def test_a_step_reads_window_and_weights_once():
    config = on_gpu("self-forcing-1.3b")
    m, s = config.model, config.workload.stream
    launches = count_piece(make_pieces(config)["block_full"]).launches
    window, chunk = 2 * s.cache_tokens * m.dim * 2, s.chunk_tokens * m.dim * 2
    own = [launch for launch in launches if launch.kind == ATTENTION and "caches.k" in launch.inputs]
    assert [(launch.bytes_read, launch.bytes_written) for launch in own] == [(chunk + window, chunk)]
    readers: dict[str, int] = {}
    for launch in launches:
        for name in launch.inputs:
            readers[name] = readers.get(name, 0) + 1
    matrices = [a.name for a in make_pieces(config)["block_full"].parameters if len(a.shape) == 2]
    assert [readers[name] for name in matrices] == [1] * len(matrices)


def test_a_pools_call_gathers_its_own_rows_alone():
    """Two rows of seven and the spare one: codes, scales and text of these two are copied, and then read as a batch."""
    config = on_gpu("self-forcing-1.3b", scheme="fp4").changed(pool=PoolConfig(7, (1, 2)))
    m, s = config.model, config.workload.stream
    launches = count_piece(make_pieces(config)["block_full.2"]).launches
    gathers = [launch for launch in launches if launch.kind == GATHER]
    moved = pool_bytes(config.kv, 2, s.cache_tokens) + 2 * 2 * m.text_tokens * m.dim * 2
    rows = 8 * 2  # which rows they are, int64
    assert sum(launch.bytes_written for launch in gathers) == moved
    assert sum(launch.bytes_read for launch in gathers) == moved + len(gathers) * rows
    alone = count_piece(
        make_pieces(on_gpu("self-forcing-1.3b", scheme="fp4", batch=2))["block_full"]
    ).launches
    for kind in (ATTENTION, EXPAND):
        taken, own = ([x for x in of if x.kind == kind] for of in (launches, alone))
        assert [(x.flops, x.bytes_read) for x in taken] == [(x.flops, x.bytes_read) for x in own]
        assert [{"text_k"} & x.inputs for x in taken] == [{"text_k"} & x.inputs for x in own]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_of_several_ranks_receives_its_heads_and_then_its_tokens(ranks):
    """Queries, keys and values of the other ranks' tokens come in one exchange, and attention's result in another."""
    config = on_gpu("self-forcing-1.3b").changed(ranks=ranks)
    launches = count_piece(make_pieces(config)["block_full"]).launches
    share = (
        config.workload.stream.chunk_tokens * config.model.dim // ranks * 2
    )  # bytes of one tensor on a rank, bf16
    received = [launch.bytes_written for launch in launches if launch.kind == EXCHANGE]
    assert received == [3 * share * (ranks - 1) // ranks, share * (ranks - 1) // ranks]


def test_a_lossy_cache_is_read_once_and_expanded_once():
    config = on_gpu("self-forcing-1.3b", scheme="fp4")
    m, s = config.model, config.workload.stream
    piece = make_pieces(config)["block_full"]
    launches = count_piece(piece).launches
    assert piece.module.kv == config.kv  # counting put its own format back
    (expand,) = [launch for launch in launches if launch.kind == EXPAND]
    scales = 4 * (
        2 * m.heads + m.heads * m.head_dim
    )  # a head's of K and of V, and a mean for each channel of K
    tables = 4 * 2 * (22 * s.cache_frames + 42 * s.frame_tokens)  # cosines and sines of slots and of patches
    assert expand.bytes_read == pool_bytes(config.kv, 1, s.cache_tokens) + scales + tables
    assert expand.bytes_written == 2 * s.cache_tokens * m.dim * 2
    stored, *over = [launch for launch in launches if launch.kind == CACHE_WRITE]
    assert stored.bytes_written == pool_bytes(config.kv, 1, s.chunk_tokens)
    assert [launch.bytes_written for launch in over] == [
        s.chunk_tokens * m.dim * 2
    ] * 2  # K and V as they are


@pytest.mark.parametrize(("name", "keeps"), [("block", False), ("block_context", True)])
def test_a_fused_layer_expands_to_fp8_once_and_reads_it_in_fp8(name, keeps):
    config = on_gpu("self-forcing-1.3b", scheme="fp4").changed(fused=True, attention="fp8")
    m, s = config.model, config.workload.stream
    piece = make_pieces(config)[name]
    own = piece.module.ops
    counted = count_piece(piece)
    assert (piece.module.kv, piece.module.ops) == (config.kv, own)
    (expand,) = [launch for launch in counted.launches if launch.kind == FP8_EXPAND]
    past = s.cache_tokens - s.chunk_tokens
    constants = 4 * (3 * m.heads + m.heads * m.head_dim) + 8 * (s.chunk_frames + 1)
    tables = 4 * 2 * (22 * s.cache_frames + 42 * s.frame_tokens)
    assert expand.bytes_read == pool_bytes(config.kv, 1, past) + constants + tables
    columns = v_columns(past)
    scales = 4 * m.heads * columns // 128
    scratch = past * 2 * m.dim + scales  # keys in int8 with a scale a head and 128 tokens, values in fp8
    assert expand.bytes_written == scratch
    (attention,) = [launch for launch in counted.launches if launch.kind == FP8_ATTENTION]
    assert attention.flops == 4 * s.chunk_tokens * s.cache_tokens * m.dim
    own_bytes = 3 * s.chunk_tokens * 2  # q, k, v in bf16
    assert attention.bytes_read == own_bytes * m.dim + scratch + 4 * m.heads + 8
    stored = [launch for launch in counted.launches if launch.kind == CACHE_WRITE]
    assert [launch.bytes_written for launch in stored] == [pool_bytes(config.kv, 1, s.chunk_tokens)] * keeps
    # The past's keys, their scales and values; beside them the hidden state, qkv, q and k, what attention gives, and
    # keys before RoPE.
    chunk = s.chunk_tokens * m.dim * 2
    window = (past + columns) * m.dim + scales
    feed_forward = 2 * s.chunk_tokens * m.ffn_dim * 2 + chunk
    assert counted.scratch_bytes == window + (7 + keeps) * chunk > feed_forward
    matmuls = sum(launch.flops for launch in counted.launches if launch.kind == MATMUL)
    assert matmuls == 2 * s.chunk_tokens * (6 * m.dim * m.dim + 2 * m.dim * m.ffn_dim)


class Toy(nn.Module):
    """Matmul, three elementwise ops and a norm, matmul, residual: five launches in all but name."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, dtype=BF16), nn.Linear(32, 8, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).float() * 2 + 1
        y = torch.nn.functional.layer_norm(y, (32,)).to(BF16)
        residual = x.float()  # used at the end: computed there, not held from here
        return (residual + self.down(y).float()).to(BF16)


def test_what_lies_between_two_matmuls_is_one_launch():
    counted = toy_count()
    kinds = [launch.kind for launch in counted.launches]
    assert kinds == [MATMUL, ROWS, MATMUL, ROWS]
    x, wide = 4 * 8 * 2, 4 * 32 * 2  # bytes
    up, down = (32 * 8 + 32) * 2, (8 * 32 + 8) * 2
    moved = [(launch.bytes_read, launch.bytes_written) for launch in counted.launches]
    assert moved == [(x + up, wide), (wide, wide), (wide + down, x), (x + x, x)]
    assert [launch.flops for launch in counted.launches] == [2 * 4 * 8 * 32, 0, 2 * 4 * 8 * 32, 0]
    assert counted.launches[3].inputs == {"x"}


def test_scratch_is_what_lies_between_two_launches():
    """Beside the norm lie what it reads and what it writes; inputs are not scratch."""
    assert toy_count().scratch_bytes == 2 * 4 * 32 * 2


def test_bytes_are_those_of_a_real_artifact(fp4):
    manifest = parse_video_manifest((fp4.folder / "manifest.json").read_bytes())
    layout = {
        "height": manifest.workload.stream.height,
        "width": manifest.workload.stream.width,
        "batch": (manifest.state_rows,),
    }
    config = resolved("tiny", "fp4", layout=layout).config
    weights = weight_bytes(config, make_pieces(config))
    assert weights == {"transformer": sum(weight.nbytes for weight in manifest.weights), "text": 0, "vae": 0}
    slots = manifest.state_rows * config.workload.stream.cache_frames
    frames = 8 * slots if config.kv.keys_before_rope else 0  # which frame each slot holds
    tokens = slots * config.workload.stream.frame_tokens
    assert pool_bytes(config.kv, 2, tokens) + frames == manifest.workload.kv.pool_bytes


def test_fp8_halves_the_matrices_of_the_blocks_alone():
    fused = on_gpu("self-forcing-1.3b", scheme="fp4").changed(fused=True)
    wide, narrow = (
        weight_bytes(config, make_pieces(config))["transformer"]
        for config in (fused, fused.changed(fp8=True))
    )
    m = fused.model
    numbers, channels = 6 * m.dim * m.dim + 2 * m.dim * m.ffn_dim, 7 * m.dim + m.ffn_dim
    assert wide - narrow == m.layers * (numbers - 4 * channels)


def test_fp8_matmuls_have_the_flops_of_bf16_ones_and_half_of_their_operands():
    config = on_gpu("self-forcing-1.3b", scheme="fp4").changed(fused=True, fp8=True, attention="fp8")
    m, tokens = config.model, config.workload.stream.chunk_tokens
    launches = count_piece(make_pieces(config)["block"]).launches
    matmuls = [launch for launch in launches if launch.kind == FP8_MATMUL]
    assert sum(launch.flops for launch in matmuls) == 2 * tokens * (6 * m.dim * m.dim + 2 * m.dim * m.ffn_dim)
    assert not [launch for launch in launches if launch.kind == MATMUL]
    (qkv, *_) = matmuls
    vectors = 4 * tokens + 3 * m.dim * (4 + 2)  # scales of rows and channels, the bias
    assert qkv.bytes_read == tokens * m.dim + 3 * m.dim * m.dim + vectors
    assert qkv.bytes_written == tokens * 3 * m.dim * 2


def toy_count() -> PieceCount:
    with torch.device("meta"):
        module = Toy()
    x, y = (Argument(name, f"value:{name}", (4, 8), BF16) for name in "xy")
    return count_piece(Piece(EngineKey("toy"), module, "", 0, (x,), (y,), positional=True))


def pool_bytes(form: KvFormat, layers: int, tokens: int) -> int:
    """Bytes of so many layers and tokens in a format."""
    return layers * tokens * sum(tensor.token_bytes for tensor in form.cache_tensors)

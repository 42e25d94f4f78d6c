"""The same against the code of another project: fastvideo's lingbot-world and the authors' camera functions.

Two files of its wheel are loaded alone, with stubs for what they import: the package itself pins too much to install.
`pip download --no-deps fastvideo==0.2.1` fetches the wheel; `SEKO_FASTVIDEO_WHEEL` names it.
"""

from __future__ import annotations

import os
import sys
import zipfile
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.families.layers.choice import INTRINSICS, POSES
from seko_export.families.lingbot import camera
from tests.lingbot.streams import INPUTS, given_of, lingbot_config, random_checkpoint
from tests.support.cameras import camera as camera_at
from tests.support.cameras import chunk_of
from tests.support.tolerances import ORACLE, relative_error
from tests.truth.eager_stream import EagerStream, random_text

WHEEL = os.environ.get("SEKO_FASTVIDEO_WHEEL", "")
pytestmark = pytest.mark.skipif(not WHEEL, reason="SEKO_FASTVIDEO_WHEEL names no wheel of fastvideo 0.2.1")
BAR = ORACLE[torch.float32]
FOLDER = "fastvideo/models/dits"


def loaded(path: str, monkeypatch: pytest.MonkeyPatch, stubs: dict[str, dict[str, Any]]) -> SimpleNamespace:
    """Run one file of the wheel, its imports answered by stubs; return its names."""
    for name, members in stubs.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            whole = ".".join(parts[:end])
            if whole not in sys.modules or end == len(parts):
                monkeypatch.setitem(sys.modules, whole, ModuleType(whole))
        vars(sys.modules[name]).update(members)
    with zipfile.ZipFile(WHEEL) as wheel:
        source = wheel.read(path).decode()
    names: dict[str, Any] = {"__name__": path}
    exec(compile(source, path, "exec"), names)
    return SimpleNamespace(**names)


def rearrange(x: Tensor, pattern: str, c1: int, c2: int, c3: int) -> Tensor:
    """The one pattern that the file asks einops for."""
    assert pattern == "1 c (f c1) (h c2) (w c3) -> 1 (f h w) (c c1 c2 c3)"
    _, c, f, h, w = x.shape
    x = x.reshape(c, f // c1, c1, h // c2, c2, w // c3, c3)
    return x.permute(1, 3, 5, 0, 2, 4, 6).reshape(1, (f // c1) * (h // c2) * (w // c3), c * c1 * c2 * c3)


class Base(nn.Module):
    def __init__(self, **_: object) -> None:
        super().__init__()

    def __post_init__(self) -> None:
        pass


def plain_attention(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    """Attention in float32; theirs would round to bfloat16."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    backends = SimpleNamespace(FLASH_ATTN=0, TORCH_SDPA=1)
    stubs = {
        "einops": {"rearrange": rearrange},
        "fastvideo.configs.models.dits.lingbotworld2": {"LingBotWorld2CausalFastVideoConfig": object},
        "fastvideo.distributed.communication_op": {
            "sequence_model_parallel_all_gather": None,
            "sequence_model_parallel_all_to_all_4D": None,
        },
        "fastvideo.distributed.parallel_state": {
            "get_sp_parallel_rank": lambda: 0,
            "get_sp_world_size": lambda: 1,
        },
        "fastvideo.models.dits.base": {"BaseDiT": Base},
        "fastvideo.platforms": {"AttentionBackendEnum": backends},
    }
    module = loaded(f"{FOLDER}/lingbotworld2/causal_fast.py", monkeypatch, stubs)
    space = module.attention.__globals__
    space["attention"] = space["flash_attention"] = plain_attention
    return module


@pytest.fixture
def cam_utils(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    stubs = {
        "scipy.interpolate": {"interp1d": None},
        "scipy.spatial.transform": {"Rotation": None, "Slerp": None},
    }
    return loaded(f"{FOLDER}/lingbotworld/cam_utils.py", monkeypatch, stubs)


@pytest.mark.filterwarnings("ignore:CUDA is not available")  # of their own autocast
def test_a_stream_past_the_wrap(theirs: SimpleNamespace, cam_utils: SimpleNamespace, worst: Any) -> None:
    config = lingbot_config(layout={"chunk_frames": 2, "sink_frames": 2, "ring_frames": 4})
    m, s = config.model, config.workload.stream
    checkpoint, text = random_checkpoint(), random_text(m, 1)
    oracle = theirs.LingBotWorld2CausalFastTransformer3DModel(
        SimpleNamespace(
            model_type="i2v", patch_size=(1, 2, 2), text_len=m.text_tokens, in_dim=m.in_channels, dim=m.dim,
            ffn_dim=m.ffn_dim, freq_dim=m.freq_dim, text_dim=m.text_dim, out_dim=m.out_channels, num_heads=m.heads,
            num_layers=m.layers, local_attn_size=s.cache_frames, sink_size=s.sink_frames, qk_norm=True,
            cross_attn_norm=True, eps=m.norm_eps,
        ),
        {},
    )  # fmt: skip
    assert {name: tuple(tensor.shape) for name, tensor in oracle.state_dict().items()} == {
        name: tuple(tensor.shape) for name, tensor in checkpoint.items()
    }
    oracle.load_state_dict(checkpoint, strict=True)
    shape = (1, s.cache_tokens, m.heads, m.head_dim)
    caches = [
        {
            "k": torch.zeros(shape),
            "v": torch.zeros(shape),
            "global_end_index": torch.zeros(1, dtype=torch.long),
            "local_end_index": torch.zeros(1, dtype=torch.long),
        }
        for _ in range(m.layers)
    ]
    wide = (1, m.text_tokens, m.heads, m.head_dim)
    texts = [
        {"k": torch.zeros(wide), "v": torch.zeros(wide), "is_init": torch.zeros(1)} for _ in range(m.layers)
    ]

    stream = EagerStream(config, checkpoint, text)
    table = given_of(config, None)["condition"]
    stream.buffers[INPUTS["condition"]].copy_(table)
    for number in range(6):
        inputs = given_of(config, number)
        for name, value in inputs.items():
            stream.buffers[INPUTS[name]].copy_(value)
        first = number * s.chunk_frames
        poses = torch.eye(4).repeat(s.chunk_frames, 1, 1)
        poses[:, :3] = inputs[POSES][0]
        rays = cam_utils.get_plucker_embeddings(poses, inputs[INTRINSICS][0], s.height, s.width)
        cells = F.pixel_unshuffle(rays.permute(0, 3, 1, 2), 8).transpose(0, 1)[None]  # [1, 384, F, h, w]
        for done in stream.run_chunk([first], [3]):
            with torch.no_grad():
                (velocity,) = oracle(
                    x=[done.latents[0]],
                    t=torch.full((1, s.chunk_tokens), done.timestep),
                    context=[text[0]],
                    seq_len=s.chunk_tokens,
                    y=[table[0][:, first : first + s.chunk_frames]],
                    dit_cond_dict={"c2ws_plucker_emb": [cells]},
                    kv_cache=caches,
                    crossattn_cache=texts,
                    current_start=first * s.frame_tokens,
                    max_attention_size=s.cache_tokens,
                    frame_seqlen=s.frame_tokens,
                )
            if done.velocity is not None:
                error = relative_error(done.velocity[0], velocity)
                worst("lingbot against fastvideo", error)
                assert error <= BAR, (number, done.timestep)


def test_poses_and_rays(cam_utils: SimpleNamespace) -> None:
    """The authors' functions, from poses in the world to a pixel's ray."""
    keys = camera_at(64, 96, 1, "wi-2,dl-3,sj-4", steps_per_frame=1, yaw=7.0)
    every = []
    for _ in range(9):
        keys.advance()
        every.append(keys.pose)
    poses = np.array(every)
    focal = np.array([480.0, 470.0, 400.0, 230.0])
    path = camera_at(64, 96, 3)
    path.take({"path": poses.repeat(4, 0)[:33], "intrinsics": focal})
    wanted = cam_utils.compute_relative_poses(torch.from_numpy(poses), framewise=True)
    at_size = cam_utils.get_Ks_transformed(torch.from_numpy(focal)[None], 480, 832, 64, 96, 64, 96)
    for number in range(3):
        chunk = {name: torch.from_numpy(value) for name, value in chunk_of(path).items()}
        part = wanted[3 * number : 3 * number + 3]
        assert relative_error(chunk[POSES], part[:, :3]) <= BAR
        assert relative_error(chunk[INTRINSICS], at_size.expand(3, 4)) <= BAR
        rays = cam_utils.get_plucker_embeddings(part.float(), at_size.float().expand(3, 4), 64, 96)
        ours = camera.rays(chunk[POSES][None], chunk[INTRINSICS][None], 64, 96)
        assert relative_error(ours[0].permute(0, 2, 3, 1), rays) <= BAR

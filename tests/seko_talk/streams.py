"""Small Seko-Talk streams for the tests, beside their reference; no tests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seko_export.checkpoints.random import random_weight
from seko_export.config.pool import PoolConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.base import MediaTensors
from seko_export.families.seko_talk import audio, picture
from seko_export.families.seko_talk.family import FAMILY
from seko_export.families.seko_talk.keys import seko_shapes, spread, to_theirs
from seko_export.families.seko_talk.presets import PRESETS, TINY
from seko_export.families.wan_layout import picture_branch
from seko_export.video.calibration import layer_constants
from seko_runtime.video.pool import Pool
from tests.support.eager_pool import eager_pool
from tests.truth.eager_stream import EagerStream, known_channels
from tests.truth.naive_seko_talk import NaiveTalk, Window, by_pass

PRESET = PRESETS[TINY]
BUFFERS = {
    name: f"input.{name}" for name in (audio.AUDIO, audio.MASKS, picture_branch.FEATURES, picture.PORTRAIT)
}


def talk_config(
    scheme: str = "fp32",
    *,
    model: Mapping[str, Any] | None = None,
    layout: Mapping[str, Any] | None = None,
    **changes: Any,
) -> VideoBuild:
    """Return a build of the tiny preset for the CPU; latents are not rounded, so that float32 can be compared."""
    schedule = replace(PRESET.schedule, sampler="euler")
    stream = replace(PRESET.stream, **(layout or {}))
    config = VideoBuild(
        replace(PRESET.model, **(model or {})), VideoConfig(stream, schedule, scheme), TargetConfig("cpu")
    )
    return config.changed(**changes)


def random_checkpoint(config: VideoBuild, seed: int = 0) -> dict[str, Tensor]:
    """Return random weights by the exporter's names, scaled so that every one shows in the output."""
    return {
        name: random_weight(name, shape, seed=seed, dtype=torch.float32, spread=spread)
        for name, shape in seko_shapes(config.model).items()
    }


def weights_of(
    config: VideoBuild, checkpoint: Mapping[str, Tensor], media: MediaTensors | None = None
) -> dict[str, Tensor]:
    """Return the artifact's weights, tables and constants of its cache."""
    graph = FAMILY.graph(config)
    tensors = dict(FAMILY.weights(graph.pieces, checkpoint, media)) | FAMILY.tables(config, checkpoint)
    tensors |= config.workload.schedule.tables(config.as_batch.workload.stream)
    if config.workload.kv_scheme != config.exact_scheme:
        known = known_channels(config.model)
        for layer in range(config.model.layers):
            scales = config.kv.calibrate(known, known)
            tensors |= {f"blocks.{layer}.kv.{name}": scale for name, scale in scales.items()}
        tensors |= layer_constants(config, tensors)
    return tensors


def random_reference(config: VideoBuild, seed: int = 4) -> Tensor:
    """Return latents [B, C, R, h, w] of the portraits."""
    s = config.workload.stream
    shape = (s.batch, config.model.in_channels, s.reference_frames, s.latent_height, s.latent_width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def begun(
    config: VideoBuild, checkpoint: Mapping[str, Tensor], text: Tensor, reference: Tensor
) -> EagerStream:
    """Return a stream of eager pieces whose picture, masks and reference are set."""
    stream = EagerStream(config, checkpoint, text)
    for name, value in FAMILY.golden_inputs(config, None).items():
        stream.buffers[BUFFERS[name]].copy_(value)
    stream.set_text(text)
    stream.write_references(reference)
    return stream


@contextmanager
def opened(config: VideoBuild, rows: int = 2, media: MediaTensors | None = None) -> Iterator[Pool]:
    """A pool over the eager model."""
    pooled = config.changed(pool=PoolConfig(rows, (1, 2)))
    weights = weights_of(pooled, random_checkpoint(config), media)
    with eager_pool(pooled, weights) as pool:
        yield pool


class Reference:
    """One naive model for each pass, which sees what went into that pass: as many histories as passes."""

    def __init__(
        self,
        config: VideoBuild,
        checkpoint: Mapping[str, Tensor],
        text: Tensor,
        reference: Tensor,
        row: int = 0,
    ) -> None:
        s, model = config.workload.stream, config.model
        steady = FAMILY.golden_inputs(config, None)
        features, masks = steady.get(picture_branch.FEATURES), steady.get(audio.MASKS)
        self.model = NaiveTalk(
            {to_theirs(name): tensor for name, tensor in checkpoint.items()},
            model.heads,
            model.audio_heads,
            Window(
                s.chunk_frames,
                s.sink_frames,
                s.layer_rings or (s.ring_frames,),
                s.reference_frames,
                s.rope_max_frames,
                s.references_apart,
            ),
            text[row],
            None if features is None else features[row],
            model.ref_state,
        )
        self.masks = None if masks is None else masks[row]
        self.reference, self.row, self.frames = reference[row], row, s.chunk_frames
        self.history: list[list[Tensor]] = [[] for _ in config.workload.schedule.timesteps]
        self.audio: list[Tensor] = []

    def begin(self, features: Tensor) -> None:
        """Take the audio of the next chunk, [B, S, F, M, width]."""
        self.audio.append(features[self.row])

    def velocity(self, number: int, latents: Tensor, time: float) -> Tensor:
        """Return the velocity of the chunk [16, F, h, w] in pass ``number``, and keep what went in."""
        self.history[number].append(latents[self.row].clone())
        every = self.model.velocity(
            by_pass(self.history[number]), time, self.reference, torch.cat(self.audio, 1), self.masks
        )
        return every[:, -self.frames :]


def write_hubert(folder: Path, width: int, seed: int = 0) -> Any:
    """Write a random HuBERT of a few channels as transformers does, and return transformers' own model of it."""
    import transformers

    config = transformers.HubertConfig(
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8,) * 7,
        conv_bias=True,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        apply_spec_augment=False,
    )
    torch.manual_seed(seed)
    model = transformers.HubertModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # else biases of zero and norms of one show nothing
            parameter.add_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor(do_normalize=True).save_pretrained(folder)
    return model


def write_clip(file: Path, width: int, seed: int = 0) -> Any:
    """Write a random CLIP as Wan's file, with a text half, and return transformers' own model of its image half."""
    import transformers

    config = transformers.CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=3,
        num_attention_heads=16,
        image_size=8,
        patch_size=4,
        hidden_act="gelu",
    )
    torch.manual_seed(seed)
    model = transformers.CLIPVisionModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # else biases of zero and norms of one show nothing
            parameter.add_(0.2 * torch.randn(parameter.shape))
    theirs = {name.removeprefix("vision_model."): tensor for name, tensor in model.state_dict().items()}
    stored = {
        "visual.patch_embedding.weight": theirs["embeddings.patch_embedding.weight"],
        "visual.cls_embedding": theirs["embeddings.class_embedding"][None, None],
        "visual.pos_embedding": theirs["embeddings.position_embedding.weight"][None],
        "visual.head": torch.randn(width, 7),
        "textual.token_embedding.weight": torch.randn(9, 4),
        "log_scale": torch.tensor(2.0),
    }
    names = {"norm1": "layer_norm1", "norm2": "layer_norm2", "mlp.0": "mlp.fc1", "mlp.2": "mlp.fc2"}
    for leaf in ("weight", "bias"):
        stored[f"visual.pre_norm.{leaf}"] = theirs[f"pre_layrnorm.{leaf}"]
        stored[f"visual.post_norm.{leaf}"] = theirs[f"post_layernorm.{leaf}"]
        for block in range(3):
            ours, at = f"visual.transformer.{block}", f"encoder.layers.{block}"
            for here, there in (names | {"attn.proj": "self_attn.out_proj"}).items():
                stored[f"{ours}.{here}.{leaf}"] = theirs[f"{at}.{there}.{leaf}"]
            stored[f"{ours}.attn.to_qkv.{leaf}"] = torch.cat(
                [theirs[f"{at}.self_attn.{part}_proj.{leaf}"] for part in "qkv"]
            )
    torch.save(stored, file)
    return model


def seen_by(model: Any, picture: Tensor) -> Tensor:
    """Return features [5, width] of a picture [H, W, 3] uint8, by transformers and the description alone."""
    side, pixels = 8, picture.double() / 127.5 - 1
    for _ in range(2):  # cubic convolution with a = -0.75, four taps, the edge repeated
        length, lines = pixels.shape[0], []
        for at in range(side):
            centre = (at + 0.5) * length / side - 0.5
            first = math.floor(centre) - 1
            line = torch.zeros_like(pixels[0])
            for tap in range(first, first + 4):
                x = abs(centre - tap)
                near = 1.25 * x**3 - 2.25 * x**2 + 1
                far = -0.75 * (x**3 - 5 * x**2 + 8 * x - 4)
                line = line + (near if x <= 1 else far) * pixels[min(max(tap, 0), length - 1)]
            lines.append(line)
        pixels = torch.stack(lines).transpose(0, 1)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).double()
    deviation = torch.tensor([0.26862954, 0.26130258, 0.27577711]).double()
    pixels = ((pixels * 0.5 + 0.5) - mean) / deviation
    with torch.no_grad():
        every = model(pixels.permute(2, 0, 1)[None].float(), output_hidden_states=True).hidden_states
    assert len(every) == 4  # the embedding, and three blocks
    return every[-2][0]


def heard_by(model: Any, voice: Tensor, first_frame: int, frames: int, count: int = 13) -> Tensor:
    """Return features [1, F, count, width] of a chunk's latent frames, by transformers and the description alone.

    ``voice`` [samples] float32 begins with the stream.
    """
    import transformers

    windows = torch.zeros(frames, 16_000)
    for at, frame in enumerate(range(first_frame, first_frame + frames)):
        left, end = (1000 * (4 * frame - 1) - 8000, 1000 * (4 * frame + 1)) if frame else (-7500, 1000)
        part = voice[max(left, 0) : end]
        windows[at, max(left, 0) - left :][: len(part)] = part
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=True)
    values = extractor(windows, sampling_rate=16_000, return_tensors="pt").input_values.reshape(windows.shape)
    with torch.no_grad():
        hidden = model(values).last_hidden_state
    assert hidden.shape[1] == 49
    return hidden[None, :, 18 : 18 + count]

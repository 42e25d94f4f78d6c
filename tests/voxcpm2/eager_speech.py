"""A pool of VoxCPM2 rows that runs the engines' modules uncompiled, call by call, as a program would name them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seko_export.engines.piece import FlatModule, Piece
from seko_export.families.layers.weights import model_weights
from seko_export.families.voxcpm2.config import VoxCpm2Config
from seko_export.families.voxcpm2.pieces import (
    PREFILL,
    SpeechLayout,
    prefill_pieces,
    step_pieces,
    voice_piece,
)
from seko_export.families.voxcpm2.solver import STEPS
from seko_export.families.voxcpm2.weights import SIZES, SpeechWeights, speech_tables
from seko_export.media.audio_vae.modules import DecodeChunk, EncodeChunk, state_size
from seko_runtime.speech import contract as c


@dataclass
class Row:
    """What the host knows of a row: its first place in the caches, its next position, its next patch, its seed."""

    start: int
    position: int = 0
    patches: int = 0
    seed: int = 0
    guidance: float = 2.0


class EagerSpeech:
    """Rows that are prefilled and stepped in any order and any company.

    Parameters
    ----------
    config, layout
        The model, and the room for it.
    model, vae : mapping of str to Tensor
        Weights by the checkpoint's names.
    """

    def __init__(
        self,
        config: VoxCpm2Config,
        layout: SpeechLayout,
        model: Mapping[str, Tensor],
        vae: Mapping[str, Tensor],
        steps: int = STEPS,
    ) -> None:
        self.config, self.layout = config, layout
        self.source = SpeechWeights(model, vae, config)
        self.values: dict[str, Tensor] = {}
        tables = speech_tables(model, config, steps, layout.dtype)
        self.values |= {f"weight:{name}": table for name, table in tables.items()}
        d, places = config.base.dim, layout.places
        zeros = {
            c.BASE_STATE: (layout.rows, d),
            c.RESIDUAL_STATE: (layout.rows, d),
            c.LAST_PATCH: (layout.rows, *config.patch_shape),
        }
        for prefix, net in (("base_lm", config.base), ("residual_lm", config.residual)):
            for part in "kv":
                if layout.form is None:
                    zeros[f"{prefix}.{part}"] = (net.layers, places, net.kv_heads, net.head_dim)
                    continue
                kinds = {"codes": layout.form.codes_shape, "scales": layout.form.scales_shape}
                for kind, shape_of in kinds.items():
                    dtype = layout.form.code_dtype if kind == "codes" else torch.uint8
                    shape = (net.layers, places, *shape_of(net.kv_heads, net.head_dim))
                    self.values[f"buffer:{prefix}.{part}_{kind}"] = torch.full(shape, 0x7E, dtype=dtype)
        for name, shape in zeros.items():  # what was never written must never matter
            self.values[f"buffer:{name}"] = torch.full(shape, torch.nan, dtype=layout.dtype)
        with torch.device("meta"):
            sizes = state_size(DecodeChunk(config.vae)), state_size(EncodeChunk(config.vae))
        self.values[f"buffer:{c.VAE_STATES}"] = torch.zeros(layout.rows, sizes[0])
        self.voice_states = torch.zeros(1, sizes[1])
        self._steps: dict[tuple[int, int], dict[str, Piece]] = {}
        self.rows = [Row(0) for _ in range(layout.rows)]

    def prefill(
        self,
        row: int,
        prompt: Mapping[str, np.ndarray[Any, Any] | Tensor],
        *,
        start: int,
        tokens: int,
        length: int,
        seed: int = 0,
        guidance: float = 2.0,
    ) -> None:
        """Run both language models over a prompt, in calls of ``tokens`` tokens; see `speech.prompts`."""
        ids, is_audio, patches = (torch.as_tensor(prompt[name]) for name in ("ids", "is_audio", "patches"))
        pieces = prefill_pieces(self.config, self.layout, tokens, length)
        self.rows[row] = row_state = Row(start, seed=seed, guidance=guidance)
        self.values[f"buffer:{c.VAE_STATES}"][row] = 0
        for first in range(0, len(ids), tokens):
            part = slice(first, first + tokens)
            count = len(ids[part])
            padding = tokens - count
            fill = torch.nn.functional.pad
            self._give(c.IDS, fill(ids[part], (0, padding), value=3))
            self._give(c.IS_AUDIO, fill(is_audio[part], (0, padding)))
            shaped = fill(patches[part], (0, 0, 0, 0, 0, padding), value=0.5)
            self._give(c.PROMPT_PATCHES, shaped.to(self.layout.dtype))
            self._give_rows([row], first=[row_state.position], count=[count], begin=f"{PREFILL}.")
            for piece in pieces.values():
                self.run(piece)
            row_state.position += count

    def begin(self, rows: Sequence[int], length: int) -> dict[str, Piece]:
        """Hand the rows of a step to its engines, and return these by role."""
        batch = len(rows)
        row_states = [self.rows[row] for row in rows]
        self._give_rows(rows, first=[row.position for row in row_states], count=[1] * batch)
        self._give(c.SEEDS, torch.tensor([row.seed for row in row_states]))
        self._give(c.PATCH_NUMBERS, torch.tensor([row.patches for row in row_states]))
        self._give(c.TEMPERATURE, torch.ones(batch))
        self._give(c.GUIDANCE, torch.tensor([row.guidance for row in row_states]))
        return {
            piece.key.role: piece for piece in step_pieces(self.config, self.layout, batch, length).values()
        }

    def step(self, rows: Sequence[int], length: int, noise: Tensor | None = None) -> dict[str, Tensor]:
        """Make the next patch of some rows; with ``noise`` [B, P, C] instead of their own."""
        pieces = self.begin(rows, length)
        self.run(pieces["noise"])
        if noise is not None:
            self.values[f"buffer:{c.PATCH}"] = noise
        self.run(pieces["condition"])
        self.solve(pieces)
        for role in ("patch_tokens", "patch_layer", "patch_embedding", "positions", "base_layer", "fusion"):
            self.run(pieces[role])
        for role in ("residual_layer", "keep_state", "decode"):
            self.run(pieces[role])
        for row in rows:
            self.rows[row].position += 1
            self.rows[row].patches += 1
        outputs = {"patch": self.values[f"buffer:{c.PATCH}"], "embedded": self.values["value:features"]}
        outputs |= {name: self.values[f"buffer:{name}"] for name in (c.STOP, c.STOP_LOGITS, c.SAMPLES)}
        outputs |= {name: self.values[f"value:{name}"] for name in ("last_base", "last_residual")}
        return outputs

    def solve(self, pieces: Mapping[str, Piece]) -> None:
        """Run the solver's steps."""
        for number in range(len(self.values[f"weight:{SIZES}"])):
            for role in ("solver_tokens", "solver_layer", "solver_step"):
                self.run(pieces[role], number)

    def set_state(self, row: int, base: Tensor, residual: Tensor, last_patch: Tensor) -> None:
        """Write what a row's next step begins with."""
        for name, state in ((c.BASE_STATE, base), (c.RESIDUAL_STATE, residual), (c.LAST_PATCH, last_patch)):
            self.values[f"buffer:{name}"][row] = state

    def state(self, row: int) -> dict[str, Tensor]:
        """Return what a row's next step begins with."""
        names = {"base": c.BASE_STATE, "residual": c.RESIDUAL_STATE, "last_patch": c.LAST_PATCH}
        return {ours: self.values[f"buffer:{name}"][row].clone() for ours, name in names.items()}

    def encode(self, samples: Tensor) -> Tensor:
        """Return the latents [T, C] of a voice's samples [n], which fill whole calls."""
        piece = voice_piece(self.config, self.layout)
        self.values[f"buffer:{c.VOICE_STATES}"] = torch.zeros_like(self.voice_states)
        latents = []
        for stretch in samples.split(piece.inputs[0].shape[1]):
            self._give(c.VOICE, stretch[None])
            self.run(piece)
            latents.append(self.values[f"buffer:{c.VOICE_LATENTS}"][0])
        return torch.cat(latents)

    def _give(self, name: str, value: Tensor) -> None:
        self.values[f"buffer:{name}"] = value

    def _give_rows(self, rows: Sequence[int], *, first: list[int], count: list[int], begin: str = "") -> None:
        self._give(begin + c.ROWS, torch.tensor(rows))
        self._give(begin + c.STARTS, torch.tensor([self.rows[row].start for row in rows]))
        self._give(begin + c.FIRST, torch.tensor(first))
        self._give(begin + c.COUNT, torch.tensor(count))

    @torch.no_grad()
    def run(self, piece: Piece, number: int = 0) -> None:
        """Call an engine for each of its layers; each tensor has to be as its signature says."""
        self._load(piece)
        module = FlatModule(piece)
        for layer in piece.served or (0,):
            tensors = []
            for argument in piece.signature:
                ref = argument.ref.replace("{layer}", str(layer))
                value = self.values[_unmarked(ref)]
                value = value[layer] if argument.ref.endswith("[{layer}]") else value
                value = value[number] if ref.endswith("[pass]") else value
                assert (tuple(value.shape), value.dtype) == (argument.shape, argument.dtype), argument
                tensors.append(value)
            for argument, output in zip(piece.outputs, module(*tensors), strict=True):
                assert (tuple(output.shape), output.dtype) == (argument.shape, argument.dtype), argument
                self.values[_unmarked(argument.ref)] = output

    def _load(self, piece: Piece) -> None:
        """Read the weights of an engine that are not there yet."""
        names = [argument.ref for argument in piece.parameters]
        if all(name.replace("{layer}", "0") in self.values for name in names):
            return
        for name, tensor in model_weights({piece.name: piece}, self.source):
            self.values[f"weight:{name}"] = tensor


def _unmarked(ref: str) -> str:
    """Return a reference without its marks. Buffers are as long as the call under way, whatever its bucket."""
    return re.sub(r"\[(\d+|pass|bucket)\]", "", ref)

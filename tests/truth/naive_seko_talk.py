"""Seko-Talk's transformer over a whole sequence at once, for one pass, written from its description; no tests.

It shares nothing with `seko_export`: one row, the names of the checkpoint's two files, no cache. One model is one
denoise pass: the reference picture and all frames since the start of the stream stand there as they went into that
pass, noisy, all at its time. A chunk sees the reference, the sink, and the last ring frames up to its own end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

EPS = 1e-6


@dataclass(frozen=True)
class Window:
    """Chunk and sink in latent frames, and the ring of each layer, repeated; a reference stands before them.

    With ``most`` a frame's position is its number from the start of the stream, behind the reference's 0; what is not
    in the sink is moved down so that the newest has at most ``most``. Without it the frames that are seen are counted;
    with ``apart`` those of the stream alone, from 0 on, and a reference has 0, too.
    """

    chunk: int
    sink: int
    rings: tuple[int, ...]
    references: int = 1
    most: int = 0
    apart: bool = False

    def place(self, frame: int, seen: list[int]) -> int:
        """Return the position of a frame among those that a chunk sees."""
        if self.apart:
            return [seen_frame for seen_frame in seen if seen_frame >= 0].index(frame) if frame >= 0 else 0
        if not self.most:
            return seen.index(frame)
        down = max(0, seen[-1] - (self.most - 1)) if frame >= self.sink else 0
        return self.references + frame - down

    def seen(self, chunk: int, layer: int) -> list[int]:
        """Return the frames that a chunk sees in a layer, oldest first; references are negative."""
        end = (chunk + 1) * self.chunk
        ring = self.rings[layer % len(self.rings)]
        ours = [frame for frame in range(end) if frame < self.sink or frame >= end - ring]
        return [*range(-self.references, 0), *ours]


class NaiveTalk:
    """One stream's model in one pass.

    Parameters
    ----------
    weights : mapping of str to Tensor
        Both files, by their own names.
    heads, audio_heads : int
        Attention heads of the transformer, and of the audio projector.
    window : Window
        What a chunk sees.
    text : Tensor
        [text tokens, text width], zero-padded.
    picture : Tensor or None
        [N, image width], CLIP's features.
    ref_state : int
        Row of the state embedding.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        heads: int,
        audio_heads: int,
        window: Window,
        text: Tensor,
        picture: Tensor | None,
        ref_state: int = 1,
    ) -> None:
        self.weights, self.heads, self.window, self.ref_state = weights, heads, window, ref_state
        self.layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
        inner = F.gelu(self.linear("text_embedding.0", text), approximate="tanh")
        self.text = self.linear("text_embedding.2", inner)
        self.picture = None
        if picture is not None:
            inner = F.gelu(self.linear("img_emb.proj.1", self.norm("img_emb.proj.0", picture)))
            self.picture = self.norm("img_emb.proj.4", self.linear("img_emb.proj.3", inner))
        self.decoder = torch_decoder(weights, audio_heads)

    @torch.no_grad()
    def velocity(
        self, latents: Tensor, time: float, reference: Tensor, audio: Tensor, masks: Tensor | None = None
    ) -> Tensor:
        """Return the velocity [16, frames, h, w] of all frames.

        Parameters
        ----------
        latents : Tensor
            [16, frames, h, w], what went into this pass.
        time : float
            Of the pass, 0..1000.
        reference : Tensor
            [16, references, h, w].
        audio : Tensor
            [speakers, frames, M, audio width].
        masks : Tensor or None
            [speakers, n].
        """
        state = self.weights["state_embedding.weight"][self.ref_state]
        old = [frame + state for frame in self.patches("ref_patch_embedding", reference)]
        frames_of = [*old, *self.patches("patch_embedding", latents)]  # [n, d] each
        rows, columns = latents.shape[2] // 2, latents.shape[3] // 2
        d = frames_of[0].shape[1]
        x = torch.stack(frames_of)  # [references + frames, n, d]

        half = self.weights["time_embedding.0.weight"].shape[1] // 2
        e = self.linear("time_embedding.2", F.silu(self.linear("time_embedding.0", wave(time, half))))
        e0 = self.linear("time_projection.1", F.silu(e)).reshape(6, d)
        voices = self.audio_tokens(audio)
        for layer in range(self.layers):
            x = self.block(layer, x, e0, (rows, columns))
            for frame in range(latents.shape[1]):
                at = self.window.references + frame
                x[at] = x[at] + self.hear(layer, x[at], voices[:, frame], time, masks)
        x = x[self.window.references :]
        shift, scale = self.weights["head.modulation"][0] + e
        y = self.linear("head.head", F.layer_norm(x, (d,), eps=EPS) * (1 + scale) + shift)
        y = y.reshape(-1, rows, columns, 2, 2, latents.shape[0])  # row and column in the patch, then channels
        return y.permute(5, 0, 1, 3, 2, 4).reshape(latents.shape)

    def block(self, layer: int, x: Tensor, e0: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return one layer's output [frames, n, d], the audio left out; chunk by chunk, each in its own window."""
        at, refs, d = f"blocks.{layer}", self.window.references, x.shape[-1]
        m = self.weights[f"{at}.modulation"][0] + e0
        y = F.layer_norm(x, (d,), eps=EPS) * (1 + m[1]) + m[0]
        q, k = (self.normed(f"{at}.self_attn.{part}", f"{at}.self_attn.norm_{part}", y) for part in "qk")
        v = self.split(self.linear(f"{at}.self_attn.v", y))  # [frames, n, H, D]
        seen_by = [(range(refs), list(range(-refs, 0)))]  # the references see themselves alone
        for chunk in range((len(x) - refs) // self.window.chunk):
            own = range(refs + chunk * self.window.chunk, refs + (chunk + 1) * self.window.chunk)
            seen_by.append((own, self.window.seen(chunk, layer)))
        parts = []
        for own, seen in seen_by:
            places = {frame + refs: self.window.place(frame, seen) for frame in seen}
            turned_q = torch.cat([turn(q[frame], places[frame], grid) for frame in own])
            turned_k = torch.cat([turn(k[frame], place, grid) for frame, place in places.items()])
            parts.append(attend(turned_q, turned_k, torch.cat([v[frame] for frame in places])))
        y = torch.cat(parts).reshape(x.shape)
        x = x + self.linear(f"{at}.self_attn.o", y) * m[2]
        y = self.norm(f"{at}.norm3", x)
        q = self.normed(f"{at}.cross_attn.q", f"{at}.cross_attn.norm_q", y).flatten(0, 1)
        y = self.beside(at, q, self.text, "k", "v", "norm_k")
        if self.picture is not None:
            y = y + self.beside(at, q, self.picture, "k_img", "v_img", "norm_k_img")
        x = x + self.linear(f"{at}.cross_attn.o", y).reshape(x.shape)
        y = F.layer_norm(x, (d,), eps=EPS) * (1 + m[4]) + m[3]
        y = F.gelu(self.linear(f"{at}.ffn.0", y), approximate="tanh")
        return x + self.linear(f"{at}.ffn.2", y) * m[5]

    def beside(self, at: str, q: Tensor, context: Tensor, k: str, v: str, norm: str) -> Tensor:
        """Return the attention [tokens, d] of q to a context [N, d] with its own keys and values."""
        keys = self.normed(f"{at}.cross_attn.{k}", f"{at}.cross_attn.{norm}", context)
        return attend(q, keys, self.split(self.linear(f"{at}.cross_attn.{v}", context)))

    def hear(self, layer: int, x: Tensor, voices: Tensor, time: float, masks: Tensor | None) -> Tensor:
        """Return what one frame [n, d] hears of its voices [speakers, A, width]."""
        at, d = f"ca.{layer}", x.shape[-1]
        table = self.adapter_times(time) + self.weights[f"{at}.shift_scale_gate"][0]
        q = self.linear(f"{at}.to_q", F.layer_norm(x, (d,), eps=EPS) * (1 + table[1]) + table[0])
        total = torch.zeros_like(x)
        for speaker, tokens in enumerate(voices):
            kv = self.linear(f"{at}.to_kv", self.norm(f"{at}.norm_kv", tokens))
            seen = attend(self.split(q), self.split(kv[:, :d]), self.split(kv[:, d:]))
            mask = torch.ones(len(x)) if masks is None else masks[speaker]
            total = total + self.linear(f"{at}.to_out", seen) * table[2] * mask[:, None]
        return total

    def adapter_times(self, time: float) -> Tensor:
        """Return [3, d] of the adapter's own time embedding."""
        at = "time_embedding.time_embedder"
        half = self.weights[f"{at}.linear_1.weight"].shape[1] // 2
        inner = self.linear(f"{at}.linear_2", F.silu(self.linear(f"{at}.linear_1", wave(time, half))))
        return self.linear("time_embedding.time_proj", F.silu(inner)).reshape(3, -1)

    def audio_tokens(self, audio: Tensor) -> Tensor:
        """Return [speakers, frames, A, width], frame by frame."""
        queries = self.weights["audio_proj.learnable_queries"]
        each = [
            [self.decoder(queries, self.linear("audio_proj.proj_in", frame)[None])[0] for frame in speaker]
            for speaker in audio
        ]
        return torch.stack([torch.stack(queries) for queries in each])

    def patches(self, name: str, latents: Tensor) -> list[Tensor]:
        """Return the tokens [n, d] of each frame."""
        tokens = F.conv3d(
            latents[None], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], stride=(1, 2, 2)
        )
        return [frame.flatten(1).T for frame in tokens[0].unbind(1)]

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Apply a linear layer of the checkpoint."""
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Apply a LayerNorm of the checkpoint."""
        return F.layer_norm(
            x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], EPS
        )

    def normed(self, name: str, norm: str, x: Tensor) -> Tensor:
        """Return heads [..., H, D] of a linear layer with an RMSNorm over the whole width."""
        y = self.linear(name, x)
        return self.split(
            y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * self.weights[f"{norm}.weight"]
        )

    def split(self, x: Tensor) -> Tensor:
        """Return [..., H, D]."""
        return x.unflatten(-1, (self.heads, -1))


def torch_decoder(weights: Mapping[str, Tensor], heads: int) -> nn.TransformerDecoder:
    """Return torch's own decoder with the projector's weights."""
    prefix = "audio_proj.transformer_decoder."
    own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    inner, width = own["layers.0.linear1.weight"].shape
    layer = nn.TransformerDecoderLayer(width, heads, inner, dropout=0.0, batch_first=True)
    decoder = nn.TransformerDecoder(layer, 1 + max(int(name.split(".")[1]) for name in own))
    decoder.load_state_dict(own)
    return decoder.eval()


def wave(time: float, half: int) -> Tensor:
    """Return [2 * half] cosines, then sines, of a time."""
    angle = torch.tensor(time).double() * 10000.0 ** (-torch.arange(half).double() / half)
    return torch.cat((angle.cos(), angle.sin())).float()


def turn(x: Tensor, place: int, grid: tuple[int, int]) -> Tensor:
    """Return x [n, H, D] of one frame, rotated at its place: pairs for time, then row, then column."""
    pairs = x.shape[-1] // 2
    side = pairs // 3
    rows, columns = grid
    at = torch.cartesian_prod(torch.tensor([place]), torch.arange(rows), torch.arange(columns)).double()
    parts = []
    for axis, count in enumerate((pairs - 2 * side, side, side)):
        parts.append(torch.outer(at[:, axis], 10000.0 ** (-torch.arange(count).double() / count)))
    angle = torch.cat(parts, 1)
    spin = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)[:, None]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * spin).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return [tokens, d] of q over k and v, each [tokens, H, D]."""
    weight = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5, -1)
    return torch.einsum("hqk,khd->qhd", weight, v).flatten(1)


def by_pass(history: Sequence[Tensor]) -> Tensor:
    """Return what went into one pass so far, [16, frames, h, w]."""
    return torch.cat(list(history), 1)

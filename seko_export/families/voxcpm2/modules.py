"""The modules of a VoxCPM2 step and of a prefill, except the transformer layers between them. Each module of a step
becomes an engine.

A row's state between two steps consists of the hidden states of both language models at the last position, and the last
patch. The original implementation has the same state at the head of its loop. A step generates the next patch from the
row's state, encodes the patch, and runs both language models over the encoded patch. The prefill runs both language
models over the prompt. Prefill and step therefore end with the same engines, and a step generates every patch.

In shapes B is the number of rows of a call, R the number of rows of the pool, T the number of tokens, P the number of
latents of a patch, and C the number of channels of a latent. d is the width of the language models, e the width of the
local encoder, and w the width of the local transformer. The local transformer has two rows for each row of a call: one
with the condition, and one without the condition, for guidance.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.families.layers.sampler import gaussian
from seko_export.families.voxcpm2.config import VoxCpm2Config
from seko_export.families.voxcpm2.layers import Norm

_SCALE_EPS = 1e-8


class PatchTokens(nn.Module):
    """The local encoder's tokens of patches: a learnt token, then each latent."""

    def __init__(self, config: VoxCpm2Config, dtype: torch.dtype) -> None:
        super().__init__()
        width = config.encoder.dim
        self.special_token = nn.Parameter(torch.empty(1, 1, width, dtype=dtype))
        self.in_proj = nn.Linear(config.latent_dim, width, dtype=dtype)

    def forward(self, patches: Tensor) -> Tensor:
        """Return the local encoder's tokens [N, 1 + P, e] of N patches [N, P, C]."""
        tokens = self.in_proj(patches)
        return torch.cat((self.special_token.expand(tokens.shape[0], -1, -1), tokens), dim=1)


class PatchEmbedding(nn.Module):
    """The module that turns a patch of sound into a token of the language models, by a projection of the local
    encoder's learnt token after the encoder's layers."""

    def __init__(self, config: VoxCpm2Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = Norm(config.encoder, dtype)
        self.proj = nn.Linear(config.encoder.dim, config.base.dim, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return one embedding [N, 1, d] for each of N patches, from the local encoder's tokens [N, 1 + P, e]."""
        result: Tensor = self.proj(self.norm(tokens[:, :1]))
        return result


class NextToken(PatchEmbedding):
    """The embedding of the patch that a step generated, once as the language models' next token and once as the patch
    features.
    """

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the new patch's embedding [B, 1, d] twice: as the language models' next token, and as the patch
        features.
        """
        token = super().forward(tokens)
        return token, token.clone()


class PromptTokens(nn.Module):
    """The prompt's tokens: text from the embedding table, patches from the local encoder."""

    def __init__(self, config: VoxCpm2Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = config.embed_scale
        self.embed_tokens = nn.Embedding(config.vocab_size, config.base.dim, dtype=dtype)

    def forward(self, ids: Tensor, is_audio: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the language models' tokens of a prompt, and the patch embeddings among these tokens.

        Parameters
        ----------
        ids : Tensor
            Token ids, int64 [T]; any id where a token is a patch.
        is_audio : Tensor
            Whether each token is a patch, bool [T].
        embedded : Tensor
            Embedding of each token's patch, [T, 1, d].

        Returns
        -------
        hidden, features : Tensor
            The language models' tokens, and the patch embeddings among them, [1, T, d] each; ``features`` are zeros
            where a token is text.
        """
        text = self.embed_tokens(ids)[None]
        text = text if self.scale == 1 else text * self.scale
        patches = embedded.view_as(text)
        is_audio = is_audio[:, None]
        return torch.where(is_audio, patches, text), torch.where(is_audio, patches, 0)


class Fsq(nn.Module):
    """Finite scalar quantisation: some channels of a hidden state are rounded to a few levels each."""

    def __init__(self, config: VoxCpm2Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = config.fsq_scale
        self.in_proj = nn.Linear(config.base.dim, config.fsq_dim, dtype=dtype)
        self.out_proj = nn.Linear(config.fsq_dim, config.base.dim, dtype=dtype)

    def levels(self, x: Tensor) -> Tensor:
        """Return whole numbers [..., fsq_dim] from -scale to scale; halves are rounded to even."""
        return torch.round(torch.tanh(self.in_proj(x)) * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Return the quantised hidden state, with the shape of ``x`` [..., d]."""
        result: Tensor = self.out_proj(self.levels(x) / self.scale)
        return result


class Fusion(nn.Module):
    """The connection from the base language model to the residual language model: norm, quantisation, fusion with the
    patches."""

    def __init__(self, config: VoxCpm2Config, dtype: torch.dtype) -> None:
        super().__init__()
        d = config.base.dim
        self.norm = Norm(config.base, dtype)
        self.fsq = Fsq(config, dtype)
        self.fusion = nn.Linear(2 * d, d, dtype=dtype)

    def forward(
        self, hidden: Tensor, features: Tensor, is_audio: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the base language model's hidden state, and the residual language model's input.

        Parameters
        ----------
        hidden, features : Tensor
            The base language model's hidden state after its last layer, and the embedding of each token's patch (zeros
            for text), [B, T, d] each.
        is_audio : Tensor, optional
            Whether each token is a patch, bool [T], for a single row: text tokens are not quantised. None: all tokens
            are patches.
        """
        states = self.norm(hidden)
        quantised = self.fsq(states)
        states = quantised if is_audio is None else torch.where(is_audio[:, None], quantised, states)
        return states, self.fusion(torch.cat((states, features), dim=-1))


class KeepState(nn.Module):
    """The end of a prefill or step. `KeepState` writes the hidden states and the patch to the rows' states, from which
    the next step starts.
    """

    def __init__(self, config: VoxCpm2Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = Norm(config.residual, dtype)

    def forward(
        self,
        hidden: Tensor,
        base: Tensor,
        patches: Tensor,
        count: Tensor,
        rows: Tensor,
        base_state: Tensor,
        residual_state: Tensor,
        last_patch: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Write the states of each row's last token into the pool, and return the last hidden states of the two
        language models, [B, d] each.

        Parameters
        ----------
        hidden : Tensor
            The residual language model's hidden states after its last layer, [B, T, d].
        base : Tensor
            The base language model's hidden states, [B, T, d], which `Fusion` returns.
        patches : Tensor
            The patch of each token, [B*T, P, C]; zeros where a token is text.
        count : Tensor
            Number of tokens of each row without padding, int64 [B].
        rows : Tensor
            The row of the pool for each batch index, int64 [B]; the pool's last row for a batch index without a
            session.
        base_state, residual_state, last_patch : Tensor
            States of all rows of the pool, written in place: [R, d], [R, d] and [R, P, C].
        """
        batch, tokens = hidden.shape[:2]
        last = torch.arange(batch, device=hidden.device) * tokens + count - 1
        kept_base = base.flatten(0, 1).index_select(0, last)
        kept_residual = self.norm(hidden.flatten(0, 1).index_select(0, last))
        base_state.index_copy_(0, rows, kept_base)
        residual_state.index_copy_(0, rows, kept_residual)
        last_patch.index_copy_(0, rows, patches.index_select(0, last))
        return kept_base, kept_residual


class Condition(nn.Module):
    """The beginning of a step: computes the local transformer's condition, and whether this step's patch is the last
    one.
    """

    def __init__(self, config: VoxCpm2Config, dtype: torch.dtype) -> None:
        super().__init__()
        d, width = config.base.dim, config.decoder.dim
        self.width = width
        self.lm_proj = nn.Linear(d, width, dtype=dtype)
        self.residual_proj = nn.Linear(d, width, dtype=dtype)
        self.cond_proj = nn.Linear(config.latent_dim, width, dtype=dtype)
        self.stop_proj = nn.Linear(d, d, dtype=dtype)
        self.stop_head = nn.Linear(d, 2, bias=False, dtype=dtype)

    def forward(
        self, rows: Tensor, base_state: Tensor, residual_state: Tensor, last_patch: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the local transformer's condition for a step, and whether the step's patch is the last one.

        Parameters
        ----------
        rows, base_state, residual_state, last_patch : Tensor
            The parameters of `KeepState.forward` with the same names; `Condition` only reads them.

        Returns
        -------
        mu : Tensor
            Tokens of the two hidden states, and zeros for the computation without condition, [B, 2, 2, w].
        cond : Tensor
            Tokens of the previous patch, twice, [B, 2, P, w].
        stop_logits : Tensor
            Logits for going on and for stopping, float32 [B, 2].
        stop : Tensor
            Whether the patch of this step is the last patch of the text: 1 or 0, uint8 [B]; 0 for equal logits.
        """
        base, residual, patch = (
            state.index_select(0, rows) for state in (base_state, residual_state, last_patch)
        )
        mu = torch.stack((self.lm_proj(base), self.residual_proj(residual)), dim=1)
        cond = self.cond_proj(patch.to(mu.dtype))
        logits = self.stop_head(F.silu(self.stop_proj(base)))
        stop = (logits[:, 1] > logits[:, 0]).to(torch.uint8)
        mus, conds = torch.stack((mu, torch.zeros_like(mu)), dim=1), torch.stack((cond, cond), dim=1)
        return mus, conds, logits.float(), stop


class PatchNoise(nn.Module):
    """The solver's initial noise, which depends on seed and number of the patch alone."""

    def __init__(self, config: VoxCpm2Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.patch_shape, self.dtype = config.patch_shape, dtype

    def forward(self, seeds: Tensor, patch_numbers: Tensor, temperature: Tensor) -> Tensor:
        """Return Gaussian noise [B, P, C] of standard deviation ``temperature`` [B] float32, which ``seeds`` and
        ``patch_numbers`` [B] int64 determine.
        """
        latents, channels = self.patch_shape
        draw = torch.zeros_like(seeds[:1])
        noise = gaussian(seeds, patch_numbers[:, None], draw, (1, latents, channels))  # [B, 1, 1, P, C]
        return (noise.flatten(0, 2).to(self.dtype) * temperature[:, None, None]).to(self.dtype)


class SolverTokens(nn.Module):
    """The local transformer's tokens in a solver step: hidden states, time, previous patch, and the patch that is being
    made."""

    def __init__(self, config: VoxCpm2Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_proj = nn.Linear(config.latent_dim, config.decoder.dim, dtype=dtype)

    def forward(self, patch: Tensor, mu: Tensor, time: Tensor, cond: Tensor) -> Tensor:
        """Return the local transformer's tokens [2B, 3 + 2P, w], from ``patch`` [B, P, C], the time token ``time`` [w],
        and ``mu`` and ``cond`` of `Condition`.
        """
        tokens = self.in_proj(patch)
        times = time.expand(*mu.shape[:2], 1, -1)
        return torch.cat((mu, times, cond, torch.stack((tokens, tokens), dim=1)), dim=2).flatten(0, 1)


class SolverStep(nn.Module):
    """A step of Euler's method along the velocity with guidance."""

    def __init__(self, config: VoxCpm2Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.latents = config.patch_size
        self.norm = Norm(config.decoder, dtype)
        self.out_proj = nn.Linear(config.decoder.dim, config.latent_dim, dtype=dtype)

    def forward(self, tokens: Tensor, patch: Tensor, guidance: Tensor, size: Tensor) -> Tensor:
        """Return the patch [B, P, C] after one solver step.

        Guidance moves away from the velocity without condition. The velocity without condition is first scaled so that
        its distance from the velocity with condition is least (CFG-Zero*).

        Parameters
        ----------
        tokens : Tensor
            The local transformer's hidden states after its last layer, [2B, 3 + 2P, w].
        patch : Tensor
            The patch before the solver step, [B, P, C].
        guidance : Tensor
            Guidance scale of each row, float32 [B].
        size : Tensor
            Size of the solver step in time, [1].
        """
        velocities: Tensor = self.out_proj(self.norm(tokens[:, tokens.shape[1] - self.latents :]))
        conditioned, free = velocities.unflatten(0, (-1, 2)).unbind(1)
        product = (conditioned * free).sum((1, 2), keepdim=True)
        free = free * (product / (free.square().sum((1, 2), keepdim=True) + _SCALE_EPS))
        guided = free + (guidance[:, None, None] * (conditioned - free).float()).to(free.dtype)
        moved: Tensor = patch - size * guided
        return moved

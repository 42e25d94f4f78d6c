"""What each rounding of the past costs where a chunk sees itself exactly: simulated in the plain layers of the sample.

    python -m scripts.kv_quality.past_in_fp8 --sample seko_export/sample --prompts 4 --attention --ways q,k,v,p,v+p

The past comes from an FP4 cache. Each way is a set of words out of `WORDS`, joined by ``+``; ``fp4`` rounds no more.
With `--attention` each is the error that it adds to attention's output in one and the same stream: streams are chaotic,
so that means of PSNR tell apart only what is far apart. The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scripts.kv_quality.activations import built_scales
from scripts.kv_quality.measures import psnr, relative_error
from scripts.kv_quality.sample import decoded, draw_prompts, open_sample
from scripts.kv_quality.streams import places, run_stream
from seko_export.config.video import VideoBuild
from seko_kernels.fused_reference import e4m3_cast, fp8_scale

WORDS = {
    "q": "q of the past's scores to e4m3",
    "q2": "the same as the sum of two e4m3 numbers",
    "k": "the past's keys to e4m3",
    "km": "the same less their mean over tokens, whose product with q is added in float32",
    "qi": "q of the past's scores to int8, a scale a token and head",
    "ki": "the past's keys to int8, a scale a token and head",
    "kc": "the past's keys to int8, a scale a pair of channels, by which q is multiplied before it is rounded",
    "v": "the past's values to e4m3",
    "vm": "the same less their mean over tokens",
    "p": "the past's probabilities to e4m3, 256 at the row's maximum",
    "p448": "the same, 448 at the maximum",
    "own16": "q, keys, values and probabilities of the chunk itself to bfloat16",
    "pastqkv16": "q, keys, values and probabilities of the past to bfloat16",
    "own8": "q, keys and values of the chunk itself to e4m3, too",
}
Q_SCALE = 2.0


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    own: Tensor,
    words: frozenset[str],
    scales: Mapping[str, Tensor],
) -> Tensor:
    """Return attention [B, H, T, D] of q [B, H, T, D] to k and v [B, H, N, D], rounded as `words` say.

    Parameters
    ----------
    q, k, v, bias
        As SDPA takes them.
    own : Tensor
        [N] bool, the chunk's tokens.
    words : frozenset of str
        Of `WORDS`.
    scales : mapping
        ``k`` and ``v``, the heads' fp8 scales [H].
    """
    past_q, past_k, past_v, shift = q, k, v, torch.zeros(())
    own_q, own_k, own_v = q, k, v
    k_scale, v_scale = (scales[name][:, None, None] for name in "kv")

    def e4m3(x: Tensor, scale: Tensor | float) -> Tensor:
        return e4m3_cast(x / scale).float() * scale

    def int8(x: Tensor) -> Tensor:
        step = x.abs().amax(-1, keepdim=True).clamp(min=1e-20) / 127
        return (x / step).round() * step

    if "kc" in words:
        pairs = k.unflatten(-1, (-1, 2)).abs().amax((0, 2, 4), keepdim=True)  # [1, H, 1, D/2, 1]
        step = (pairs.expand(*pairs.shape[:-1], 2).flatten(-2) / 127).clamp(min=1e-20)
        past_k = (k / step).round()
        past_q = q * step
    if "qi" in words:
        past_q = int8(past_q)
    if "ki" in words:
        past_k = int8(k)
    if "q" in words or "q2" in words:
        past_q = e4m3(q, Q_SCALE)
        if "q2" in words:
            past_q = past_q + e4m3(q - past_q, Q_SCALE / 16)
    weight = (~own).float()[:, None] * (
        1.0 if bias is None else (bias[:, 0, 0, :] == 0).float()[:, None, :, None]
    )
    count = weight.sum(-2, keepdim=True).clamp(min=1)
    if "k" in words:
        past_k = e4m3(k, k_scale)
    if "km" in words:
        mean = (k * weight).sum(-2, keepdim=True) / count
        past_k, shift = e4m3(k - mean, k_scale), q @ mean.transpose(-1, -2)
    if "v" in words:
        past_v = e4m3(v, v_scale)
    if "vm" in words:
        mean = (v * weight).sum(-2, keepdim=True) / count
        past_v = e4m3(v - mean, v_scale) + mean
    if "own8" in words:
        own_q, own_k, own_v = e4m3(q, Q_SCALE), e4m3(k, k_scale), e4m3(v, v_scale)
    if "own16" in words:
        own_q, own_k, own_v = (x.bfloat16().float() for x in (q, k, v))
    if "pastqkv16" in words:
        past_q, past_k, past_v = (x.bfloat16().float() for x in (past_q, past_k, past_v))
    scores = torch.where(own, own_q @ own_k.transpose(-1, -2), past_q @ past_k.transpose(-1, -2) + shift)
    scores = scores * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = p.sum(-1, keepdim=True)
    past_p = own_p = p
    for word, top in (("p", 256.0), ("p448", 448.0)):
        if word in words:
            past_p = e4m3_cast(p * top).float() / top
    if "own16" in words:
        own_p = p.bfloat16().float()
    if "pastqkv16" in words:
        past_p = past_p.bfloat16().float()
    zero = torch.zeros(())
    return (torch.where(own, zero, past_p) @ past_v + torch.where(own, own_p, zero) @ own_v) / total


class Rounded(TorchFunctionMode):
    """Puts `attend` in the place of each attention over the cache; those over the text stand between them."""

    def __init__(
        self,
        config: VideoBuild,
        scales: list[dict[str, Tensor]],
        words: frozenset[str],
        also: Sequence[frozenset[str]] = (),
    ) -> None:
        super().__init__()
        self._config, self._scales, self._words, self._calls = config, scales, words, 0
        self.errors = dict.fromkeys(also, torch.zeros((), dtype=torch.float64))
        self.norm = torch.zeros((), dtype=torch.float64)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        call = self._calls
        self._calls += 1
        if call % 2:
            return func(*args, **(kwargs or {}))
        layers, passes = self._config.model.layers, len(self._config.workload.schedule.timesteps) + 1
        number = call // 2
        own = places(self._config, number // (layers * passes)).chunk
        q, k, v = args[:3]
        if k.shape[2] != len(own):
            raise RuntimeError(f"attention over {k.shape[2]} keys, expected the cache's {len(own)}")
        bias, scales = (kwargs or {}).get("attn_mask"), self._scales[number % layers]
        with torch._C.DisableTorchFunction():
            result = attend(q, k, v, bias, own, self._words, scales)
            if number >= layers * passes:  # the first chunk has no past
                self.norm = self.norm + result.double().square().sum()
                for words in self.errors:
                    off = attend(q, k, v, bias, own, words, scales) - result
                    self.errors[words] = self.errors[words] + off.double().square().sum()
        return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.kv_quality.past_in_fp8", description=__doc__)
    parser.add_argument("--sample", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--chunks", type=int, default=7)
    parser.add_argument("--ways", default="fp4,q,k,v,p,q+k+v,q+k+v+p")
    parser.add_argument(
        "--attention", action="store_true", help="each way's error of attention alone, in one stream"
    )
    options = parser.parse_args()
    sample = open_sample(options.sample)
    text = sample.embed(draw_prompts(options.prompts, 0, held_out=True))
    exact, seeds = sample.build(options.prompts, "cpu"), list(range(options.prompts))
    fp4 = exact.changed(kv_scheme="fp4")
    held = built_scales(fp4.kv, sample, "cpu")
    scales = [{"k": fp8_scale(c["k_global_scale"]), "v": fp8_scale(c["v_global_scale"])} for c in held]
    if options.attention:
        ways = {way: frozenset(way.split("+")) - {"fp4"} for way in options.ways.split(",")}
        mode = Rounded(fp4, scales, frozenset(), tuple(ways.values()))
        with mode:
            run_stream(sample, fp4, text, seeds, options.chunks, held)
        print(
            json.dumps({way: float((mode.errors[words] / mode.norm).sqrt()) for way, words in ways.items()})
        )
        return
    decode = sample.decoder(options.chunks * sample.stream.chunk_frames, "cpu")
    frames = sample.stream.chunk_frames
    truth = run_stream(sample, exact, text, seeds, options.chunks)
    video = decoded(decode, truth)
    found = {}
    for way in options.ways.split(","):
        words = frozenset(way.split("+")) - {"fp4"}
        if words - WORDS.keys():
            raise SystemExit(f"unknown words {sorted(words - WORDS.keys())}")
        with Rounded(fp4, scales, words):
            made = run_stream(sample, fp4, text, seeds, options.chunks, held)
        ends = [
            float(
                relative_error(
                    made[:, :, i * frames : (i + 1) * frames], truth[:, :, i * frames : (i + 1) * frames]
                ).mean()
            )
            for i in range(options.chunks)
        ]
        each = psnr(decoded(decode, made), video)
        found[way] = {
            "psnr_db": float(each.mean()),
            "chunks": ends,
            "each": [round(float(x), 1) for x in each],
        }
        print(way, found[way], file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()

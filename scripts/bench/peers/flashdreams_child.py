"""A stream of flashdreams' own Wan 2.1 transformer, from its package, with random weights; a process of its own.

It runs as it ships: compiled with `max-autotune-no-cudagraphs`, captured once its window is full. Prints one JSON
object a chunk: milliseconds, and seconds since the process was started. Its first chunks are eager, so a cold start
ends with its first chunk, and a steady chunk is one of those after the capture.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from importlib.machinery import ModuleSpec
from typing import Any

import torch

TIMESTEPS, SIGMAS = (1000.0, 937.5, 833.33, 625.0), (1.0, 0.9375, 0.8333, 0.625)
LATENT_HEIGHT, LATENT_WIDTH = 60, 104


def stand_in_for_s3() -> None:
    """Let the package be imported without boto3, which it uses to read weights from S3 alone."""
    if importlib.util.find_spec("boto3") is not None:
        return
    for name in ("boto3", "botocore", "botocore.exceptions"):
        sys.modules[name] = importlib.util.module_from_spec(ModuleSpec(name, None))
    sys.modules["botocore.exceptions"].ClientError = type("ClientError", (Exception,), {})  # type: ignore[attr-defined]


def main() -> None:
    """Run the stream."""
    parser = argparse.ArgumentParser()
    parser.add_argument("begun", type=float, help="when the process was started, as time.time()")
    parser.add_argument("chunks", type=int)
    options = parser.parse_args()
    stand_in_for_s3()
    from flashdreams.recipes.wan.transformer.impl.network import WanDiTNetworkConfig
    from flashdreams.recipes.wan.transformer.wan21 import Wan21TransformerConfig

    network = WanDiTNetworkConfig()
    config = Wan21TransformerConfig(network=network, len_t=3, window_size_t=21, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = config.setup()
    model = model.to("cuda").eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    on: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    text = torch.randn(1, network.text_len, network.text_dim, **on)
    with torch.no_grad():
        cache = model.initialize_autoregressive_cache(
            height=LATENT_HEIGHT, width=LATENT_WIDTH, text_embeddings=text
        )
        times = [torch.tensor(t, **on) for t in TIMESTEPS]
        zero = torch.zeros((), **on)
        for number in range(options.chunks):
            began = time.perf_counter()
            cache.start(number)
            x = torch.randn(model.latent_shape, **on)
            for t, sigma, following in zip(times, SIGMAS, (*SIGMAS[1:], 0.0), strict=True):
                clean = x - sigma * model.predict_flow(noisy_latent=x, timestep=t, cache=cache)
                x = (1 - following) * clean + following * torch.randn_like(clean) if following else clean
            model.finalize_kv_cache(noisy_latent=x, timestep=zero, cache=cache, input=None)
            cache.finalize(number)
            finite = bool(torch.isfinite(x).all())  # waits for the device
            took = time.perf_counter() - began
            print(json.dumps({"chunk": number, "ms": 1e3 * took, "since_start_s": time.time() - options.begun,
                              "finite": finite}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

"""How large keys and values get: watched while the exact track runs, made into the scales of a lossy cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from seko_export.pieces import BuildConfig, make_pieces


class KvPeaks:
    """The largest magnitudes of K and V, per layer and head, seen while the exact track runs."""

    def __init__(self, config: BuildConfig) -> None:
        self._config = config
        self._peaks = torch.zeros(config.model.layers, 2, config.model.heads)
        self._calls = 0
        signature = make_pieces(replace(config, kv_scheme=config.exact_scheme))["block"].signature
        self._caches = [i for i, a in enumerate(signature) if a.name in ("caches.k", "caches.v")]

    def watch(
        self, block: Callable[[list[Tensor]], Sequence[Tensor]]
    ) -> Callable[[list[Tensor]], Sequence[Tensor]]:
        """Return the block engine with an eye on its caches; layers are called in order."""

        def watched(inputs: list[Tensor]) -> Sequence[Tensor]:
            caches = [inputs[i] for i in self._caches]  # each [B*N, H, D]
            outputs = block(inputs)
            peaks = torch.stack([cache.abs().amax(dim=(0, 2)).float() for cache in caches]).cpu()
            layer = self._calls % self._config.model.layers
            self._peaks[layer] = torch.maximum(self._peaks[layer], peaks)
            self._calls += 1
            return outputs

        return watched

    def calibrate(self) -> dict[str, Tensor]:
        """Return the cache format's scales as weights: ``blocks.{layer}.kv.NAME``."""
        return {
            f"blocks.{layer}.kv.{name}": tensor
            for layer in range(self._config.model.layers)
            for name, tensor in self._config.kv.calibrate(*self._peaks[layer]).items()
        }
